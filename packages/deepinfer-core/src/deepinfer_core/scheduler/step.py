"""From chosen rows to a frozen `StepPlan`: metadata, and where each first token comes from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from deepinfer_core.cache.block_pool import Owner
from deepinfer_core.scheduler.sequence import Sequence
from deepinfer_core.types import (
    Admission,
    BlockDelta,
    Phase,
    SchedulerOutput,
    SequenceMetadata,
    StepKind,
    StepPlan,
)

__all__ = ["PlannedRow", "UnsettledStep", "build_plan"]


@dataclass(slots=True)
class PlannedRow:
    """One sequence's share of a step: decided and reserved, not yet booked.

    Args:
        sequence: who.
        phase: what it does.
        start: U before this step.
        num_rows: tokens fed.
        num_drafts: drafts among them.
        blocks: what was reserved for it.
        enters: it leaves the waiting queue with this step, and took a slot.
    """

    sequence: Sequence
    phase: Phase
    start: int
    num_rows: int
    num_drafts: int = 0
    blocks: tuple[BlockDelta, ...] = ()
    enters: bool = False

    @property
    def end(self) -> int:
        """U after this step."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class UnsettledStep:
    """A launched step: its plan, and its sequences, so that results need no look-up by name."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]


def build_plan(
    step_seq: int,
    kind: StepKind,
    rows: Seq[PlannedRow],
    previous: UnsettledStep | None,
    *,
    preempted: tuple[int, ...],
    history_len: int,
) -> StepPlan:
    """Return the frozen plan. Reads the sequences, changes nothing.

    Args:
        step_seq: the step's number.
        kind: prefill or decode.
        rows: what was chosen; all of them are reserved.
        previous: the last unsettled step; its carry supplies tokens the host does not know yet.
        preempted: uids taken off the device.
        history_len: token ids before the first computed position that the model needs.
    """
    places: dict[Owner, int] = {}
    if previous is not None:
        places = {
            Owner(meta.uid, meta.generation): place
            for place, meta in enumerate(previous.plan.sequences)
        }
    # A chunk's tokens and place are settled facts whatever is in flight; only a decode row can
    # depend on a token that the host has not seen.
    remap = tuple(
        places[row.sequence.owner] if row.phase is Phase.VERIFY and row.sequence.unsettled else -1
        for row in rows
    )
    sequences = tuple(
        _metadata(row, source >= 0, history_len) for row, source in zip(rows, remap, strict=True)
    )
    output = SchedulerOutput(
        step_seq=step_seq,
        kind=kind,
        remap=remap,
        num_rows=sum(row.num_rows for row in rows),
        strict=any(row.sequence.request.strict for row in rows),
        preempted=preempted,
    )
    return StepPlan(output, sequences)


def _metadata(row: PlannedRow, from_carry: bool, history_len: int) -> SequenceMetadata:
    sequence, start = row.sequence, row.start
    assert sequence.slot is not None, f"request {sequence.uid} is in a step without a slot"
    end = row.end
    if row.phase is Phase.VERIFY:
        # The host supplies the last sampled token; drafts are known to the device alone.
        token_ids = () if from_carry else tuple(sequence.tokens[-1:])
    else:
        token_ids = tuple(sequence.tokens[start:end])
    params = sequence.request.params
    targets = _prompt_targets(sequence, start, end) if row.phase is not Phase.VERIFY else ()
    return SequenceMetadata(
        uid=sequence.uid,
        generation=sequence.generation,
        slot=sequence.slot,
        phase=row.phase,
        start=start,
        num_rows=row.num_rows,
        token_ids=token_ids,
        kv_len=end,
        blocks=row.blocks,
        num_drafts=row.num_drafts,
        tail_start=sequence.tail_start,
        remaining=sequence.remaining,
        admission=_admission(sequence, start, history_len) if row.enters else None,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs if targets else None,
        prompt_targets=targets,
    )


def _admission(sequence: Sequence, start: int, history_len: int) -> Admission:
    params = sequence.request.params
    return Admission(
        params=params,
        seed=sequence.request.seed,
        history=tuple(sequence.tokens[max(0, start - history_len) : start]),
        prompt_len=sequence.prompt_len,
        token_ids=tuple(sequence.tokens) if params.uses_penalties else (),
    )


def _prompt_targets(sequence: Sequence, start: int, end: int) -> tuple[int, ...]:
    """Return the prompt tokens after rows `start .. end - 1`, or () when all were delivered."""
    last = min(end, sequence.prompt_len - 1)  # position of the last target
    if sequence.request.params.prompt_logprobs is None or last < sequence.prompt_logprobs_from:
        return ()
    return sequence.request.prompt_token_ids[start + 1 : last + 1]
