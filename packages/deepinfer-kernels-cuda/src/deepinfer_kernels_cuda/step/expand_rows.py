"""Rows of ragged sequences, laid end to end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_number, check_tensor

__all__ = ["expand_rows"]

_ROWS = 512  # of one store
_SEQUENCES = 1024  # of one load


def expand_rows(num_rows: Tensor, start: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Lay sequences end to end and say for each row whose it is and where it sits.

    Args:
        num_rows: [R] int64, contiguous, rows of each sequence; 0 and below is none.
        start: [R] int64, contiguous, position of each sequence's first row.
        total: rows of the step, padding included.
    Returns:
        sequence [total] int64, -1 for padding; positions [total] int64, 0 for padding. Rows beyond
        `total` are left out: whoever knows the numbers on the host checks their sum.
    Raises:
        KernelInputError: a shape, dtype or device is not as above.
    Source: reference.step.expand_rows.
    """
    check_tensor("num_rows", num_rows, shape=(None,), dtype=torch.int64)
    device, count = num_rows.device, num_rows.shape[0]
    check_tensor("start", start, shape=(count,), dtype=torch.int64, device=device)
    check_number("total", total, 0)
    sequence = torch.empty(total, dtype=torch.int64, device=device)
    positions = torch.empty_like(sequence)
    if total:
        _expand_rows[(count + 1,)](
            num_rows, start, sequence, positions, count, total, _SEQUENCES, _ROWS, num_warps=4
        )
    return sequence, positions


@triton.jit
def _expand_rows(
    num_rows_ptr,
    start_ptr,
    sequence_ptr,
    positions_ptr,
    count,
    total,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
):
    # Program s writes the rows of sequence s, the last one what is behind them all.
    s = tl.program_id(0)
    first = tl.full((), 0, tl.int64)
    for begin in range(0, s, SEQUENCES):
        i = begin + tl.arange(0, SEQUENCES)
        first += tl.sum(tl.maximum(tl.load(num_rows_ptr + i, mask=i < s, other=0), 0))
    padding = s == count
    rows = tl.maximum(tl.load(num_rows_ptr + s, mask=s < count, other=0), 0)
    start = tl.load(start_ptr + s, mask=s < count, other=0)
    last = tl.where(padding, total, tl.minimum(first + rows, total))
    owner = tl.where(padding, -1, s).to(tl.int64)
    while first < last:
        row = first + tl.arange(0, ROWS)
        offset = tl.arange(0, ROWS) + tl.zeros((ROWS,), tl.int64)
        position = tl.where(padding, tl.zeros((ROWS,), tl.int64), start + offset)
        tl.store(sequence_ptr + row, owner + tl.zeros((ROWS,), tl.int64), mask=row < last)
        tl.store(positions_ptr + row, position, mask=row < last)
        first += ROWS
        start += ROWS
