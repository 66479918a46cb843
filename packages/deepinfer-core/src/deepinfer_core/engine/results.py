"""What comes back of a step: the device's results, copied out through pinned buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.engine.stage import StagedStep
from deepinfer_core.interfaces import DeviceRuntime, KernelBackend
from deepinfer_core.model.state import StateSizes
from deepinfer_core.plans import Logprobs, StepResult
from deepinfer_core.types import PromptLogprob, TokenLogprob

__all__ = ["ResultBuffers", "Scores", "StepOutput"]

_NUM_NUMBERS = 4  # of a sequence, behind its tokens


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of n tokens and of the best ones at their places, on the device.

    Attributes:
        ids: [n, 1 + k] int64, the token and the best ones. values: [n, 1 + k] float32.
    """

    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, backend: KernelBackend, logits: Tensor, token_ids: Tensor, num_top: int) -> Scores:
        """Score tokens [n] by raw logits [n, V]."""
        chosen, best_ids, best = backend.logprobs(logits, token_ids, num_top)
        return cls(
            torch.cat((token_ids.unsqueeze(1), best_ids), 1),
            torch.cat((chosen.unsqueeze(1), best), 1),
        )

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Return the rows of several parts, end to end."""
        return cls(torch.cat([p.ids for p in parts]), torch.cat([p.values for p in parts]))


@dataclass(frozen=True)
class StepOutput:
    """A step's results on the device.

    Attributes:
        columns: [R, 1 + drafts + 4 + 2 * g] int64: token ids, their number, status, start, drafts
            verified; new drafts, and their survival as the bits of float32.
        has_survival: whether the drafter told it.
        scores: those of sampled tokens, [n * (1 + most drafts)] rows, then those of each prompt.
    """

    columns: Tensor
    has_survival: bool
    scores: Sequence[Scores]


class ResultBuffers:
    """Pinned buffers of one place of the ring, for what a step yields."""

    def __init__(self, runtime: DeviceRuntime, sizes: StateSizes, num_new_drafts: int | None):
        """Allocate them; `num_new_drafts` is what the drafter proposes, None without one."""
        self._runtime, self._wide = runtime, 1 + sizes.max_drafts
        self._num_new_drafts = num_new_drafts
        width = self._wide + _NUM_NUMBERS + 2 * (num_new_drafts or 0)
        self._has_survival = False
        self._columns = runtime.pinned((sizes.num_slots, width), torch.int64)
        self._scores: list[tuple[Tensor, Tensor]] = []

    def copy(self, output: StepOutput) -> None:
        """Copy a step's results to the host (copy-out queue)."""
        self._columns[: len(output.columns)].copy_(output.columns, non_blocking=True)
        self._has_survival = output.has_survival
        self._scores = []
        for each in output.scores:  # few requests ask for them: buffers of their own will do
            ids = self._runtime.pinned(tuple(each.ids.shape), torch.int64)
            values = self._runtime.pinned(tuple(each.values.shape), torch.float32)
            ids.copy_(each.ids, non_blocking=True)
            values.copy_(each.values, non_blocking=True)
            self._scores.append((ids, values))

    def collect(self, step: StagedStep) -> StepResult:
        """Build the result of the step that was copied last; it shares no memory with buffers."""
        columns = self._columns[: len(step.plan.rows)].numpy().copy()
        wide, scores = self._wide, [(i.numpy(), v.numpy()) for i, v in self._scores]
        drafts, bits = np.split(columns[:, wide + _NUM_NUMBERS :], 2, axis=1)
        logprobs = None
        if len(step.scored):
            logprobs = self._logprobs(step, *scores.pop(0))
        return StepResult(
            step_seq=step.plan.output.step_seq,
            token_ids=columns[:, :wide],
            num_tokens=columns[:, wide],
            status=columns[:, wide + 1],
            start=columns[:, wide + 2],
            num_verified=columns[:, wide + 3],
            drafts=None if self._num_new_drafts is None else drafts,
            survival=bits.astype(np.int32).view(np.float32) if self._has_survival else None,
            logprobs=logprobs,
            prompt_logprobs=_prompt_logprobs(step, scores),
        )

    def _logprobs(self, step: StagedStep, ids: np.ndarray, values: np.ndarray) -> Logprobs:
        count, per_row = len(step.scored), 1 + step.num_draft_columns

        def wide(array: np.ndarray) -> np.ndarray:
            full = np.zeros((count, self._wide, array.shape[-1]), dtype=array.dtype)
            full[:, :per_row] = array.reshape(count, per_row, -1)
            return full

        all_ids, all_values = wide(ids), wide(values)
        return Logprobs(
            rows=step.scored,
            num_top=step.num_top,
            chosen=all_values[:, :, 0],
            best_ids=all_ids[:, :, 1:],
            best=all_values[:, :, 1:],
        )


def _prompt_logprobs(
    step: StagedStep, scores: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Mapping[int, tuple[PromptLogprob, ...]]:
    found = {}
    for asked, (ids, values) in zip(step.prompt_rows, scores, strict=True):
        found[asked.place] = tuple(
            PromptLogprob(
                asked.start + row,
                TokenLogprob(token, value, tuple(zip(best_ids, best, strict=True))),
            )
            for row, ((token, *best_ids), (value, *best)) in enumerate(
                zip(ids.tolist(), values.tolist(), strict=True), start=1
            )
        )
    return found
