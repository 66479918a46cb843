"""Scores of index entries, as ordered 16-bit keys with the best of each block.

A key orders as the bfloat16 score does; an entry that is not visible has key 0, below all scores.
Keys are stored as int16 and read as unsigned.

The weighted terms of a row's heads are summed by a second product, with ones. That is exact where
float32 is, has one order, and leaves each sum in one place, where a reduction across lanes would
leave copies. Operands are made finite first, so that no row can spoil one beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.attention.index_operands import (
    load_queries,
    load_weights,
    ordered_keys,
    unpack_keys,
    weighted_terms,
)
from deepinfer_kernels_cuda.kernel_math import dot
from deepinfer_kernels_cuda.values import BlockStore, Rows

__all__ = ["ScorePlan", "Scores", "index_scores", "score_plan"]

UNIT = 128  # a row's places are a multiple of this
COLUMNS = 8  # of a tensor core's smallest product: sums of rows and tiles
LISTED = tl.constexpr(2)  # the values of MODE
TILED = tl.constexpr(1)


@dataclass(frozen=True)
class ScorePlan:
    """Compile-time sizes of scoring.

    Attributes:
        rows: consecutive rows of one sequence that share a tile of keys.
        keys: entries of a tile.
        warps, stages: of a program; stages of the loop over tiles.
        joined: one product of all channels, for Blackwell, whose tensor memory has no room for the
            sums of eight; otherwise eight products, whose keys stay in registers.
        registers: most of a thread; None leaves them to the compiler.
        resident: programs that a processor runs at a time, as measured.
        rounds: most times that all processors are filled.
    """

    rows: int
    keys: int
    warps: int
    stages: int = 3
    joined: bool = False
    registers: int | None = None
    resident: int = 3
    rounds: int = 4


@dataclass(frozen=True)
class Scores:
    """Keys of `capacity` places a row; places of blocks that hold none of its own are unset."""

    entry: Tensor  # [B, capacity] int16
    block: Tensor  # [B, capacity / candidate_block] int16, the highest of each block


def score_plan(
    num_rows: int, num_sequences: int, entries_a_block: int, listed: bool, device: torch.device
) -> ScorePlan:
    """Return the sizes for a step. The bits of a score are the same for all of them.

    Measured on an H200 at 64k entries. One row each: 128 keys 55 % of the bound, 64 keys 44 %. Rows
    of one sequence: four at 64 keys 60 %, eight at 128 keys 53 %, two at 128 keys 47 %. Six rows
    each: two at a time 52 %, four 40 %.
    """
    joined = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
    keys = 128 if listed or entries_a_block % 128 == 0 else 64
    # Few rows: every program has some tiles to pay for its start. Many: rows of unequal contexts.
    rounds = 1 if num_rows <= 16 else 4
    if listed or num_rows < 2 * num_sequences:
        return ScorePlan(1, keys, 4, joined=joined, registers=128, resident=4, rounds=rounds)
    if num_rows < 8 * num_sequences:
        return ScorePlan(2, keys, 4, joined=joined, rounds=rounds)
    return ScorePlan(4, 64, 4, joined=joined, rounds=6)


def _splits(num_tiles: int, most: int, slots: int, rounds: int) -> int:
    """Return how many programs share the keys of a tile of rows.

    As many as fit in `rounds` rounds of `slots` programs, of those that leave the fewest idle. Only
    the most that fit in each number of rounds compete: fewer leave more of the same slots idle.
    """
    filled = {}
    for used in range(1, rounds + 1):
        splits = max(1, min(most, used * slots // num_tiles))
        programs = num_tiles * splits
        filled[splits] = programs / (triton.cdiv(programs, slots) * slots)
    best = max(filled.values())
    return max(splits for splits, share in filled.items() if share > best - 0.02)


def index_scores(
    queries: Tensor,
    weights: Tensor,
    keys: BlockStore,
    rows: Rows,
    candidates: Tensor | None,
    candidate_block: int,
    plan: ScorePlan,
    part: slice,
) -> Scores:
    """Score the visible entries of some rows: all of them, or those in the row's candidate blocks.

    In the second case the places of a row are those of its candidate blocks, one behind another.

    Args:
        queries: [B, H, d] bfloat16. weights: [B, H] bfloat16.
        keys: packed entries. rows: of all B rows.
        candidates: [B, n] int32 blocks of `candidate_block` entries, ascending, -1 behind; or None.
        plan: sizes.
        part: which rows to score.
    Returns:
        `Scores` of those rows. The key of an entry depends neither on other rows nor, but for
        `joined`, on the plan.
    Source: reference.indexer.index_scores; model-v41.md 6 and 10.
    """
    queries, weights = queries[part], weights[part]
    sequence, positions, slots = (t[part] for t in (rows.sequence, rows.positions, rows.slots))
    num_rows, num_heads, channels = queries.shape
    width, entries_a_block = keys.data.shape[2], keys.data.shape[1]
    most = keys.table.shape[1] * entries_a_block
    if candidates is not None:
        candidates = candidates[part]
        most = candidates.shape[1] * candidate_block
        mode = LISTED.value
    else:
        mode = TILED.value if entries_a_block % plan.keys == 0 else 0
    capacity = triton.cdiv(most, UNIT) * UNIT
    device = queries.device
    entry = torch.empty(num_rows, capacity, dtype=torch.int16, device=device)
    block = torch.empty(num_rows, capacity // candidate_block, dtype=torch.int16, device=device)
    first = None
    num_tiles = num_rows
    if plan.rows > 1:
        first = _tiles_of(sequence, plan.rows, rows.sequence_slots.shape[0])
        num_tiles = first.shape[0]
    aligned = width % 4 == 0
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    most_splits = capacity // plan.keys
    splits = _splits(num_tiles, most_splits, plan.resident * processors, plan.rounds)
    words = channels // 8
    _score_kernel[(num_tiles, splits)](
        queries, weights, keys.data, keys.data.view(torch.int32) if aligned else keys.data,
        keys.table, positions, sequence, slots,
        queries if candidates is None else candidates, queries if first is None else first,
        entry, block,
        num_rows, most, keys.table.stride(0), capacity,
        0 if candidates is None else candidates.shape[1],
        RATIO=keys.ratio, CHANNELS=channels, HEADS=num_heads,
        HEAD_PAD=max(16, triton.next_power_of_2(num_heads)), WORDS=words,
        WORD_PAD=max(16, triton.next_power_of_2(words)), WIDTH=width, PER_BLOCK=entries_a_block,
        CANDIDATE=candidate_block, ROWS=plan.rows, KEYS=plan.keys, MODE=mode, ALIGNED=aligned,
        JOINED=plan.joined, TILES=COLUMNS // plan.rows, STAGES=plan.stages,
        num_warps=plan.warps, maxnreg=plan.registers,
    )  # fmt: skip
    return Scores(entry, block)


def _tiles_of(sequence: Tensor, tile: int, num_sequences: int) -> Tensor:
    num_rows = sequence.shape[0]
    # A step of padding only has no sequence; its one tile is of no rows.
    num_tiles = max(1, min(num_rows, num_rows // tile + num_sequences))
    first = torch.empty(num_tiles, dtype=torch.int32, device=sequence.device)
    _plan_kernel[(1,)](sequence, first, num_rows, num_tiles, tile, 1024, num_warps=4)
    return first


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "tile"])
def _plan_kernel(sequence_ptr, first_ptr, num_rows, num_tiles, tile, BLOCK: tl.constexpr):
    begin = 0  # first row of the sequence that the last row seen belongs to
    count = 0
    for base in range(0, num_rows, BLOCK):
        row = base + tl.arange(0, BLOCK)
        own = tl.load(sequence_ptr + row, mask=row < num_rows, other=-1)
        before = tl.load(sequence_ptr + row - 1, mask=(row > 0) & (row < num_rows), other=-1)
        starts = tl.where((row == 0) | (own != before), row, 0)
        start = tl.maximum(tl.associative_scan(starts, 0, _larger), begin)
        leads = ((own >= 0) & ((row - start) % tile == 0)).to(tl.int32)
        place = count + tl.cumsum(leads, 0) - 1
        tl.store(first_ptr + place, row, mask=(leads > 0) & (place < num_tiles))
        count += tl.sum(leads, 0)
        begin = tl.max(start, 0)
    for base in range(0, num_tiles, BLOCK):
        place = base + tl.arange(0, BLOCK)
        tl.store(first_ptr + place, -1, mask=(place >= count) & (place < num_tiles))


@triton.jit(do_not_specialize=["num_rows", "most", "table_stride", "num_candidates"])
def _score_kernel(
    q_ptr, w_ptr, byte_ptr, word_ptr, table_ptr, position_ptr, sequence_ptr, slot_ptr,
    candidate_ptr, first_ptr, entry_ptr, block_ptr,
    num_rows, most, table_stride, capacity, num_candidates,
    RATIO: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, HEAD_PAD: tl.constexpr,
    WORDS: tl.constexpr, WORD_PAD: tl.constexpr, WIDTH: tl.constexpr, PER_BLOCK: tl.constexpr,
    CANDIDATE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, MODE: tl.constexpr,
    ALIGNED: tl.constexpr, JOINED: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Score tiles split, split + splits, ... of ROWS rows of one sequence.

    Columns of sums are (tile, row): so many tiles are scored before their keys are stored.
    """
    COLUMNS: tl.constexpr = ROWS * TILES
    PAIRS: tl.constexpr = ROWS * HEAD_PAD
    split, splits = tl.program_id(1), tl.num_programs(1)
    lead = tl.program_id(0) if ROWS == 1 else tl.load(first_ptr + tl.program_id(0))
    # A tile of no rows sees no entry.
    used = lead >= 0
    lead = tl.maximum(lead, 0)
    own = tl.load(sequence_ptr + lead)
    used &= own >= 0
    row = lead + tl.arange(0, ROWS)
    there = (row < num_rows) & used
    there &= tl.load(sequence_ptr + row, mask=there, other=-1) == own
    column = tl.arange(0, COLUMNS)
    column_row = lead + column % ROWS
    column_there = (column_row < num_rows) & used
    column_there &= tl.load(sequence_ptr + column_row, mask=column_there, other=-1) == own
    position = tl.load(position_ptr + column_row, mask=column_there, other=-1)
    visible = ((position + 1) // RATIO).to(tl.int32)
    if MODE == LISTED:
        # Places of candidate blocks: no more than there are blocks with a visible entry.
        places = tl.minimum(tl.cdiv(visible, CANDIDATE), num_candidates) * CANDIDATE
    else:
        visible = tl.minimum(visible, most)
        places = visible
    furthest = tl.max(places, 0)
    newest = tl.max(visible, 0) - 1
    count = tl.cdiv(tl.cdiv(furthest, KEYS) - split, splits)
    if count <= 0:
        return
    table = table_ptr + tl.load(slot_ptr + lead) * table_stride
    offset = tl.arange(0, KEYS)
    k = tl.arange(0, WORD_PAD)
    g = tl.arange(0, WORD_PAD // 4)
    if JOINED:
        q0 = load_queries(q_ptr, row, there, -1, CHANNELS, HEADS, HEAD_PAD, WORDS, WORD_PAD, ROWS)
    else:
        q0 = load_queries(q_ptr, row, there, 0, CHANNELS, HEADS, HEAD_PAD, WORDS, WORD_PAD, ROWS)
        q1 = load_queries(q_ptr, row, there, 1, CHANNELS, HEADS, HEAD_PAD, WORDS, WORD_PAD, ROWS)
        q2 = load_queries(q_ptr, row, there, 2, CHANNELS, HEADS, HEAD_PAD, WORDS, WORD_PAD, ROWS)
        q3 = load_queries(q_ptr, row, there, 3, CHANNELS, HEADS, HEAD_PAD, WORDS, WORD_PAD, ROWS)
        q4 = load_queries(q_ptr, row, there, 4, CHANNELS, HEADS, HEAD_PAD, WORDS, WORD_PAD, ROWS)
        q5 = load_queries(q_ptr, row, there, 5, CHANNELS, HEADS, HEAD_PAD, WORDS, WORD_PAD, ROWS)
        q6 = load_queries(q_ptr, row, there, 6, CHANNELS, HEADS, HEAD_PAD, WORDS, WORD_PAD, ROWS)
        q7 = load_queries(q_ptr, row, there, 7, CHANNELS, HEADS, HEAD_PAD, WORDS, WORD_PAD, ROWS)
    h = tl.arange(0, HEAD_PAD)
    weight = load_weights(w_ptr, row, there, h // 2 * 2, HEADS)
    weight |= load_weights(w_ptr, row, there, h // 2 * 2 + 1, HEADS) << 16
    weight = tl.broadcast_to(tl.reshape(weight, [1, PAIRS]), [KEYS, PAIRS])
    # ones[(row, head), (tile, row)]
    ones = (tl.arange(0, PAIRS) // HEAD_PAD)[:, None] == (column % ROWS)[None, :]
    ones = ones.to(tl.float32).to(tl.bfloat16)
    entry_base = entry_ptr + column_row.to(tl.int64)[None, :] * capacity
    block_base = block_ptr + column_row.to(tl.int64)[None, :] * (capacity // CANDIDATE)
    scores = tl.zeros([KEYS, COLUMNS], tl.float32)
    first_tile = table + split * KEYS // PER_BLOCK
    block_id = tl.load(first_tile, mask=MODE == TILED, other=0)
    for i in tl.range(0, count, num_stages=STAGES):
        tile = split + i * splits
        if MODE == TILED:
            # Behind the newest entry lie unused ones of the same block.
            first = block_id.to(tl.int64) * PER_BLOCK + tile * KEYS % PER_BLOCK
            next_tile = tl.minimum(tile + splits, tl.cdiv(furthest, KEYS) - 1)
            block_id = tl.load(table + next_tile * KEYS // PER_BLOCK)
            words_at = (word_ptr + first * (WIDTH // 4)) + offset * (WIDTH // 4)
            bytes_at = (byte_ptr + first * WIDTH) + offset * WIDTH
        else:
            place = tile * KEYS + offset
            if MODE == LISTED:
                listed = tl.load(
                    candidate_ptr + lead.to(tl.int64) * num_candidates + place // CANDIDATE,
                    mask=place < furthest, other=0,
                )  # fmt: skip
                place = tl.maximum(listed, 0) * CANDIDATE + place % CANDIDATE
            entry = tl.minimum(place, newest)
            stored = tl.load(table + entry // PER_BLOCK).to(tl.int64)
            stored = stored * PER_BLOCK + entry % PER_BLOCK
            words_at = word_ptr + stored * (WIDTH // 4)
            bytes_at = byte_ptr + stored * WIDTH
        if ALIGNED:
            at = words_at[:, None] + k[None, :]
            if WORDS == WORD_PAD:
                words = tl.load(at)
            else:
                words = tl.load(at, mask=(k < WORDS)[None, :], other=0)
        else:
            at = bytes_at[:, None] + 4 * k[None, :]
            inside = (k < WORDS)[None, :]
            words = tl.load(at, mask=inside, other=0).to(tl.int32)
            words |= tl.load(at + 1, mask=inside, other=0).to(tl.int32) << 8
            words |= tl.load(at + 2, mask=inside, other=0).to(tl.int32) << 16
            words |= tl.load(at + 3, mask=inside, other=0).to(tl.int32) << 24
        scale_at = bytes_at[:, None] + (4 * WORDS + g)[None, :]
        if WORDS == WORD_PAD:
            scale = tl.load(scale_at)
        else:
            scale = tl.load(scale_at, mask=(g < WORDS // 4)[None, :], other=0)
        a0, a1, a2, a3, a4, a5, a6, a7 = unpack_keys(words, scale, KEYS, WORD_PAD)
        dots = tl.zeros([KEYS, PAIRS], tl.float32)
        if JOINED:
            low = tl.join(tl.join(a0, a1), tl.join(a2, a3))
            high = tl.join(tl.join(a4, a5), tl.join(a6, a7))
            a = tl.reshape(tl.join(low, high), [KEYS, WORD_PAD * 8])
            dots = dot(a, q0, dots)
        else:
            dots = dot(a0, q0, dots)
            dots = dot(a1, q1, dots)
            dots = dot(a2, q2, dots)
            dots = dot(a3, q3, dots)
            dots = dot(a4, q4, dots)
            dots = dot(a5, q5, dots)
            dots = dot(a6, q6, dots)
            dots = dot(a7, q7, dots)
        sums = dot(weighted_terms(dots, weight), ones, tl.zeros([KEYS, COLUMNS], tl.float32))
        if TILES == 1:
            scores = sums
        else:
            scores = tl.where((column // ROWS == i % TILES)[None, :], sums, scores)
        if (i % TILES == TILES - 1) | (i == count - 1):
            number = i // TILES * TILES + column // ROWS
            filled = column_there & (number <= i)
            tiles = split + number * splits
            key = ordered_keys(scores)
            to = tiles[None, :] * KEYS + offset[:, None]
            if MODE == LISTED:
                chosen = tl.load(
                    candidate_ptr + column_row.to(tl.int64)[None, :] * num_candidates
                    + to // CANDIDATE,
                    mask=(to < furthest) & filled[None, :], other=-1,
                )  # fmt: skip
                known = chosen * CANDIDATE + to % CANDIDATE < visible[None, :]
                key = tl.where((chosen >= 0) & known, key, 0)
            else:
                key = tl.where(to < visible[None, :], key, 0)
            tl.store(entry_base + to, key.to(tl.int16), mask=filled[None, :])
            best = tl.max(tl.reshape(key, [KEYS // CANDIDATE, CANDIDATE, COLUMNS]), 1)
            block = tl.arange(0, KEYS // CANDIDATE)[:, None] + tiles[None, :] * (KEYS // CANDIDATE)
            tl.store(block_base + block, best.to(tl.int16), mask=filled[None, :])
