"""Twins of window rings, block entries and sparse attention.

bfloat16 activations round where the release rounds; float32 and float64 ones round nothing. Stores
of uint8 are packed, others hold plain values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.reference.entries import decode_entry, encode_entry, round_entry
from deepinfer_kernels_cuda.reference.norm import rms_norm, rotate
from deepinfer_kernels_cuda.values import BlockStore, Rows, WindowStore

__all__ = ["attend", "newest_rows", "of_sequence", "prepare_keys", "write_entries", "write_window"]

_CHUNK = 64  # entries between two looks at the running maximum
_TILE = 128  # rows at a time: their gathered keys are the largest thing here


def newest_rows(rows: Rows, depth: int) -> Tensor:
    """Return [B] bool: the row is one of the last `depth` of its sequence."""
    behind = of_sequence(rows.first_position + rows.row_start.diff(), rows.sequence)
    return (rows.sequence >= 0) & (rows.positions + depth >= behind)


def of_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """Return values [R] of each row's sequence; 0 in padding, even in a step without sequences."""
    return torch.nn.functional.pad(values, (0, 1))[sequence]  # padding's -1 names the last one


def _store(data: Tensor, kind: str, x: Tensor) -> Tensor:
    return encode_entry(kind, x.detach()) if data.dtype == torch.uint8 else x.detach().to(data)


def _fetch(data: Tensor, place: tuple[Tensor, Tensor], kind: str, like: Tensor) -> Tensor:
    raw = data[place]
    packed = data.dtype == torch.uint8
    return (decode_entry(kind, raw, like.shape[-1]) if packed else raw).to(_wide(like))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def write_window(store: WindowStore, keys: Tensor, rows: Rows) -> None:
    """See `attention.window.write_window`."""
    ring_len = store.data.shape[1]
    kept = newest_rows(rows, ring_len)
    place = rows.slots[kept], rows.positions[kept] % ring_len
    store.data[place] = _store(store.data, "window", keys[kept])


def prepare_keys(
    latent: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    window: WindowStore | None = None,
    rows: Rows | None = None,
) -> Tensor:
    """See `attention.prepare.prepare_keys`; float32 latents are not rounded."""
    keys = rotate(rms_norm(latent, weight, eps), positions, inv_freq)
    keys = round_entry("window", keys) if keys.dtype == torch.bfloat16 else keys
    if window is not None and rows is not None:
        write_window(window, keys, rows)
    return keys


def write_entries(store: BlockStore, entries: Tensor, rows: Rows, kind: str) -> None:
    """See `attention.entries.write_entries`."""
    last_of_group = rows.positions % store.ratio == store.ratio - 1
    kept = rows.writes & (rows.sequence >= 0) & last_of_group
    place = _place(store, rows.slots[kept], rows.positions[kept] // store.ratio)
    store.data[place] = _store(store.data, kind, entries[kept])


def _place(store: BlockStore, slots: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    size = store.data.shape[1]
    return store.table[slots, entry // size].long(), entry % size


def attend(
    queries: Tensor,
    keys: Tensor,
    window: WindowStore,
    rows: Rows,
    sink: Tensor,
    *,
    scale: float,
    entries: BlockStore | None = None,
    picks: Tensor | None = None,
    inverse_rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `attention.attend.attend`."""
    out = torch.empty_like(queries)
    tiles = range(0, queries.shape[0], _TILE)
    parts = []
    for start in tiles:
        tile = slice(start, start + _TILE)
        seen, visible = _window(keys, window, rows, tile)
        if entries is not None and picks is not None:
            index = picks[tile].long()
            real = (index >= 0) & (rows.sequence[tile] >= 0).unsqueeze(-1)
            slots = rows.slots[tile].unsqueeze(-1).expand_as(index)
            place = _place(entries, slots, index.clamp(min=0))
            found = _fetch(entries.data, place, "compressed", keys)
            seen, visible = torch.cat((seen, found), 1), torch.cat((visible, real), 1)
        parts.append(_weigh(queries[tile], seen, visible, sink, scale))
    out = torch.cat(parts).to(queries.dtype) if parts else out
    return out if inverse_rotary is None else rotate(out, *inverse_rotary, inverse=True)


def _window(keys: Tensor, window: WindowStore, rows: Rows, tile: slice) -> tuple[Tensor, Tensor]:
    """Return the window's keys [n, window_len, d] of a tile's rows and which are visible."""
    sequence = rows.sequence[tile][:, None]
    step = torch.arange(rows.window_len, device=keys.device)
    position = rows.window_first[tile][:, None] + step
    lowest = rows.window_floor[tile].clamp(min=0)[:, None]
    visible = (position >= lowest) & (position <= rows.window_last[tile][:, None])
    visible &= sequence >= 0
    ring_place = rows.slots[tile][:, None].expand_as(position), position % window.data.shape[1]
    old = _fetch(window.data, ring_place, "window", keys)
    ahead = position - of_sequence(rows.first_position, sequence)
    start = of_sequence(rows.row_start[:-1], sequence)
    new = keys[(start + ahead).clamp(0, len(keys) - 1)].to(old.dtype)
    return torch.where(ahead[..., None] < 0, old, new), visible


def _weigh(queries: Tensor, seen: Tensor, visible: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Return softmax-weighted sums [n, H, d], wide, of keys seen [n, m, d]."""
    seen = seen.masked_fill(~visible[..., None], 0)
    scores = (queries.to(seen.dtype) @ seen.mT * scale).masked_fill(~visible[:, None], -torch.inf)
    rounds = queries.dtype == torch.bfloat16
    size = _CHUNK if rounds else max(scores.shape[-1], 1)
    top = torch.full_like(scores[..., 0], -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(queries, dtype=seen.dtype)
    for part, values in zip(scores.split(size, -1), seen.split(size, 1), strict=True):
        higher = torch.maximum(top, part.detach().amax(-1))
        origin = higher.masked_fill(higher == -torch.inf, 0)
        weight, decay = torch.exp(part - origin[..., None]), torch.exp(top - origin)
        total = total * decay + weight.sum(-1)
        weight = weight.bfloat16().to(seen.dtype) if rounds else weight
        out = out * decay[..., None] + weight @ values
        top = higher
    origin = top.masked_fill(top == -torch.inf, 0)
    result = out / (total + torch.exp(sink.to(seen.dtype) - origin))[..., None]
    return torch.where((top == -torch.inf)[..., None], torch.zeros_like(result), result)
