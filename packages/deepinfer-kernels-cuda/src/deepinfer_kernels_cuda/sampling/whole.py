"""Rows so flat that their best few thousand tokens do not hold the border: searched as a whole.

One program a row, which leaves at once where nothing is open. It counts the row's tokens by their
distance from the head's end, holds those of the few distances around which the border must be, and
sums the mass before them exactly. Should the border not lie there, it is searched bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.sampling.draw import draw_arguments, draw_key
from deepinfer_kernels_cuda.sampling.head import Head
from deepinfer_kernels_cuda.sampling.inputs import Sampled
from deepinfer_kernels_cuda.sampling.noise import MOST_NOISE, gumbel_of
from deepinfer_kernels_cuda.sampling.scan import (
    MASS_UNIT,
    NOBODY,
    Scanned,
    cut_arguments,
    cut_flags,
    exp_of,
    is_cut,
    mass_of,
    scaled,
)
from deepinfer_kernels_cuda.sampling.search import (
    LAST_RANK,
    load_tile,
    measure,
    ranked,
    reaches,
    search,
)
from deepinfer_kernels_cuda.values import SampleInputs

__all__ = ["end_whole_rows"]

_NO_LOGIT = tl.constexpr(float("-inf"))
_BINS = tl.constexpr(256)  # of distances from an origin, 1/16 each; the last one has all the rest
_BINS_A_UNIT = tl.constexpr(16.0)
_LEVELS = tl.constexpr(3)  # of ever smaller bins


def end_whole_rows(
    found: Scanned,
    head: Head,
    inputs: SampleInputs,
    limit: Tensor,
    mass: Tensor,
    unfinished: Tensor,
    sampled: Sampled | None,
) -> None:
    """Find limit [N] int64 and mass [N] float64 of rows that are `unfinished` [N] int32.

    Args:
        head: its values and ids of these rows are overwritten.
        sampled: gets tokens in the place of limits and masses.
    """
    num_rows, vocab_size = found.values.shape
    blank = found.raw_max
    _end_whole[(num_rows,)](
        *draw_arguments(inputs, blank),
        *cut_arguments(inputs.top_k, inputs.top_p, inputs.min_p, blank),
        found.values,
        found.value_max,
        head.bound,
        head.count,
        head.peak,
        head.total,
        head.values,
        head.ids,
        blank if sampled is None else sampled.token_ids,
        limit,
        mass,
        unfinished,
        vocab_size,
        found.tiles.count,
        TILE=found.tiles.size,
        HAS_CYCLE=inputs.cycle is not None,
        **cut_flags(inputs.top_k, inputs.top_p, inputs.min_p),
        DRAW=sampled is not None,
        num_warps=16 if found.tiles.size >= 2048 else 4,
        enable_fp_fusion=False,
    )


@triton.jit
def _bins(v, rank, limit, origin, scale):
    """Return bins of tokens up to a rank: -1 nearer than the origin, the last one farther off."""
    number = tl.minimum(tl.maximum((-v - origin) * scale, -1.0), _BINS - 1.0)
    # tokens just before the origin round down, not towards it
    number = tl.where(-v < origin, -1.0, number).to(tl.int32)
    return tl.where(rank <= limit, number, _BINS - 1)


@triton.jit
def _border(
    values_ptr, vocab_size, peak, temperature, k, p, total, limit, least, held_values_ptr,
    held_ids_ptr, BY_MASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the smallest rank up to `limit` with k tokens or a share p of `total` up to it.

    Args:
        least: a scaled value that the border is not above.
    """
    number = tl.arange(0, _BINS)
    origin, scale = -least, tl.full((), _BINS_A_UNIT, tl.float32)
    level, dense = tl.full((), 0, tl.int32), tl.full((), 1, tl.int32)
    first, last = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (level < _LEVELS) & (dense != 0):
        counts = tl.zeros((_BINS,), tl.int32)
        ahead, weight_ahead = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
        for begin in range(0, vocab_size, TILE):
            v, _, rank, weight = load_tile(values_ptr, begin, vocab_size, peak, temperature, TILE)
            place = _bins(v, rank, limit, origin, scale)
            ahead += tl.sum((place < 0).to(tl.int32), 0)
            weight_ahead += tl.sum(tl.where(place < 0, mass_of(weight), 0), 0)
            counts += tl.histogram(tl.where(place < 0, _BINS - 1, place), _BINS)
        counts = tl.where(number == _BINS - 1, 0, counts)
        if BY_MASS:
            # Tokens of a bin weigh about what its middle does.
            weights = tl.exp(-(origin + (number.to(tl.float32) + 0.5) / scale))
            sums = tl.cumsum(counts.to(tl.float32) * weights, 0)
            short = sums + weight_ahead.to(tl.float32) * MASS_UNIT < total.to(tl.float32) * p
        else:
            short = tl.cumsum(counts, 0) + ahead < k
        middle = tl.sum(short.to(tl.int32), 0)  # where the border is, by this estimate
        radius = tl.full((), 0, tl.int32)
        if BY_MASS:
            for wide in tl.static_range(1, 4):
                around = tl.sum(tl.where(tl.abs(number - middle) <= wide, counts, 0), 0)
                radius = tl.where(around <= TILE, wide, radius)
        first, last = middle - radius, tl.minimum(middle + radius, _BINS - 2)
        dense = (tl.sum(tl.where(number == middle, counts, 0), 0) > TILE).to(tl.int32)
        level += 1
        if (dense != 0) & (level < _LEVELS):
            # look closer: at a few bins around the middle
            origin += tl.maximum(middle - 1, 0).to(tl.float32) / scale
            scale *= _BINS // 4
    held, before = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    lighter = tl.full((), 0, tl.int64)
    for begin in range(0, vocab_size, TILE):
        v, ids, rank, weight = load_tile(values_ptr, begin, vocab_size, peak, temperature, TILE)
        place = _bins(v, rank, limit, origin, scale)
        before += tl.sum((place < first).to(tl.int32), 0)
        lighter += tl.sum(tl.where(place < first, mass_of(weight), 0), 0)
        near = (place >= first) & (place <= last)
        slot = held + tl.cumsum(near.to(tl.int32), 0) - 1
        tl.store(held_values_ptr + slot, v, mask=near & (slot < TILE))
        tl.store(held_ids_ptr + slot, ids, mask=near & (slot < TILE))
        held += tl.sum(near.to(tl.int32), 0)
    tl.debug_barrier()  # what one thread has stored another one loads
    i = tl.arange(0, TILE)
    v = tl.load(held_values_ptr + i, mask=i < held, other=_NO_LOGIT)
    ids = tl.load(held_ids_ptr + i, mask=i < held, other=0)
    tl.debug_barrier()
    rank = tl.where(i < held, ranked(v, ids), LAST_RANK + 1)
    mass = tl.where(i < held, mass_of(exp_of(v)), 0)
    if BY_MASS:
        ends = reaches(lighter + tl.sum(mass, 0), total, p)
        right = ends & ((reaches(lighter, total, p) == 0) | (before == 0))
    else:
        right = (before < k) & (k <= before + held)
    zero, none = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    if right & (held <= TILE) & (held > 0):
        high = tl.max(tl.where(i < held, rank, 0), 0)
        border = search(
            rank, mass, k, p, total, before, lighter, zero, high, held, values_ptr, vocab_size,
            peak, temperature, BY_MASS, TILE, False,
        )  # fmt: skip
    else:
        border = search(
            rank, mass, k, p, total, none, zero, zero, limit, vocab_size + none, values_ptr,
            vocab_size, peak, temperature, BY_MASS, TILE, True,
        )  # fmt: skip
    return border


