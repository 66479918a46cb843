"""Rows of the embedding table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.kernel_math import as_bf16
from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["embed"]


@triton.jit
def _embed(ids_ptr, table_ptr, out_ptr, size, width, BLOCK: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    known = (token >= 0) & (token < size)
    value = tl.load(table_ptr + token * width + column, mask=inside & known, other=0.0)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        value = as_bf16(value.to(tl.float32))
    tl.store(out_ptr + row * width + column, value, mask=inside)


def embed(token_ids: Tensor, table: Matrix, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return rows of the table.

    Args:
        token_ids: [B] int64. An id outside the table gives a row of zeros.
        table: `plain` [V, D], bfloat16 or float32.
        dtype: of the result, bfloat16 or float32; None is the table's own.
    Returns:
        [B, D] of `dtype`.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.linear.embed.
    """
    check_tensor("token_ids", token_ids, shape=(None,), dtype=torch.int64)
    size, width = table.shape
    check_tensor(
        "table.payload",
        table.payload,
        shape=(size, width),
        dtype=(torch.bfloat16, torch.float32),
        device=token_ids.device,
    )
    rows = token_ids.shape[0]
    dtype = dtype or table.payload.dtype
    check_value("dtype", dtype, dtype in (torch.bfloat16, torch.float32), "bfloat16 or float32")
    out = torch.empty((rows, width), dtype=dtype, device=token_ids.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(width))
        _embed[(rows, triton.cdiv(width, block))](
            token_ids, table.payload, out, size, width, BLOCK=block, num_warps=4, **OVERLAP
        )
    return out
