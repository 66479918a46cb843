"""Twins of index scores and of the selection by them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_kernels_cuda.reference.entries import decode_entry
from deepinfer_kernels_cuda.values import BlockStore, Rows

__all__ = ["Selected", "best_places", "index_scores", "index_select", "read_index_keys"]

_SCORES_AT_ONCE = 1 << 24  # rows x heads x entries of a product


@dataclass(frozen=True)
class Selected:
    """See `attention.index_select.Selected`."""

    picks: Tensor
    candidates: Tensor | None


def read_index_keys(keys: BlockStore, slot: Tensor, count: int, channels: int) -> Tensor:
    """Return the first `count` index keys of a slot, [count, channels]."""
    per_block = keys.data.shape[1]
    blocks = keys.table[slot, : -(-count // per_block)].long()
    entries = keys.data[blocks].flatten(0, 1)[:count]
    return decode_entry("index", entries, channels) if entries.dtype == torch.uint8 else entries


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return `sum_h weights[:, h] * max(0, queries[:, h] . keys[j])`.

    queries [n, H, d], weights [n, H], keys [m, d] -> [n, m] in the dtype of the queries, which
    bfloat16 makes the place of three roundings: of products, of terms and of the sum.
    """
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    dots = torch.einsum("nhd,md->nhm", queries.to(wide), keys.to(wide)).to(queries.dtype)
    terms = dots.clamp(min=0) * weights.unsqueeze(-1)
    return terms.to(wide).sum(1).to(queries.dtype)


def best_places(scores: Tensor, count: int) -> Tensor:
    """Return places [n, count] int32 of the highest scores, ascending, -1 behind; ties: lower."""
    ranked, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    size = scores.shape[-1]
    places = order.masked_fill(ranked == -torch.inf, size)[:, :count].sort(-1).values
    places = torch.nn.functional.pad(places, (0, max(0, count - size)), value=size)
    return places.masked_fill(places == size, -1).int()


def _best_blocks(scores: Tensor, visible: Tensor, block: int, count: int) -> Tensor:
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % block), value=-torch.inf)
    value = padded.unflatten(1, (-1, block)).amax(-1)
    newest = (visible - 1).div(block, rounding_mode="floor").unsqueeze(1)
    number = torch.arange(value.shape[1], device=scores.device)
    others = value.masked_fill(number >= newest, -torch.inf)
    chosen = torch.nn.functional.pad(best_places(others, count - 1), (0, 1), value=-1)
    return chosen.scatter(1, (chosen >= 0).sum(1, keepdim=True), newest.int())


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
) -> Selected:
    """See `attention.index_select.index_select`; it reads lengths back from the device."""
    device, (num_rows, num_heads, channels) = queries.device, queries.shape
    picks = torch.full((num_rows, top_k), -1, dtype=torch.int32, device=device)
    published = picks.new_full((num_rows, publish), -1) if publish else None
    visible = ((rows.positions + 1) // keys.ratio).masked_fill(rows.sequence < 0, 0)
    sequence, bounds = rows.sequence.tolist(), visible.tolist()
    for number in sorted(set(sequence) - {-1}):
        mine = [row for row in range(num_rows) if sequence[row] == number]
        count = max(bounds[row] for row in mine)
        if count == 0:
            continue
        known = read_index_keys(keys, rows.slots[mine[0]], count, channels).to(queries.dtype)
        step = max(1, _SCORES_AT_ONCE // (num_heads * count))
        for first in range(0, len(mine), step):
            part = torch.tensor(mine[first : first + step], device=device)
            scores = index_scores(queries[part], weights[part], known)
            entry = torch.arange(count, device=device)
            scores = scores.masked_fill(entry >= visible[part].unsqueeze(1), -torch.inf)
            if published is not None:
                published[part] = _best_blocks(scores, visible[part], candidate_block, publish)
            if candidates is not None:
                blocks = torch.where(candidates[part] < 0, count, candidates[part]).long()
                inside = torch.zeros(len(part), count + 1, dtype=torch.bool, device=device)
                inside.scatter_(1, blocks.clamp(max=count), True)
                scores = scores.masked_fill(~inside[:, entry // candidate_block], -torch.inf)
            picks[part] = best_places(scores, top_k)
    return Selected(picks, published)