@triton.jit
def _end_whole(
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    cycle_ptr,
    temperature_stride,
    seeds_stride,
    positions_stride,
    cycle_stride,
    stream,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    values_ptr,
    value_max_ptr,
    bound_ptr,
    count_ptr,
    peak_ptr,
    total_ptr,
    held_values_ptr,
    held_ids_ptr,
    token_ptr,
    limit_ptr,
    kept_mass_ptr,
    open_ptr,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    HAS_CYCLE: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    DRAW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(open_ptr + row) != 0:
        peak = tl.load(peak_ptr + row)
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        values_ptr += row * vocab_size
        held_values_ptr += row * TILE
        held_ids_ptr += row * TILE
        k, p, low, _any = is_cut(
            row,
            vocab_size,
            top_k_ptr,
            top_p_ptr,
            min_p_ptr,
            top_k_stride,
            top_p_stride,
            min_p_stride,
            HAS_TOP_K,
            HAS_TOP_P,
            HAS_MIN_P,
        )
        limit, total = tl.full((), LAST_RANK, tl.int64), tl.full((), 1.0, tl.float64)
        least = tl.full((), 0.0, tl.float32)
        if tl.load(count_ptr + row) <= TILE:  # else the border may be within the head
            least = tl.maximum(scaled(tl.load(bound_ptr + row), peak, temperature), -1.0e30)
        if HAS_TOP_K:  # noqa: SIM102 (known when compiled)
            if k > 0:
                limit = _border(
                    values_ptr, vocab_size, peak, temperature, k, p, total, limit, least,
                    held_values_ptr, held_ids_ptr, False, TILE,
                )  # fmt: skip
                _count, sum_ = measure(
                    limit,
                    limit,
                    limit,
                    values_ptr,
                    vocab_size,
                    peak,
                    temperature,
                    TILE,
                    True,
                )
                total = sum_.to(tl.float64) * MASS_UNIT
        if HAS_TOP_P:  # noqa: SIM102 (known when compiled)
            if p < 1.0:
                if k == 0:
                    total = tl.load(total_ptr + row)
                limit = _border(
                    values_ptr, vocab_size, peak, temperature, k, p, total, limit,
                    tl.where(k > 0, 0.0, least), held_values_ptr, held_ids_ptr, True, TILE,
                )  # fmt: skip
        if DRAW:
            position, key, cycle, k0, k1 = draw_key(
                row,
                seeds_ptr,
                positions_ptr,
                cycle_ptr,
                seeds_stride,
                positions_stride,
                cycle_stride,
                stream,
                HAS_CYCLE,
            )
            most, token = tl.full((), _NO_LOGIT, tl.float32), tl.full((), 0, tl.int32)
            for tile in range(0, num_tiles):
                top = tl.load(value_max_ptr + row * num_tiles + tile)
                if scaled(top, peak, temperature) + MOST_NOISE >= most:
                    v, ids, rank, weight = load_tile(
                        values_ptr, tile * TILE, vocab_size, peak, temperature, TILE
                    )
                    kept = (rank <= limit) & (weight >= low)
                    noisy = v + gumbel_of(ids, position, key, cycle, k0, k1)
                    noisy = tl.where(kept, noisy, _NO_LOGIT)
                    best = tl.max(noisy, 0)
                    drawn = tl.min(tl.where(kept & (noisy == best), ids, NOBODY), 0)
                    token = tl.where(best > most, drawn, token)
                    most = tl.maximum(most, best)
            tl.store(token_ptr + row, token.to(tl.int64))
        else:
            kept_mass = tl.full((), 0, tl.int64)
            for begin in range(0, vocab_size, TILE):
                v, ids, rank, weight = load_tile(
                    values_ptr, begin, vocab_size, peak, temperature, TILE
                )
                kept = (rank <= limit) & (weight >= low)
                kept_mass += tl.sum(tl.where(kept, mass_of(weight), 0), 0)
            tl.store(limit_ptr + row, limit)
            tl.store(kept_mass_ptr + row, kept_mass.to(tl.float64) * MASS_UNIT)
