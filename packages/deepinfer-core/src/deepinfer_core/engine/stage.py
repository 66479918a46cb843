"""What the host sends of a plan before its step runs: columns, tokens, and what few steps have.

Everything here follows from the plan alone, so it is made while the step before still runs; the
forward queue then works on tensors and waits for nothing. Plans are copied into pinned buffers, and
these into buffers on the device, so nothing of a plan is read after its launch has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.engine.mirror import GrowingMirror, Mirror, Parts
from deepinfer_core.engine.sampler import Admitted, Sampler, SamplingNeeds
from deepinfer_core.interfaces import DeviceRuntime
from deepinfer_core.model.state import StateSizes
from deepinfer_core.plans import PHASES, Phase, StepPlan, StepRows

__all__ = ["FINAL_CHUNK", "VERIFY", "PromptRows", "StagedStep", "StepBuffers"]

FINAL_CHUNK, VERIFY = PHASES.index(Phase.FINAL_CHUNK), PHASES.index(Phase.VERIFY)
_NOBODY = np.zeros(0, dtype=np.int64)
_NUM_FIELDS = len(StepRows.FIELDS)


@dataclass(frozen=True)
class PromptRows:
    """Rows of one sequence whose next prompt tokens are to be scored.

    Attributes:
        place: the sequence's place in the plan.
        start: position of its first row. first: place of that row among hidden rows.
        num_targets: prompt tokens to score; `extra` holds them as `targets <place>`.
        num_top: alternatives of each.
    """

    place: int
    start: int
    first: int
    num_targets: int
    num_top: int


@dataclass(frozen=True)
class StagedStep:
    """A plan as the host has packed it, and its numbers on the device.

    Attributes:
        plan: where it came from; only what is not an array of it is read later.
        columns: [fields, R] int64 on the device. tokens: int64 on the device, `plan.token_ids`.
        extra: on the device, what the step has of: `loads`, `saves` [n, 2]; `table <pool>` [3, n];
            `entering` [m] places; `history` [3, n] slot, position and id of tokens that the model
            looks back at, `known` the same of all that are known; `keep` [B'] rows that run every
            layer; `scored` [n] places; `targets <place>`; those of `Sampler.admit_on_host`.
        num_sampled: rows that are sampled.
        all_verify: whether every sequence decodes.
        needs: what the sampler needs to know of the step.
        num_draft_columns: most drafts that a sequence of the step verifies.
        prompt_rows: sequences with prompt log-probabilities in this step.
        scored: places of sequences with log-probabilities. num_top: alternatives of each.
    """

    plan: StepPlan
    columns: Tensor
    tokens: Tensor
    extra: GrowingMirror
    num_sampled: int
    all_verify: bool
    needs: SamplingNeeds
    num_draft_columns: int
    prompt_rows: Sequence[PromptRows]
    scored: np.ndarray
    num_top: np.ndarray

    def column(self, name: str) -> Tensor:
        """Return a field of `StepRows`: [R] int64."""
        return self.columns[StepRows.FIELDS.index(name)]


class StepBuffers:
    """The buffers of one place of the ring; what a step in flight sends goes through them alone.

    Args:
        runtime: of the device.
        sizes: of the state.
        max_rows: most rows of a step.
        window: positions a row sees, its own included.
        drafting: send a drafter what is known of sequences that enter.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        sizes: StateSizes,
        *,
        max_rows: int,
        window: int,
        drafting: bool,
    ):
        """Allocate the buffers."""
        self._sizes, self._max_rows, self._window = sizes, max_rows, window
        self._drafting = drafting
        self._steady = Mirror(runtime, _NUM_FIELDS * sizes.num_slots + max_rows, torch.int64)
        self._extra = GrowingMirror(runtime, torch.int64)
        self._size = 0

    def stage(self, plan: StepPlan, sampler: Sampler) -> StagedStep:
        """Copy a plan into the host buffers; `send` copies them to the device."""
        rows = plan.rows
        count, num_rows, row_counts = len(rows), plan.output.num_rows, rows.num_rows
        num_drafts = int(rows.num_drafts.max(initial=0))
        self._check(plan, num_drafts)
        split = _NUM_FIELDS * count
        self._size = split + len(plan.token_ids)
        self._steady.array[:split] = rows.data.reshape(-1)
        self._steady.array[split : self._size] = plan.token_ids
        all_verify = bool(rows.phase.min(initial=VERIFY) == VERIFY)
        sampled = row_counts if all_verify else _num_sampled(rows)
        extra: Parts = {}
        prompt_rows: Sequence[PromptRows] = ()
        _add_deltas(plan, extra)
        hidden_start = self._tail(plan, extra)
        slots = rows.slot
        if plan.extras:
            self._add_entering(plan, sampler, extra)
            prompt_rows = _prompt_rows(plan, hidden_start, extra)
        wanted = sampler.num_top(slots)
        scored = _NOBODY
        if wanted.max(initial=-1) >= 0:
            scored = np.flatnonzero((wanted >= 0) & (sampled > 0))
            if len(scored):
                extra["scored"] = scored
        self._extra.fill(extra)
        return StagedStep(
            plan=plan,
            columns=self._steady.device[:split].view(_NUM_FIELDS, count),
            tokens=self._steady.device[split : self._size],
            extra=self._extra,
            num_sampled=num_rows if all_verify else int(sampled.sum()),
            all_verify=all_verify,
            needs=sampler.needs(slots if all_verify else slots[sampled > 0]),
            num_draft_columns=num_drafts,
            prompt_rows=prompt_rows,
            scored=scored,
            num_top=wanted[scored],
        )

    def send(self) -> None:
        """Copy the staged plan to the device (copy-in queue)."""
        self._steady.send(self._size)
        self._extra.send()

    def _check(self, plan: StepPlan, num_drafts: int) -> None:
        rows, sizes, step_seq = plan.rows, self._sizes, plan.output.step_seq
        num_rows = plan.output.num_rows
        most = len(plan.token_ids)  # with drafts that are trimmed
        assert most <= self._max_rows and len(rows) <= sizes.num_slots, (
            f"step {step_seq} has {most} rows of {len(rows)} sequences, but the worker was "
            f"made for {self._max_rows} rows of {sizes.num_slots} sequences"
        )
        assert len(rows) <= num_rows <= len(plan.token_ids) == rows.num_rows.sum() or (
            not len(rows) and not num_rows
        ), (
            f"step {step_seq} has {num_rows} rows, {len(plan.token_ids)} token ids, and sequences "
            f"with {rows.num_rows.sum()} rows"
        )
        assert not plan.trims or (rows.phase == VERIFY).all(), f"step {step_seq} trims a prompt"
        assert num_drafts <= sizes.max_drafts, (
            f"step {step_seq} verifies {num_drafts} drafts of a sequence, but the state "
            f"has room for {sizes.max_drafts}"
        )

    def _add_entering(
        self,
        plan: StepPlan,
        sampler: Sampler,
        extra: Parts,
    ) -> None:
        """Add the places of sequences that enter, their settings, and what lies before them."""
        rows = plan.rows
        entering = [(p, each.admission) for p, each in plan.extras.items() if each.admission]
        if not entering:
            return
        history, known = [], []
        for place, admission in entering:
            slot, start = int(rows.slot[place]), int(rows.start[place])
            before = _tokens_at(slot, start - len(admission.history), admission.history)
            history.append(before)
            ids = admission.token_ids
            known.append(_tokens_at(slot, 0, ids) if ids else before)
        extra["entering"] = np.array([place for place, _ in entering], dtype=np.int64)
        extra["history"] = np.concatenate(history, axis=1)
        if self._drafting:
            extra["known"] = np.concatenate(known, axis=1)
        sampler.admit_on_host([Admitted(int(rows.slot[p]), each) for p, each in entering], extra)

    def _tail(self, plan: StepPlan, extra: Parts) -> np.ndarray | None:
        """Add `keep` if late layers see other rows, or less, than the others do.

        Returns the place of each sequence's first row among hidden rows, or None where that is
        also its place among all rows.
        """
        # Rows this far above a tail's start see nothing below it: decoding needs no tail. Starts
        # from the carry are upper bounds, too high by the drafts of the step before at most.
        rows = plan.rows
        tail, far = rows.tail_start, self._window - 1 + self._sizes.max_drafts
        above = rows.start - tail
        if above.min(initial=far) >= far or not ((tail > 0) & (above < far)).any():
            return None
        if plan.trims:  # all of them decode, above their tails
            extra["keep"] = np.arange(plan.output.num_rows)
            return None
        # rows that skip the late layers are the first ones of a chunk below its prompt's tail
        skipped = (-above).clip(0, rows.num_rows)
        first = np.cumsum(rows.num_rows) - rows.num_rows
        offset = np.arange(len(plan.token_ids)) - np.repeat(first, rows.num_rows)
        extra["keep"] = np.flatnonzero(offset >= np.repeat(skipped, rows.num_rows))
        kept = rows.num_rows - skipped
        hidden_start: np.ndarray = np.cumsum(kept) - kept
        return hidden_start


