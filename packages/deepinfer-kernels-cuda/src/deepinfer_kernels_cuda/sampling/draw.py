"""A draw from all tokens of a row, for rows that top-k, top-p and min-p leave whole.

A program draws from some tiles of a row. Whatever their number, the row's draw is the largest noisy
value, and the lowest id of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.sampling.noise import (
    MOST_NOISE,
    gumbel,
    gumbel_of,
    philox_words,
)
from deepinfer_kernels_cuda.sampling.scan import (
    NOBODY,
    Scanned,
    cut_arguments,
    cut_flags,
    is_cut,
    merge_row,
    scaled,
)
from deepinfer_kernels_cuda.values import SampleInputs

__all__ = ["Drawn", "draw", "draw_arguments", "draw_key", "merge_draw"]

_NO_LOGIT = tl.constexpr(float("-inf"))
# With so many rows the device is busy, and a program draws from several tiles, with four warps.
# H200, V = 129280, both passes with four warps instead of eight: 512 sampled rows 222 us instead of
# 233, 128 rows 67 instead of 68, one row 9.2 instead of 8.7.
_MANY_ROWS = 32
_SEVERAL = 4


@dataclass(frozen=True, slots=True)
class Drawn:
    """Draws of parts of rows: values and ids [N, parts]; a row has `parts`, padded for kernels."""

    values: Tensor
    ids: Tensor
    parts: int
    padded: int


def draw(found: Scanned, inputs: SampleInputs) -> Drawn:
    """Draw in each part of rows that are sampled whole; what other rows have is unspecified."""
    (num_rows, vocab_size), tiles = found.values.shape, found.tiles
    several = _SEVERAL if num_rows >= _MANY_ROWS else 1
    parts = -(-tiles.count // several)
    blank = found.raw_max
    drawn = Drawn(
        torch.empty(num_rows, parts, dtype=torch.float32, device=blank.device),
        torch.empty(num_rows, parts, dtype=torch.int32, device=blank.device),
        parts,
        triton.next_power_of_2(parts),
    )
    _draw[(num_rows * parts,)](
        *draw_arguments(inputs, blank),
        *cut_arguments(inputs.top_k, inputs.top_p, inputs.min_p, blank),
        found.raw_max,
        found.value_max,
        found.value_id,
        found.values,
        drawn.values,
        drawn.ids,
        vocab_size,
        tiles.count,
        parts,
        TILE=tiles.size,
        TILES=tiles.padded,
        SEVERAL=several,
        HAS_CYCLE=inputs.cycle is not None,
        **cut_flags(inputs.top_k, inputs.top_p, inputs.min_p),
        num_warps=4 if several > 1 else tiles.num_warps,
        enable_fp_fusion=False,
    )
    return drawn


def draw_arguments(inputs: SampleInputs, blank: Tensor) -> tuple[Tensor | int, ...]:
    """Return the arguments from `temperature_ptr` to `stream` of kernels that draw."""
    cycle = inputs.cycle
    return (
        inputs.temperature,
        inputs.seeds,
        inputs.positions,
        blank if cycle is None else cycle,
        inputs.temperature.stride(0),
        inputs.seeds.stride(0),
        inputs.positions.stride(0),
        0 if cycle is None else cycle.stride(0),
        inputs.stream,
    )


@triton.jit
def draw_key(
    row,
    seeds_ptr,
    positions_ptr,
    cycle_ptr,
    seeds_stride,
    positions_stride,
    cycle_stride,
    stream,
    HAS_CYCLE: tl.constexpr,
):
    """Return position, stream, cycle and the seed's two words of a row, uint32."""
    k0 = tl.load(seeds_ptr + row * seeds_stride).to(tl.uint32)
    k1 = tl.load(seeds_ptr + row * seeds_stride + 1).to(tl.uint32)
    position = tl.load(positions_ptr + row * positions_stride).to(tl.uint32)
    cycle = tl.full((), 0, tl.uint32)
    if HAS_CYCLE:
        cycle = tl.load(cycle_ptr + row * cycle_stride).to(tl.uint32)
    # a stream of 1 comes as a constant
    return position, tl.full((), stream, tl.uint32), cycle, k0, k1


@triton.jit
def _draw(
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
    raw_max_ptr,
    value_max_ptr,
    value_id_ptr,
    values_ptr,
    drawn_ptr,
    drawn_id_ptr,
    vocab_size,
    num_tiles,
    parts,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    SEVERAL: tl.constexpr,
    HAS_CYCLE: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
):
    pid = tl.program_id(0)
    row, part = (pid // parts).to(tl.int64), pid % parts
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    _, _, _, cut = is_cut(
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
    if (temperature > 0) & (cut == 0):
        peak, best, broken = merge_row(
            row, num_tiles, raw_max_ptr, value_max_ptr, value_id_ptr, TILES
        )
        if broken == 0:
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
            # The best token without noise begins; tiles that cannot pass it are left out.
            most = gumbel_of(best, position, key, cycle, k0, k1)
            chosen = best
            for i in range(SEVERAL):
                tile = part * SEVERAL + i
                here = tile < num_tiles
                top = tl.load(value_max_ptr + row * num_tiles + tile, mask=here, other=_NO_LOGIT)
                if scaled(top, peak, temperature) + MOST_NOISE >= most:
                    # A thread has the four tokens that share a counter.
                    quad = tile * (TILE // 4) + tl.arange(0, TILE // 4)
                    token = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
                    x = tl.load(
                        values_ptr + row * vocab_size + token,
                        mask=token < vocab_size,
                        other=_NO_LOGIT,
                    )
                    w0, w1, w2, w3 = philox_words(quad.to(tl.uint32), position, key, cycle, k0, k1)
                    x02, x13 = tl.split(tl.reshape(x, (TILE // 4, 2, 2)))
                    x0, x2 = tl.split(x02)
                    x1, x3 = tl.split(x13)
                    v0 = scaled(x0, peak, temperature) + gumbel(w0)
                    v1 = scaled(x1, peak, temperature) + gumbel(w1)
                    v2 = scaled(x2, peak, temperature) + gumbel(w2)
                    v3 = scaled(x3, peak, temperature) + gumbel(w3)
                    upper = tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3))
                    value = tl.max(upper, 0)
                    # within a quad the first one that has it
                    first = tl.where(v2 == value, 2, 3)
                    first = tl.where(v1 == value, 1, first)
                    first = tl.where(v0 == value, 0, first)
                    found = tl.min(tl.where(upper == value, quad * 4 + first, NOBODY), 0)
                    lower = (value == most) & (found < chosen)
                    chosen = tl.where((value > most) | lower, found, chosen)
                    most = tl.maximum(most, value)
            tl.store(drawn_ptr + pid, most)
            tl.store(drawn_id_ptr + pid, chosen)


@triton.jit
def merge_draw(row, parts, drawn_ptr, drawn_id_ptr, PARTS: tl.constexpr):
    """Return the token that was drawn for a row."""
    part = tl.arange(0, PARTS)
    here, place = part < parts, row * parts + part
    values = tl.load(drawn_ptr + place, mask=here, other=_NO_LOGIT)
    ids = tl.load(drawn_id_ptr + place, mask=here, other=NOBODY)
    return tl.min(tl.where(here & (values == tl.max(values, 0)), ids, NOBODY), 0)
