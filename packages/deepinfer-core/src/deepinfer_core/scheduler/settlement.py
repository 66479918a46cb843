"""Applying a step's result: what the next step needs at once, what clients see afterwards.

settle_rows(...)       critical: lengths, tokens, ends; on columns, rows apart only if they end
Settlement.finish()    deferred: log-probabilities, updates for clients, published blocks
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer_core.plans import Logprobs, RowStatus, StepKind, StepResult
from deepinfer_core.scheduler.constraints import ConstraintFailed, advance
from deepinfer_core.scheduler.lanes import MAX_STOPS
from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.sequence import LIVE, Sequence
from deepinfer_core.scheduler.step import UnsettledStep
from deepinfer_core.types import FinishReason, PromptLogprob, SequenceUpdate, TokenLogprob

__all__ = ["Settlement", "settle_rows"]

_FAULTS = {
    RowStatus.NON_FINITE: (
        "non_finite",
        "The model's values for this request are not finite (step {step}). Other requests are not "
        "affected. Send it again; if that fails too, the weights are damaged.",
    ),
    RowStatus.BAD_SOURCE: (
        "bad_source",
        "The engine lost track of this request's tokens (step {step}, row {row}). This is a fault "
        "of the engine; other requests are not affected. Send it again.",
    ),
}


@dataclass(slots=True)
class Settlement:
    """A settled step of which clients were not told yet.

    Args:
        step: what was settled.
        result: what it yielded.
        roster: all requests.
        kept: [R] int64, tokens of each row that were committed.
        ends: row -> terminal update of a request that ended with this step.
        dead: [R] bool, rows of requests that had ended before, of which nothing is told; None
            when there are none.
        survival: of the drafts that were fed, [R, g] float32, and [R] bool where it is known; None
            without drafts.
        failed: row -> why its grammar failed.
        runs: the committed tokens of each row.
        finished: requests whose terminal update was handed out since.
        told: whether clients were told.
    """

    step: UnsettledStep
    result: StepResult
    roster: Roster
    kept: np.ndarray
    dead: np.ndarray | None
    survival: tuple[np.ndarray, np.ndarray] | None = None
    ends: dict[int, SequenceUpdate] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    runs: list[tuple[int, ...]] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    told: bool = False

    def finish(self) -> tuple[SequenceUpdate, ...]:
        """Return what the step means for requests, in plan order, and publish what is final."""
        updates = self.updates()
        self.publish()
        return updates

    def updates(self) -> tuple[SequenceUpdate, ...]:
        """Return what the step means for requests, in plan order; to be asked once."""
        result, ends = self.result, self.ends
        logprobs = _logprobs_by_row(result.logprobs, result.token_ids, self.runs)
        new = tuple.__new__  # calling the class would be half the cost of a row
        found: list[SequenceUpdate | None] = [
            new(
                SequenceUpdate,
                (
                    sequence.uid, run, logprobs.get(row, ()), (), None, None, None,
                    sequence.num_preemptions, sequence.num_cached, sequence.replayed,
                ),
            )
            if run
            else None
            for row, (sequence, run) in enumerate(zip(self.step.sequences, self.runs, strict=True))
        ]  # fmt: skip
        for row in {*ends, *result.prompt_logprobs}:
            found[row] = self._special_update(row, logprobs.get(row, ()))
        for row in () if self.dead is None else self.dead.nonzero()[0].tolist():
            found[row] = None
        self.told = True
        if self.finished:  # nothing follows a terminal update
            found = [each for each in found if each is None or each.uid not in self.finished]
        return tuple(update for update in found if update is not None)

    def publish(self) -> None:
        """Publish the whole blocks that have become final."""
        roster = self.roster
        for slot in roster.prefixes.unpublished(roster.lanes).tolist():
            sequence = roster.by_slot[slot]
            assert sequence is not None, f"slot {slot} has no sequence"
            roster.prefixes.publish(sequence)

    def _special_update(
        self, row: int, logprobs: tuple[TokenLogprob, ...]
    ) -> SequenceUpdate | None:
        """Return the update of a row that ends, or whose prompt has new log-probabilities."""
        sequence, run, end = self.step.sequences[row], self.runs[row], self.ends.get(row)
        items = self.result.prompt_logprobs.get(row, ())
        dead = self.dead is not None and self.dead[row]
        known = () if dead else _undelivered(sequence, items)
        if not (run or known or end):
            return None
        return SequenceUpdate(
            sequence.uid,
            run,
            logprobs,
            known,
            None if end is None else end.finish_reason,
            None if end is None else end.error,
            None if end is None else end.error_code,
            sequence.num_preemptions,
            sequence.num_cached,
            sequence.replayed,
        )


def settle_rows(roster: Roster, step: UnsettledStep, result: StepResult) -> Settlement:
    """Commit what a step yields; the step is already out of the books."""
    lanes, rows = roster.lanes, step.plan.rows
    slots = rows.slot
    decode = step.plan.output.kind is StepKind.DECODE
    settled, left = lanes.all.settled[slots], lanes.all.left[slots]
    # Steps are settled in order, so L is now exactly where the device must have started.
    lost = (result.start if decode else result.start + rows.num_replay) != settled
    plain = lanes.plain[slots]
    num_tokens = result.num_tokens
    # All new rows of a chunk are final; of a decode row, the fed token and the accepted drafts.
    final = num_tokens if decode else rows.num_rows - rows.num_replay
    live = fine = None  # all of them are, in most steps
    if not plain.all() or result.status.any() or lost.any():
        live = lanes.live[slots]
        good = (result.status == RowStatus.OK) & ~lost
        fine = live & good
        # L follows an overrun too: the next one starts behind it.
        num_tokens, final = np.where(fine, num_tokens, 0), np.where(good, final, 0)
    kept = np.minimum(num_tokens, left)
    reached = (num_tokens >= left) & (num_tokens > 0)
    kept, stopped = _cut_at_stops(result.token_ids, kept, lanes.stops[slots, : lanes.num_stops])
    survival = None
    if decode and lanes.drafts.shape[1]:
        survival = lanes.survival[0, slots], lanes.all.num_records[slots] > 0
    settlement = Settlement(step, result, roster, kept, None if live is None else ~live, survival)
    _count(roster, step, result, num_tokens)
    if fine is not None:
        stopped = np.zeros_like(reached) if stopped is None else stopped
        for row in np.flatnonzero(fine & ~plain & (kept > 0)).tolist():
            _look_apart(settlement, row, stopped)
    special = reached if stopped is None else reached | stopped
    if fine is not None:
        special = special | ~(fine & (lanes.prefilling[slots] | lanes.running[slots]))
        special[list(settlement.failed)] = True
    lanes.all.settled[slots] = settled + final
    lanes.all.left[slots] = left - kept
    _commit(settlement)
    for row in special.nonzero()[0].tolist():
        status = RowStatus.BAD_SOURCE if lost[row] else RowStatus(int(result.status[row]))
        reason = None
        if stopped is not None and stopped[row]:
            reason = FinishReason.STOP
        elif reached[row]:
            reason = FinishReason.LENGTH
        _conclude(settlement, row, status, reason)
    return settlement


def _cut_at_stops(
    token_ids: np.ndarray, kept: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Cut runs behind their first stop id, in position order; it comes before a cap behind it.

    Args:
        token_ids: [R, n]. kept: [R] how many of them count. stops: [R, n].
    Returns:
        What is kept then, and which rows have stopped, [R] bool, or None when none has.
    """
    width = token_ids.shape[1]
    found = token_ids == stops if width == 1 else token_ids[:, :, None] == stops[:, None, :]
    if not found.any():
        return kept, None
    found = found.reshape(len(kept), width, -1).any(2) & (np.arange(width) < kept[:, None])
    stopped: np.ndarray = found.any(1)
    return np.where(stopped, found.argmax(1) + 1, kept), stopped


