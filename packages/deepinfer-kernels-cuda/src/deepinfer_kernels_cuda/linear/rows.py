"""Products with bfloat16 and float32 weights, float32 sums.

The weight is the first operand, as in `linear.blocks`. Products of two bfloat16 numbers are exact
in float32; with a float32 operand both are widened and multiplied outside the matrix unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernel_math import dot
from deepinfer_kernels_cuda.linear.chunks import Cut, as_stored, workspace
from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin

__all__ = ["RowTile", "row_product", "row_tile"]

WORD = tl.constexpr(128)


@triton.jit(do_not_specialize=["rows"])
def _row_product(
    w_ptr,
    x_ptr,
    out_ptr,
    rows,
    outputs,
    columns,
    chunk,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    begin(not WHOLE)
    row_tiles = tl.cdiv(rows, BN)
    place = tl.program_id(0)
    row_tile = place % row_tiles
    place = place // row_tiles
    first_chunk = 0
    if not WHOLE:
        first_chunk = place % CHUNKS
        place = place // CHUNKS
    m = place * BM + tl.arange(0, BM)
    n = row_tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    m_inside = m < outputs
    n_inside = n < rows
    w_tile = w_ptr + (m.to(tl.int64) * columns)[:, None] + k[None, :]
    x_tile = x_ptr + (n.to(tl.int64) * columns)[None, :] + k[:, None]

    total = tl.zeros([BM, BN], tl.float32)
    for index in range(first_chunk, CHUNKS if WHOLE else first_chunk + 1):
        acc = tl.zeros([BM, BN], tl.float32)
        start = index * chunk * WORD
        end = tl.minimum(start + chunk * WORD, columns)
        for column in tl.range(start, end, BK, num_stages=STAGES):
            if EVEN:
                w = tl.load(w_tile + column)
                x = tl.load(x_tile + column, mask=n_inside[None, :], other=0.0)
            else:
                k_inside = column + k < columns
                w_inside = m_inside[:, None] & k_inside[None, :]
                w = tl.load(w_tile + column, mask=w_inside, other=0.0)
                x_inside = n_inside[None, :] & k_inside[:, None]
                x = tl.load(x_tile + column, mask=x_inside, other=0.0)
            if WIDE:
                w = w.to(tl.float32)
                x = x.to(tl.float32)
            acc = dot(w, x, acc)
        if CHUNKS > 1 and WHOLE:
            total += acc
        else:
            total = acc
    offset = n.to(tl.int64)[None, :] * outputs + m[:, None]
    inside = n_inside[None, :] & m_inside[:, None]
    if WHOLE:
        tl.store(out_ptr + offset, as_stored(total, out_ptr), mask=inside)
    else:
        chunk_stride = tl.cast(rows, tl.int64) * outputs
        tl.store(out_ptr + first_chunk * chunk_stride + offset, total, mask=inside)


@dataclass(frozen=True)
class RowTile:
    """Shape of a program: outputs and rows of its tile, columns a turn, pipeline stages, warps."""

    outputs: int
    rows: int
    columns: int
    stages: int
    warps: int


def row_tile(rows: int, wide: bool) -> RowTile:
    """Return the shape of a program for a number of rows.

    wide: whether an operand is float32.
    """
    if wide:
        return RowTile(64, 16, 32, 3, 4)
    if rows <= 16:
        return RowTile(64, 16, 128, 4, 4)
    # The head, 129280x5120, at 60 rows on an H200: 320 us, 4.2 TB/s.
    return RowTile(128, 64, 64, 4, 4) if rows <= 64 else RowTile(128, 128, 64, 4, 8)


def row_product(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    cut: Cut | None = None,
    *,
    whole: bool | None = None,
    tile: RowTile | None = None,
) -> Tensor:
    """Return `x @ weight^T` with float32 sums, in `dtype`: [B, out] bfloat16 or float32.

    Args:
        x: [B, in], weight: [out, in], bfloat16 or float32, contiguous.
        cut: of the columns, if not that of this weight's shape.
        whole: whether a program sums all chunks of its tile; tile: its shape. None leaves it to
            the number of rows. The bits are the same.
    """
    rows, columns = x.shape
    outputs = weight.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    cut = cut or Cut.of(outputs, columns)
    wide = torch.float32 in (x.dtype, weight.dtype)
    tile = tile or row_tile(rows, wide)
    row_tiles = triton.cdiv(rows, tile.rows)
    tiles = triton.cdiv(outputs, tile.outputs)
    whole = cut.whole(row_tiles * tiles) if whole is None else whole
    target = out if whole else workspace(cut.chunks, out)
    programs = 1 if whole else cut.chunks
    _row_product[(row_tiles * tiles * programs,)](
        weight,
        x,
        target,
        rows,
        outputs,
        columns,
        cut.words,
        CHUNKS=cut.chunks,
        WHOLE=whole,
        EVEN=outputs % tile.outputs == 0 and columns % tile.columns == 0,
        WIDE=wide,
        BM=tile.outputs,
        BN=tile.rows,
        BK=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **OVERLAP,
    )
    if not whole:
        cut.add_up(target, out)
    return out
