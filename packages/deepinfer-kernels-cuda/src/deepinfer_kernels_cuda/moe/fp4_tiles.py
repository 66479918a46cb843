"""What the two grouped products over FP4 weights share: sizes of tiles and how they run.

A tile of weights is widened to bfloat16 in registers, which is exact: two significant bits and a
power of two. Rows rounded to fp8 are exact in bfloat16 as well, so that a plain bfloat16 product
with float32 sums has the very factors of a block-scaled one, and there is nothing to promote.
Weights are the first operand (rows of the tensor core's tile), rows of the step the second one:
a tile may be 8 to 128 of them wide, and no row's sum changes with it. So a slot's last tile, which
is not full, may run as one of a half or a quarter of the width.

One warp group is a program, and two programs share a multiprocessor: while one widens its weights,
or ends its tile, the other one multiplies. Several groups in a program would all widen at the same
time, as they wait for each other at every turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_kernels_cuda.kernel_math import dot
from deepinfer_kernels_cuda.linear.blocks import on_hopper
from deepinfer_kernels_cuda.moe.fp4_planes import (
    BLOCK,
    PLANE,
    scale_plane,
    widen_block,
    widen_words,
)

__all__ = [
    "GROUP",
    "MOST_TILE_ROWS",
    "OUT_ROWS",
    "STAGES",
    "WARPS",
    "add_block",
    "block_columns",
    "choose_tile_rows",
    "tile_options",
]

# Measured on one H200 with 48 slots of 5120 x 2304. Rows of weights in a tile (gate and up: half of
# each) and warps, both products of 8192 rows, one after the other and long enough to be held at the
# power limit: 128 with 4 warps 6.3 ms, 256 with 16 warps 7.0.
OUT_ROWS = 128
WARPS = 4
STAGES = 3
# Row tiles that pass over the same weights together.
GROUP = 16
MOST_TILE_ROWS = 128
# Tiles of fewer pairs are multiplied plane by plane: there the compiler takes an older instruction,
# which would sum a product over a whole block in another order.
LEAST_WHOLE = 16
# Tiles of so many pairs may run as ones of a half or a quarter.
LEAST_SPLIT = 64


@triton.jit
def _settle_sums(acc):
    """Return sums as they are, once they are there.

    On Hopper a product in flight from one turn of a loop to the next reads weights from registers
    that the next turn writes anew: one form gave other sums at times on an H200. And the compiler
    would cut a long product into short ones, to wait for each.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def block_columns(WHOLE: tl.constexpr):
    """Return the channels of the first product over a block."""
    if WHOLE:
        return tl.arange(0, BLOCK)
    else:
        return tl.arange(0, PLANE)


@triton.jit
def _columns_of(x, column, FIRST: tl.constexpr, width, EVEN: tl.constexpr, WHOLE: tl.constexpr):
    """Return channels of x from FIRST on, transposed; zero beyond the width."""
    if EVEN:
        return tl.load(x + FIRST).T
    else:
        inside = column + FIRST + block_columns(WHOLE) < width
        return tl.load(x + FIRST, mask=inside[None, :], other=0.0).T


@triton.jit
def add_block(
    acc,
    words,
    scales,
    x,
    column,
    width,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    SETTLE: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
):
    """Return sums with the products of one block of channels added, in the order of channels.

    words: of the weights, [BM, PLANE]. scales: [BM]. x: pointers to the channels from `column` on,
    as many as `block_columns` are.
    """
    if WHOLE:
        w = widen_block(words, scales, BM, WIDE)
        acc = dot(w, _columns_of(x, column, 0, width, EVEN, WHOLE), acc)
    else:
        p0, p1, p2, p3 = widen_words(words)
        x0 = _columns_of(x, column, 0, width, EVEN, WHOLE)
        acc = dot(scale_plane(p0, scales, 0, WIDE), x0, acc)
        x1 = _columns_of(x, column, PLANE, width, EVEN, WHOLE)
        acc = dot(scale_plane(p1, scales, 1, WIDE), x1, acc)
        x2 = _columns_of(x, column, 2 * PLANE, width, EVEN, WHOLE)
        acc = dot(scale_plane(p2, scales, 2, WIDE), x2, acc)
        x3 = _columns_of(x, column, 3 * PLANE, width, EVEN, WHOLE)
        acc = dot(scale_plane(p3, scales, 3, WIDE), x3, acc)
    if SETTLE:
        acc = _settle_sums(acc)
    return acc


def choose_tile_rows(num_pairs: int, num_slots: int) -> int:
    """Return pairs of a tile: about the mean of a slot when all pairs are served here.

    Measured with 48 slots, both products: 30 rows 248 us (16: 275), 60 rows 277 (8: 325), 128 rows
    353 (16: 408), 256 rows 459 (32: 488), 512 rows 648 (128: 678), 1024 rows 975 (64: 1164).
    """
    mean = num_pairs / num_slots
    for tile_rows, most in ((8, 4), (16, 10), (32, 24), (64, 80)):
        if mean <= most:
            return tile_rows
    return MOST_TILE_ROWS


def tile_options(tile_rows: int, device: torch.device) -> dict[str, int | bool]:
    """Return the constants of a product with tiles of so many pairs on a device."""
    return {
        "SETTLE": on_hopper(device),
        "WHOLE": tile_rows >= LEAST_WHOLE,
        "SPLIT": tile_rows >= LEAST_SPLIT,
        "BM": OUT_ROWS,
        "BN": tile_rows,
        "GROUP": GROUP,
    }
