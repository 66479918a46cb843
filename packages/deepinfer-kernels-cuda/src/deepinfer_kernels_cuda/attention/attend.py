"""Sparse attention over window rings and picked block entries, with a sink.

One latent is key and value of all heads. A row sees `window_len` window positions, then its picks,
in chunks of 64 entries. Three kernels:

    places    addresses of the entries a row sees; packs keys of this step
    weights   scores of a row's chunks in order -> exp(score - running maximum) as bfloat16, and the
              decay of what came before; where rows are few, of a run of chunks -> plain scores
    sums      weights @ entries of a row for a share of its channels

The last two widen packed entries to bfloat16 in registers (`widen`), where every value is exact.
Channels come out of that in another order, in which queries are loaded and results are stored.

Bits of a row depend on nothing but the row: products run over channels and entries in one order,
maxima have none, and sums of weights are of integers (steps of 2^-21), which have none either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.attention import places as _places
from deepinfer_kernels_cuda.attention.places import check_stores, find_places
from deepinfer_kernels_cuda.attention.widen import (
    PICK_SHIFT,
    columns_of_pairs,
    load_word,
    pair_word,
    pairs_of_columns,
    row_of,
    widen_picks,
    widen_window,
)
from deepinfer_kernels_cuda.checks import check_alignment, check_tensor, check_value
from deepinfer_kernels_cuda.kernel_math import INTERPRET, as_bf16, dot
from deepinfer_kernels_cuda.norm.rotate import cos_sin
from deepinfer_kernels_cuda.values import BlockStore, Rows, WindowStore

__all__ = ["attend"]

CHUNK = tl.constexpr(_places.CHUNK)
# What a chunk holds.
_WINDOW = tl.constexpr(0)
_MIXED = tl.constexpr(1)
_PICKS = tl.constexpr(2)

_LOG2_E = tl.constexpr(1.4426950408889634)
# A float32 of this size has whole numbers alone in its last bits: adding it rounds to them.
_ROUNDS = tl.constexpr(12582912.0)
_ROUNDS_BITS = tl.constexpr(0x4B400000)

STEP = 16  # words (of 8 channels) multiplied at once for scores; bits of results depend on it


@dataclass(frozen=True)
class Plan:
    """How kernels are laid out; bits of a row are the same in every plan.

    Attributes:
        rows: that it is for, at most.
        run: chunks a program of the weights kernel, which then leaves scores; None for all.
        stages: of the weights kernel.
        share: words a program of the sums kernel.
        sum_stages, sum_warps, sum_regs: of the sums kernel.
    """

    rows: int
    run: int | None
    stages: int
    share: int
    sum_stages: int
    sum_warps: int
    sum_regs: int | None = None


# Measured on an H200, 512 picks of 64k contexts in a pool of 2.1 GB. In microseconds: 1 row 26.0
# (27.7 with shares of 16); 60 rows 50.8 (57.1 in runs of 1, 59.7 in whole rows); 128 rows 78.3
# (97.3 in runs of 5); 1056 rows 432 in one slice (447 in two, 452 in four; 447 against 471 with one
# stage; 443 with shares of 16, 495 with shares of 64).
PLANS = (
    Plan(16, run=1, stages=1, share=8, sum_stages=3, sum_warps=4),
    Plan(72, run=3, stages=2, share=16, sum_stages=3, sum_warps=4),
    Plan(2**62, run=None, stages=3, share=32, sum_stages=3, sum_warps=8, sum_regs=128),
)
SLICE_ROWS = 1056  # rows whose weights are held at a time: 86 MB, eight rows for each of 132 SMs


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
    """Attend to the window and to picked block entries; key and value are the same vector.

    Window positions of a row run from `window_first` to `window_last`. Those at or above its
    sequence's `first_position` come from `keys`, older ones from the ring; none below
    `window_floor`. Rounding is that of release numerics (model-v41.md 10): scores in float32, the
    running maximum over chunks of 64 entries, weights rounded to bfloat16 in the sum of entries and
    not in the denominator, one rounding of the quotient.

    Args:
        queries: [B, H, d] bfloat16, contiguous; d a multiple of 32.
        keys: [B', d] bfloat16, contiguous, as `round_window` returns them; rows that `row_start`
            and `first_position` describe.
        window: `data` [slots + 1, ring_len, entry_width("window", d)] uint8, contiguous. It and
            `entries.data` begin at a multiple of 16 bytes where 512 divides d, and at one of 4
            where that divides their width.
        rows: of the queries; `window_len` and `picks.shape[1]` are compile-time sizes.
        sink: [H] float32.
        scale: of scores.
        entries: `data` [blocks + 1, entries a block, entry_width("compressed", d)] uint8,
            contiguous; `table` [slots + 1, max blocks] int32, whose lines may lie apart.
        picks: [B, K] int32 entry numbers of a row's slot; negative ones are no entries.
        inverse_rotary: positions [B] int64 and inv_freq [n] float32; the result is then rotated
            back, with the bits of `rotate(..., inverse=True)`.
    Returns:
        [B, H, d] bfloat16, not yet rotated back unless `inverse_rotary` is given. A row that sees
        nothing yields zero, padding too.
        Bits of a row do not depend on other rows.
    Raises:
        KernelInputError: a shape, dtype or stride is not as above.
    Source: reference.attention.attend; model-v41.md 4.
    """
    check_tensor("queries", queries, shape=(None, None, None), dtype=torch.bfloat16)
    (num_rows, heads, channels), device = queries.shape, queries.device
    check_tensor("keys", keys, shape=(None, channels), dtype=torch.bfloat16, device=device)
    check_tensor("sink", sink, shape=(heads,), dtype=torch.float32, device=device)
    check_alignment("queries", queries, 4)  # read in pairs of channels
    check_stores(queries, window, rows, entries, picks)
    pool, table, chosen = window.data, rows.slots, None
    if entries is not None and picks is not None and picks.shape[1]:
        pool, table, chosen = entries.data, entries.table, picks
    out = torch.empty_like(queries)
    if num_rows == 0 or heads == 0:
        return out
    positions, inv_freq = (rows.positions, sink) if inverse_rotary is None else inverse_rotary
    if inverse_rotary is not None:
        check_tensor("positions", positions, shape=(num_rows,), dtype=torch.int64, device=device)
        check_tensor("inv_freq", inv_freq, shape=(None,), dtype=torch.float32, device=device)
        count = inv_freq.shape[0]
        needs = f"at most {channels // 2}, one for each pair of channels"
        check_value("inv_freq.shape[0]", count, 2 * count <= channels, needs)
    num_pairs = 0 if inverse_rotary is None else inv_freq.shape[0]
    num_picks = 0 if chosen is None else chosen.shape[1]
    sizes = {"H": heads, "D": channels, "WINDOW_LEN": rows.window_len}
    sizes["MIXED"] = num_picks > 0 and rows.window_len % CHUNK.value != 0
    # the packed keys are held until the kernels that read them are queued
    places, _packed = find_places(keys, window, rows, pool, table, chosen)
    for start in range(0, num_rows, SLICE_ROWS):
        part = slice(start, min(start + SLICE_ROWS, num_rows))
        _attend_rows(
            out[part], queries[part], places[part], sink, scale, positions[part], inv_freq,
            num_pairs, sizes,
        )  # fmt: skip
    return out


def _attend_rows(
    out: Tensor,
    queries: Tensor,
    places: Tensor,
    sink: Tensor,
    scale: float,
    positions: Tensor,
    inv_freq: Tensor,
    num_pairs: int,
    sizes: dict[str, int],
) -> None:
    """Write `out` of some rows."""
    (count, heads, channels), device = queries.shape, queries.device
    plan = next(plan for plan in PLANS if count <= plan.rows or plan is PLANS[-1])
    whole = plan.run is None
    block_h = max(16, min(64, triton.next_power_of_2(heads)))
    head_blocks, chunks = triton.cdiv(heads, block_h), places.shape[1] // CHUNK.value
    words = max(4, triton.next_power_of_2(channels // 8))
    step, share = min(STEP, words), min(plan.share, words)
    run = chunks if plan.run is None else plan.run
    size = (count, head_blocks, chunks, block_h)
    dtype = torch.bfloat16 if whole else torch.float32
    weights = torch.empty(*size, CHUNK.value, dtype=dtype, device=device)
    decay = torch.empty(size if whole else 1, dtype=torch.float32, device=device)
    inverse = torch.empty(count, head_blocks, block_h, dtype=torch.float32, device=device)
    sizes = {
        **sizes, "BLOCK_H": block_h, "CHUNKS": chunks, "HEAD_BLOCKS": head_blocks, "WHOLE": whole,
    }  # fmt: skip
    _weights_kernel[(count * head_blocks, triton.cdiv(chunks, run))](
        queries.view(torch.int32), places, sink, scale, weights, decay, inverse,
        **sizes, WORDS=words, STEP=step, RUN=run, STAGES=plan.stages,
        num_warps=4, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    _sums_kernel[(count * head_blocks, words // share)](
        out.view(torch.int32), sink, places, weights, decay, inverse, positions, inv_freq,
        **sizes, SHARE=share, PAIRS=num_pairs, STAGES=plan.sum_stages,
        num_warps=plan.sum_warps, num_stages=1, maxnreg=plan.sum_regs,
    )  # fmt: skip


@triton.jit
def _bytes_at(place, D: tl.constexpr):
    """Return byte pointers [n, 1] of addresses."""
    entry = place.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(entry, 16)[:, None] if D % 512 == 0 else entry[:, None]


@triton.jit
def _window_columns(place, FIRST, STEP: tl.constexpr, D: tl.constexpr):
    """Return columns [64, 8 * STEP] of window entries, from word FIRST on."""
    ALIGNED: tl.constexpr = (D + D // 32) % 4 == 0
    seen, base = (place != 0)[:, None], _bytes_at(place, D)
    half = (2 * FIRST + tl.arange(0, 2 * STEP))[None, :]
    payload = load_word(base, half, seen & (half < D // 4), ALIGNED)
    low, high = tl.split(tl.reshape(payload, [CHUNK, STEP, 2]))
    group = (FIRST // 4 + tl.arange(0, STEP // 4))[None, :]
    scale = tl.load(base + D + group, mask=seen & (group < D // 32), other=0)
    return widen_window(low, high, scale)


@triton.jit
def _pick_columns(place, FIRST, STEP: tl.constexpr, D: tl.constexpr):
    """Return columns [64, 8 * STEP] of picked entries / 2^PICK_SHIFT, from word FIRST on."""
    ALIGNED: tl.constexpr = (D // 2 + D // 16) % 4 == 0
    there, base = (place != 0)[:, None], _bytes_at(place, D)
    word = (FIRST + tl.arange(0, STEP))[None, :]
    payload = load_word(base, word, there & (word < D // 8), ALIGNED)
    group = (FIRST // 2 + tl.arange(0, STEP // 2))[None, :]
    scale = tl.load(base + D // 2 + group, mask=there & (group < D // 16), other=0)
    return widen_picks(payload, scale)


@triton.jit
def _exp(x, shift):
    """Return 2^shift * exp(x)."""
    y = tl.fma(x, _LOG2_E, shift)
    if INTERPRET:
        return tl.exp2(y)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _soften(scores, chunk, top, total, KIND: tl.constexpr, WINDOW_LEN: tl.constexpr):
    """Return (weights bfloat16, decay, top, total) behind a chunk's scores [h, 64].

    Weights of picks are 2^PICK_SHIFT times what they are, as their entries are too small.
    """
    higher = tl.maximum(top, tl.max(scores, axis=1))
    origin = tl.where(higher == float("-inf"), 0.0, higher)
    if KIND == _MIXED:
        is_pick = chunk * CHUNK + tl.arange(0, CHUNK) >= WINDOW_LEN
        weight = _exp(scores - origin[:, None], tl.where(is_pick, 1.0 * PICK_SHIFT, 0.0)[None, :])
        whole = tl.where(is_pick, 2.0 ** (21 - PICK_SHIFT), 2.0**21)[None, :]
    elif KIND == _PICKS:
        weight = _exp(scores - origin[:, None], 1.0 * PICK_SHIFT)
        whole = 2.0 ** (21 - PICK_SHIFT)
    else:
        weight = _exp(scores - origin[:, None], 0.0)
        whole = 2.0**21
    steps = tl.fma(weight, whole, _ROUNDS).to(tl.int32, bitcast=True) - _ROUNDS_BITS
    decay = _exp(top - origin, 0.0)
    total = tl.fma(total, decay, tl.sum(steps, axis=1).to(tl.float32) * 2.0**-21)
    return as_bf16(weight), decay, higher, total


@triton.jit
def _inverse_of(total, top, sink):
    """Return what sums of entries are multiplied by; 0 where nothing was seen."""
    origin = tl.where(top == float("-inf"), 0.0, top)
    return tl.where(total == 0.0, 0.0, tl.div_rn(1.0, total + tl.exp(sink - origin)))


@triton.jit
def _columns_of(place, chunk, FIRST, KIND: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr,
                WINDOW_LEN: tl.constexpr):  # fmt: skip
    """Return columns [64, 8 * STEP] of a chunk's entries; those of picks are / 2^PICK_SHIFT."""
    if KIND == _WINDOW:
        return _window_columns(place, FIRST, STEP, D)
    elif KIND == _PICKS:
        return _pick_columns(place, FIRST, STEP, D)
    else:
        in_window = row_of(chunk * CHUNK + tl.arange(0, CHUNK)) < WINDOW_LEN
        window = _window_columns(tl.where(in_window, place, 0), FIRST, STEP, D)
        return window + _pick_columns(tl.where(in_window, 0, place), FIRST, STEP, D)


@triton.jit
def _weights_kernel(
    q_ptr, place_ptr, sink_ptr, scale, weight_ptr, decay_ptr, inverse_ptr,
    H: tl.constexpr, D: tl.constexpr, WINDOW_LEN: tl.constexpr, BLOCK_H: tl.constexpr,
    CHUNKS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, MIXED: tl.constexpr, WHOLE: tl.constexpr,
    WORDS: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write weights, decays and inverse denominators of a row; or scores of a run of its chunks."""
    own = tl.program_id(0).to(tl.int64)
    head = (own % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    query = ()
    for i in tl.static_range(WORDS // STEP):
        pair = 4 * i * STEP + tl.arange(0, 4 * STEP)
        at = (own // HEAD_BLOCKS * H + head)[:, None] * (D // 2) + pair[None, :]
        inside = (head < H)[:, None] & (pair < D // 2)[None, :]
        part = columns_of_pairs(tl.load(q_ptr + at, mask=inside, other=0))
        query = query + (part,)  # type: ignore[assignment]  # noqa: RUF005
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    LAST: tl.constexpr = (WINDOW_LEN + CHUNK - 1) // CHUNK
    KIND: tl.constexpr = _MIXED if MIXED else _WINDOW
    if WHOLE:
        begin, end, begin_picks, end_picks = 0, LAST, LAST, CHUNKS
    else:
        begin = tl.program_id(1) * RUN
        end = tl.minimum(begin + RUN, LAST)
        begin_picks = tl.maximum(begin, LAST)
        end_picks = tl.minimum(begin + RUN, CHUNKS)
    for chunk in range(begin, end):
        top, total = _weigh_chunk(
            chunk, query, scale, top, total, own, place_ptr, weight_ptr, decay_ptr,
            KIND, WHOLE, BLOCK_H, CHUNKS, HEAD_BLOCKS, STEP, D, WINDOW_LEN,
        )  # fmt: skip
    for chunk in tl.range(begin_picks, end_picks, num_stages=STAGES):
        top, total = _weigh_chunk(
            chunk, query, scale, top, total, own, place_ptr, weight_ptr, decay_ptr,
            _PICKS, WHOLE, BLOCK_H, CHUNKS, HEAD_BLOCKS, STEP, D, WINDOW_LEN,
        )  # fmt: skip
    if WHOLE:
        sink = tl.load(sink_ptr + head, mask=head < H, other=0.0)
        lane = tl.arange(0, BLOCK_H)
        tl.store(inverse_ptr + own * BLOCK_H + lane, _inverse_of(total, top, sink))


@triton.jit
def _weigh_chunk(
    chunk, query, scale, top, total, own, place_ptr, weight_ptr, decay_ptr,
    KIND: tl.constexpr, WHOLE: tl.constexpr, BLOCK_H: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, WINDOW_LEN: tl.constexpr,
):  # fmt: skip
    """Write weights and decay of a chunk, or its scores; return (top, total)."""
    chunk_places = place_ptr + (own // HEAD_BLOCKS * CHUNKS + chunk) * CHUNK
    lane = tl.arange(0, CHUNK)
    place = tl.load(chunk_places + lane)
    scores = tl.zeros([BLOCK_H, CHUNK], tl.float32)
    for i in tl.static_range(len(query)):
        key = _columns_of(place, chunk, i * STEP, KIND, STEP, D, WINDOW_LEN)
        scores = dot(query[i], tl.trans(key), scores)
    if KIND == _PICKS:
        scores *= scale * 2.0**PICK_SHIFT
    elif KIND == _MIXED:
        is_pick = chunk * CHUNK + lane >= WINDOW_LEN
        scores *= tl.where(is_pick, scale * 2.0**PICK_SHIFT, scale)[None, :]
    else:
        scores *= scale
    seen = tl.load(chunk_places + row_of(lane)) != 0
    scores = tl.where(seen[None, :], scores, float("-inf"))
    line = (own * CHUNKS + chunk) * BLOCK_H + tl.arange(0, BLOCK_H)
    cell = line[:, None] * CHUNK + lane[None, :]
    if WHOLE:
        weight, decay, top, total = _soften(scores, chunk, top, total, KIND, WINDOW_LEN)
        tl.store(weight_ptr + cell, weight)
        tl.store(decay_ptr + line, decay)
    else:
        tl.store(weight_ptr + cell, scores)
    return top, total


@triton.jit
def _sums_kernel(
    out_ptr, sink_ptr, place_ptr, weight_ptr, decay_ptr, inverse_ptr, position_ptr, frequency_ptr,
    H: tl.constexpr, D: tl.constexpr, WINDOW_LEN: tl.constexpr, BLOCK_H: tl.constexpr,
    CHUNKS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, MIXED: tl.constexpr, WHOLE: tl.constexpr,
    SHARE: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write weighted sums of a row's entries for SHARE words of channels."""
    own = tl.program_id(0).to(tl.int64)
    row = own // HEAD_BLOCKS
    first_word = tl.program_id(1) * SHARE
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    sums = tl.zeros([BLOCK_H, 8 * SHARE], tl.float32)
    LAST: tl.constexpr = (WINDOW_LEN + CHUNK - 1) // CHUNK
    KIND: tl.constexpr = _MIXED if MIXED else _WINDOW
    for chunk in range(0, LAST):
        sums, top, total = _add_chunk(
            chunk, sums, top, total, own, first_word, place_ptr, weight_ptr, decay_ptr,
            KIND, WHOLE, BLOCK_H, CHUNKS, HEAD_BLOCKS, SHARE, D, WINDOW_LEN,
        )  # fmt: skip
    for chunk in tl.range(LAST, CHUNKS, num_stages=STAGES):
        sums, top, total = _add_chunk(
            chunk, sums, top, total, own, first_word, place_ptr, weight_ptr, decay_ptr,
            _PICKS, WHOLE, BLOCK_H, CHUNKS, HEAD_BLOCKS, SHARE, D, WINDOW_LEN,
        )  # fmt: skip
    lane = tl.arange(0, BLOCK_H)
    head = (own % HEAD_BLOCKS) * BLOCK_H + lane
    if WHOLE:
        inverse = tl.load(inverse_ptr + own * BLOCK_H + lane)
    else:
        inverse = _inverse_of(total, top, tl.load(sink_ptr + head, mask=head < H, other=0.0))
    pair = 4 * first_word + tl.arange(0, 4 * SHARE)
    word = pairs_of_columns(as_bf16(sums * inverse[:, None]))
    if PAIRS > 0:
        turned = pair - (D // 2 - PAIRS)
        is_turned = (turned >= 0) & (turned < PAIRS)
        frequency = tl.load(frequency_ptr + turned, mask=is_turned, other=0.0)
        cos, sin = cos_sin(tl.load(position_ptr + row).to(tl.float32) * frequency)
        real = (word << 16).to(tl.float32, bitcast=True)
        imag = (word & -65536).to(tl.float32, bitcast=True)
        new_real = tl.fma(real, cos[None, :], imag * sin[None, :])
        new_imag = tl.fma(real, (-sin)[None, :], imag * cos[None, :])
        word = tl.where(is_turned[None, :], pair_word(new_real, new_imag), word)
    at = (row * H + head)[:, None] * (D // 2) + pair[None, :]
    tl.store(out_ptr + at, word, mask=(head < H)[:, None] & (pair < D // 2)[None, :])


@triton.jit
def _add_chunk(
    chunk, sums, top, total, own, first_word, place_ptr, weight_ptr, decay_ptr,
    KIND: tl.constexpr, WHOLE: tl.constexpr, BLOCK_H: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, WINDOW_LEN: tl.constexpr,
):  # fmt: skip
    """Return (sums, top, total) with a chunk; its weights are stored, or made of its scores."""
    at = (own // HEAD_BLOCKS) * (CHUNKS * CHUNK) + chunk * CHUNK + tl.arange(0, CHUNK)
    place = tl.load(place_ptr + at)
    key = _columns_of(place, chunk, first_word, KIND, SHARE, D, WINDOW_LEN)
    line = (own * CHUNKS + chunk) * BLOCK_H + tl.arange(0, BLOCK_H)
    weight = tl.load(weight_ptr + line[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :])
    if WHOLE:
        decay = tl.load(decay_ptr + line)
    else:
        weight, decay, top, total = _soften(weight, chunk, top, total, KIND, WINDOW_LEN)
    return dot(weight, key, sums * decay[:, None]), top, total
