"""The products of experts whose weights are bfloat16 in memory: small models, not V4.1 itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernel_math import as_bf16, dot
from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin
from deepinfer_kernels_cuda.moe.permute import Permutation
from deepinfer_kernels_cuda.moe.prepare import PreparedExperts
from deepinfer_kernels_cuda.moe.tiles import activate, tile_of

__all__ = ["plain_products"]

BM = 64
BK = 64


@triton.jit(do_not_specialize=["num_tiles"])
def _plain_gate_up(
    x_ptr,
    w1_ptr,
    w3_ptr,
    order_ptr,
    tile_ptr,
    weights_ptr,
    out_ptr,
    width,
    inner,
    num_tiles,
    limit,
    TOP_K: tl.constexpr,
    ROUND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    begin()
    row_tile, out_tile = tile_of(tl.program_id(0), num_tiles, tl.cdiv(inner, BM), 8)
    slot = tl.load(tile_ptr + 3 * row_tile).to(tl.int64)
    if slot < 0:
        return
    first = tl.load(tile_ptr + 3 * row_tile + 1)
    count = tl.load(tile_ptr + 3 * row_tile + 2)
    n = tl.arange(0, BN)
    pair = tl.load(order_ptr + first + tl.minimum(n, count - 1))
    m = out_tile * BM + tl.arange(0, BM)
    c = tl.arange(0, BK)
    weight_row = slot * inner * width + tl.minimum(m, inner - 1).to(tl.int64)[:, None] * width
    x_row = (pair // TOP_K).to(tl.int64)[:, None] * width
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, width, BK):
        column = start + c[None, :]
        x = tl.load(x_ptr + x_row + column, mask=column < width, other=0.0).T
        w1 = tl.load(w1_ptr + weight_row + column, mask=column < width, other=0.0)
        w3 = tl.load(w3_ptr + weight_row + column, mask=column < width, other=0.0)
        gate = dot(w1, x, gate)
        up = dot(w3, x, up)
    # Weights beyond the last row are those of the last row: no part of anything's scale.
    known = (m < inner)[:, None]
    gate = tl.where(known, gate, 0.0)
    rows = activate(gate, up, tl.load(weights_ptr + pair), limit, ROUND, BM, BN)
    place = (first + n).to(tl.int64)[:, None] * inner + m[None, :]
    tl.store(out_ptr + place, rows, mask=(n < count)[:, None] & (m < inner)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _plain_down(
    x_ptr,
    w2_ptr,
    order_ptr,
    tile_ptr,
    out_ptr,
    inner,
    width,
    num_tiles,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    begin()
    row_tile, out_tile = tile_of(tl.program_id(0), num_tiles, tl.cdiv(width, BM), 8)
    slot = tl.load(tile_ptr + 3 * row_tile).to(tl.int64)
    if slot < 0:
        return
    first = tl.load(tile_ptr + 3 * row_tile + 1)
    count = tl.load(tile_ptr + 3 * row_tile + 2)
    n = tl.arange(0, BN)
    m = out_tile * BM + tl.arange(0, BM)
    c = tl.arange(0, BK)
    weight_row = slot * width * inner + tl.minimum(m, width - 1).to(tl.int64)[:, None] * inner
    x_row = (first + tl.minimum(n, count - 1)).to(tl.int64)[:, None] * inner
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, inner, BK):
        column = start + c[None, :]
        x = tl.load(x_ptr + x_row + column, mask=column < inner, other=0.0).T
        w2 = tl.load(w2_ptr + weight_row + column, mask=column < inner, other=0.0)
        acc = dot(w2, x, acc)
    pair = tl.load(order_ptr + first + n, mask=n < count, other=0).to(tl.int64)
    place = pair[:, None] * width + m[None, :]
    inside = (n < count)[:, None] & (m < width)[None, :]
    tl.store(out_ptr + place, as_bf16(tl.trans(acc)), mask=inside)


def plain_products(
    x: Tensor,
    weights: Tensor,
    w1: PreparedExperts,
    w3: PreparedExperts,
    w2: PreparedExperts,
    permutation: Permutation,
    limit: float,
    tile_rows: int,
) -> Tensor:
    """Return the parts of all pairs, [B, k, D] bfloat16; see `moe.experts.experts`.

    x is rounded to fp8 already where the weights want it. Parts of pairs without a slot are left
    as they were in memory.
    """
    inner, width = w1.shape
    rows, top_k = weights.shape
    order, tiles = permutation.order, permutation.tiles
    between = torch.empty((rows * top_k, inner), dtype=torch.bfloat16, device=x.device)
    parts = torch.empty((rows, top_k, width), dtype=torch.bfloat16, device=x.device)
    sizes = {"BM": BM, "BN": tile_rows, "BK": BK}
    _plain_gate_up[(tiles.shape[0] * triton.cdiv(inner, BM),)](
        x,
        w1.payload,
        w3.payload,
        order,
        tiles,
        weights,
        between,
        width,
        inner,
        tiles.shape[0],
        limit,
        TOP_K=top_k,
        ROUND=w2.rounds_input,
        **sizes,
        num_warps=4,
        num_stages=3,
        **OVERLAP,
    )
    _plain_down[(tiles.shape[0] * triton.cdiv(width, BM),)](
        between,
        w2.payload,
        order,
        tiles,
        parts,
        inner,
        width,
        tiles.shape[0],
        **sizes,
        num_warps=4,
        num_stages=3,
        **OVERLAP,
    )
    return parts
