"""Addresses of the packed entries that rows see."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.attention.widen import row_of
from deepinfer_kernels_cuda.checks import (
    check_alignment,
    check_blocks,
    check_number,
    check_rows,
    check_tensor,
    check_together,
)
from deepinfer_kernels_cuda.quant.entries import WINDOW, entry_width, load_groups, store_entries
from deepinfer_kernels_cuda.values import BlockStore, Rows, WindowStore

__all__ = ["CHUNK", "check_stores", "find_places"]

CHUNK = 64  # entries; addresses of a row come in whole chunks


_FIELDS = (
    *("positions", "sequence", "slots", "row_start", "first_position"),
    *("window_first", "window_last", "window_floor"),
)


def check_stores(
    queries: Tensor,
    window: WindowStore,
    rows: Rows,
    entries: BlockStore | None,
    picks: Tensor | None,
) -> None:
    """Raise `KernelInputError` unless what rows see, and rows, are as `attend` tells."""
    num_rows, device = queries.shape[0], queries.device
    check_rows(rows, num_rows, device, _FIELDS)
    _check_store("window.data", window.data, "window", queries)
    check_number("rows.window_len", rows.window_len, 1)
    check_number("window.data.shape[1]", window.data.shape[1], 1)
    check_together(entries=entries, picks=picks)
    if entries is None or picks is None:
        return
    check_tensor("picks", picks, shape=(num_rows, None), dtype=torch.int32, device=device)
    _check_store("entries.data", entries.data, "compressed", queries)
    check_tensor(
        "entries.table", entries.table, shape=(None, None), dtype=torch.int32, device=device,
        contiguous=False,
    )  # fmt: skip
    if num_rows and picks.shape[1]:
        check_blocks("entries", entries)


def _check_store(name: str, data: Tensor, kind: str, queries: Tensor) -> None:
    channels = queries.shape[2]
    width = entry_width(kind, channels)
    shape, dtype = (None, None, width), torch.uint8
    check_tensor(name, data, shape=shape, dtype=dtype, device=queries.device)
    # what `_bytes_at` of `attend` and `load_word` take for granted
    check_alignment(name, data, 16 if channels % 512 == 0 else 4 if width % 4 == 0 else 1)


def find_places(
    keys: Tensor,
    window: WindowStore,
    rows: Rows,
    pool: Tensor,
    table: Tensor,
    picks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the addresses of what rows see, and this step's keys packed, which some point to.

    Keys are packed as ring entries are, exactly, as they are rounded; an entry then is read in one
    way wherever it lies. Both results have to be held until the kernels that read them are queued.

    Args:
        keys: [B', d] bfloat16. window, rows: as of `attend`.
        pool, table, picks: `data` and `table` of the block entries, and [B, K] int32 or None.
    Returns:
        int64 [B, n], n a multiple of 64: window entries, then picks, 0 where nothing is seen; place
        i of 64 holds entry `row_of(i)`. uint8 [B', entry_width("window", d)].
    """
    num_rows, (num_keys, channels) = rows.window_first.shape[0], keys.shape
    num_picks = 0 if picks is None else picks.shape[1]
    size = max(1, triton.cdiv(rows.window_len + num_picks, CHUNK)) * CHUNK
    width = entry_width("window", channels)
    places = torch.empty(num_rows, size, dtype=torch.int64, device=keys.device)
    packed = torch.empty(num_keys, width, dtype=torch.uint8, device=keys.device)
    groups = triton.next_power_of_2(channels // 32)
    tile = max(1, 64 // groups)
    _places_kernel[(num_rows + triton.cdiv(num_keys, tile),)](
        keys, packed, window.data, pool, table, table if picks is None else picks, rows.sequence,
        rows.slots, rows.row_start, rows.first_position, rows.window_first, rows.window_last,
        rows.window_floor, places, num_rows, num_keys, table.stride(0),
        D=channels, WINDOW_LEN=rows.window_len, PICKS=num_picks,
        RING_LEN=window.data.shape[1], PER_BLOCK=pool.shape[1], PLACES=size,
        BLOCK=triton.next_power_of_2(size), GROUPS=groups, TILE=tile, num_warps=4,
    )  # fmt: skip
    return places, packed


@triton.jit(do_not_specialize=["num_rows", "num_keys", "table_stride"])
def _places_kernel(
    keys_ptr, packed_ptr, ring_ptr, pool_ptr, table_ptr, picks_ptr, sequence_ptr, slot_ptr,
    row_start_ptr, first_ptr, window_first_ptr, window_last_ptr, floor_ptr, place_ptr,
    num_rows, num_keys, table_stride,
    D: tl.constexpr, WINDOW_LEN: tl.constexpr, PICKS: tl.constexpr, RING_LEN: tl.constexpr,
    PER_BLOCK: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the addresses of a row's entries; programs behind the rows pack keys, exactly."""
    row = tl.program_id(0).to(tl.int64)
    if row >= num_rows:
        key = (row - num_rows) * TILE + tl.arange(0, TILE)
        x = load_groups(keys_ptr, key, key < num_keys, D, GROUPS, 32)
        base = packed_ptr + key * (D + D // 32)
        store_entries(base, x, key < num_keys, WINDOW, D, GROUPS, 32)
    else:
        sequence = tl.load(sequence_ptr + row)
        slot = tl.load(slot_ptr + row)
        i = tl.arange(0, BLOCK)
        index = row_of(i)
        place = _window_places(
            index, row, sequence, slot, ring_ptr, packed_ptr, row_start_ptr, first_ptr,
            window_first_ptr, window_last_ptr, floor_ptr, num_keys, D, WINDOW_LEN, RING_LEN,
        )  # fmt: skip
        if PICKS > 0:
            place |= _pick_places(
                index, row, sequence, slot, pool_ptr, table_ptr, picks_ptr, table_stride,
                D, WINDOW_LEN, PICKS, PER_BLOCK,
            )  # fmt: skip
        tl.store(place_ptr + row * PLACES + i, place, mask=i < PLACES)


@triton.jit
def _window_places(
    index, row, sequence, slot, ring_ptr, keys_ptr, row_start_ptr, first_ptr, window_first_ptr,
    window_last_ptr, floor_ptr, num_keys, D: tl.constexpr, WINDOW_LEN: tl.constexpr,
    RING_LEN: tl.constexpr,
):  # fmt: skip
    """Return addresses (int64) of packed entries of a row's window, 0 where nothing is seen."""
    WIDTH: tl.constexpr = D + D // 32
    real = tl.maximum(sequence, 0)
    position = tl.load(window_first_ptr + row).to(tl.int32) + index
    lowest = tl.maximum(tl.load(floor_ptr + row), 0).to(tl.int32)
    seen = (index < WINDOW_LEN) & (position >= lowest) & (sequence >= 0)
    seen &= position <= tl.load(window_last_ptr + row).to(tl.int32)
    # a step of padding alone has no sequence that could be asked
    first = tl.load(first_ptr + real, mask=sequence >= 0, other=0)
    ahead = position - first.to(tl.int32)
    key = tl.load(row_start_ptr + real, mask=sequence >= 0, other=0) + ahead
    seen &= (ahead < 0) | (key < num_keys)
    old = ring_ptr + (slot * RING_LEN + tl.maximum(position, 0) % RING_LEN) * WIDTH
    entry = tl.where(ahead < 0, old, keys_ptr + key * WIDTH)
    return tl.where(seen, entry.to(tl.int64), 0)


@triton.jit
def _pick_places(
    index, row, sequence, slot, pool_ptr, table_ptr, picks_ptr, table_stride,
    D: tl.constexpr, WINDOW_LEN: tl.constexpr, PICKS: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return addresses (int64) of packed entries of a row's picks, 0 where there is none."""
    at = index - WINDOW_LEN
    there = (at >= 0) & (at < PICKS) & (sequence >= 0)
    entry = tl.load(picks_ptr + row * PICKS + at, mask=there, other=-1)
    there &= entry >= 0
    table = table_ptr + slot * table_stride
    block = tl.load(table + entry // PER_BLOCK, mask=there, other=0).to(tl.int64)
    place = (block * PER_BLOCK + entry % PER_BLOCK) * (D // 2 + D // 16)
    return tl.where(there, (pool_ptr + place).to(tl.int64), 0)
