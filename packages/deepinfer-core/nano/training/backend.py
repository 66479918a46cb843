"""`TrainingBackend`: the ops of the model over packed training rows, quick and differentiable.

It serves the same `DeepseekV41.forward` as the CPU backend, with two liberties that only a
trainer has: every sequence begins at position 0 inside the batch, so that caches are just this
forward's own tensors; and what depends on the data is a mask, never a shape, so that the whole
compiles. `picks` and `candidates` are masks here, opaque to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nano.training import ops, rounding

if TYPE_CHECKING:
    from deepinfer_core.interfaces import ExpertWeights, Matrix

__all__ = ["Chosen", "PackedRows", "PackedState", "TrainingBackend"]

# Heads as tall as this run in the compute dtype: the vocabulary in float32 would cost as much as
# all the rest.
_TALL = 1024


class PackedRows:
    """The rows of N packed sequences of T tokens, laid end to end; satisfies what the ops read.

    Args:
        documents: [N, T] int64, number of the document a token belongs to within its row. Those of
            ratio 2 pool pairs: a document begins at an even place.
    """

    is_image = None

    def __init__(self, documents: Tensor):
        """Number the positions of each document from 0."""
        self.documents = documents
        place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
        fresh = torch.ones_like(documents, dtype=torch.bool)
        fresh[:, 1:] = documents[:, 1:] != documents[:, :-1]
        start = torch.where(fresh, place, 0).cummax(1).values
        self.shape = (documents.shape[0], documents.shape[1])
        self.positions = (place - start).flatten()
        self.sequence = torch.zeros_like(self.positions)


@dataclass
class _Entries:
    """What a KV source wrote in this forward: [N, entries, channels]."""

    ratio: int
    value: Tensor | None = None


class PackedState:
    """Stands in for `ModelState`: holds what lower layers wrote for upper ones."""

    def __init__(self, ratios: dict[int, int], num_layers: int):
        """Make room for the block entries of each KV source (layer -> ratio)."""
        self.windows = (None,) * num_layers
        self.history = None
        self.carried = dict.fromkeys(ratios)
        self.blocks = {
            pool: {layer: _Entries(ratio) for layer, ratio in ratios.items()}
            for pool in ("compressed", "index")
        }


@dataclass
class Chosen:
    """What an index source chose, and what its loss needs.

    Attributes:
        seen: [N, T, entries] bool, entries that attention uses.
        scores: [N, T, entries] float32 index scores, -inf where not seen.
        mass: attention mass on each entry, summed over the layers that used the choice; detached.
    """

    seen: Tensor
    scores: Tensor
    mass: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Selected:
    picks: Chosen
    candidates: Tensor | None


@dataclass(frozen=True)
class _Runtime:
    device: torch.device


class TrainingBackend:
    """Ops over packed rows.

    Args:
        strength: [] float32: 0 leaves caches and inputs of quantised matrices as they are, 1 rounds
            them to their stored formats.
        round_inputs: whether inputs of quantised matrices are rounded at all (numerics `release`),
            or caches alone (`cache`).
        sparse: [] bool: whether attention sees only what the index sources chose.
        dtype: of activations and products: bfloat16, or float32 for comparisons.
        window: sliding window, tokens.

    Attributes:
        choices: what each index source chose in this forward.
        load: for each layer that ran, tokens an expert got: [experts] int64.
    """

    name = "training"
    strict = False

    def __init__(
        self,
        strength: Tensor,
        sparse: Tensor,
        *,
        window: int,
        dtype: torch.dtype = torch.bfloat16,
        round_inputs: bool = True,
    ):
        """See the class."""
        self._round_inputs = round_inputs
        self.strength, self.sparse, self.window = strength, sparse, window
        self.activation_dtype = dtype
        self.runtime = _Runtime(strength.device)
        self.choices: list[Chosen] = []
        self.load: list[Tensor] = []

    def prepare(self, matrix: Matrix) -> Matrix:
        """Weights stay as the trainer made them."""
        return matrix

    def _operand(self, x: Tensor) -> Tensor:
        """Return the input of a quantised matrix."""
        return rounding.as_fp8_rows(x, self.strength) if self._round_inputs else x

    # linear

    def embed(self, token_ids: Tensor, table: Matrix) -> Tensor:
        """See `KernelBackend.embed`."""
        return ops.gather(token_ids, table.payload, self.activation_dtype)

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """See `KernelBackend.linear`."""
        if weight.format != "plain":
            x = self._operand(x)
        return x @ weight.payload.to(x.dtype).T

    def linear_float32(self, x: Tensor, weight: Matrix) -> Tensor:
        """See `KernelBackend.linear_float32`; a vocabulary's products are of the compute dtype."""
        if weight.shape[0] >= _TALL:
            tall = weight.payload.to(self.activation_dtype)
            return (x.to(self.activation_dtype) @ tall.T).float()
        return x.float() @ weight.payload.float().T

    def grouped_linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """See `KernelBackend.grouped_linear`."""
        blocks = weight.payload.to(x.dtype).unflatten(0, (x.shape[1], -1))
        return torch.einsum("bgi,goi->bgo", x, blocks).flatten(1)

    # norms and residual streams

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """See `KernelBackend.rms_norm`."""
        return ops.rms_norm(x, weight, eps)

    def mhc_mix(
        self,
        streams: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        *,
        norm_eps: float,
        eps: float,
        iterations: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `KernelBackend.mhc_mix`."""
        return ops.mix(streams, fn, scale, base, norm_eps, eps, iterations)

    def mhc_collapse(self, coefficient: Tensor, streams: Tensor) -> Tensor:
        """See `KernelBackend.mhc_collapse`."""
        return ops.collapse(coefficient, streams)

    def mhc_merge(self, y: Tensor, post: Tensor, comb: Tensor, streams: Tensor) -> Tensor:
        """See `KernelBackend.mhc_merge`."""
        return ops.merge(y, post, comb, streams)

    # attention

    def rotate(
        self, x: Tensor, positions: Tensor, inv_freq: Tensor, *, inverse: bool = False
    ) -> Tensor:
        """See `KernelBackend.rotate`."""
        return ops.rotate(x, positions, inv_freq, inverse)

    def round_window(self, keys: Tensor) -> Tensor:
        """See `KernelBackend.round_window`."""
        return rounding.as_fp8_rows(keys, self.strength)

    def write_window(self, store: Any, keys: Tensor, rows: PackedRows) -> None:
        """Nothing comes later: a forward holds whole sequences."""

    def pool_groups(self, values: Tensor, gates: Tensor, state: Any, rows: PackedRows) -> Tensor:
        """See `KernelBackend.pool_groups`; even places yield values that nothing reads."""
        return ops.pool(values, gates)

    def write_entries(self, store: _Entries, entries: Tensor, rows: PackedRows, kind: str) -> None:
        """See `KernelBackend.write_entries`."""
        how = rounding.as_fp4_compressed if kind == "compressed" else rounding.as_fp4_rows
        complete = entries.unflatten(0, rows.shape)[:, store.ratio - 1 :: store.ratio]
        store.value = how(complete.contiguous(), self.strength)

    def round_index(self, x: Tensor) -> Tensor:
        """See `KernelBackend.round_index`."""
        return rounding.as_fp4_rows(x, self.strength)

    def index_select(
        self,
        queries: Tensor,
        weights: Tensor,
        keys: _Entries,
        rows: PackedRows,
        *,
        top_k: int,
        candidates: Tensor | None,
        candidate_block: int,
        publish: int,
    ) -> _Selected:
        """See `KernelBackend.index_select`; scores keep their gradient for the indexer's loss.

        Candidate blocks are cut from the start of the packed row, where inference cuts them from
        the start of the sequence.
        """
        known = keys.value
        assert known is not None, "a source writes its keys before it selects"
        seen, scores, published = ops.select(
            queries.unflatten(0, rows.shape),
            weights.unflatten(0, rows.shape),
            known,
            rows.documents,
            self.sparse,
            candidates,
            keys.ratio,
            top_k,
            candidate_block,
            publish,
        )
        chosen = Chosen(seen, scores)
        self.choices.append(chosen)
        return _Selected(chosen, published)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        window: Any,
        rows: PackedRows,
        sink: Tensor,
        *,
        scale: float,
        entries: _Entries | None = None,
        picks: Chosen | None = None,
    ) -> Tensor:
        """See `KernelBackend.attend`."""
        query = (queries * scale).unflatten(0, rows.shape)
        key = keys.unflatten(0, rows.shape)
        if entries is None or picks is None:
            return ops.attend_near(query, key, rows.documents, sink, self.window).flatten(0, 1)
        assert entries.value is not None, "a source writes its entries before anyone attends"
        out, mass = ops.attend_far(
            query, key, rows.documents, sink, entries.value, picks.seen, self.window
        )
        picks.mass.append(mass.detach())
        return out.flatten(0, 1)

    # experts

    def route(
        self, x: Tensor, gate: Matrix, bias: Tensor, *, top_k: int, temperature: float, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `KernelBackend.route`."""
        logits = self.linear_float32(x, gate) / temperature
        order, weights, load = ops.route(logits, bias, top_k, scale)
        self.load.append(load)
        return order, weights

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, *, limit: float
    ) -> Tensor:
        """See `KernelBackend.experts`.

        Every expert runs on every row and the weight of those not chosen is 0: for experts this
        small one plain product is quicker than sorting rows.
        """
        operand = self._operand(x)
        gate = operand @ experts.w1.payload.to(x.dtype).flatten(0, 1).T
        up = operand @ experts.w3.payload.to(x.dtype).flatten(0, 1).T
        inner = self._operand(ops.gated(gate, up, ids, weights, limit, experts.w1.payload.shape[0]))
        return (inner @ experts.w2.payload.to(x.dtype).transpose(1, 2).flatten(0, 1)).float()

    def shared_expert(
        self, x: Tensor, w1: Matrix, w3: Matrix, w2: Matrix, *, limit: float
    ) -> Tensor:
        """See `KernelBackend.shared_expert`."""
        return self.linear(ops.plain_gated(self.linear(x, w1), self.linear(x, w3), limit), w2)

    # Engram

    def engram_rows(
        self,
        folded: Tensor,
        history: Any,
        rows: PackedRows,
        pad_id: int,
        multipliers: Tensor,
        primes: Tensor,
    ) -> Tensor:
        """See `KernelBackend.engram_rows`."""
        return ops.engram_rows(folded, rows.positions, pad_id, multipliers, primes)

    def engram_fetch(self, table: Matrix, row_ids: Tensor) -> Callable[[], Tensor]:
        """See `KernelBackend.engram_fetch`."""
        return lambda: ops.gather(row_ids, table.payload, self.activation_dtype).flatten(1)

    def engram_gate(
        self,
        streams: Tensor,
        kv: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        eps: float,
        is_image: Tensor | None,
    ) -> Tensor:
        """See `KernelBackend.engram_gate`."""
        return ops.engram_gate(streams, kv, query_weight, key_weight, eps)
