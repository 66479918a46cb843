"""One rank's device side: sends a plan, runs the model, samples, hands back a ticket.

All state on the device is written by work on the forward queue, in the order of launches; the host
only sends immutable plans. So no write can overtake an earlier step's read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.engine.sampler import Sampler, StagedSampling
from deepinfer_core.engine.stage import PLACEHOLDER, PromptRows, StagedStep, stage
from deepinfer_core.engine.step_ring import WorkerStepState
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.model.state import ModelState
from deepinfer_core.types import (
    PromptLogprob,
    RowStatus,
    StepPlan,
    StepResult,
    TokenLogprob,
)

__all__ = ["CarryState", "Worker"]

# Prompt rows whose logits exist at a time: a row of them is as wide as the vocabulary.
PROMPT_PIECE = 64


@dataclass(frozen=True)
class CarryState:
    """What a step leaves for the next; satisfies `interfaces.Carry`."""

    tokens: Tensor
    start: Tensor
    tag: Tensor


@dataclass(frozen=True)
class _Scores:
    """Log-probabilities of n tokens and of the best ones at their places, on the device."""

    token_ids: Tensor
    chosen: Tensor
    best_ids: Tensor
    best: Tensor

    def to_host(self, num_top: Sequence[int]) -> list[TokenLogprob]:
        """Copy them, with `num_top[i]` alternatives of the i-th."""
        columns = (self.token_ids, self.chosen, self.best_ids, self.best)
        rows = zip(*(column.tolist() for column in columns), num_top, strict=True)
        return [
            TokenLogprob(token, value, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, value, ids, values, count in rows
        ]


@dataclass(frozen=True)
class _Output:
    """A step's results on the device; `scored` are places in the plan, in the order of `scores`."""

    start: Tensor
    status: Tensor
    token_ids: Tensor
    scored: Sequence[int]
    scores: _Scores | None
    prompt_scores: Mapping[int, _Scores]


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
        self._device = backend.runtime.device
        self._sampler = Sampler(state.sizes.num_slots, model.config.vocab_size, self._device)
        self._carry: CarryState | None = None

    def launch(self, plan: StepPlan) -> WorkerStepState:
        """Queue a step and return its ticket.

        Returns at once where the device has queues of its own; on the CPU the work is done then.
        """
        runtime = self.backend.runtime
        copy_in, forward = runtime.queue("copy_in"), runtime.queue("forward")
        copy_out = runtime.queue("copy_out")
        staged: list[tuple[StagedStep, StagedSampling]] = []
        produced: list[_Output] = []
        results: list[StepResult] = []
        copy_in.submit(lambda: staged.append(self._stage(plan)))
        forward.wait_for(copy_in.record())
        forward.submit(lambda: produced.append(self._run(*staged[0])))
        forward_done = forward.record()
        copy_out.wait_for(forward_done)
        copy_out.submit(lambda: results.append(_to_host(plan, produced[0])))
        return WorkerStepState(plan, forward_done, copy_out.record(), lambda: results[0])

    def scrub(self, blocks: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Zero blocks and slots whose content is not finite, before any later step."""
        self.backend.runtime.queue("forward").submit(lambda: self.state.scrub(blocks, slots))

    def _stage(self, plan: StepPlan) -> tuple[StagedStep, StagedSampling]:
        window = self.model.config.sliding_window
        return stage(plan, window, self._device), self._sampler.stage(plan)

    @torch.no_grad()
    def _run(self, step: StagedStep, sampling: StagedSampling) -> _Output:
        backend = self.backend.with_strict(step.plan.output.strict)
        self._apply_deltas(step)
        self._sampler.admit(sampling)
        first, start, status = backend.correct_inputs(
            step.first_tokens.unsqueeze(-1), step.start, step.uids, step.remap, self._carry
        )
        rows = RowBatch.build(
            backend,
            step.num_rows,
            start,
            step.slots,
            window=self.model.config.sliding_window,
            window_floor=step.window_floor,
            write_floor=step.write_floor,
        )
        tokens = step.tokens.index_copy(0, rows.row_start[:-1], first[:, 0])
        done = self.model.forward(backend, tokens, rows, self.state, tail=step.tail)
        end = start + (rows.row_start[1:] - rows.row_start[:-1])
        output = self._sample(backend, step, sampling, done.hidden, start, end, status)
        self._carry = CarryState(output.token_ids.unsqueeze(-1), end, step.uids)
        return output

    def _apply_deltas(self, step: StagedStep) -> None:
        """Write new block-table entries, and the history of sequences that enter a slot."""
        for delta in step.tables:
            table = self.state.tables[delta.pool]
            table[delta.slots, delta.places] = delta.block_ids.to(table.dtype)
        if self.model.engram is not None:
            for slot, start, token_ids in step.history:
                self.state.set_history(slot, start, self.model.engram.folded(token_ids, None))

    def _sample(
        self,
        backend: KernelBackend,
        step: StagedStep,
        sampling: StagedSampling,
        hidden: Tensor,
        start: Tensor,
        end: Tensor,
        status: Tensor,
    ) -> _Output:
        """Sample after the last row of each sequence that asks for it, and score what was asked."""
        sequences = step.plan.sequences
        logits = self.model.logits(backend, hidden[step.last_hidden])
        positions = end[step.sampled]
        sampled, faults = self._sampler.sample(backend, logits, sampling, positions)
        token_ids = torch.full_like(start, PLACEHOLDER).index_copy(0, step.sampled, sampled)
        worst = torch.maximum(status[step.sampled], faults)
        status = status.index_copy(0, step.sampled, worst)
        chosen = [row for row, meta in enumerate(sequences) if meta.samples]
        asked = [i for i, row in enumerate(chosen) if sequences[row].logprobs is not None]
        scored = [chosen[i] for i in asked]
        scores = None
        if asked:
            num_top = max(sequences[row].logprobs or 0 for row in scored)
            scores = _score(backend, logits[asked], sampled[asked], num_top)
        prompt_scores = {
            rows.row: self._prompt_scores(
                backend, rows, hidden, sequences[rows.row].prompt_logprobs or 0
            )
            for rows in step.prompt_rows
        }
        return _Output(start, status, token_ids, scored, scores, prompt_scores)

    def _prompt_scores(
        self, backend: KernelBackend, asked: PromptRows, hidden: Tensor, num_top: int
    ) -> _Scores:
        """Score the prompt tokens that follow a sequence's rows, which all ran every layer."""
        parts = []
        for begin in range(0, len(asked.targets), PROMPT_PIECE):
            targets = asked.targets[begin : begin + PROMPT_PIECE]
            place = asked.first + begin
            logits = self.model.logits(backend, hidden[place : place + len(targets)])
            parts.append(_score(backend, logits, targets, num_top))
        columns = ((p.token_ids, p.chosen, p.best_ids, p.best) for p in parts)
        return _Scores(*(torch.cat(column) for column in zip(*columns, strict=True)))


def _score(backend: KernelBackend, logits: Tensor, token_ids: Tensor, num_top: int) -> _Scores:
    return _Scores(token_ids, *backend.logprobs(logits, token_ids, num_top))


def _to_host(plan: StepPlan, output: _Output) -> StepResult:
    sequences = plan.sequences
    tokens = output.token_ids.tolist()
    logprobs: dict[int, TokenLogprob] = {}
    if output.scores is not None:
        num_top = [sequences[row].logprobs or 0 for row in output.scored]
        values = output.scores.to_host(num_top)
        logprobs = dict(zip(output.scored, values, strict=True))
    prompt: dict[int, tuple[PromptLogprob, ...]] = {}
    for row, scores in output.prompt_scores.items():
        meta = sequences[row]
        found = scores.to_host([meta.prompt_logprobs or 0] * len(scores.chosen))
        prompt[row] = tuple(PromptLogprob(meta.start + i, v) for i, v in enumerate(found, start=1))
    return StepResult(
        step_seq=plan.output.step_seq,
        token_ids=tuple((tokens[row],) if m.samples else () for row, m in enumerate(sequences)),
        status=tuple(RowStatus(value) for value in output.status.tolist()),
        logprobs=tuple((logprobs[row],) if row in logprobs else () for row in range(len(tokens))),
        prompt_logprobs=tuple(prompt.get(row, ()) for row in range(len(tokens))),
        start=tuple(output.start.tolist()),
    )
