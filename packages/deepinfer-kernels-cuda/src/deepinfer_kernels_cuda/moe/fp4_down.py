"""Second product over FP4 weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernel_math import as_bf16
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
from deepinfer_kernels_cuda.moe.tiles import tile_of

__all__ = ["run_down"]


@triton.jit
def _down_tile(
    pointers,
    sizes,
    tile,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    SETTLE: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    x_ptr, w2_ptr, s2_ptr, order_ptr, out_ptr = pointers
    inner, width, panel_rows, num_blocks = sizes
    slot, first, count, out_tile = tile
    n = tl.arange(0, BN)
    m = out_tile * BM + tl.arange(0, BM)
    c = tl.arange(0, PLANE)
    panel = slot * num_blocks * panel_rows
    w2 = w2_ptr + panel * PLANE + (m[:, None] * PLANE + c[None, :])
    s2 = s2_ptr + panel + m
    row = (first + tl.minimum(n, count - 1)).to(tl.int64)
    x = x_ptr + row[:, None] * inner + block_columns(WHOLE)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(num_blocks):
        words, scales = tl.load(w2), tl.load(s2)
        column = block * BLOCK
        acc = add_block(acc, words, scales, x, column, inner, EVEN, WIDE, SETTLE, WHOLE, BM)
        w2 += panel_rows * PLANE
        s2 += panel_rows
        x += BLOCK
    pair = tl.load(order_ptr + first + n, mask=n < count, other=0).to(tl.int64)
    place = pair[:, None] * width + m[None, :]
    inside = (n < count)[:, None] & (m < width)[None, :]
    tl.store(out_ptr + place, as_bf16(tl.trans(acc)), mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def _down(
    x_ptr,
    w2_ptr,
    s2_ptr,
    order_ptr,
    tile_ptr,
    out_ptr,
    inner,
    width,
    panel_rows,
    num_blocks,
    num_tiles,
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
    row_tile, out_tile = tile_of(tl.program_id(0), num_tiles, tl.cdiv(width, BM), GROUP)
    slot = tl.load(tile_ptr + 3 * row_tile).to(tl.int64)
    if slot < 0:
        return
    first = tl.load(tile_ptr + 3 * row_tile + 1)
    count = tl.load(tile_ptr + 3 * row_tile + 2)
    pointers = (x_ptr, w2_ptr, s2_ptr, order_ptr, out_ptr)
    sizes = (inner, width, panel_rows, num_blocks)
    tile = (slot, first, count, out_tile)
    if SPLIT:
        if count <= BN // 4:
            _down_tile(pointers, sizes, tile, EVEN, WIDE, SETTLE, WHOLE, BM, BN // 4)
            return
        if count <= BN // 2:
            _down_tile(pointers, sizes, tile, EVEN, WIDE, SETTLE, WHOLE, BM, BN // 2)
            return
    _down_tile(pointers, sizes, tile, EVEN, WIDE, SETTLE, WHOLE, BM, BN)


def run_down(
    x: Tensor,
    w2: PreparedExperts,
    permutation: Permutation,
    tile_rows: int,
    top_k: int,
) -> Tensor:
    """Return the parts of all pairs, [B, k, D] bfloat16, of the result of `run_gate_up`.

    Parts of pairs without a slot are left as they were in memory.
    """
    width, inner = w2.shape
    num_pairs, num_tiles = permutation.order.shape[0], permutation.tiles.shape[0]
    out = torch.empty((num_pairs // top_k, top_k, width), dtype=torch.bfloat16, device=x.device)
    _down[(num_tiles * triton.cdiv(width, OUT_ROWS),)](
        x,
        w2.payload,
        w2.scale,
        permutation.order,
        permutation.tiles,
        out,
        inner,
        width,
        w2.payload.shape[2],
        w2.payload.shape[1],
        num_tiles,
        EVEN=inner % BLOCK_CHANNELS == 0,
        WIDE=w2.wide_scales,
        **tile_options(tile_rows, x.device),
        num_warps=WARPS,
        num_stages=STAGES,
        **OVERLAP,
    )
    return out
