"""Products of many rows with bfloat16 weights: persistent programs, tiles read by descriptors.

Sums have the order of `linear.blocks` and `linear.rows`, so rows have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer_kernels_cuda.kernel_math import INTERPRET, dot
from deepinfer_kernels_cuda.linear.blocks import on_hopper
from deepinfer_kernels_cuda.linear.chunks import Cut, as_stored
from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin
from deepinfer_kernels_cuda.linear.rows import row_product

__all__ = ["MANY_ROWS", "many_rows_product", "plain_product"]

WORD = tl.constexpr(128)
# Row tiles that go through the outputs together, so that weights come from the L2 cache.
GROUP = 8
COLUMNS = 64
# Rows from which this is faster than `row_product`.
MANY_ROWS = 768


@triton.jit
def _place(tile, row_tiles, out_tiles, GROUP: tl.constexpr):
    first = tile // (GROUP * out_tiles) * GROUP
    count = tl.minimum(row_tiles - first, GROUP)
    inner = tile % (GROUP * out_tiles)
    return first + inner % count, inner // count


@triton.jit(do_not_specialize=["rows"])
def _many_rows(
    x_desc,
    w_desc,
    out_desc,
    out_ptr,
    rows,
    outputs,
    columns,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    begin()
    row_tiles = tl.cdiv(rows, BM)
    out_tiles = tl.cdiv(outputs, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * out_tiles, PROGRAMS, flatten=True):
        row_tile, out_tile = _place(tile, row_tiles, out_tiles, GROUP)
        acc = tl.zeros([BM, BN], tl.float32)
        for column in range(0, columns, BK):
            x = x_desc.load([row_tile * BM, column])
            w = w_desc.load([out_tile * BN, column])
            acc = dot(x, w.T, acc)
        out_desc.store([row_tile * BM, out_tile * BN], as_stored(acc, out_ptr))


@triton.jit(do_not_specialize=["rows"])
def _many_rows_in_chunks(
    x_desc,
    w_desc,
    out_desc,
    out_ptr,
    rows,
    outputs,
    columns,
    chunk,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):
    begin()
    row_tiles = tl.cdiv(rows, BM)
    out_tiles = tl.cdiv(outputs, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * out_tiles, PROGRAMS):
        row_tile, out_tile = _place(tile, row_tiles, out_tiles, GROUP)
        total = tl.zeros([BM, BN], tl.float32)
        if ONE_LOOP:
            # Loads run ahead past the end of a chunk: on an H200 304 us for 8192 rows of
            # 2304x5120, with a loop a chunk 351. Compilers for Blackwell fail with it.
            acc = tl.zeros([BM, BN], tl.float32)
            left = chunk * (WORD // BK)
            for column in range(0, columns, BK):
                x = x_desc.load([row_tile * BM, column])
                w = w_desc.load([out_tile * BN, column])
                acc = dot(x, w.T, acc)
                left -= 1
                if left == 0:
                    total += acc
                    acc = tl.zeros([BM, BN], tl.float32)
                    left = chunk * (WORD // BK)
            if left < chunk * (WORD // BK):
                total += acc
        else:
            for start in range(0, columns, chunk * WORD):
                acc = tl.zeros([BM, BN], tl.float32)
                for column in range(start, tl.minimum(start + chunk * WORD, columns), BK):
                    x = x_desc.load([row_tile * BM, column])
                    w = w_desc.load([out_tile * BN, column])
                    acc = dot(x, w.T, acc)
                total += acc
        out_desc.store([row_tile * BM, out_tile * BN], as_stored(total, out_ptr))


@dataclass(frozen=True)
class ManyRowsTile:
    """Shape of a program: rows and outputs of its tile, pipeline stages, warps."""

    height: int
    width: int
    stages: int
    warps: int


def _many_rows_tile(
    rows: int, outputs: int, chunks: int, dtype: torch.dtype, processors: int
) -> ManyRowsTile:
    """Return the shape of a program for a product's sizes; no bits change with it.

    Measured on an H200. 8192 rows: 128x256 793 TFLOP/s of 817 (cuBLAS) at 32768x1280; the second
    sum of chunks leaves registers for half of that, a float32 result shared memory. 1024 rows of
    512x5120, 32 tiles of 128x128: 30 us, with 64x64 19.
    """
    if chunks == 1 and dtype == torch.bfloat16:
        return ManyRowsTile(128, 256, 3, 8)
    if 4 * triton.cdiv(rows, 128) * triton.cdiv(outputs, 128) <= processors:
        return ManyRowsTile(64, 64, 6, 4)
    return ManyRowsTile(128, 128, 4, 8)


def many_rows_product(
    x: Tensor, weight: Tensor, dtype: torch.dtype, cut: Cut | None = None
) -> Tensor:
    """Return `x @ weight^T` with float32 sums, in `dtype`: [B, out] bfloat16 or float32.

    Args:
        x: [B, in], each row contiguous; weight: [out, in], contiguous; both bfloat16. Where
            descriptors cannot reach them, `linear.rows.row_product` does the same.
        cut: of the columns, if not that of this weight's shape.
    """
    rows, columns = x.shape
    outputs = weight.shape[0]
    strides = (x.stride(0), columns, outputs)
    if any(stride % 8 for stride in strides) or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return row_product(x.contiguous(), weight, dtype, cut)
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    cut = cut or Cut.of(outputs, columns)
    processors = 4 if INTERPRET.value else _processors(x.device)
    tile = _many_rows_tile(rows, outputs, cut.chunks, dtype, processors)
    tiles = triton.cdiv(rows, tile.height) * triton.cdiv(outputs, tile.width)
    kernel, more, form = _many_rows, [], {}
    if cut.chunks > 1:
        kernel, more = _many_rows_in_chunks, [cut.words]
        form = {"ONE_LOOP": on_hopper(x.device)}
    height, width = tile.height, tile.width
    kernel[(min(processors, tiles),)](
        TensorDescriptor(x, [rows, columns], [x.stride(0), 1], [height, COLUMNS]),
        TensorDescriptor(weight, [outputs, columns], [columns, 1], [width, COLUMNS]),
        TensorDescriptor(out, [rows, outputs], [outputs, 1], [height, width]),
        out,
        rows,
        outputs,
        columns,
        *more,
        BM=height,
        BN=width,
        BK=COLUMNS,
        GROUP=GROUP,
        PROGRAMS=processors,
        **form,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OVERLAP,
    )
    return out


def plain_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x @ weight^T` with float32 sums, in `dtype`, of any number of rows.

    x: [B, in], weight: [out, in], bfloat16 or float32, contiguous.
    """
    narrow = x.dtype == weight.dtype == torch.bfloat16
    many = narrow and x.shape[0] >= MANY_ROWS and weight.shape[0] >= 64
    return (many_rows_product if many else row_product)(x, weight, dtype)


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