def _commit(settlement: Settlement) -> None:
    """Keep the tokens, and the drafts behind them."""
    result, kept, lanes = settlement.result, settlement.kept, settlement.roster.lanes
    sequences, slots = settlement.step.sequences, settlement.step.plan.rows.slot
    ids, counts = result.token_ids, kept.tolist()
    yields = kept.nonzero()[0]
    if len(yields) < len(counts):
        slots, ids, kept = slots[yields], ids[yields], kept[yields]
    if ids.shape[1] == 1:
        lanes.all.last_token[slots] = ids[:, 0]
    else:
        lanes.all.last_token[slots] = ids[np.arange(len(ids)), kept - 1]
    if result.drafts is not None and result.drafts.shape[1]:
        drafts = result.drafts if len(ids) == len(counts) else result.drafts[yields]
        lanes.drafts[slots] = drafts
        lanes.all.known_drafts[slots] = drafts.shape[1]
        if result.survival is not None:
            survival = result.survival
            lanes.record(slots, survival if len(ids) == len(counts) else survival[yields])
    runs: list[tuple[int, ...]]
    if result.token_ids.shape[1] == 1:
        found = result.token_ids[:, 0].tolist()
        runs = [(token,) if count else () for token, count in zip(found, counts, strict=True)]
    else:
        found = result.token_ids.tolist()
        runs = [tuple(row[:count]) for row, count in zip(found, counts, strict=True)]
    settlement.runs = runs
    for sequence, run in zip(sequences, runs, strict=True):
        sequence.tokens += run


