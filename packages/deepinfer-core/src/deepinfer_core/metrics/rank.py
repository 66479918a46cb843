"""What one rank counts, step by step. Plain numbers; how they are exposed is a server's matter.

    metrics.observe_step(record)              once the step's times are known
    metrics.observe_settled(plan, result)     what it yielded
    metrics.observe_constrained(result)       how a request with a constraint ended
    metrics.snapshot(counts, totals)          name -> `Family`, plain values by labels

All of it is called by the thread of the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepinfer_core.metrics.families import (
    Counter,
    Family,
    FamilyKind,
    Histogram,
    by_label,
    gauge,
    plain,
)
from deepinfer_core.metrics.sources import of_counts, of_totals, of_watchdog
from deepinfer_core.metrics.speculation import SpeculationMetrics
from deepinfer_core.plans import PHASES, Phase, StepKind, StepPlan, StepResult

if TYPE_CHECKING:
    from deepinfer_core.engine.records import StepRecord
    from deepinfer_core.engine.watchdog import Watchdog
    from deepinfer_core.scheduler.counts import SchedulerCounts

__all__ = ["Metrics"]

_VERIFY = PHASES.index(Phase.VERIFY)
_KINDS = tuple(StepKind)
# Parts of the host's time, in the order of a step's life.
_PARTS = ("grammar", "drain", "inbox", "vote", "build", "launch", "wait", "settle", "deferred")


class Metrics:
    """What one rank counts, step by step."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._step_time = {kind: Histogram() for kind in _KINDS}
        self._step_interval = {kind: Histogram() for kind in _KINDS}
        self._rows = {kind: Histogram() for kind in _KINDS}
        self._parts = {part: Histogram() for part in _PARTS}
        self._gap, self._row_ns, self._chunk = Histogram(), Histogram(), Histogram()
        self._verified, self._accepted = Histogram(), Histogram()
        self._speculation = SpeculationMetrics()
        self._bubbles, self._empty, self._constrained = Counter(), Counter(), Counter()
        self._accepted_at = np.zeros(0, dtype=np.int64)  # by position of the draft
        self._drafted_at = np.zeros(0, dtype=np.int64)
        self._last_end_ns = 0  # of the step observed last, on the device where that tells
        self._busy_ns = self._span_ns = 0  # of the device

    def observe_step(self, record: StepRecord) -> None:
        """Take a step's record once its deferred part has ended, in the order of launches.

        `bubble` and, where the device tells, `device` are set by now.
        """
        kind = record.kind
        if record.num_sequences:
            self._rows[kind].observe(record.num_rows)
        else:
            self._empty.add(1, kind.value)
        self._observe_device(record)
        host_ns = self._observe_host(record)
        if record.num_rows:
            self._row_ns.observe(host_ns // record.num_rows)
        if record.bubble is not None:
            self._bubbles.add(1, record.bubble)

    def observe_settled(
        self,
        plan: StepPlan,
        result: StepResult,
        survival: tuple[np.ndarray, np.ndarray] | None = None,
        kept: np.ndarray | None = None,
    ) -> None:
        """Take what a step yielded: sizes of chunks, accepted drafts.

        Args:
            survival: of the drafts that were fed, [R, g], and [R] if known; None without a drafter.
            kept: [R], tokens that were committed; None where that is all of them. A sequence that
                had ended, or ends inside its run, says nothing about drafts.
        """
        whole = np.ones(len(plan.rows), dtype=np.bool_)
        if kept is not None:
            whole = (kept > 0) & (kept == result.num_tokens)
        if survival is not None and plan.output.kind is StepKind.DECODE:
            self._speculation.observe(plan, result, *survival, whole)
        rows = plan.rows
        chunks = rows.num_rows[rows.phase != _VERIFY]
        if len(chunks):
            self._chunk.observe_all(chunks)
        verified = (rows.phase == _VERIFY) & (result.num_tokens > 0) & whole
        if verified.any():
            self._observe_verified(result.num_verified[verified], result.num_tokens[verified])

    def observe_constrained(self, result: str) -> None:
        """Take how a request with a constraint ended: `valid`, `invalid` or `unfinished`."""
        self._constrained.add(1, result)

    def snapshot(
        self,
        counts: SchedulerCounts,
        totals: object,
        watchdog: Watchdog | None = None,
    ) -> dict[str, Family]:
        """Return all values by name.

        Args:
            counts: how many requests and blocks are where.
            totals: a dataclass of numbers that only grow; a field is a name, and one that holds a
                mapping has a label: its keys.
            watchdog: the loop's, if it has one.
        """
        return {
            **self._of_steps(),
            **self._of_yield(),
            **self._speculation.families(),
            **of_counts(counts),
            **of_totals(totals),
            **({} if watchdog is None else of_watchdog(watchdog)),
        }

    def _observe_host(self, record: StepRecord) -> int:
        """Take the host's parts for this step; return their sum, the wait left out.

        The part "settle" of the iteration that planned it is an older step's; its own settlement
        came later and is taken instead.
        """
        parts, host_ns = self._parts, 0
        parts["wait"].observe(record.wait_end_ns - record.wait_begin_ns)
        begin = record.masked_ns or record.settled_ns
        if record.masked_ns:
            parts["grammar"].observe(begin - record.settled_ns)
        for part, end in (
            ("drain", record.drained_ns),
            ("inbox", record.inbox_ns),
            ("vote", record.voted_ns),
            ("build", record.built_ns),
            ("launch", record.launched_ns),
        ):
            if end:
                parts[part].observe(end - begin)
                host_ns += end - begin
                begin = end
        for part, begin, end in (
            ("settle", record.wait_end_ns, record.settle_end_ns),
            ("deferred", record.deferred_begin_ns, record.deferred_end_ns),
        ):
            if end:
                parts[part].observe(end - begin)
                host_ns += end - begin
        return host_ns

    def _observe_device(self, record: StepRecord) -> None:
        """Take the step's time, and the time since the step before it ended."""
        if record.device is None:
            begin, end = record.launched_ns, record.wait_end_ns
        else:
            begin, end = record.device.forward
            self._busy_ns += end - begin
        self._step_time[record.kind].observe(end - begin)
        last_end = self._last_end_ns
        if last_end and not record.after_idle:
            self._step_interval[record.kind].observe(end - last_end)
            if record.device is not None:
                self._gap.observe(begin - last_end)
                self._span_ns += begin - last_end
        if record.device is not None:
            self._span_ns += end - begin
        self._last_end_ns = end

    def _observe_verified(self, num_drafts: np.ndarray, num_tokens: np.ndarray) -> None:
        """Take the verify rows that yielded something; a yield is accepted drafts and one more."""
        self._verified.observe_all(num_drafts + 1)
        self._accepted.observe_all(num_tokens)
        drafted, accepted = _at_least(num_drafts), _at_least(num_tokens - 1)
        missing = len(drafted) - len(self._drafted_at)
        if missing > 0:
            self._drafted_at = np.pad(self._drafted_at, (0, missing))
            self._accepted_at = np.pad(self._accepted_at, (0, missing))
        self._drafted_at[: len(drafted)] += drafted
        self._accepted_at[: len(accepted)] += accepted

    def _of_steps(self) -> dict[str, Family]:
        kinds = (
            ("step_time_ns", self._step_time, "Time of a step on the device."),
            ("step_interval_ns", self._step_interval, "From one step's end to the next one's."),
            ("rows", self._rows, "Rows of a step."),
        )
        found = {
            name: Family(FamilyKind.HISTOGRAM, text, ("kind",), by_label(histograms.items()))
            for name, histograms, text in kinds
        }
        found["host_iteration_ns"] = Family(
            FamilyKind.HISTOGRAM,
            "Parts of the host's iterations; `wait` is for the device.",
            ("part",),
            by_label(self._parts.items()),
        )
        found["device_gap_ns"] = plain(self._gap, "Time without a forward between two steps.")
        found["host_ns_per_row"] = plain(self._row_ns, "The host's time for a step, by its rows.")
        found["bubble_total"] = Family(
            FamilyKind.COUNTER, "Steps launched too late.", ("cause",), self._bubbles.values()
        )
        found["empty_steps"] = Family(
            FamilyKind.COUNTER, "Steps without rows.", ("kind",), self._empty.values()
        )
        if self._span_ns > 0:
            found["overlap_ratio"] = gauge(
                self._busy_ns / self._span_ns, "Device busy time over all time that is not idle."
            )
        return found

    def _of_yield(self) -> dict[str, Family]:
        accepted = zip(self._accepted_at.tolist(), self._drafted_at.tolist(), strict=True)
        return {
            "chunk_len": plain(self._chunk, "Rows of a chunk of a prompt."),
            "constrained_requests_total": Family(
                FamilyKind.COUNTER,
                "Requests with a constraint that have ended, by what became of their text.",
                ("result",),
                self._constrained.values(),
            ),
            "accepted_len": plain(self._accepted, "Tokens that a verified sequence yields."),
            "verified_tokens_per_row": plain(
                self._verified, "Tokens fed for a sequence that is verified."
            ),
            "acceptance": Family(
                FamilyKind.GAUGE,
                "Share of drafts at a position that were accepted.",
                ("position",),
                {(str(place),): part / whole for place, (part, whole) in enumerate(accepted)},
            ),
        }


def _at_least(values: np.ndarray) -> np.ndarray:
    """Return [max(values)] int64: how many of the values are above 0, above 1, ..."""
    above: np.ndarray = len(values) - np.cumsum(np.bincount(values))
    return above[:-1]
