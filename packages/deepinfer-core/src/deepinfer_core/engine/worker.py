"""One rank's device side: applies a plan's deltas, runs the model, samples, hands back a ticket.

All state on the device is written by work on the forward queue, in the order of launches; the host
only sends immutable plans. So no write can overtake an earlier step's read (rule W1 of
`scheduler.md`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.engine.sampler import Sampler, host_logprobs
from deepinfer_core.engine.step_ring import WorkerStepState
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.deepseek_v41 import DeepseekV41, Tail
from deepinfer_core.model.state import ModelState
from deepinfer_core.types import (
    PromptLogprob,
    RowStatus,
    SequenceMetadata,
    StepPlan,
    StepResult,
    TokenLogprob,
)

__all__ = ["CarryState", "Worker"]

PLACEHOLDER = -1  # an illegal id: one that reaches the model is a fault, not a token


@dataclass(frozen=True)
class CarryState:
    """What a step leaves for the next; satisfies `interfaces.Carry`."""

    tokens: Tensor
    start: Tensor
    tag: Tensor


@dataclass
class _Output:
    """A step's sampler output, filled by device work."""

    start: Tensor
    status: Tensor
    token_ids: Tensor
    logprobs: dict[int, TokenLogprob]
    prompt_logprobs: dict[int, tuple[PromptLogprob, ...]]


