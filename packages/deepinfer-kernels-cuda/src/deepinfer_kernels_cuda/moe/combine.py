"""Sums the parts of a row's experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor
from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin

__all__ = ["combine"]

COLUMNS = 1024


@triton.jit
def _combine(
    parts_ptr, ids_ptr, out_ptr, width, num_slots, TOP_K: tl.constexpr, COLUMNS: tl.constexpr
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(TOP_K):
        slot = tl.load(ids_ptr + row * TOP_K + k)
        known = (slot >= 0) & (slot < num_slots)
        part = parts_ptr + (row * TOP_K + k) * width + column
        value = tl.load(part, mask=inside & known, other=0.0).to(tl.float32)
        total = value if k == 0 else total + value
    tl.store(out_ptr + row * width + column, total, mask=inside)


def combine(parts: Tensor, ids: Tensor, num_slots: int) -> Tensor:
    """Sum the parts of each row, in the order of its choices.

    Args:
        parts: [B, k, D] bfloat16. A part whose id is no slot is not read.
        ids: [B, k] int32, k at least 1.
        num_slots: ids from 0 to below it are slots.
    Returns:
        [B, D] float32. Deterministic; a row depends on its own parts alone.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.moe.combine.
    """
    check_tensor("parts", parts, shape=(None, None, None), dtype=torch.bfloat16)
    rows, top_k, width = parts.shape
    check_tensor("ids", ids, shape=(rows, top_k), dtype=torch.int32, device=parts.device)
    out = torch.empty((rows, width), dtype=torch.float32, device=parts.device)
    if out.numel():
        grid = (rows, triton.cdiv(width, COLUMNS))
        _combine[grid](
            parts, ids, out, width, num_slots, TOP_K=top_k, COLUMNS=COLUMNS, num_warps=4, **OVERLAP
        )
    return out
