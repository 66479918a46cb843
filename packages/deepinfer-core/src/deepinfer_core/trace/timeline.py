"""Records of steps as slices on lanes: what the trace file and the drawing have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deepinfer_core.engine.records import PARTS, StepRecord

__all__ = [
    "HOST_PARTS",
    "Gap",
    "Slice",
    "gaps",
    "host_slices",
    "in_flight",
    "shown_time",
    "span_ns",
]

# What the host does, in the order of a step's life. "settle" is the critical part of settlement.
HOST_PARTS = (*(part for part in PARTS if part != "settle"), "wait", "settle", "deferred")


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time, for one step.

    Args:
        name: a part of the host's time, one of `HOST_PARTS`.
        begin_ns, end_ns: when, on the loop's clock.
        record: the step it was for.
    """

    name: str
    begin_ns: int
    end_ns: int
    record: StepRecord


@dataclass(frozen=True, slots=True)
class Gap:
    """Time without a forward before a step.

    Args:
        begin_ns, end_ns: when, on the loop's clock.
        record: the step after it.
    """

    begin_ns: int
    end_ns: int
    record: StepRecord


def host_slices(record: StepRecord) -> Iterator[Slice]:
    """Yield what the host did for a step; parts that took no time are left out."""
    begin = record.settled_ns or record.begin_ns  # up to there it settled an older step
    for part, name in PARTS.items():
        end = getattr(record, name)
        if end:
            if end > begin:
                yield Slice(part, begin, end, record)
            begin = end
    for part, begin, end in (
        ("wait", record.wait_begin_ns, record.wait_end_ns),
        ("settle", record.wait_end_ns, record.settle_end_ns),
        ("deferred", record.deferred_begin_ns, record.deferred_end_ns),
    ):
        if end > begin > 0:
            yield Slice(part, begin, end, record)


def gaps(records: Iterable[StepRecord]) -> list[Gap]:
    """Return the times in which the device had no forward to run, those after idling left out."""
    found, last_end = [], 0
    for record in records:
        if record.device is None:
            continue
        begin, end = record.device.forward
        if begin > last_end > 0 and not record.after_idle:
            found.append(Gap(last_end, begin, record))
        last_end = end
    return found


def in_flight(records: Iterable[StepRecord]) -> list[tuple[int, int]]:
    """Return (instant, steps launched and not settled from then on), ascending."""
    changes = []
    for record in records:
        if record.launched_ns:
            changes.append((record.launched_ns, 1))
            if record.settle_end_ns:
                changes.append((record.settle_end_ns, -1))
    changes.sort()
    levels, level = [], 0
    for instant, change in changes:
        level += change
        levels.append((instant, level))
    return levels


def span_ns(records: Sequence[StepRecord]) -> tuple[int, int]:
    """Return when the first of these steps began and the last one's work ended."""
    begin = min(record.begin_ns for record in records)
    end = begin
    for record in records:
        ends = [record.launched_ns, record.settle_end_ns, record.deferred_end_ns]
        if record.device is not None:
            ends.append(record.device.copy_out[1])
        end = max(end, *ends)
    return begin, end


def shown_time(ns: float) -> str:
    """Return a length of time as people read it, three digits and a unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"
