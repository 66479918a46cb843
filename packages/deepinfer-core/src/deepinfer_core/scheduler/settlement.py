"""Applying one row of a step's result to its sequence."""

from __future__ import annotations

from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.sequence import LIVE, Sequence
from deepinfer_core.types import (
    FinishReason,
    Phase,
    PromptLogprob,
    RowStatus,
    SequenceMetadata,
    SequenceUpdate,
    StepResult,
)

__all__ = ["apply_row"]

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


def apply_row(
    roster: Roster, sequence: Sequence, meta: SequenceMetadata, result: StepResult, row: int
) -> SequenceUpdate | None:
    """Commit what row `row` of a step yields; the step is already out of the books.

    Returns:
        What it means for the request, or None when there is nothing to tell.
    """
    status = result.status[row]
    if sequence.state not in LIVE:  # the overrun of a request that has ended
        if status is not RowStatus.OK:
            roster.releases.taint(sequence.owner)
        return None
    if status is RowStatus.OK and result.start[row] != sequence.settled_len:
        # Steps are settled in order, so L is now exactly where the device must have started.
        status = RowStatus.BAD_SOURCE
    if status is not RowStatus.OK:
        code, sentence = _FAULTS[status]
        error = sentence.format(step=result.step_seq, row=row)
        return roster.end(sequence, FinishReason.ERROR, error, code=code, bad=True)

    token_ids = result.token_ids[row]
    expected = range(1, 2 + meta.num_drafts) if meta.samples else range(1)
    assert len(token_ids) in expected, (
        f"step {result.step_seq} yields {len(token_ids)} tokens for request {meta.uid}"
    )
    # All rows of a chunk are final; of a decode row, the fed token and the accepted drafts.
    sequence.settled_len += len(token_ids) if meta.phase is Phase.VERIFY else meta.num_rows
    produced = sequence.produce(token_ids)
    known = _undelivered(sequence, result.prompt_logprobs[row]) if meta.prompt_targets else ()
    if produced.finish_reason is not None:
        roster.end(sequence, produced.finish_reason)
    if not token_ids and not known:
        return None
    return SequenceUpdate(
        sequence.uid,
        token_ids=tuple(produced.token_ids),
        logprobs=result.logprobs[row][: len(produced.token_ids)],
        prompt_logprobs=known,
        finish_reason=produced.finish_reason,
        num_preemptions=sequence.num_preemptions,
    )


def _undelivered(sequence: Sequence, items: tuple[PromptLogprob, ...]) -> tuple[PromptLogprob, ...]:
    """Return those that are new: a recomputed chunk may overlap what was told before."""
    known = tuple(item for item in items if item.position >= sequence.prompt_logprobs_from)
    if known:
        sequence.prompt_logprobs_from = known[-1].position + 1
    return known
