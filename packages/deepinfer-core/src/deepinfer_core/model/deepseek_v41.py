"""DeepSeek-V4.1: the whole forward pass over a flattened batch.

The batch holds the rows of ragged sequences.

The model is a causal encoder and decoder: layers above the last KV source own no block KV, so of a
prompt they need only the last rows (decoder-side bounded replay). `forward` takes those rows as
`tail`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.attention import Attention, Selections
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.config import LayerRole, ModelConfig
from deepinfer_core.model.dspark import Drafter
from deepinfer_core.model.engram import EngramHash, apply_engram
from deepinfer_core.model.layers import Block, Tap, no_tap, start_streams
from deepinfer_core.model.rope import inverse_frequencies
from deepinfer_core.model.state import ModelState
from deepinfer_core.model.weights import BlockWeights, ModelWeights

__all__ = ["DeepseekV41", "Forwarded", "Tail"]


@dataclass(frozen=True)
class Tail:
    """Rows that run the layers above the last KV source.

    Attributes:
        rows: [B'] int64 ascending; of each sequence its last rows or none.
        floor: [B'] int64, first position that windows of those layers may see.
    """

    rows: Tensor
    floor: Tensor


@dataclass(frozen=True)
class Forwarded:
    """Result of a forward pass for the rows that ran every layer.

    Attributes:
        hidden: [B', D] collapsed streams, before the final norm.
        features: [B', n * D] drafter features, or None without draft targets.
        rows: the rows the two belong to.
    """

    hidden: Tensor
    features: Tensor | None
    rows: RowBatch


class DeepseekV41:
    """Weights and constants of one model; all state of sequences is in `ModelState`.

    Args:
        engram: token folding and hash tables; None for a model without Engram layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        engram: EngramHash | None,
        device: torch.device,
    ):
        """Build the layers, their rotary frequencies and the drafter."""
        self.config, self.engram = config, engram
        channels = config.qk_rope_head_dim
        self._window_freq = inverse_frequencies(channels, config.rope_theta).to(device)
        self._block_freq = inverse_frequencies(
            channels, config.compress_rope_theta, config.rope_scaling
        ).to(device)
        self._take(weights)

    def _take(self, weights: ModelWeights) -> None:
        config = self.config
        self.weights = weights
        self.blocks = tuple(
            self._block(w, config.num_experts_per_tok, role)
            for w, role in zip(weights.layers, config.layers, strict=True)
        )
        self.drafter: Drafter | None = None
        if weights.drafter is not None:
            chosen = config.dspark_num_experts_per_tok
            stages = tuple(self._block(w, chosen) for w in weights.drafter.stages)
            self.drafter = Drafter(config, weights.drafter, stages, weights.embed, weights.head)

    def with_weights(self, weights: ModelWeights) -> DeepseekV41:
        """Return the model with other weights and the same constants: a step of a trainer."""
        other = copy.copy(self)
        other._take(weights)
        return other

    def _block(
        self, weights: BlockWeights, num_chosen: int, role: LayerRole | None = None
    ) -> Block:
        frequencies = self._block_freq if role is not None and role.ratio else self._window_freq
        attention = Attention(
            self.config, weights.attention, frequencies, role, weights.compressor, weights.indexer
        )
        return Block(self.config, weights, attention, num_chosen)

    def forward(
        self,
        backend: KernelBackend,
        token_ids: Tensor,
        rows: RowBatch,
        state: ModelState,
        *,
        tail: Tail | None = None,
        embeddings: Tensor | None = None,
        tap: Tap = no_tap,
    ) -> Forwarded:
        """Run all layers over the rows of a step and write their state.

        Args:
            token_ids: [B] int64.
            tail: rows for the layers above the last KV source; all rows when None.
            embeddings: [B, D] act in place of the embedding of `token_ids` (image rows).
        """
        config = self.config
        if embeddings is None:
            embeddings = backend.embed(token_ids, self.weights.embed)
        hidden = start_streams(embeddings, config.hc_mult)
        memory = self._fetch_memory(backend, token_ids, rows, state)
        selections, features, kept = Selections(), [], None
        for block, role in zip(self.blocks, config.layers, strict=True):
            layer_id = role.layer_id
            if role.engram_index is not None and block.weights.engram is not None:
                found = memory[role.engram_index]()
                streams = apply_engram(
                    backend,
                    block.weights.engram,
                    hidden.streams,
                    found if kept is None else found[kept],
                    config.rms_norm_eps,
                    rows.is_image,
                )
                hidden = replace(hidden, streams=streams)
            if role.is_draft_target:
                features.append(_mean(backend, hidden.streams))
                tap("target", layer_id, features[-1])
            keep = tail.rows if tail is not None and layer_id == config.last_kv_source else None
            hidden, selections = block(
                backend,
                hidden,
                rows,
                state.windows[layer_id],
                state,
                selections,
                keep=keep,
                tap=tap,
                layer_id=layer_id,
            )
            if keep is not None and tail is not None:
                rows = rows.select(keep).with_floor(tail.floor)
                features, kept = [feature[keep] for feature in features], keep
            tap("hidden", layer_id, hidden.streams)
            if role.is_index_source and selections.picks is not None:
                tap("picks", layer_id, selections.picks)
            if role.publishes_candidates and selections.candidates is not None:
                tap("candidates", layer_id, selections.candidates)
        collapsed = backend.mhc_collapse(hidden.coefficient, hidden.streams)
        return Forwarded(collapsed, torch.cat(features, -1) if features else None, rows)

    def logits(self, backend: KernelBackend, hidden: Tensor) -> Tensor:
        """Return logits [n, V] float32 of collapsed streams [n, D]."""
        normed = backend.rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)
        return backend.linear_float32(normed, self.weights.head)

    def _fetch_memory(
        self, backend: KernelBackend, token_ids: Tensor, rows: RowBatch, state: ModelState
    ) -> list[Callable[[], Tensor]]:
        """Begin to read what every Engram layer needs, in the order of these layers."""
        if self.engram is None:
            return []
        engram = self.engram
        folded = engram.folded(token_ids, rows.is_image)
        row_ids = backend.engram_rows(
            folded, state.history, rows, engram.pad_id, engram.multipliers, engram.primes
        )
        layers = [block.weights.engram for block in self.blocks]
        tables = [weights.table for weights in layers if weights is not None]
        return [
            backend.engram_fetch(table, ids) for table, ids in zip(tables, row_ids, strict=True)
        ]


def _mean(backend: KernelBackend, streams: Tensor) -> Tensor:
    count = streams.shape[1]
    equal = torch.full(streams.shape[:2], 1.0 / count, dtype=torch.float32, device=streams.device)
    return backend.mhc_collapse(equal, streams)