def _num_sampled(rows: StepRows) -> np.ndarray:
    """Return how many rows of each sequence are sampled: [R] int64."""
    phase = rows.phase
    return np.where(phase == VERIFY, rows.num_rows, (phase == FINAL_CHUNK).astype(np.int64))


def _add_deltas(plan: StepPlan, extra: Parts) -> None:
    """Add what changes state around the step: block tables, and slots that are copied."""
    for pool, delta in plan.tables.items():
        if len(delta.slots):
            extra[f"table {pool}"] = (delta.slots, delta.places, delta.block_ids)
    for name, pairs in (("loads", plan.output.window_loads), ("saves", plan.output.window_saves)):
        if pairs:
            extra[name] = np.array(pairs, dtype=np.int64)


def _tokens_at(slot: int, first: int, token_ids: Sequence[int]) -> np.ndarray:
    """Return [3, n] int64: slot, position and id of tokens from position `first` on."""
    ids = np.array(token_ids, dtype=np.int64)
    return np.stack((np.full_like(ids, slot), np.arange(first, first + len(ids)), ids))


def _prompt_rows(plan: StepPlan, hidden_start: np.ndarray | None, extra: Parts) -> list[PromptRows]:
    """Return whose prompt tokens are scored; adds their ids to `extra`."""
    found = []
    for place, extras in plan.extras.items():
        if extras.prompt_logprobs is None or not extras.prompt_targets:
            continue
        if hidden_start is None:
            first = int(plan.rows.num_rows[:place].sum())
        else:
            first = int(hidden_start[place])
        extra[f"targets {place}"] = np.array(extras.prompt_targets, dtype=np.int64)
        found.append(
            PromptRows(
                place=place,
                start=int(plan.rows.start[place]),
                first=first,
                num_targets=len(extras.prompt_targets),
                num_top=extras.prompt_logprobs,
            )
        )
    return found
