"""The ops of training, each compiled on its own: what `TrainingBackend` is made of.

What a row may see is decided by masks over packed documents; the arithmetic is core's own wherever
it depends on no cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.cpu.ops import engram
from deepinfer_core.cpu.ops import streams as residual
from deepinfer_core.cpu.ops.compressor import pool_pair
from deepinfer_core.cpu.ops.moe import clamped_product
from nano.training.fused import fused

__all__ = [
    "LOWEST",
    "attend_far",
    "attend_near",
    "collapse",
    "engram_gate",
    "engram_rows",
    "gated",
    "gather",
    "merge",
    "mix",
    "plain_gated",
    "pool",
    "rms_norm",
    "rotate",
    "route",
    "select",
]

_TIE_BREAK = 1e-9

# Stands for -inf where a sum over nothing must not become NaN.
LOWEST = -1e30


@fused
def gather(index: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a table: index [..] -> [.., width]."""
    rows: Tensor = torch.nn.functional.embedding(index, table)
    return rows.to(dtype)


@fused
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `KernelBackend.rms_norm`."""
    return residual.rms_norm(x, weight, eps)


@fused
def mix(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `KernelBackend.mhc_mix`; the product is of the streams' dtype."""
    flat = streams.flatten(1)
    statistic = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + norm_eps)
    logits = (flat @ fn.to(flat.dtype).T).float() * statistic
    return residual.sinkhorn(logits, scale, base, eps, iterations)


collapse = fused(residual.mhc_collapse)
merge = fused(residual.mhc_merge)
rotate = fused(residual.rotate)


@fused
def pool(values: Tensor, gates: Tensor) -> Tensor:
    """Pool each row with the one before it: [B, d] float32."""
    own = torch.stack((values, gates), dim=1)
    pair = torch.stack((own.roll(1, 0), own), dim=1)
    return pool_pair(pair[:, :, 0], pair[:, :, 1])


@fused
def select(
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
def attend_near(query: Tensor, key: Tensor, documents: Tensor, sink: Tensor, window: int) -> Tensor:
    """Attend to the window alone: query [N, T, H, d], scaled, and key [N, T, d]."""
    near = _with_previous(key.unflatten(1, (-1, window)))  # [N, C, 2 W, d]
    scores = _near_scores(query, near, documents, window)
    total = torch.logaddexp(scores.logsumexp(-1), sink)
    weight = torch.exp(scores - total.unsqueeze(-1)).to(near.dtype)
    return torch.einsum("ncths,ncsd->ncthd", weight, near).flatten(1, 2)


@fused
def attend_far(
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
    total = torch.logaddexp(total, torch.logsumexp(far.clamp(min=LOWEST), -1))
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
def route(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the experts of each row, their weights and how many rows each expert got."""
    score = torch.nn.functional.softplus(logits).sqrt()
    order = torch.topk((score + bias).detach(), top_k, dim=-1).indices
    chosen = score.gather(1, order)
    experts = torch.arange(score.shape[1], device=score.device)
    load = (order.unsqueeze(-1) == experts).sum((0, 1))
    return order, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale, load


@fused
def gated(
    gate: Tensor, up: Tensor, ids: Tensor, weights: Tensor, limit: float, count: int
) -> Tensor:
    """Return the inner activations of all experts, 0 for those that a row did not choose."""
    experts = torch.arange(count, device=ids.device)
    share = ((ids.unsqueeze(-1) == experts) * weights.unsqueeze(-1)).sum(1)
    inner = clamped_product(gate.float(), up.float(), limit).unflatten(1, (count, -1))
    chosen: Tensor = inner * share.unsqueeze(-1)
    return chosen.flatten(1).to(gate.dtype)


@fused
def plain_gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return the inner activations of one expert."""
    return clamped_product(gate.float(), up.float(), limit).to(gate.dtype)


@fused
def engram_rows(
    folded: Tensor, positions: Tensor, pad_id: int, multipliers: Tensor, primes: Tensor
) -> Tensor:
    """Return table rows of packed documents: none looks back beyond its beginning."""
    tokens = [folded]
    for back in range(1, multipliers.shape[1]):
        tokens.append(torch.where(positions >= back, folded.roll(back, 0), pad_id))
    layers = zip(multipliers.unbind(), primes.unbind(), strict=True)
    return torch.stack([engram.layer_rows(tokens, *layer) for layer in layers])


@fused
def engram_gate(
    streams: Tensor, kv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> Tensor:
    """See `KernelBackend.engram_gate`; there are no images."""
    return engram.engram_gate(streams, kv, query_weight, key_weight, eps, None)


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
