"""Index scores, top-k entries and candidate blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.cpu.ops.attention import read_entries
from deepinfer_core.cpu.ops.linear import pad_rows, product, tiles
from deepinfer_core.interfaces import BlockStore, Rows

__all__ = ["Selected", "best", "block_candidates", "candidate_mask", "index_scores", "index_select"]

QUERY_TILE = 8  # strict form: rows of a product
KEY_TILE = 64  # strict form: entries of a product


@dataclass(frozen=True)
class Selected:
    """Satisfies `interfaces.Selection`."""

    picks: Tensor
    candidates: Tensor | None


def index_scores(
    queries: Tensor, weights: Tensor, keys: Tensor, strict: bool, release: bool
) -> Tensor:
    """Return `sum_h weights[h] * max(0, queries[h] . keys[j])`.

    queries [n, H, d], weights [n, H], keys [m, d] float32 -> [n, m] float32. In release numerics
    the products, the weighted terms and the sum are each rounded to bfloat16.
    """
    if not strict:
        return _score_tile(queries.float(), weights.float(), keys, release)
    count, entries = queries.shape[0], keys.shape[0]
    keys = pad_rows(keys, KEY_TILE)
    parts = []
    for tile in tiles(count, QUERY_TILE):
        query = pad_rows(queries[tile].float(), QUERY_TILE)
        weight = pad_rows(weights[tile].float(), QUERY_TILE)
        row = [
            _score_tile(query, weight, keys[piece], release) for piece in tiles(entries, KEY_TILE)
        ]
        parts.append(torch.cat(row, dim=1))
    return torch.cat(parts)[:count, :entries]


def _score_tile(queries: Tensor, weights: Tensor, keys: Tensor, release: bool) -> Tensor:
    heads = queries.shape[1]
    dots: Tensor = product(queries.flatten(0, 1), keys, strict=False).unflatten(0, (-1, heads))
    if release:
        terms = dots.bfloat16().float().clamp(min=0) * weights.unsqueeze(-1)
        return terms.bfloat16().float().sum(1).bfloat16().float()
    return (dots.clamp(min=0) * weights.unsqueeze(-1)).sum(1)


def best(scores: Tensor, count: int) -> Tensor:
    """Return places of the `count` highest finite scores, ascending, -1 behind.

    Equal scores: the lower place wins.
    """
    kept = min(count, scores.shape[-1])
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :kept]
    beyond = scores.shape[-1]
    places = torch.where(scores.gather(-1, order) == -torch.inf, beyond, order).sort(dim=-1).values
    places = torch.nn.functional.pad(places, (0, count - kept), value=beyond)
    return torch.where(places == beyond, -1, places).to(torch.int32)


def block_candidates(scores: Tensor, visible: Tensor, block: int, count: int) -> Tensor:
    """Return the `count` best blocks of `block` entries by their best visible score.

    The newest one is always kept.
    scores [n, m] float32 with -inf beyond `visible` [n] int64 -> [n, count] int32, ascending, -1
    behind.
    """
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % block), value=-torch.inf)
    value = padded.unflatten(-1, (-1, block)).amax(-1)
    newest = torch.div(visible - 1, block, rounding_mode="floor")
    number = torch.arange(value.shape[-1], device=value.device)
    value = value.masked_fill(number == newest.unsqueeze(-1), torch.inf)
    return best(value.masked_fill(number > newest.unsqueeze(-1), -torch.inf), count)


def candidate_mask(candidates: Tensor, block: int, entries: int) -> Tensor:
    """Return [n, entries] bool: which entries lie in a candidate block."""
    blocks = -(-entries // block)
    inside = torch.zeros(
        candidates.shape[0], blocks + 1, dtype=torch.bool, device=candidates.device
    )
    place = torch.where(candidates < 0, blocks, candidates.long()).clamp(max=blocks)
    inside.scatter_(1, place, True)
    return inside[:, :blocks].repeat_interleave(block, dim=1)[:, :entries]


def index_select(
    queries: Tensor,
    weights: Tensor,
    keys: BlockStore,
    rows: Rows,
    *,
    top_k: int,
    candidates: Tensor | None,
    candidate_block: int,
    publish: int,
    strict: bool,
    packed: bool,
    release: bool,
) -> Selected:
    """See `KernelBackend.index_select`."""
    count = queries.shape[0]
    picks = torch.full((count, top_k), -1, dtype=torch.int32, device=queries.device)
    published = (
        torch.full((count, publish), -1, dtype=torch.int32, device=queries.device)
        if publish
        else None
    )
    visible = torch.where(rows.sequence >= 0, (rows.positions + 1) // keys.ratio, 0)
    for s in range(rows.sequence_slots.shape[0]):
        own = (rows.sequence == s).nonzero().squeeze(-1)
        entries = int(visible[own].max()) if own.numel() else 0
        if entries == 0:
            continue
        every = torch.arange(entries, device=queries.device)
        slot = rows.sequence_slots[s : s + 1]
        known = read_entries(keys, slot, every.unsqueeze(0), "index", queries.shape[-1], packed)[0]
        with torch.no_grad():  # a selection has no gradient
            scores = index_scores(queries[own], weights[own], known, strict, release)
        scores = scores.masked_fill(every >= visible[own].unsqueeze(-1), -torch.inf)
        if published is not None:
            published[own] = block_candidates(scores, visible[own], candidate_block, publish)
        if candidates is not None:
            inside = candidate_mask(candidates[own], candidate_block, entries)
            scores = scores.masked_fill(~inside, -torch.inf)
        picks[own] = best(scores, top_k)
    return Selected(picks, published)