def _look_apart(settlement: Settlement, row: int, stopped: np.ndarray) -> None:
    """Find the end of a row with many stop ids or a grammar."""
    sequence, kept = settlement.step.sequences[row], settlement.kept
    ids = settlement.result.token_ids[row, : int(kept[row])].tolist()
    stop_ids = sequence.request.stop_ids
    if len(stop_ids) > MAX_STOPS:
        first = next((i for i, token_id in enumerate(ids) if token_id in stop_ids), None)
        if first is not None:
            stopped[row], kept[row] = True, first + 1
            ids = ids[: first + 1]
    if sequence.constraint is None or sequence.state not in LIVE:
        return
    body = ids[:-1] if stopped[row] and ids[-1] in stop_ids else ids
    try:
        taken, done = advance(sequence, body)
        if done:  # maybe within the run: what follows, a stop id too, is not part of the output
            stopped[row], kept[row] = True, taken
    except ConstraintFailed as error:
        settlement.failed[row] = str(error)
        kept[row] = 0  # nobody is shown what a grammar may have refused


def _conclude(
    settlement: Settlement, row: int, status: RowStatus, reason: FinishReason | None
) -> None:
    """End or retire a sequence whose row is not like most."""
    roster, sequence = settlement.roster, settlement.step.sequences[row]
    if status is not RowStatus.OK:
        roster.totals.count_status(status)
    if sequence.state not in LIVE:  # the overrun of a request that has ended
        if status is not RowStatus.OK:
            roster.releases.taint(sequence.owner)
    elif status is not RowStatus.OK:
        code, sentence = _FAULTS[status]
        error = sentence.format(step=settlement.step.step_seq, row=row)
        end = roster.end(sequence, FinishReason.ERROR, error, code=code, bad=True)
        settlement.ends[row] = end
    elif row in settlement.failed:
        error = settlement.failed[row]
        end = roster.end(sequence, FinishReason.ERROR, error, code="constraint")
        settlement.ends[row] = end
    elif reason is not None:
        settlement.ends[row] = roster.end(sequence, reason)
    roster.retire(sequence)


def _count(roster: Roster, step: UnsettledStep, result: StepResult, num_tokens: np.ndarray) -> None:
    totals, output = roster.totals, step.plan.output
    if output.kind is StepKind.DECODE:
        count, yielded = len(num_tokens), int(num_tokens.sum())
        totals.decode_rows += count
        totals.yielded_tokens += yielded
        totals.verified_tokens += int(result.num_verified.sum())
        totals.rollback_tokens += output.num_rows - yielded
    else:
        totals.chunk_tokens += output.num_rows


def _logprobs_by_row(
    logprobs: Logprobs | None, token_ids: np.ndarray, runs: list[tuple[int, ...]]
) -> dict[int, tuple[TokenLogprob, ...]]:
    if logprobs is None:
        return {}
    rows, new = logprobs.rows.tolist(), tuple.__new__
    counts = np.array([len(runs[row]) for row in rows], dtype=np.int64)
    told = np.arange(token_ids.shape[1]) < counts[:, None]  # flat from here on: committed ones
    best = zip(logprobs.best_ids[told].tolist(), logprobs.best[told].tolist(), strict=True)
    tops = [tuple(zip(ids, values, strict=True)) for ids, values in best]
    if (logprobs.num_top < logprobs.best.shape[2]).any():
        wanted = np.repeat(logprobs.num_top, counts).tolist()
        tops = [top[:count] for top, count in zip(tops, wanted, strict=True)]
    chosen = logprobs.chosen[told].tolist()
    each = zip(token_ids[logprobs.rows][told].tolist(), chosen, tops, strict=True)
    flat = [new(TokenLogprob, values) for values in each]
    ends = counts.cumsum().tolist()
    return {
        row: tuple(flat[end - len(runs[row]) : end]) for row, end in zip(rows, ends, strict=True)
    }


def _undelivered(sequence: Sequence, items: tuple[PromptLogprob, ...]) -> tuple[PromptLogprob, ...]:
    """Return those that are new: a recomputed chunk may overlap what was told before."""
    known = tuple(item for item in items if item.position >= sequence.prompt_logprobs_from)
    if known:
        sequence.prompt_logprobs_from = known[-1].position + 1
    return known