class Worker:
    """Runs plans on one device.

    Args:
        backend: ops; its runtime's queues carry the work.
        model: weights and forward pass.
        state: caches and slots of all sequences.
    """

    def __init__(self, backend: KernelBackend, model: DeepseekV41, state: ModelState):
        """Start with an empty carry."""
        self.backend, self.model, self.state = backend, model, state
        self.sampler = Sampler(
            state.sizes.num_slots, model.config.vocab_size, backend.runtime.device
        )
        self._device = backend.runtime.device
        self._carry: CarryState | None = None

    def launch(self, plan: StepPlan) -> WorkerStepState:
        """Queue a step and return at once with its ticket."""
        runtime = self.backend.runtime
        forward, copy_out = runtime.queue("forward"), runtime.queue("copy_out")
        produced: list[_Output] = []
        results: list[StepResult] = []
        forward.submit(lambda: produced.append(self._run(plan)))
        forward_done = forward.record()
        copy_out.wait_for(forward_done)
        copy_out.submit(lambda: results.append(_to_host(plan, produced[0])))
        return WorkerStepState(plan, forward_done, copy_out.record(), lambda: results[0])

    def scrub(self, blocks: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Zero blocks and slots whose content is not finite, before any later step."""
        self.backend.runtime.queue("forward").submit(lambda: self.state.scrub(blocks, slots))

    @torch.no_grad()
    def _run(self, plan: StepPlan) -> _Output:
        backend = self.backend.with_strict(plan.output.strict)
        sequences = plan.sequences
        for meta in sequences:
            self._apply_deltas(meta)
        first, start, status = self._sources(backend, plan)
        rows = RowBatch.build(
            [meta.num_rows for meta in sequences],
            start,
            [meta.slot for meta in sequences],
            window=self.model.config.sliding_window,
            window_floor=[meta.window_start for meta in sequences],
            write_floor=[
                meta.start + meta.num_replay if meta.num_replay else 0 for meta in sequences
            ],
            device=self._device,
        )
        tail = self._tail(sequences, rows)
        done = self.model.forward(
            backend, self._tokens(sequences, first, rows), rows, self.state, tail=tail
        )
        output = _Output(start, status, torch.full_like(start, PLACEHOLDER), {}, {})
        self._sample(backend, sequences, rows, tail, done.hidden, output)
        tags = torch.tensor(
            [meta.uid for meta in sequences], dtype=torch.int64, device=self._device
        )
        counts = rows.row_start[1:] - rows.row_start[:-1]
        self._carry = CarryState(output.token_ids.unsqueeze(-1), start + counts, tags)
        for row, meta in enumerate(sequences):
            if meta.prompt_logprobs is not None and meta.prompt_targets:
                output.prompt_logprobs[row] = self._prompt_logprobs(
                    backend, meta, row, rows, done.hidden
                )
        return output

    def _apply_deltas(self, meta: SequenceMetadata) -> None:
        """Bring a sequence's slot up to date: settings and history on entry, new blocks."""
        admission = meta.admission
        if admission is not None:
            self.sampler.admit(meta.slot, admission)
            if admission.history and self.model.engram is not None:
                ids = torch.tensor(admission.history, device=self._device)
                folded = self.model.engram.folded(ids, None)
                self.state.set_history(meta.slot, meta.start, folded.tolist())
        for delta in meta.blocks:
            self.state.set_blocks(meta.slot, delta.pool, delta.first, list(delta.block_ids))

    def _sources(self, backend: KernelBackend, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Return each sequence's first token, start position and status.

        They come from the host or from the carry.
        """
        table = [
            (meta.token_ids[0] if meta.token_ids else PLACEHOLDER, meta.start, meta.uid, remap)
            for meta, remap in zip(plan.sequences, plan.output.remap, strict=True)
        ]
        columns = torch.tensor(table, dtype=torch.int64, device=self._device)
        tokens, start, tag, remap = columns.unbind(1)
        tokens, start, status = backend.correct_inputs(
            tokens.unsqueeze(-1), start, tag, remap, self._carry
        )
        return tokens[:, 0], start, status

    def _tokens(
        self, sequences: tuple[SequenceMetadata, ...], first: Tensor, rows: RowBatch
    ) -> Tensor:
        """Return the token of each row [B]; the first of a sequence is the corrected one."""
        flat = [
            token
            for meta in sequences
            for token in (meta.token_ids or (PLACEHOLDER,) * meta.num_rows)
        ]
        tokens = torch.tensor(flat, dtype=torch.int64, device=self._device)
        tokens[rows.row_start[:-1]] = first
        return tokens

    def _tail(self, sequences: tuple[SequenceMetadata, ...], rows: RowBatch) -> Tail | None:
        """Return the rows that run every layer.

        None when all of them do and see no window that was cut.
        """
        reach = self.model.config.sliding_window - 1  # rows further on see nothing below the tail
        if all(not meta.tail_start or meta.start >= meta.tail_start + reach for meta in sequences):
            return None
        floor = torch.tensor(
            [meta.tail_start for meta in sequences], dtype=torch.int64, device=self._device
        )
        keep = (rows.positions >= floor[rows.sequence]).nonzero().squeeze(-1)
        return Tail(keep, floor[rows.sequence[keep]])

    def _sample(
        self,
        backend: KernelBackend,
        sequences: tuple[SequenceMetadata, ...],
        rows: RowBatch,
        tail: Tail | None,
        hidden: Tensor,
        output: _Output,
    ) -> None:
        """Sample after the last row of each sequence that asks for it (written: output)."""
        chosen = [row for row, meta in enumerate(sequences) if meta.samples]
        if not chosen:
            return
        last = rows.row_start[1:][chosen] - 1
        place = last if tail is None else torch.searchsorted(tail.rows, last)
        logits = self.model.logits(backend, hidden[place])
        positions = rows.positions[last] + 1
        slots = [sequences[row].slot for row in chosen]
        token_ids, status = self.sampler.sample(backend, logits, slots, positions)
        output.token_ids[chosen] = token_ids
        output.status[chosen] = torch.maximum(output.status[chosen], status)
        asked = [(i, row) for i, row in enumerate(chosen) if sequences[row].logprobs is not None]
        tops = [sequences[row].logprobs or 0 for _, row in asked]
        index = [i for i, _ in asked]
        values = host_logprobs(backend, logits[index], token_ids[index], tops)
        output.logprobs.update({row: value for (_, row), value in zip(asked, values, strict=True)})

    def _prompt_logprobs(
        self,
        backend: KernelBackend,
        meta: SequenceMetadata,
        row: int,
        rows: RowBatch,
        hidden: Tensor,
    ) -> tuple[PromptLogprob, ...]:
        """Return log-probabilities of the prompt tokens that follow this step's rows.

        Every row ran all layers.
        """
        count, begin = len(meta.prompt_targets), int(rows.row_start[row])
        logits = self.model.logits(backend, hidden[begin : begin + count])
        targets = torch.tensor(meta.prompt_targets, device=self._device)
        values = host_logprobs(backend, logits, targets, [meta.prompt_logprobs or 0] * count)
        return tuple(
            PromptLogprob(meta.start + i, value) for i, value in enumerate(values, start=1)
        )


def _to_host(plan: StepPlan, output: _Output) -> StepResult:
    tokens, status, start = output.token_ids.tolist(), output.status.tolist(), output.start.tolist()
    rows = range(len(plan.sequences))
    sampled = [meta.samples for meta in plan.sequences]
    return StepResult(
        step_seq=plan.output.step_seq,
        token_ids=tuple((tokens[row],) if sampled[row] else () for row in rows),
        status=tuple(RowStatus(value) for value in status),
        logprobs=tuple((output.logprobs[row],) if row in output.logprobs else () for row in rows),
        prompt_logprobs=tuple(output.prompt_logprobs.get(row, ()) for row in rows),
        start=tuple(start),
    )
