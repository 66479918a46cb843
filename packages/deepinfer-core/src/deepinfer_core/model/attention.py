"""One layer's attention.

Window, compressed entries, indexer, grouped output.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer_core.interfaces import BlockStore, KernelBackend, Rows, Selection, WindowStore
from deepinfer_core.model.config import LayerRole, ModelConfig
from deepinfer_core.model.state import ModelState
from deepinfer_core.model.weights import AttentionWeights, CompressorWeights, IndexerWeights

__all__ = ["Attention", "Selections"]


@dataclass(frozen=True)
class Selections:
    """What index sources chose so far in this forward, handed from layer to layer.

    picks: [B, K] int32 of the nearest index source below.
    candidates: [B, n] int32 of the candidate source.
    """

    picks: Tensor | None = None
    candidates: Tensor | None = None


@dataclass(frozen=True)
class Attention:
    """Attention of one layer. `role` is None in a draft stage, which has a window only."""

    config: ModelConfig
    weights: AttentionWeights
    inv_freq: Tensor
    role: LayerRole | None = None
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None

    def keys(self, backend: KernelBackend, x: Tensor, positions: Tensor) -> Tensor:
        """Return window keys [B, d] of normed inputs x [B, D], rounded as they are stored."""
        latent = backend.rms_norm(
            backend.linear(x, self.weights.wkv), self.weights.kv_norm, self.config.rms_norm_eps
        )
        return backend.round_window(backend.rotate(latent, positions, self.inv_freq))

    def write_blocks(
        self, backend: KernelBackend, x: Tensor, rows: Rows, state: ModelState
    ) -> None:
        """Write compressed KV and index keys of the groups these rows complete.

        KV sources only.
        """
        weights, role, eps = self.compressor, self.role, self.config.rms_norm_eps
        if weights is None or role is None:
            return
        if weights.wgate is None:
            latent = backend.linear(x, weights.wkv)
        else:
            values = backend.linear_float32(x, weights.wkv)
            gates = backend.linear_float32(x, weights.wgate)
            pooled = backend.pool_groups(values, gates, state.carried[role.layer_id], rows)
            latent = pooled.to(backend.activation_dtype)
        latent = backend.rms_norm(latent, weights.norm, eps)
        first_token = rows.positions + 1 - role.ratio
        entry = backend.rotate(latent, first_token, self.inv_freq)
        backend.write_entries(state.blocks["compressed"][role.layer_id], entry, rows, "compressed")
        index_key = backend.rms_norm(
            backend.linear(latent, weights.index_wk), weights.index_norm, eps
        )
        index_key = backend.rotate(index_key, first_token, self.inv_freq)
        backend.write_entries(state.blocks["index"][role.layer_id], index_key, rows, "index")

    def __call__(
        self,
        backend: KernelBackend,
        x: Tensor,
        keys: Tensor,
        window: WindowStore,
        rows: Rows,
        state: ModelState | None,
        selections: Selections,
    ) -> tuple[Tensor, Selections]:
        """Attend from rows x [B, D].

        Return the layer's output [B, D] and the selections for layers above.
        """
        config, weights = self.config, self.weights
        latent = backend.rms_norm(
            backend.linear(x, weights.wq_a), weights.q_norm, config.rms_norm_eps
        )
        if state is not None and self.indexer is not None:
            selections = self._select(backend, x, latent, rows, state, selections)
        queries = backend.linear(latent, weights.wq_b).unflatten(
            -1, (config.num_attention_heads, -1)
        )
        queries = backend.rotate(queries, rows.positions, self.inv_freq)
        out = backend.attend(
            queries,
            keys,
            window,
            rows,
            weights.sink,
            scale=config.head_dim**-0.5,
            entries=self._entries(state),
            picks=None if self._entries(state) is None else selections.picks,
        )
        out = backend.rotate(out, rows.positions, self.inv_freq, inverse=True)
        grouped = out.unflatten(1, (config.o_groups, -1)).flatten(2)
        return backend.linear(
            backend.grouped_linear(grouped, weights.wo_a), weights.wo_b
        ), selections

    def _entries(self, state: ModelState | None) -> BlockStore | None:
        if state is None or self.role is None or self.role.kv_source is None:
            return None
        return state.blocks["compressed"][self.role.kv_source]

    def _select(
        self,
        backend: KernelBackend,
        x: Tensor,
        latent: Tensor,
        rows: Rows,
        state: ModelState,
        selections: Selections,
    ) -> Selections:
        config, role, weights = self.config, self.role, self.indexer
        assert role is not None and role.kv_source is not None and weights is not None, (
            "an indexer has a source"
        )
        queries = backend.linear(latent, weights.wq_b).unflatten(-1, (config.index_n_heads, -1))
        queries = backend.round_index(backend.rotate(queries, rows.positions, self.inv_freq))
        factor = (config.index_head_dim * config.index_n_heads) ** -0.5
        head_weights = backend.linear(x, weights.weights_proj)
        head_weights = (head_weights.float() * factor).to(head_weights.dtype)
        found: Selection = backend.index_select(
            queries,
            head_weights,
            state.blocks["index"][role.kv_source],
            rows,
            top_k=config.index_topk,
            candidates=selections.candidates if role.uses_candidates else None,
            candidate_block=config.candidate_block_size,
            publish=config.candidate_topk_blocks if role.publishes_candidates else 0,
        )
        published = found.candidates if role.publishes_candidates else selections.candidates
        return Selections(found.picks, published)
