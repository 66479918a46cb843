"""A step on the forward queue: correction, model, sampling, acceptance, drafts, carry.

Nothing here reads the device from the host, and everything that lives longer than a step is written
here alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.engine.carry import Carries, Corrected
from deepinfer_core.engine.drafting import Drafter, DraftInputs, Entering
from deepinfer_core.engine.mirror import GrowingMirror
from deepinfer_core.engine.results import Scores, StepOutput
from deepinfer_core.engine.sampler import SampledRows, Sampler, SamplingNeeds
from deepinfer_core.engine.stage import (
    FINAL_CHUNK,
    VERIFY,
    PromptRows,
    StagedStep,
)
from deepinfer_core.engine.verification import Picks, Verification
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.deepseek_v41 import DeepseekV41, Forwarded, Tail
from deepinfer_core.model.state import ModelState
from deepinfer_core.plans import RowStatus

__all__ = ["Forward", "StepForward"]

# Prompt rows whose logits exist at a time: a row of them is as wide as the vocabulary.
PROMPT_PIECE = 64


@dataclass(frozen=True)
class StepForward:
    """A step between its forward pass and its sampling.

    Attributes:
        number: of the launch.
        inputs: first tokens of sequences. lengths: [R] int64, drafts verified. num_rows: [R] int64,
            rows of each sequence. tokens: [B] int64, of all rows.
        rows, done: what ran, and what came of it.
        unsound: [R] bool: some row of a prompt is not finite.
    """

    step: StagedStep
    number: int
    inputs: Corrected
    lengths: Tensor
    num_rows: Tensor
    tokens: Tensor
    rows: RowBatch
    done: Forwarded
    unsound: Tensor


class Forward:
    """Device work of one rank's steps, in the order of their launches."""

    def __init__(
        self,
        backend: KernelBackend,
        model: DeepseekV41,
        state: ModelState,
        sampler: Sampler,
        drafter: Drafter | None,
        verification: Verification,
    ):
        """Start with an empty carry."""
        self._backend, self._model, self._state = backend, model, state
        self._sampler, self._drafter, self._verification = sampler, drafter, verification
        self._vocab_size, self._wide = model.config.vocab_size, 1 + state.sizes.max_drafts
        self._carries = Carries(state.sizes, self._vocab_size, backend.runtime.device)

    @torch.no_grad()
    def run(self, step: StagedStep, number: int) -> StepForward:
        """Apply a step's deltas and run the model; `number` counts launches."""
        backend = self._backend.with_strict(step.plan.output.strict)
        self._apply_deltas(step)
        inputs = self._carries.correct(backend, step, number)
        first, num_replay = step.column("start"), step.column("num_replay")
        lengths, num_rows = self._verification.lengths(step), step.column("num_rows")
        if step.plan.trims:  # then all sequences decode
            num_rows = lengths + 1
        rows = RowBatch.build(
            backend,
            num_rows,
            inputs.start,
            inputs.slots,
            window=self._model.config.sliding_window,
            window_floor=step.column("window_start"),
            write_floor=torch.where(num_replay > 0, first + num_replay, 0),
            total=step.plan.output.num_rows,
        )
        offset = rows.positions - inputs.start[rows.sequence]
        tokens = inputs.fed[rows.sequence, offset.clamp(max=self._wide - 1)]
        if not step.plan.trims:
            tokens = torch.where(offset < self._wide, tokens, step.tokens)
        tokens = tokens.masked_fill(inputs.bad[rows.sequence], 0)
        tail, probe = None, _Probe(self._model.config.last_kv_source - 1)
        if "keep" in step.extra:
            keep = step.extra["keep"]
            tail = Tail(keep, step.column("tail_start")[rows.sequence[keep]])
        done = self._model.forward(backend, tokens, rows, self._state, tail=tail, tap=probe)
        unsound = self._unsound(step, done, rows, probe if tail is not None else None)
        return StepForward(step, number, inputs, lengths, num_rows, tokens, rows, done, unsound)

    @torch.no_grad()
    def sample(self, forward: StepForward, masks: GrowingMirror | None) -> StepOutput:
        """Sample, accept, draft, and leave the carry.

        Args:
            forward: what `run` returned.
            masks: `masks` [n, words] int32 and their `places` [n] in [R, 1 + drafts], and maybe
                `forced` [R, 1 + 2 * drafts] int32, tokens that must come from the place of the
                first sampled one on, -1 behind them; or None.
        """
        step, inputs, num_rows = forward.step, forward.inputs, forward.num_rows
        backend = self._backend.with_strict(step.plan.output.strict)
        verify = step.column("phase") == VERIFY
        final = step.column("phase") == FINAL_CHUNK
        num_sampled = torch.where(verify, num_rows, final.long())
        sampled = self._sampled_rows(backend, forward, num_sampled)
        hidden_end = forward.done.rows.row_start[1:]
        place = hidden_end[sampled.owner] - num_sampled[sampled.owner] + sampled.offset
        logits = self._model.logits(backend, forward.done.hidden[place])
        mask = None if masks is None else _spread(masks, sampled, len(num_rows), self._wide)
        settings = self._sampler.settings(sampled, step.needs, mask)
        chosen = backend.sample(logits, settings)
        targets = inputs.fed.new_zeros(len(inputs.fed), self._wide)
        targets[sampled.owner, sampled.offset] = chosen.token_ids
        broken = torch.zeros_like(targets, dtype=torch.bool)
        broken[sampled.owner, sampled.offset] = chosen.status != 0
        accepted, token_ids = self._verification.accept(
            step, backend, logits, sampled, settings, targets, broken, inputs, forward.lengths
        )
        at_end = broken.gather(1, accepted.unsqueeze(1)).squeeze(1)
        status = (at_end | forward.unsound).long() * RowStatus.NON_FINITE
        status = status.masked_fill(inputs.bad, RowStatus.BAD_SOURCE)
        failed = status != 0
        token_ids = token_ids.masked_fill(failed.unsqueeze(1), 0)
        num_tokens = torch.where(failed, 1, accepted + 1) * (num_sampled > 0)
        end = inputs.start + torch.where(verify, num_tokens, num_rows)
        if SamplingNeeds.PENALTIES in step.needs:
            self._sampler.count(step.column("slot"), token_ids, num_tokens.masked_fill(failed, 0))
        left = torch.where(failed | (num_tokens == 0), -1, inputs.tag)
        last = token_ids.gather(1, (num_tokens - 1).clamp(min=0).unsqueeze(1))
        forced = None if masks is None else masks.get("forced")
        drafts, survival = self._draft(
            backend, forward, token_ids, num_tokens, last, end, failed, forced
        )
        self._carries.leave(forward.number, torch.cat((last, drafts), 1), end, left)
        if "saves" in step.extra:
            self._state.copy_slots(step.extra["saves"])
        numbers = torch.stack((num_tokens, status, inputs.start, forward.lengths), 1)
        bits = torch.zeros_like(drafts)
        if survival is not None:
            bits = survival.contiguous().view(torch.int32).long()
        columns = torch.cat((token_ids, numbers, drafts, bits), 1)
        scores = self._scores(backend, forward, logits, num_sampled, token_ids)
        return StepOutput(columns, survival is not None, scores)

    def _apply_deltas(self, step: StagedStep) -> None:
        """Write block tables, stored states, and what is known of sequences that enter."""
        extra, state = step.extra, self._state
        for pool, table in state.tables.items():
            if f"table {pool}" in extra:
                slots, places, block_ids = extra[f"table {pool}"]
                table[slots, places] = block_ids.to(table.dtype)
        if "loads" in extra:
            state.copy_slots(extra["loads"])
        if "entering" not in extra:
            return
        engram = self._model.engram
        if engram is not None:
            slots, positions, token_ids = extra["history"]
            state.history[slots, positions % state.history.shape[1]] = engram.folded(
                token_ids, None
            )
        self._sampler.admit(
            extra["settings"],
            penalised=extra.get("penalised"),
            prompts=extra.get("prompts"),
            outputs=extra.get("outputs"),
            bias=extra.get("bias"),
        )
        if self._drafter is not None:
            place = extra["entering"]
            self._drafter.admit(
                Entering(
                    slots=step.column("slot")[place],
                    uids=step.column("uid")[place],
                    generations=step.column("generation")[place],
                    starts=step.column("start")[place],
                    history=extra["known"],
                )
            )

    def _unsound(
        self, step: StagedStep, done: Forwarded, rows: RowBatch, probe: _Probe | None
    ) -> Tensor:
        """Say which prompts have a row that is not finite: blocks of theirs are not to be shared.

        Every row counts, so that chunks of any size find the same. Rows that skip the late layers
        are judged by what the last KV source has read.
        """
        count = len(step.plan.rows)
        device = rows.positions.device
        if step.all_verify:
            return torch.zeros(count, dtype=torch.bool, device=device)
        judged = [(done.hidden, done.rows)]
        if probe is not None and probe.seen is not None:
            judged.append((probe.seen, rows))
        number = torch.zeros(count + 1, dtype=torch.int64, device=device)  # padding comes first
        for values, owners in judged:
            wrong = (~values.isfinite()).flatten(1).any(1)
            number = number.index_add(0, owners.sequence + 1, wrong.long())
        return (number[1:] > 0) & (step.column("phase") != VERIFY)

    def _sampled_rows(
        self, backend: KernelBackend, forward: StepForward, num_sampled: Tensor
    ) -> SampledRows:
        step, inputs = forward.step, forward.inputs
        after = inputs.start + forward.num_rows - num_sampled
        owner, positions = backend.expand_rows(num_sampled, after, step.num_sampled)
        return SampledRows(
            owner=owner,
            offset=positions - after[owner],
            positions=positions + 1,
            slots=step.column("slot"),
            fed=inputs.fed,
        )

    def _draft(
        self,
        backend: KernelBackend,
        forward: StepForward,
        token_ids: Tensor,
        num_tokens: Tensor,
        last: Tensor,
        end: Tensor,
        failed: Tensor,
        forced: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what is drafted behind the tokens, [R, g] legal ids, and its survival.

        Where a grammar leaves no choice its tokens are drafts, and the drafter's stay behind them.
        """
        step = forward.step
        if self._drafter is None:
            return token_ids[:, :0], None
        slots = forward.inputs.slots.masked_fill(failed, self._state.sizes.scratch_slot)
        picks = Picks(
            backend,
            self._sampler,
            step,
            last.squeeze(1),
            end,
            wide=self._wide,
            rejection=self._verification.rejection,
        )
        proposed = self._drafter.propose(
            backend,
            DraftInputs(
                uids=step.column("uid"),
                generations=step.column("generation"),
                slots=slots,
                token_ids=token_ids,
                num_tokens=num_tokens,
                end=end,
                fed=forward.tokens,
                rows=forward.rows,
                hidden=forward.done.hidden,
                features=forward.done.features,
                hidden_rows=forward.done.rows,
                samples=step.num_sampled > 0,
                pick=picks.next,
            ),
        )
        drafts, certain = proposed.token_ids, None
        if forced is not None:
            number = torch.arange(drafts.shape[1], device=drafts.device)
            ahead = forced.long().gather(1, num_tokens.unsqueeze(1) + number)
            certain = ahead >= 0
            drafts = torch.where(certain, ahead, drafts)
        drafts = drafts.masked_fill((drafts < 0) | (drafts >= self._vocab_size), 0)
        if not step.num_sampled:
            return drafts, None
        verification = self._verification
        return drafts, verification.remember(slots, drafts, proposed.confidence, picks, certain)

    def _scores(
        self,
        backend: KernelBackend,
        forward: StepForward,
        logits: Tensor,
        num_sampled: Tensor,
        token_ids: Tensor,
    ) -> list[Scores]:
        """Score the tokens of sequences that asked for it, then prompt tokens."""
        step, scores = forward.step, []
        if "scored" in step.extra:
            place = step.extra["scored"]
            count = num_sampled[place].unsqueeze(1)
            number = torch.arange(1 + step.num_draft_columns, device=place.device)
            first = (num_sampled.cumsum(0) - num_sampled)[place].unsqueeze(1)
            rows = (first + torch.minimum(number, count - 1)).flatten()
            ids = token_ids[place, : len(number)].flatten()
            scores.append(Scores.of(backend, logits[rows], ids, int(step.num_top.max())))
        for asked in step.prompt_rows:
            targets = step.extra[f"targets {asked.place}"]
            scores.append(self._prompt_scores(backend, asked, targets, forward.done.hidden))
        return scores

    def _prompt_scores(
        self, backend: KernelBackend, asked: PromptRows, targets: Tensor, hidden: Tensor
    ) -> Scores:
        """Score the prompt tokens that follow a sequence's rows, which all ran every layer."""
        parts = []
        for begin in range(0, asked.num_targets, PROMPT_PIECE):
            piece = targets[begin : begin + PROMPT_PIECE]
            place = asked.first + begin
            logits = self._model.logits(backend, hidden[place : place + len(piece)])
            parts.append(Scores.of(backend, logits, piece, asked.num_top))
        return Scores.joined(parts)


class _Probe:
    """A tap that keeps the streams of one layer."""

    def __init__(self, layer_id: int):
        self._layer_id = layer_id
        self.seen: Tensor | None = None

    def __call__(self, name: str, layer_id: int, value: Tensor) -> None:
        if name == "hidden" and layer_id == self._layer_id:
            self.seen = value


def _spread(masks: GrowingMirror, rows: SampledRows, count: int, wide: int) -> Tensor:
    """Return a mask for every sampled row, all ones where none was sent."""
    sent = masks["masks"]
    full = torch.full((count * wide, sent.shape[1]), -1, dtype=sent.dtype, device=sent.device)
    return full.index_copy(0, masks["places"].long(), sent)[rows.owner * wide + rows.offset]
