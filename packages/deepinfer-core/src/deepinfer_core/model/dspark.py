"""DSpark drafter: a block of drafts from the target's features.

Parallel stages, then a short serial head.

The stages' rings are filled from features of committed positions alone (`feed`); drafting leaves
nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer_core.interfaces import KernelBackend, Matrix, Rows
from deepinfer_core.model.attention import Selections
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.layers import Block, start_streams
from deepinfer_core.model.state import ModelState
from deepinfer_core.model.weights import DrafterWeights

__all__ = ["Drafted", "Drafter", "Pick", "greedy"]

# logits [R, V] float32, drafts so far [R, k] int64 -> token ids [R] int64
Pick = Callable[[Tensor, Tensor], Tensor]


def greedy(logits: Tensor, drafts: Tensor) -> Tensor:
    """Return the most likely token of each row; the lowest id on ties."""
    return torch.argmax(logits, dim=-1)


@dataclass(frozen=True)
class Drafted:
    """Drafts of R sequences, g each.

    Attributes:
        token_ids: [R, g] int64. logits: [R, g, V] float32 with the Markov term.
        confidence: [R, g] float32 before the sigmoid: the chance that a draft passes when those
            before it did.
    """

    token_ids: Tensor
    logits: Tensor
    confidence: Tensor


class Drafter:
    """The draft stages and their heads; embedding and output head are the target's."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DrafterWeights,
        stages: tuple[Block, ...],
        embed: Matrix,
        head: Matrix,
    ):
        """Take the drafter's weights, and embedding and output head of the target."""
        self.config, self.weights, self.stages, self.embed, self.head = (
            config,
            weights,
            stages,
            embed,
            head,
        )

    def feed(self, backend: KernelBackend, features: Tensor, rows: Rows, state: ModelState) -> None:
        """Store keys of committed positions: features [B, n * D] of `rows`."""
        projected = backend.linear(features, self.weights.main_proj)
        x = backend.rms_norm(projected, self.weights.main_norm, self.config.rms_norm_eps)
        for stage, ring in zip(self.stages, state.draft_windows, strict=True):
            backend.write_window(ring, stage.attention.keys(backend, x, rows.positions), rows)

    def draft(
        self,
        backend: KernelBackend,
        last_token_ids: Tensor,
        positions: Sequence[int] | Tensor,
        slots: Sequence[int] | Tensor,
        state: ModelState,
        pick: Pick = greedy,
        *,
        num_drafts: int | None = None,
        window_floor: Tensor | None = None,
    ) -> Drafted:
        """Propose a block after each sequence's last token.

        Args:
            last_token_ids: [R] int64, sampled but not yet in the cache.
            positions: position of that token, the first without a feature.
            slots: slot of each sequence.
            pick: chooses a draft by its logits.
            num_drafts: how many of the block to return; all by default.
            window_floor: [R] int64, first position whose keys are kept; 0 by default.
        """
        config, size = self.config, self.config.dspark_block_size
        count = len(positions)
        rows = self._rows(backend, positions, slots, window_floor)
        tokens = torch.full(
            (count, size), config.dspark_noise_token_id, device=last_token_ids.device
        )
        tokens[:, 0] = last_token_ids
        hidden = start_streams(backend.embed(tokens.flatten(), self.embed), config.hc_mult)
        for stage, ring in zip(self.stages, state.draft_windows, strict=True):
            hidden, _ = stage(backend, hidden, rows, ring, None, Selections())
        collapsed = backend.mhc_collapse(hidden.coefficient, hidden.streams)
        normed = backend.rms_norm(collapsed, self.weights.norm, config.rms_norm_eps)
        base = backend.linear_float32(normed, self.head).unflatten(0, (count, size))
        hidden, wanted = collapsed.unflatten(0, (count, size)), num_drafts or size
        return self._serial(backend, last_token_ids, base[:, :wanted], hidden, pick)

    def _rows(
        self,
        backend: KernelBackend,
        positions: Sequence[int] | Tensor,
        slots: Sequence[int] | Tensor,
        window_floor: Tensor | None,
    ) -> RowBatch:
        """Return rows whose windows hold what precedes the block and all of the block."""
        window, size = self.config.sliding_window, self.config.dspark_block_size
        count = len(positions)
        rows = RowBatch.build(
            backend,
            torch.full((count,), size, device=backend.runtime.device),
            positions,
            slots,
            window=window,
            window_floor=window_floor,
            total=count * size,
        )
        first = rows.first_position[rows.sequence]
        return replace(
            rows,
            window_first=first - window,
            window_last=first + size - 1,
            window_len=window + size,
        )

    def _serial(
        self, backend: KernelBackend, last: Tensor, base: Tensor, hidden: Tensor, pick: Pick
    ) -> Drafted:
        weights, token = self.weights, last
        tokens, logits, confidence = last.new_zeros(len(last), 0), [], []
        for i in range(base.shape[1]):
            state = backend.embed(token, weights.markov_embed)
            row = base[:, i] + backend.linear_float32(state, weights.markov_head)
            joined = torch.cat((hidden[:, i].float(), state.float()), dim=-1)
            confidence.append(backend.linear_float32(joined, weights.confidence)[:, 0])
            token = pick(row, tokens)
            tokens = torch.cat((tokens, token.unsqueeze(1)), 1)
            logits.append(row)
        return Drafted(tokens, torch.stack(logits, 1), torch.stack(confidence, 1))
