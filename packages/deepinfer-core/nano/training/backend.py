"""`TrainingBackend`: the ops of the model over packed training rows, quick and differentiable.

It serves the same `DeepseekV41.forward` as the CPU backend, with two liberties that only a
trainer has: every sequence begins at position 0 inside the batch, so that caches are just this
forward's own tensors; and what depends on the data is a mask, never a shape, so that the whole
compiles. `picks` and `candidates` are masks here, opaque to the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer_core.cpu.ops import streams as residual
from deepinfer_core.cpu.ops.compressor import pool_pair
from deepinfer_core.cpu.ops.engram import engram_gate
from deepinfer_core.cpu.ops.moe import clamped_product
from nano.training import rounding
from nano.training.fused import fused

if TYPE_CHECKING:
    from deepinfer_core.interfaces import ExpertWeights, Matrix

__all__ = ["Chosen", "PackedRows", "PackedState", "TrainingBackend"]

# Heads as tall as this run in the compute dtype: the vocabulary in float32 would cost as much as
# all the rest.
_TALL = 1024

_TIE_BREAK = 1e-9

# Stands for -inf where a sum over nothing must not become NaN.
_LOWEST = -1e30


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
        return _gather(token_ids, table.payload, self.activation_dtype)

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
        return _rms_norm(x, weight, eps)

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
        return _mix(streams, fn, scale, base, norm_eps, eps, iterations)

    def mhc_collapse(self, coefficient: Tensor, streams: Tensor) -> Tensor:
        """See `KernelBackend.mhc_collapse`."""
        return _collapse(coefficient, streams)

    def mhc_merge(self, y: Tensor, post: Tensor, comb: Tensor, streams: Tensor) -> Tensor:
        """See `KernelBackend.mhc_merge`."""
        return _merge(y, post, comb, streams)

    # attention

    def rotate(
        self, x: Tensor, positions: Tensor, inv_freq: Tensor, *, inverse: bool = False
    ) -> Tensor:
        """See `KernelBackend.rotate`."""
        return _rotate(x, positions, inv_freq, inverse)

    def round_window(self, keys: Tensor) -> Tensor:
        """See `KernelBackend.round_window`."""
        return rounding.as_fp8_rows(keys, self.strength)

    def write_window(self, store: Any, keys: Tensor, rows: PackedRows) -> None:
        """Nothing comes later: a forward holds whole sequences."""

    def pool_groups(self, values: Tensor, gates: Tensor, state: Any, rows: PackedRows) -> Tensor:
        """See `KernelBackend.pool_groups`; even places yield values that nothing reads."""
        return _pool(values, gates)

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
        seen, scores, published = _select(
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
            return _attend_near(query, key, rows.documents, sink, self.window).flatten(0, 1)
        assert entries.value is not None, "a source writes its entries before anyone attends"
        out, mass = _attend_far(
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
        order, weights, load = _route(logits, bias, top_k, scale)
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
        inner = self._operand(_gated(gate, up, ids, weights, limit, experts.w1.payload.shape[0]))
        return (inner @ experts.w2.payload.to(x.dtype).transpose(1, 2).flatten(0, 1)).float()

    def shared_expert(
        self, x: Tensor, w1: Matrix, w3: Matrix, w2: Matrix, *, limit: float
    ) -> Tensor:
        """See `KernelBackend.shared_expert`."""
        return self.linear(_plain_gated(self.linear(x, w1), self.linear(x, w3), limit), w2)

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
        return _engram_rows(folded, rows.positions, pad_id, multipliers, primes)

    def engram_read(self, table: Matrix, row_ids: Tensor) -> Tensor:
        """See `KernelBackend.engram_read`."""
        return _gather(row_ids, table.payload, self.activation_dtype).flatten(1)

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
        return _engram_gate(streams, kv, query_weight, key_weight, eps)


@fused
def _gather(index: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    rows: Tensor = torch.nn.functional.embedding(index, table)
    return rows.to(dtype)


@fused
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return residual.rms_norm(x, weight, eps)


@fused
def _mix(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    flat = streams.flatten(1)
    statistic = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + norm_eps)
    logits = (flat @ fn.to(flat.dtype).T).float() * statistic
    return residual.sinkhorn(logits, scale, base, eps, iterations)


_collapse = fused(residual.mhc_collapse)
_merge = fused(residual.mhc_merge)
_rotate = fused(residual.rotate)


@fused
def _pool(values: Tensor, gates: Tensor) -> Tensor:
    own = torch.stack((values, gates), dim=1)
    pair = torch.stack((own.roll(1, 0), own), dim=1)
    return pool_pair(pair[:, :, 0], pair[:, :, 1])


@fused
def _select(
    queries: Tensor,
    weights: Tensor,
    known: Tensor,
    documents: Tensor,
    sparse: Tensor,
    candidates: Tensor | None,
    ratio: int,
    top_k: int,
    block: int,
    publish: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return which entries are seen, their scores (-inf elsewhere) and the candidates."""
    dots = torch.einsum("nthd,ned->nthe", queries, known).float()
    visible = _visible(documents, ratio)
    scores = (dots.clamp(min=0) * weights.float().unsqueeze(-1)).sum(2)
    scores = scores.masked_fill(~visible, -torch.inf)
    known_scores = scores.detach()
    inside = visible if candidates is None else visible & candidates
    best = _among_best(known_scores.masked_fill(~inside, -torch.inf), top_k) & inside
    published = visible & _candidates(known_scores, visible, block, publish) if publish else None
    seen = torch.where(sparse, best, visible)
    return seen, scores.masked_fill(~seen, -torch.inf), published


