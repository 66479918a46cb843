"""Window rings and sparse attention with a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.cpu.ops.formats import decode_entry, encode_entry
from deepinfer_core.cpu.ops.linear import ROW_TILE, pad_rows, tiles
from deepinfer_core.interfaces import BlockStore, Rows, WindowStore

__all__ = [
    "attend",
    "last_rows",
    "read_entries",
    "round_entry",
    "softmax_with_sink",
    "write_window",
]

WIDE_TILE = 64  # rows of a tile when nothing asks for fixed shapes: bounds the gathered keys
SOFTMAX_CHUNK = 64  # the released kernel takes its running maximum over this many entries


def round_entry(kind: str, x: Tensor) -> Tensor:
    """Return x [..., d] as it reads back from a packed cache entry; dtype of x."""
    return decode_entry(kind, encode_entry(kind, x), x.shape[-1]).to(x.dtype)


def last_rows(rows: Rows, depth: int, allowed: Tensor | None = None) -> Tensor:
    """Return the rows among the last `depth` of each sequence: no two of them share a ring place.

    Only allowed rows [B] bool; padding never.
    """
    index = rows.sequence.clamp(min=0)
    count = rows.row_start[1:] - rows.row_start[:-1]
    last = (rows.first_position + count - 1)[index]
    chosen = (rows.positions > last - depth) & (rows.sequence >= 0)
    return (chosen if allowed is None else chosen & allowed).nonzero().squeeze(-1)


def write_window(store: WindowStore, keys: Tensor, rows: Rows, packed: bool) -> None:
    """See `KernelBackend.write_window`."""
    ring_len = store.data.shape[1]
    chosen = last_rows(rows, ring_len)
    values = keys[chosen].detach()
    place = (rows.slots[chosen], rows.positions[chosen] % ring_len)
    store.data[place] = encode_entry("window", values) if packed else values.to(store.data.dtype)


def read_entries(
    store: BlockStore, slots: Tensor, index: Tensor, kind: str, channels: int, packed: bool
) -> Tensor:
    """Return entries `index` [n, m] of `slots` [n] as float32 [n, m, channels].

    Any index of an unused entry is safe.
    """
    per_block = store.data.shape[1]
    block = store.table[
        slots.unsqueeze(-1), (index // per_block).clamp(max=store.table.shape[1] - 1)
    ]
    raw = store.data[block.long(), index % per_block]
    return decode_entry(kind, raw, channels) if packed else raw.float()


def softmax_with_sink(scores: Tensor, values: Tensor, sink: Tensor, release: bool) -> Tensor:
    """Return sum(p * value) with `exp(sink)` added to the softmax's denominator.

    scores [n, H, m] float32 with -inf where nothing is seen, values [n, m, d] float32, sink [H] ->
    [n, H, d]. In release numerics the maximum runs over chunks of 64 entries and weights are
    rounded to bfloat16.
    """
    step = SOFTMAX_CHUNK if release else scores.shape[-1]
    top = scores.new_full(scores.shape[:-1], -torch.inf)
    total, out = torch.zeros_like(top), scores.new_zeros(*top.shape, values.shape[-1])
    for start in range(0, scores.shape[-1], step):
        part = scores[..., start : start + step]
        new_top = torch.maximum(top, part.detach().amax(-1))  # only steadies the exponent
        safe = torch.where(new_top == -torch.inf, 0.0, new_top)
        weight = torch.exp(part - safe.unsqueeze(-1))
        decay = torch.exp(top - safe)
        total = total * decay + weight.sum(-1)
        rounded = weight.bfloat16().float() if release else weight
        out = out * decay.unsqueeze(-1) + torch.bmm(rounded, values[:, start : start + step])
        top = new_top
    safe = torch.where(top == -torch.inf, 0.0, top)
    denominator = total + torch.exp(sink - safe)
    return torch.where((top == -torch.inf).unsqueeze(-1), 0.0, out / denominator.unsqueeze(-1))


def _window_keys(
    keys: Tensor, window: WindowStore, rows: Rows, tile: slice, packed: bool
) -> tuple[Tensor, Tensor]:
    """Return (keys [n, window_len, d] float32, visible [n, window_len]) for the rows of a tile."""
    offset = torch.arange(rows.window_len, device=keys.device)
    position = rows.window_first[tile].unsqueeze(-1) + offset
    floor = rows.window_floor[tile].clamp(min=0).unsqueeze(-1)
    visible = (position >= floor) & (position <= rows.window_last[tile].unsqueeze(-1))
    visible &= rows.sequence[tile].unsqueeze(-1) >= 0
    sequence = rows.sequence[tile].clamp(min=0)
    age = position - rows.first_position[sequence].unsqueeze(-1)  # >= 0: computed in this step
    fresh = (age + rows.row_start[sequence].unsqueeze(-1)).clamp(0, max(keys.shape[0] - 1, 0))
    raw = window.data[rows.slots[tile].unsqueeze(-1), position.clamp(min=0) % window.data.shape[1]]
    ring = decode_entry("window", raw, keys.shape[-1]) if packed else raw.float()
    chosen = torch.where((age >= 0).unsqueeze(-1), keys[fresh].float(), ring)
    return chosen, visible


def attend(
    queries: Tensor,
    keys: Tensor,
    window: WindowStore,
    rows: Rows,
    sink: Tensor,
    *,
    scale: float,
    entries: BlockStore | None,
    picks: Tensor | None,
    strict: bool,
    packed: bool,
    release: bool,
) -> Tensor:
    """See `KernelBackend.attend`."""
    size = ROW_TILE if strict else WIDE_TILE
    outputs = []
    for tile in tiles(queries.shape[0], size):
        values, visible = _window_keys(keys, window, rows, tile, packed)
        if entries is not None and picks is not None:
            index = picks[tile].long()
            found = read_entries(
                entries, rows.slots[tile], index.clamp(min=0), "compressed", keys.shape[-1], packed
            )
            values, visible = torch.cat((values, found), 1), torch.cat((visible, index >= 0), 1)
        # zero what is not seen: a weight of 0 times NaN left by another request would be NaN
        values = values.masked_fill(~visible.unsqueeze(-1), 0.0)
        query, count = queries[tile].float(), visible.shape[0]
        if strict:
            query, values, visible = (pad_rows(t, size) for t in (query, values, visible))
        scores = torch.bmm(query, values.transpose(1, 2)) * scale
        scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
        outputs.append(softmax_with_sink(scores, values, sink, release)[:count])
    if not outputs:
        return torch.empty_like(queries)
    return torch.cat(outputs).to(queries.dtype)
