"""One layer: hyper-connections around attention and experts.

Those that collapse the streams are lagged: a connection uses what the one before it computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.interfaces import KernelBackend, Rows, WindowStore
from deepinfer_core.model.attention import Attention, Selections
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.state import ModelState
from deepinfer_core.model.weights import BlockWeights, MixWeights, MoeWeights

__all__ = ["Block", "Hidden", "Tap", "no_tap", "start_streams"]

# Called with a name, the layer and a tensor; goldens, statistics and training losses look in here.
Tap = Callable[[str, int, Tensor], None]


def no_tap(name: str, layer_id: int, value: Tensor) -> None:
    """Look at nothing."""


@dataclass(frozen=True)
class Hidden:
    """Residual streams [B, S, D] and their coefficient [B, S] float32.

    The next sub-layer collapses the streams with the coefficient.
    """

    streams: Tensor
    coefficient: Tensor

    def keep(self, rows: Tensor) -> Hidden:
        """Return the chosen rows."""
        return Hidden(self.streams[rows], self.coefficient[rows])


def start_streams(embeddings: Tensor, count: int) -> Hidden:
    """Return equal copies of embeddings [B, D]; the first sub-layer reads the first stream."""
    coefficient = embeddings.new_zeros(embeddings.shape[0], count, dtype=torch.float32)
    coefficient[:, 0] = 1.0
    return Hidden(embeddings.unsqueeze(1).repeat(1, count, 1), coefficient)


@dataclass(frozen=True)
class Block:
    """A layer of the model or a stage of the drafter.

    They differ in `num_chosen` and in what attention sees.
    """

    config: ModelConfig
    weights: BlockWeights
    attention: Attention
    num_chosen: int

    def attention_input(self, backend: KernelBackend, hidden: Hidden) -> Tensor:
        """Return the normed input [B, D] of attention."""
        collapsed = backend.mhc_collapse(hidden.coefficient, hidden.streams)
        return backend.rms_norm(collapsed, self.weights.attn_norm, self.config.rms_norm_eps)

    def __call__(
        self,
        backend: KernelBackend,
        hidden: Hidden,
        rows: RowBatch,
        window: WindowStore,
        state: ModelState | None,
        selections: Selections,
        *,
        keep: Tensor | None = None,
        tap: Tap = no_tap,
        layer_id: int = -1,
    ) -> tuple[Hidden, Selections]:
        """Run the layer.

        Args:
            window: ring of this layer; written when `state` is given (a draft stage leaves nothing
                behind).
            keep: rows to go on with once this layer's keys and block entries are written for all of
                them.
        """
        x = self.attention_input(backend, hidden)
        keys = self.attention.keys(backend, x, rows.positions)
        if state is not None:
            self.attention.write_blocks(backend, x, rows, state)
        queries = rows
        if keep is not None:
            hidden, x, queries = hidden.keep(keep), x[keep], rows.queries(keep)
        pre, post, comb = self._mix(backend, hidden.streams, self.weights.attn_mix)
        y, selections = self.attention(backend, x, keys, window, queries, state, selections)
        if state is not None:
            backend.write_window(window, keys, rows)
        streams = backend.mhc_merge(y, post, comb, hidden.streams)
        return self._experts(backend, Hidden(streams, pre), queries, tap, layer_id), selections

    def _mix(
        self, backend: KernelBackend, streams: Tensor, mix: MixWeights
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        return backend.mhc_mix(
            streams,
            mix.fn,
            mix.scale,
            mix.base,
            norm_eps=config.rms_norm_eps,
            eps=config.hc_eps,
            iterations=config.hc_sinkhorn_iters,
        )

    def _experts(
        self, backend: KernelBackend, hidden: Hidden, rows: Rows, tap: Tap, layer_id: int
    ) -> Hidden:
        config, weights = self.config, self.weights.moe
        pre, post, comb = self._mix(backend, hidden.streams, self.weights.ffn_mix)
        collapsed = backend.mhc_collapse(hidden.coefficient, hidden.streams)
        x = backend.rms_norm(collapsed, self.weights.ffn_norm, config.rms_norm_eps)
        ids, chosen = backend.route(
            x,
            weights.gate,
            _bias(weights, rows),
            top_k=self.num_chosen,
            temperature=config.gate_temp,
            scale=config.routed_scaling_factor,
        )
        tap("expert_ids", layer_id, ids)
        tap("expert_weights", layer_id, chosen)
        placed = ids if weights.slots is None else weights.slots[ids.long()]
        placed = placed.masked_fill((rows.sequence < 0).unsqueeze(-1), -1)
        routed = backend.experts(x, placed, chosen, weights.experts, limit=config.swiglu_limit)
        shared = backend.shared_expert(
            x, weights.shared_w1, weights.shared_w3, weights.shared_w2, limit=config.swiglu_limit
        )
        y = (routed + shared.float()).to(x.dtype)
        return Hidden(backend.mhc_merge(y, post, comb, hidden.streams), pre)


def _bias(weights: MoeWeights, rows: Rows) -> Tensor:
    """Return the router's bias: [E], or [B, E] when some rows lie in an image span."""
    if rows.is_image is None:
        return weights.bias
    return torch.where(rows.is_image.unsqueeze(-1), weights.bias_image, weights.bias)
