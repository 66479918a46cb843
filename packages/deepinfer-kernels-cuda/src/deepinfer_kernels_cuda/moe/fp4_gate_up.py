"""First product over FP4 weights, gate and up together, and the activation behind it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin
from deepinfer_kernels_cuda.moe.fp4_planes import BLOCK, PLANE
from deepinfer_kernels_cuda.moe.fp4_tiles import (
    add_block,
    gate_up_config,
    settles,
)
from deepinfer_kernels_cuda.moe.permute import Permutation
from deepinfer_kernels_cuda.moe.prepare import BLOCK as BLOCK_CHANNELS
from deepinfer_kernels_cuda.moe.prepare import PreparedExperts
from deepinfer_kernels_cuda.moe.tiles import activate, tile_of

__all__ = ["run_gate_up"]


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
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
):
    begin()
    row_tile, out_tile = tile_of(tl.program_id(0), num_tiles, tl.cdiv(inner, BM), GROUP)
    slot = tl.load(tile_ptr + 3 * row_tile).to(tl.int64)
    if slot < 0:
        return
    first = tl.load(tile_ptr + 3 * row_tile + 1)
    count = tl.load(tile_ptr + 3 * row_tile + 2)
    n = tl.arange(0, BN)
    pair = tl.load(order_ptr + first + tl.minimum(n, count - 1))
    row = (pair // TOP_K).to(tl.int64)
    # One tile of both weights, gate rows above up rows: one chain of products, so that the
    # matrix unit never waits for a second sum.
    r = tl.arange(0, 2 * BM)
    is_gate = r < BM
    m = (out_tile * BM + r % BM).to(tl.int64)
    c = tl.arange(0, PLANE)
    panel = slot * num_blocks * panel_rows
    offset = (panel + m[:, None]) * PLANE + c[None, :]
    words_ptr = tl.where(is_gate[:, None], w1_ptr + offset, w3_ptr + offset)
    scales_ptr = tl.where(is_gate, s1_ptr + panel + m, s3_ptr + panel + m)
    x = x_ptr + row[:, None] * width + c[None, :]
    acc = tl.zeros((2 * BM, BN), tl.float32)
    for block in range(num_blocks):
        scales = tl.load(scales_ptr)
        words = tl.load(words_ptr)
        acc = add_block(acc, words, scales, x, block, width, EVEN, WIDE, SETTLE)
        words_ptr += panel_rows * PLANE
        scales_ptr += panel_rows
        x += BLOCK
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BM, BN)), (1, 2, 0)))
    m = out_tile * BM + tl.arange(0, BM)
    weight = tl.load(weights_ptr + pair)
    inner_rows = activate(gate, up, weight, limit, True, BM, BN)
    place = (first + n).to(tl.int64)[:, None] * inner + m[None, :]
    inside = (n < count)[:, None] & (m < inner)[None, :]
    tl.store(out_ptr + place, inner_rows, mask=inside)


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
    config = gate_up_config(tile_rows)
    _gate_up[(num_tiles * triton.cdiv(inner, config.out_rows),)](
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
        SETTLE=settles(config, x),
        BM=config.out_rows,
        BN=tile_rows,
        GROUP=config.group,
        num_warps=config.warps,
        num_stages=config.stages,
        **OVERLAP,
    )
    return out
