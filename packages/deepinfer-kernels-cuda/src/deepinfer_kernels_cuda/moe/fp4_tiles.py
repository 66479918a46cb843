"""What the two grouped products over FP4 weights share: sizes of tiles and how they run.

A tile of weights is widened to bfloat16 in registers, which is exact: two significant bits and a
power of two. Rows rounded to fp8 are exact in bfloat16 as well, so that a plain bfloat16 product
with float32 sums has the very factors of a block-scaled one, and there is nothing to promote.
Weights are the first operand (rows of the tensor core's tile), rows of the step the second one:
a tile may be 8 to 128 of them wide, and no row's sum changes with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernel_math import dot
from deepinfer_kernels_cuda.moe.fp4_planes import BLOCK, PLANE, scale_plane, widen_words

__all__ = [
    "MOST_TILE_ROWS",
    "ProductConfig",
    "add_block",
    "choose_tile_rows",
    "down_config",
    "gate_up_config",
    "settles",
]

MOST_TILE_ROWS = 128


@triton.jit
def _settle_sums(acc):
    """Return sums as they are, once they are there.

    On Hopper a product in flight from one turn of a loop to the next makes the assembler wait after
    every single matrix instruction of the loop, 16 times a turn for 4 (Triton 3.6 and 3.7).
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def _columns_of(x, block, P: tl.constexpr, width, EVEN: tl.constexpr):
    """Return channels of plane P of a block, [rows, 32]; zero beyond the width."""
    if EVEN:
        return tl.load(x + P * PLANE)
    else:
        column = block * BLOCK + P * PLANE + tl.arange(0, PLANE)[None, :]
        return tl.load(x + P * PLANE, mask=column < width, other=0.0)


@triton.jit
def add_block(
    acc,
    words,
    scales,
    x,
    block,
    width,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    SETTLE: tl.constexpr,
):
    """Return sums with the products of one block of channels, plane by plane, added.

    words: of the weights, [BM, PLANE]. scales: [BM]. x: pointers to the block's first plane.
    """
    p0, p1, p2, p3 = widen_words(words)
    x0 = _columns_of(x, block, 0, width, EVEN).T
    acc = dot(scale_plane(p0, scales, 0, WIDE), x0, acc)
    x1 = _columns_of(x, block, 1, width, EVEN).T
    acc = dot(scale_plane(p1, scales, 1, WIDE), x1, acc)
    x2 = _columns_of(x, block, 2, width, EVEN).T
    acc = dot(scale_plane(p2, scales, 2, WIDE), x2, acc)
    x3 = _columns_of(x, block, 3, width, EVEN).T
    acc = dot(scale_plane(p3, scales, 3, WIDE), x3, acc)
    if SETTLE:
        acc = _settle_sums(acc)
    return acc


@dataclass(frozen=True)
class ProductConfig:
    """How a product runs.

    Attributes:
        out_rows: output channels of a program.
        warps, stages: of a program.
        group: row tiles that pass over the same weights together.
        settle: whether sums are waited for at each turn; see `_settle_sums`.
    """

    out_rows: int
    warps: int
    stages: int
    group: int
    settle: bool


# Measured on one H200 with 48 slots of 5120 x 2304, both products together.
#   60 rows   4 warps, 3 stages 286 us; 4 stages 291, half as many output channels 318
#   1024 rows groups of 8 tiles 1.18 ms, of 16 1.22
#   8192 rows 16 warps 6.4 ms; 4 warps and half as many output channels 6.6, 8 warps 7.2;
#             groups of 16 tiles 3 % faster than of 8
# Settled sums: with 4 warps 4 % faster at 60 rows and 12 % at 8192, with 16 warps 4 % slower.
FEW = ProductConfig(64, warps=4, stages=3, group=8, settle=True)
MANY = ProductConfig(128, warps=16, stages=3, group=16, settle=False)


def gate_up_config(tile_rows: int) -> ProductConfig:
    """Return how the first product runs with tiles of so many pairs."""
    return MANY if tile_rows == MOST_TILE_ROWS else FEW


def down_config(tile_rows: int) -> ProductConfig:
    """Return how the second product runs with tiles of so many pairs.

    Twice as many output channels as the first one, which has gate and up of each.
    """
    config = gate_up_config(tile_rows)
    return replace(config, out_rows=2 * config.out_rows)


def choose_tile_rows(num_pairs: int, num_slots: int) -> int:
    """Return pairs of a tile: about the mean of a slot when all pairs are served here.

    Measured with 48 slots: 8 rows 170 us (16: 190), 60 rows 286 (8: 330), 128 rows 338 (16: 406),
    1024 rows 1213 (128: 1363).
    """
    mean = num_pairs / num_slots
    for tile_rows, most in ((8, 2), (16, 10), (32, 40), (64, 160)):
        if mean <= most:
            return tile_rows
    return MOST_TILE_ROWS


def settles(config: ProductConfig, x: Tensor) -> bool:
    """Return whether sums are settled on the device of x: nowhere but on Hopper."""
    return config.settle and x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