@fused
def _attend_near(
    query: Tensor, key: Tensor, documents: Tensor, sink: Tensor, window: int
) -> Tensor:
    """Attend to the window alone: query [N, T, H, d], scaled, and key [N, T, d]."""
    near = _with_previous(key.unflatten(1, (-1, window)))  # [N, C, 2 W, d]
    scores = _near_scores(query, near, documents, window)
    total = torch.logaddexp(scores.logsumexp(-1), sink)
    weight = torch.exp(scores - total.unsqueeze(-1)).to(near.dtype)
    return torch.einsum("ncths,ncsd->ncthd", weight, near).flatten(1, 2)


@fused
def _attend_far(
    query: Tensor,
    key: Tensor,
    documents: Tensor,
    sink: Tensor,
    entries: Tensor,
    seen: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attend to window and entries; return also the mass [N, T, entries] that these got."""
    near = _with_previous(key.unflatten(1, (-1, window)))
    scores = _near_scores(query, near, documents, window)
    far = torch.einsum("nthd,ned->nthe", query, entries).float()
    far = far.masked_fill(~seen.unsqueeze(2), -torch.inf)
    total = torch.logaddexp(scores.logsumexp(-1), sink).flatten(1, 2)  # [N, T, H]
    total = torch.logaddexp(total, torch.logsumexp(far.clamp(min=_LOWEST), -1))
    share = torch.exp(far - total.unsqueeze(-1))
    weight = torch.exp(scores - total.unflatten(1, (-1, window)).unsqueeze(-1)).to(near.dtype)
    close = torch.einsum("ncths,ncsd->ncthd", weight, near).flatten(1, 2)
    out = close + torch.einsum("nthe,ned->nthd", share.to(near.dtype), entries)
    return out, share.detach().sum(2)


def _near_scores(query: Tensor, near: Tensor, documents: Tensor, window: int) -> Tensor:
    """Return [N, C, W, H, 2 W] float32 scores of each chunk, -inf where nothing is seen."""
    scores = torch.einsum("ncthd,ncsd->ncths", query.unflatten(1, (-1, window)), near)
    seen = _window_mask(documents, window).unsqueeze(3)
    return scores.float().masked_fill(~seen, -torch.inf)


@fused
def _route(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the experts of each row, their weights and how many rows each expert got."""
    score = torch.nn.functional.softplus(logits).sqrt()
    order = torch.topk((score + bias).detach(), top_k, dim=-1).indices
    chosen = score.gather(1, order)
    experts = torch.arange(score.shape[1], device=score.device)
    load = (order.unsqueeze(-1) == experts).sum((0, 1))
    return order, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale, load


@fused
def _gated(
    gate: Tensor, up: Tensor, ids: Tensor, weights: Tensor, limit: float, count: int
) -> Tensor:
    """Return the inner activations of all experts, 0 for those that a row did not choose."""
    experts = torch.arange(count, device=ids.device)
    share = ((ids.unsqueeze(-1) == experts) * weights.unsqueeze(-1)).sum(1)
    inner = clamped_product(gate.float(), up.float(), limit).unflatten(1, (count, -1))
    chosen: Tensor = inner * share.unsqueeze(-1)
    return chosen.flatten(1).to(gate.dtype)


@fused
def _plain_gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return clamped_product(gate.float(), up.float(), limit).to(gate.dtype)


@fused
def _engram_rows(
    folded: Tensor, positions: Tensor, pad_id: int, multipliers: Tensor, primes: Tensor
) -> Tensor:
    tokens = [folded]
    for back in range(1, multipliers.shape[1]):
        tokens.append(torch.where(positions >= back, folded.roll(back, 0), pad_id))
    layers = []
    for factors, sizes in zip(multipliers.unbind(), primes.unbind(), strict=True):
        hashed = tokens[0] * factors[0]
        columns = []
        for back in range(1, len(tokens)):
            hashed = hashed ^ (tokens[back] * factors[back])
            columns.append(hashed.unsqueeze(-1) % sizes[back - 1])
        flat = sizes.flatten()
        layers.append(torch.cat(columns, -1) + (flat.cumsum(0) - flat))
    return torch.stack(layers)


@fused
def _engram_gate(
    streams: Tensor, kv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> Tensor:
    return engram_gate(streams, kv, query_weight, key_weight, eps, None)


def _visible(documents: Tensor, ratio: int) -> Tensor:
    """Return [N, T, entries] bool: same document, and complete at or before the query."""
    length = documents.shape[1]
    last = torch.arange(ratio - 1, length, ratio, device=documents.device)
    place = torch.arange(length, device=documents.device)
    same = documents.unsqueeze(2) == documents[:, last].unsqueeze(1)
    return same & (last <= place.unsqueeze(1))


def _window_mask(documents: Tensor, chunk: int) -> Tensor:
    """Return [N, C, W, 2 W] bool: keys of the previous and the own chunk that a query sees."""
    own = documents.unflatten(1, (-1, chunk))
    near = _with_previous(own, filler=-1)
    query = torch.arange(chunk, device=documents.device).unsqueeze(1) + chunk
    key = torch.arange(2 * chunk, device=documents.device)
    band = (key <= query) & (key > query - chunk)
    same: Tensor = own.unsqueeze(3) == near.unsqueeze(2)
    return band & same


def _with_previous(chunks: Tensor, filler: int = 0) -> Tensor:
    """Return each chunk behind the one before it: [N, C, W, ..] -> [N, C, 2 W, ..]."""
    before = torch.cat((torch.full_like(chunks[:, :1], filler), chunks[:, :-1]), dim=1)
    return torch.cat((before, chunks), dim=2)


def _among_best(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` highest scores of each row."""
    size = scores.shape[-1]
    if count >= size:
        return torch.ones_like(scores, dtype=torch.bool)
    # exact zeros are common where all heads are rectified away: of those the lower places win
    place = torch.arange(size, device=scores.device)
    best = (scores - _TIE_BREAK * place).topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


def _candidates(scores: Tensor, visible: Tensor, block: int, count: int) -> Tensor:
    """Return [N, T, entries] bool: entries of the `count` best blocks, the newest one included."""
    value = scores.unflatten(-1, (-1, block)).amax(-1)
    blocks = torch.arange(value.shape[-1], device=scores.device)
    newest = torch.where(visible.unflatten(-1, (-1, block)).any(-1), blocks, -1).amax(-1)
    value = value.masked_fill(blocks == newest.unsqueeze(-1), torch.inf)
    return _among_best(value, count).repeat_interleave(block, dim=-1)
