"""What the loop remembers of its last steps, and what can be read off a run of them.

    iteration that planned the step    S grammar D I V B L             ends: settled .. launched
    the device                                            copy_in forward copy_out
    a later iteration                                              wait settle .. deferred

Letters are those of the loop. Instants are on its clock.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from deepinfer_core.engine.step_ring import DeviceTimes
from deepinfer_core.plans import StepKind, StepPlan

__all__ = [
    "CAPACITY",
    "PARTS",
    "StepRecord",
    "StepRecords",
    "bubble_cause",
    "device_gaps_ns",
    "overlap_ratio",
]

CAPACITY = 4096  # steps that are remembered

# Parts of an iteration in their order: name -> the field that holds its end.
PARTS: Mapping[str, str] = {
    "settle": "settled_ns",
    "grammar": "masked_ns",
    "drain": "drained_ns",
    "inbox": "inbox_ns",
    "vote": "voted_ns",
    "build": "built_ns",
    "launch": "launched_ns",
}
# Causes of bubbles that lie before the iteration: deferred parts, and all else between.
DEFERRED, OTHER = "deferred", "other"
_LOOK_BACK = 8  # steps; an iteration settles one of the few that were launched before it

_NO_UIDS = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class StepRecord:
    """One step: when its parts ran, in ns on the loop's clock; 0 until known.

    Attributes:
        step_seq, kind: the plan's.
        num_sequences, num_rows, num_drafts: its sizes; drafts are those of all its sequences.
        begin_ns: the iteration that planned it began.
        settled_ns, masked_ns, drained_ns, inbox_ns, voted_ns, built_ns, launched_ns: ends of that
            iteration's parts, see `PARTS`. `masked_ns` is that of the sampling launch which waited
            for a grammar's masks. A part that did not run has 0.
        wait_begin_ns, wait_end_ns: the host waited for this step's results; in a later iteration,
            inside its part "settle".
        settle_end_ns: the critical part of its settlement ended.
        deferred_begin_ns, deferred_end_ns: its deferred part: text, streams, publication.
        device: when its parts ran on the device, or None where the device does not tell.
        uids: [num_sequences] int64: who was in it.
        after_idle: nothing was in flight and nothing could run just before its iteration, so that
            the gap on the device is nobody's fault.
        bubble: the part that was slow, if the device ran dry before this step was launched.
    """

    step_seq: int
    kind: StepKind
    num_sequences: int = 0
    num_rows: int = 0
    num_drafts: int = 0
    begin_ns: int = 0
    settled_ns: int = 0
    masked_ns: int = 0
    drained_ns: int = 0
    inbox_ns: int = 0
    voted_ns: int = 0
    built_ns: int = 0
    launched_ns: int = 0
    wait_begin_ns: int = 0
    wait_end_ns: int = 0
    settle_end_ns: int = 0
    deferred_begin_ns: int = 0
    deferred_end_ns: int = 0
    device: DeviceTimes | None = None
    uids: np.ndarray = field(default_factory=lambda: _NO_UIDS)
    after_idle: bool = False
    bubble: str | None = None

    @classmethod
    def of(cls, plan: StepPlan, begin_ns: int) -> StepRecord:
        """Return the record of a step whose iteration began at `begin_ns`."""
        output, rows = plan.output, plan.rows
        return cls(
            step_seq=output.step_seq,
            kind=output.kind,
            num_sequences=len(rows),
            num_rows=output.num_rows,
            num_drafts=output.num_rows - len(rows) if plan.trims else int(rows.num_drafts.sum()),
            begin_ns=begin_ns,
            uids=rows.uid.copy(),  # a view would keep the whole matrix alive
        )

    def parts_ns(self) -> dict[str, int]:
        """Return part of its iteration -> ns; "settle" includes the wait for the device."""
        lengths, begin = {}, self.begin_ns
        for part, name in PARTS.items():
            end = getattr(self, name) or begin
            lengths[part] = end - begin
            begin = end
        return lengths

    def line(self) -> str:
        """Return it as one line of JSON."""
        values: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        values["uids"] = self.uids.tolist()
        if self.device is not None:
            device = self.device
            values["device"] = {
                "copy_in": device.copy_in,
                "forward": device.forward,
                "copy_out": device.copy_out,
                "stalled_ns": device.stalled_ns,
            }
        return json.dumps(values)


class StepRecords:
    """The last steps in the order of their launches, the oldest forgotten first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Remember `capacity` steps, at least 1."""
        assert capacity >= 1, f"a ring of {capacity} records"
        self.capacity = capacity
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        """Iterate from the oldest."""
        return iter(self._records)

    def append(self, record: StepRecord) -> None:
        """Remember the step launched last; its later fields are filled in as they become known."""
        self._records.append(record)

    def last(self, num: int) -> list[StepRecord]:
        """Return the newest `num`, oldest first; fewer when there are not as many."""
        newest = list(islice(reversed(self._records), num))
        newest.reverse()
        return newest

    def before(self, record: StepRecord) -> StepRecord | None:
        """Return the step launched just before `record`, or None when it is forgotten."""
        return next(self._older(record), None)

    def judge(self, record: StepRecord, ran_dry: bool | None = None) -> str | None:
        """Decide whether the launch of `record` came too late; sets and returns its `bubble`.

        Call it once the device times of the step and of the one before it are known.

        Args:
            record: one of these.
            ran_dry: whether `forward_done` of the step before had passed when the launch returned,
                where the device does not tell times.
        """
        record.bubble = None
        previous = self.before(record)
        if previous is not None and not record.after_idle:
            dry = _ran_dry(previous, record) if ran_dry is None else ran_dry
            if dry:
                record.bubble = bubble_cause(
                    previous,
                    record,
                    waited_ns=self.waited_ns(record),
                    deferred_ns=self._deferred_ns(previous.launched_ns, record),
                )
        return record.bubble

    def waited_ns(self, record: StepRecord) -> int:
        """Return how long the iteration that planned `record` waited for the device."""
        return sum(
            each.wait_end_ns - each.wait_begin_ns
            for each in islice(self._older(record), _LOOK_BACK)
            if record.begin_ns <= each.wait_begin_ns < record.settled_ns
        )

    def dump(self, path: str | Path, num: int | None = None) -> int:
        """Write the newest `num` (None: all), oldest first, one JSON object a line.

        Returns:
            How many lines it wrote.

        Raises:
            OSError: the file cannot be written.
        """
        records = self.last(len(self) if num is None else num)
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(record.line() + "\n" for record in records)
        return len(records)

    def _deferred_ns(self, since_ns: int, record: StepRecord) -> int:
        """Return the time of deferred parts between an instant and the iteration of `record`."""
        return sum(
            each.deferred_end_ns - each.deferred_begin_ns
            for each in islice(self._older(record), _LOOK_BACK)
            if since_ns <= each.deferred_begin_ns < record.begin_ns
        )

    def _older(self, record: StepRecord) -> Iterator[StepRecord]:
        """Iterate over what was launched before `record`, newest first."""
        newest_first = reversed(self._records)
        for each in newest_first:
            if each is record:
                break
        return newest_first


def bubble_cause(
    previous: StepRecord, record: StepRecord, *, waited_ns: int = 0, deferred_ns: int = 0
) -> str:
    """Return what took longest between the launch of `previous` and that of `record`.

    Args:
        previous: the step launched just before.
        record: the step whose launch came too late.
        waited_ns: time inside its part "settle" in which the host waited for the device.
        deferred_ns: time of deferred parts before its iteration.

    Returns:
        A name of `PARTS`, "deferred", or "other" for the rest of the time before its iteration.
    """
    parts = record.parts_ns()
    parts["settle"] -= waited_ns
    parts[DEFERRED] = deferred_ns
    parts[OTHER] = record.begin_ns - previous.launched_ns - deferred_ns
    return max(parts, key=parts.__getitem__)


def overlap_ratio(records: Iterable[StepRecord]) -> float | None:
    """Return device busy time over the time from the first forward's begin to the last one's end.

    Time in which a forward stood still for masks is not busy. Gaps before steps that came after
    idling do not count. None when no step has device times.
    """
    forwards = _forwards(records)
    if not forwards:
        return None
    gaps = _gaps(forwards)
    stalled = sum(record.device.stalled_ns for record, _ in forwards if record.device is not None)
    idle = sum(gap for gap, record in gaps if record.after_idle)
    span = forwards[-1][1][1] - forwards[0][1][0]
    busy = span - stalled - sum(gap for gap, _ in gaps)
    return busy / (span - idle) if span > idle else None


def device_gaps_ns(records: Iterable[StepRecord]) -> np.ndarray:
    """Return [n] int64: begin of each forward minus the end of the one before.

    Gaps that come of idling are left out.
    """
    gaps = [gap for gap, record in _gaps(_forwards(records)) if not record.after_idle]
    return np.asarray(gaps, dtype=np.int64)


_Forward = tuple[StepRecord, tuple[int, int]]


def _forwards(records: Iterable[StepRecord]) -> list[_Forward]:
    return [(each, each.device.forward) for each in records if each.device is not None]


def _gaps(forwards: Sequence[_Forward]) -> list[tuple[int, StepRecord]]:
    """Return the ns without a forward before each but the first."""
    return [
        (max(later[0] - earlier[1], 0), record)
        for (_, earlier), (record, later) in pairwise(forwards)
    ]


def _ran_dry(previous: StepRecord, record: StepRecord) -> bool:
    if previous.device is None or not record.launched_ns:
        return False
    return previous.device.forward[1] < record.launched_ns
