"""Gather of table rows, from device memory or pinned host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.kernel_math import as_bf16, ue8m0_value
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["engram_read"]


@triton.jit(do_not_specialize=["num_ids"])
def _read_rows(
    payload_ptr,
    scale_ptr,
    id_ptr,
    out_ptr,
    num_ids,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    IDS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    channel = tl.arange(0, GROUPS)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    group = tl.arange(0, GROUPS)[None, :]
    tiles = tl.cdiv(num_ids, IDS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile * IDS + tl.arange(0, IDS).to(tl.int64)
        row = tl.load(id_ptr + index, mask=index < num_ids, other=0)
        inside = (index < num_ids)[:, None, None] & (channel < WIDTH)
        offset = row[:, None, None] * WIDTH + channel
        value = tl.load(payload_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            kept = (index < num_ids)[:, None] & (group < WIDTH // 32)
            scale = tl.load(scale_ptr + row[:, None] * (WIDTH // 32) + group, mask=kept, other=127)
            value = value * ue8m0_value(scale)[:, :, None]
        tl.store(out_ptr + index[:, None, None] * WIDTH + channel, as_bf16(value), mask=inside)


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
        groups = triton.next_power_of_2(-(-width // 32))
        # Measured on an H200 with 200 thousand rows of 256 in device memory: 8 rows and 2 warps
        # reach 80 % of a copy, 4 warps 72 %. From host memory, a few programs of 64 rows and 16
        # warps keep the bus busy: 4 of them read as fast as 16 of 8 rows, and hide 90 % of the
        # time behind a product on another stream.
        ids, warps = (512 // groups, 16) if max_programs > 0 else (64 // groups, 2)
        ids = max(1, ids)
        programs = triton.cdiv(num_ids, ids)
        _read_rows[(min(programs, max_programs) if max_programs > 0 else programs,)](
            payload,
            payload if scale is None else scale,
            row_ids,
            out,
            num_ids,
            WIDTH=width,
            SCALED=scaled,
            IDS=ids,
            GROUPS=groups,
            num_warps=warps,
        )
    return out


def _check_reach(name: str, tensor: Tensor, row_ids: Tensor) -> None:
    reachable = tensor.device == row_ids.device or tensor.is_pinned()
    needs = f"{row_ids.device} or pinned host memory; call `.to(...)` or `.pin_memory()` first"
    check_value(f"{name}.device", str(tensor.device), reachable, needs)
