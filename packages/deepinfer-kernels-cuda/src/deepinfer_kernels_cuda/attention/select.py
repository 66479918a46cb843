"""The exact best of scored entries, and of blocks of them.

A unit of 64 or 128 entries, a block and an entry are chosen by the same rule: the higher key
first, the lower number on ties. Whatever entry is among the K best lies in one of the K best
blocks, and that block in one of the K best units: each of K other blocks, which come before its
own, would hold an entry that comes before it. So a row's choice reads its units, the blocks of K
units and the entries of K blocks; or the blocks of all where there are no more than K units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.attention.index_scores import Scores
from deepinfer_kernels_cuda.kernel_math import INTERPRET

__all__ = ["MOST_RANKED", "Sizes", "select", "select_sizes"]

MOST_RANKED = 1 << 15  # keys ranked at a time, since `_keep` counts them in 16 bits
FORCED_KEY = tl.constexpr(0xFFFF)  # above the key of any score


class Sizes(NamedTuple):
    """Compile-time sizes of a choice: powers of two, and how many keys each step ranks."""

    padded: int  # entries or blocks that are kept
    units: int
    in_blocks: int  # blocks of the units that are kept
    in_entries: int  # entries of the blocks that are kept; 0 where blocks are chosen


def select_sizes(places: int, top_k: int, candidate_block: int, blocks: bool) -> Sizes:
    """Return the sizes for rows of `places`; `select` ranks at most `MOST_RANKED` keys a step."""
    size = 64 if blocks else 128
    padded = triton.next_power_of_2(top_k)
    units = triton.next_power_of_2(triton.cdiv(places, size))
    in_blocks = min(padded, units) * (size // candidate_block)
    return Sizes(padded, units, in_blocks, 0 if blocks else padded * candidate_block)


def select(
    scores: Scores,
    sequence: Tensor,
    positions: Tensor,
    *,
    ratio: int,
    top_k: int,
    candidates: Tensor | None,
    candidate_block: int,
    blocks: bool,
    out: Tensor,
) -> None:
    """Write the `top_k` best entries of each row, or its best candidate blocks.

    Args:
        scores: of the rows. sequence, positions: [B] int64.
        candidates: [B, n] int32 if the places of `scores` are those of candidate blocks.
        blocks: choose blocks; the one of the newest visible entry is always among them.
        out: [B, top_k] int32, overwritten: ascending, -1 behind.
    """
    num_rows, capacity = scores.entry.shape
    size = 64 if blocks else 128
    num_units = capacity // size
    unit = scores.block  # stands for what is not read
    if num_units > top_k:
        unit = torch.empty(num_rows, num_units, dtype=torch.int16, device=sequence.device)
        _unit_kernel[(num_rows, triton.cdiv(num_units, 256))](
            scores.block, unit, sequence, positions, num_units,
            0 if candidates is None else candidates.shape[1],
            RATIO=ratio, CANDIDATE=candidate_block, IN_UNIT=size // candidate_block, UNITS=256,
            LISTED=candidates is not None, num_warps=4,
        )  # fmt: skip
    lists = torch.empty(num_rows, 2, top_k, dtype=torch.int32, device=sequence.device)
    padded, units, in_blocks, _ = select_sizes(capacity, top_k, candidate_block, blocks)
    largest = max(in_blocks, units if units > top_k else 1)
    _select_kernel[(num_rows,)](
        scores.entry, scores.block, unit, sequence, positions,
        out if candidates is None else candidates, lists, out,
        capacity, 0 if candidates is None else candidates.shape[1],
        RATIO=ratio, TOP_K=top_k, PADDED=padded, CANDIDATE=candidate_block, UNIT=size,
        UNITS=units, IN_BLOCKS=in_blocks, LISTED=candidates is not None, BLOCKS=blocks,
        # More programs at a time where there are many: 1024 rows took 80 instead of 121 us.
        maxnreg=80 if num_rows > 264 else None,
        num_warps=4 if largest <= 2048 else 8 if largest <= 8192 else 16,
    )  # fmt: skip


@triton.jit
def _visible_places(
    row, sequence_ptr, position_ptr, capacity, num_candidates,
    RATIO: tl.constexpr, CANDIDATE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Return how many places of a row have keys; what lies behind the last one's block is unset."""
    position = tl.load(position_ptr + row)
    own = tl.load(sequence_ptr + row)
    visible = tl.where(own >= 0, (position + 1) // RATIO, 0).to(tl.int32)
    if LISTED:
        return tl.minimum(tl.cdiv(visible, CANDIDATE), num_candidates) * CANDIDATE
    else:
        return tl.minimum(visible, capacity)


@triton.jit(do_not_specialize=["num_units", "num_candidates"])
def _unit_kernel(
    block_ptr, unit_ptr, sequence_ptr, position_ptr, num_units, num_candidates,
    RATIO: tl.constexpr, CANDIDATE: tl.constexpr, IN_UNIT: tl.constexpr, UNITS: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    visible = _visible_places(
        row, sequence_ptr, position_ptr, num_units * (IN_UNIT * CANDIDATE), num_candidates,
        RATIO, CANDIDATE, LISTED,
    )  # fmt: skip
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    block = unit[:, None] * IN_UNIT + tl.arange(0, IN_UNIT)[None, :]
    known = block < tl.cdiv(visible, CANDIDATE)
    at = row * num_units * IN_UNIT + block
    key = tl.load(block_ptr + at, mask=known, other=0).to(tl.int32) & 0xFFFF
    best = tl.max(key, 1).to(tl.int16)
    tl.store(unit_ptr + row * num_units + unit, best, mask=unit < num_units)


@triton.jit
def _reaches(key, threshold):
    """Return 1 where key >= threshold, else 0; one instruction on Hopper."""
    if INTERPRET:
        return (key >= threshold).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .s32 t; add.s32 t, $1, $2; min.relu.s32 $0, t, 1; }",
            "=r,r,r",
            [key, tl.broadcast_to(1 - threshold, key.shape)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _keep(key, TOP_K: tl.constexpr):
    """Return (kept, place among the kept, number kept) of int32 keys [n]; key 0 is never kept."""
    # The highest threshold that at least TOP_K keys reach, bit by bit. Counts of integers: no order
    # of sums matters. `reach` keys lie at or above it, `above` beyond it.
    threshold = 0
    reach = key.shape[0]
    above = 0
    for step in tl.static_range(16):
        higher = threshold | (0x8000 >> step)
        found = tl.sum(_reaches(key, higher), 0)
        enough = found >= TOP_K
        threshold = tl.where(enough, higher, threshold)
        reach = tl.where(enough, found, reach)
        above = tl.where(enough, above, found)
    room = tl.where(threshold > 0, TOP_K - above, 0)
    higher = (key > threshold).to(tl.int32)
    equal = (key == threshold).to(tl.int32)
    # Both counts in one scan: at most TOP_K - 1 lie above, at most MOST_RANKED are equal.
    running = tl.cumsum((higher << 16) | equal, 0)
    equal_so_far = running & 0xFFFF
    kept = (higher > 0) | ((equal > 0) & (equal_so_far <= room))
    place = (running >> 16) + tl.minimum(equal_so_far, room) - 1
    return kept, place, above + tl.minimum(reach - above, room)


@triton.jit(do_not_specialize=["num_candidates"])
def _select_kernel(
    entry_ptr, block_ptr, unit_ptr, sequence_ptr, position_ptr, candidate_ptr, list_ptr, out_ptr,
    capacity, num_candidates,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, PADDED: tl.constexpr, CANDIDATE: tl.constexpr,
    UNIT: tl.constexpr, UNITS: tl.constexpr, IN_BLOCKS: tl.constexpr, LISTED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    visible = _visible_places(
        row, sequence_ptr, position_ptr, capacity, num_candidates, RATIO, CANDIDATE, LISTED
    )
    num_units = tl.cdiv(visible, UNIT)
    num_blocks = tl.cdiv(visible, CANDIDATE)
    newest = visible - 1
    unit_list = list_ptr + row * (2 * TOP_K)
    block_list = unit_list + TOP_K
    out = out_ptr + row * TOP_K
    slot = tl.arange(0, PADDED)
    in_list = slot < TOP_K
    PER_UNIT: tl.constexpr = UNIT // CANDIDATE

    if UNITS > TOP_K:
        if num_units > TOP_K:
            i = tl.arange(0, UNITS)
            key = tl.load(unit_ptr + row * (capacity // UNIT) + i, mask=i < num_units, other=0)
            key = key.to(tl.int32) & 0xFFFF
            if BLOCKS:
                key = tl.where(i == newest // UNIT, FORCED_KEY, key)
            kept, place, total = _keep(key, TOP_K)
            tl.store(unit_list + place, i, mask=kept)
            tl.store(unit_list + slot, -1, mask=in_list & (slot >= total))
        else:
            tl.store(unit_list + slot, tl.where(slot < num_units, slot, -1), mask=in_list)
        tl.debug_barrier()

    if BLOCKS or num_blocks > TOP_K:
        i = tl.arange(0, IN_BLOCKS)
        unit = i // PER_UNIT
        if UNITS > TOP_K:
            unit = tl.load(unit_list + unit, mask=unit < TOP_K, other=-1)
        block = unit * PER_UNIT + i % PER_UNIT
        known = (unit >= 0) & (block < num_blocks)
        key = tl.load(block_ptr + row * (capacity // CANDIDATE) + block, mask=known, other=0)
        key = key.to(tl.int32) & 0xFFFF
        if BLOCKS:
            key = tl.where(known & (block == newest // CANDIDATE), FORCED_KEY, key)
        kept, place, total = _keep(key, TOP_K)
        chosen = out if BLOCKS else block_list
        tl.store(chosen + place, block, mask=kept)
        tl.store(chosen + slot, -1, mask=in_list & (slot >= total))
    else:
        tl.store(block_list + slot, tl.where(slot < num_blocks, slot, -1), mask=in_list)

    if not BLOCKS:
        tl.debug_barrier()
        i = tl.arange(0, PADDED * CANDIDATE)
        block = tl.load(block_list + i // CANDIDATE, mask=i // CANDIDATE < TOP_K, other=-1)
        entry = block * CANDIDATE + i % CANDIDATE
        known = (block >= 0) & (entry < visible)
        key = tl.load(entry_ptr + row * capacity + entry, mask=known, other=0)
        kept, place, total = _keep(key.to(tl.int32) & 0xFFFF, TOP_K)
        if LISTED:
            listed = tl.load(candidate_ptr + row * num_candidates + block, mask=known, other=0)
            entry = listed * CANDIDATE + i % CANDIDATE
        tl.store(out + place, entry, mask=kept)
        tl.store(out + slot, -1, mask=in_list & (slot >= total))
