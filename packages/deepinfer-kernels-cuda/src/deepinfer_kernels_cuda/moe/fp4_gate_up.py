"""First product over FP4 weights, gate and up together, and the activation behind it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin
from deepinfer_kernels_cuda.moe.fp4_planes import BLOCK, PLANE
from deepinfer_kernels_cuda.moe.fp4_tiles import (
    OUT_ROWS,
    STAGES,
    WARPS,
    add_block,
    block_columns,
    tile_options,
)
from deepinfer_kernels_cuda.moe.permute import Permutation
from deepinfer_kernels_cuda.moe.prepare import BLOCK as BLOCK_CHANNELS
from deepinfer_kernels_cuda.moe.prepare import PreparedExperts
from deepinfer_kernels_cuda.moe.tiles import activate, tile_of

__all__ = ["run_gate_up"]


@triton.jit
def _gate_up_tile(
    pointers,
    sizes,
    tile,
    limit,
    TOP_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    SETTLE: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    HALF: tl.constexpr = BM // 2
    x_ptr, w1_ptr, s1_ptr, w3_ptr, s3_ptr, order_ptr, weights_ptr, out_ptr = pointers
    width, inner, panel_rows, num_blocks = sizes
    slot, first, count, out_tile = tile
    n = tl.arange(0, BN)
    pair = tl.load(order_ptr + first + tl.minimum(n, count - 1))
    row = (pair // TOP_K).to(tl.int64)
    # One tile of both weights, gate rows above up rows: one chain of products, so that the
    # matrix unit never waits for a second sum.
    r = tl.arange(0, BM)
    is_gate = r < HALF
    m = (out_tile * HALF + r % HALF).to(tl.int64)
    c = tl.arange(0, PLANE)
    panel = slot * num_blocks * panel_rows
    offset = (panel + m[:, None]) * PLANE + c[None, :]
    words_ptr = tl.where(is_gate[:, None], w1_ptr + offset, w3_ptr + offset)
    scales_ptr = tl.where(is_gate, s1_ptr + panel + m, s3_ptr + panel + m)
    x = x_ptr + row[:, None] * width + block_columns(WHOLE)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(num_blocks):
        scales = tl.load(scales_ptr)
        words = tl.load(words_ptr)
        column = block * BLOCK
        acc = add_block(acc, words, scales, x, column, width, EVEN, WIDE, SETTLE, WHOLE, BM)
        words_ptr += panel_rows * PLANE
        scales_ptr += panel_rows
        x += BLOCK
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BN)), (1, 2, 0)))
    m = out_tile * HALF + tl.arange(0, HALF)
    weight = tl.load(weights_ptr + pair)
    inner_rows = activate(gate, up, weight, limit, True, HALF, BN)
    place = (first + n).to(tl.int64)[:, None] * inner + m[None, :]
    inside = (n < count)[:, None] & (m < inner)[None, :]
    tl.store(out_ptr + place, inner_rows, mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up(
    x_ptr,
    w1_ptr,
    s1_ptr,
    w3_ptr,
    s3_ptr,
    order_ptr,
    tile_ptr,
    weights_ptr,
    out_ptr,
    width,
    inner,
    panel_rows,
    num_blocks,
    num_tiles,
    limit,
    TOP_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    SETTLE: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
):
    begin()
    row_tile, out_tile = tile_of(tl.program_id(0), num_tiles, tl.cdiv(inner, BM // 2), GROUP)
    slot = tl.load(tile_ptr + 3 * row_tile).to(tl.int64)
    if slot < 0:
        return
    first = tl.load(tile_ptr + 3 * row_tile + 1)
    count = tl.load(tile_ptr + 3 * row_tile + 2)
    pointers = (x_ptr, w1_ptr, s1_ptr, w3_ptr, s3_ptr, order_ptr, weights_ptr, out_ptr)
    sizes = (width, inner, panel_rows, num_blocks)
    tile = (slot, first, count, out_tile)
    if SPLIT:
        if count <= BN // 4:
            _gate_up_tile(
                pointers, sizes, tile, limit, TOP_K, EVEN, WIDE, SETTLE, WHOLE, BM, BN // 4
            )
            return
        if count <= BN // 2:
            _gate_up_tile(
                pointers, sizes, tile, limit, TOP_K, EVEN, WIDE, SETTLE, WHOLE, BM, BN // 2
            )
            return
    _gate_up_tile(pointers, sizes, tile, limit, TOP_K, EVEN, WIDE, SETTLE, WHOLE, BM, BN)


def run_gate_up(
    x: Tensor,
    weights: Tensor,
    w1: PreparedExperts,
    w3: PreparedExperts,
    permutation: Permutation,
    limit: float,
    tile_rows: int,
) -> Tensor:
    """Return the input of the second product, [pairs, I] bfloat16 in the order of `permutation`.

    x: [B, D] bfloat16, rounded to fp8 already. Places behind the last pair are left as they were.
    """
    inner, width = w1.shape
    num_pairs, num_tiles = permutation.order.shape[0], permutation.tiles.shape[0]
    out = torch.empty((num_pairs, inner), dtype=torch.bfloat16, device=x.device)
    _gate_up[(num_tiles * triton.cdiv(inner, OUT_ROWS // 2),)](
        x,
        w1.payload,
        w1.scale,
        w3.payload,
        w3.scale,
        permutation.order,
        permutation.tiles,
        weights,
        out,
        width,
        inner,
        w1.payload.shape[2],
        w1.payload.shape[1],
        num_tiles,
        limit,
        TOP_K=weights.shape[1],
        EVEN=width % BLOCK_CHANNELS == 0,
        WIDE=w1.wide_scales or w3.wide_scales,
        **tile_options(tile_rows, x.device),
        num_warps=WARPS,
        num_stages=STAGES,
        **OVERLAP,
    )
    return out
