"""Gather of table rows, from device memory or pinned host memory."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.kernel_math import as_bf16, ue8m0_value
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["engram_read"]


VECTOR = 8  # channels of a thread: 8 bytes of fp8 in, 16 bytes of bfloat16 out


@triton.jit(do_not_specialize=["num_ids"])
def _read_rows(
    payload_ptr,
    scale_ptr,
    id_ptr,
    out_ptr,
    num_ids,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    VECTOR: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Write VECTORS vectors of the output, which ends where a row does, at a time.

    Every thread finds the row and the scale of its own vectors, so nothing is exchanged.
    """
    A_ROW: tl.constexpr = WIDTH // VECTOR
    place = tl.arange(0, VECTOR)[None, :]
    total = num_ids.to(tl.int64) * A_ROW
    for tile in tl.range(tl.program_id(0), tl.cdiv(total, VECTORS), tl.num_programs(0)):
        vector = tile * VECTORS + tl.arange(0, VECTORS).to(tl.int64)
        inside = vector < total
        row = tl.load(id_ptr + vector // A_ROW, mask=inside, other=0)
        offset = row * WIDTH + vector % A_ROW * VECTOR
        value = tl.load(payload_ptr + (offset[:, None] + place), mask=inside[:, None], other=0.0)
        value = value.to(tl.float32)
        if SCALED:
            scale = tl.load(scale_ptr + offset // 32, mask=inside, other=127)
            value *= ue8m0_value(scale)[:, None]
        to = out_ptr + (vector[:, None] * VECTOR + place)
        tl.store(to, as_bf16(value), mask=inside[:, None])


def engram_read(table: Matrix, row_ids: Tensor, *, max_programs: int = 0) -> Tensor:
    """Gather and widen table rows, laid side by side for every row of the step.

    Args:
        table: `fp8_row` (payload [rows, width] float8_e4m3fn, scale [rows, width / 32] uint8) or
            `plain` (bfloat16 or float32), contiguous. On the device, or in pinned host memory,
            which the device then reads over the bus without a copy on the host.
        row_ids: [B, c] int64 on the device, each in [0, rows).
        max_programs: bound of the programs at work, so that a read from host memory leaves the
            device to others: 2 for a decode step, 4 to 8 for a chunk; 0 is no bound.
    Returns:
        [B, c * width] bfloat16. Deterministic; exact before its one rounding. The width is a
        compile-time size.
    Raises:
        KernelInputError: a shape, dtype, stride, format or device is not as above.
    Source: reference.engram.engram_read.
    """
    check_tensor("row_ids", row_ids, shape=(None, None), dtype=torch.int64)
    scaled = table.format == "fp8_row"
    allowed = scaled or table.format == "plain"
    check_value("table.format", table.format, allowed, "'fp8_row' or 'plain'; convert it first")
    payload, scale = table.payload, table.scale
    dtypes = (torch.float8_e4m3fn,) if scaled else (torch.bfloat16, torch.float32)
    check_tensor("table.payload", payload, shape=(None, None), dtype=dtypes, anywhere=True)
    width = payload.shape[1]
    check_value("table.payload.shape[1]", width, 0 < width <= 8192, "1 to 8192 channels")
    _check_reach("table.payload", payload, row_ids)
    if scaled:
        check_value("table.payload.shape[1]", width, width % 32 == 0, "a multiple of 32")
        check_value("table.scale", None, scale is not None, "the scales of fp8 rows")
        assert scale is not None
        shape = (payload.shape[0], width // 32)
        check_tensor("table.scale", scale, shape=shape, dtype=torch.uint8, anywhere=True)
        _check_reach("table.scale", scale, row_ids)
    batch, columns = row_ids.shape
    out = torch.empty((batch, columns * width), dtype=torch.bfloat16, device=row_ids.device)
    num_ids = batch * columns
    if num_ids:
        vector = math.gcd(width, VECTOR)
        # Measured on an H200. 8192 x 24 of 40 million rows of 256 in device memory: 80.5 % of a
        # copy; with 512 vectors 79 %. 1024 x 24 from host memory by 2, 4, 8 programs of 4096
        # vectors and 16 warps: 393, 208, 152 us, 97 % or more of it hidden behind a product on
        # another stream; of 2048 vectors: 481, 254, 159 us. The bus takes 150 us.
        vectors, warps = (4096, 16) if max_programs > 0 else (256, 4)
        programs = triton.cdiv(num_ids * (width // vector), vectors)
        _read_rows[(min(programs, max_programs) if max_programs > 0 else programs,)](
            payload,
            payload if scale is None else scale,
            row_ids,
            out,
            num_ids,
            WIDTH=width,
            SCALED=scaled,
            VECTOR=vector,
            VECTORS=vectors,
            num_warps=warps,
        )
    return out


def _check_reach(name: str, tensor: Tensor, row_ids: Tensor) -> None:
    reachable = tensor.device == row_ids.device or tensor.is_pinned()
    needs = f"{row_ids.device} or pinned host memory; call `.to(...)` or `.pin_memory()` first"
    check_value(f"{name}.device", str(tensor.device), reachable, needs)
