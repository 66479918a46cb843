"""Block tables, brought up to date on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor

__all__ = ["apply_deltas"]

_ITEMS = 256  # of one program


def apply_deltas(table: Tensor, slots: Tensor, places: Tensor, block_ids: Tensor) -> None:
    """Write `table[slots[i], places[i]] = block_ids[i]` for every i.

    Args:
        table: [slots + 1, max blocks] int32, contiguous, written.
        slots, places, block_ids: [n] int64, contiguous. No place is named twice; one outside the
            table is skipped.
    Raises:
        KernelInputError: a shape, dtype or device is not as above.
    Source: reference.step.apply_deltas.
    """
    check_tensor("table", table, shape=(None, None), dtype=torch.int32)
    count = slots.shape[0] if slots.dim() else 0
    for name, column in (("slots", slots), ("places", places), ("block_ids", block_ids)):
        check_tensor(name, column, shape=(count,), dtype=torch.int64, device=table.device)
    if count:
        _apply_deltas[(triton.cdiv(count, _ITEMS),)](
            table, slots, places, block_ids, count, *table.shape, _ITEMS, num_warps=4
        )


@triton.jit
def _apply_deltas(
    table_ptr, slots_ptr, places_ptr, ids_ptr, count, num_slots, length, ITEMS: tl.constexpr
):
    i = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    slot = tl.load(slots_ptr + i, mask=i < count, other=-1)
    place = tl.load(places_ptr + i, mask=i < count, other=-1)
    block_id = tl.load(ids_ptr + i, mask=i < count, other=0)
    inside = (slot >= 0) & (slot < num_slots) & (place >= 0) & (place < length)
    tl.store(table_ptr + slot * length + place, block_id.to(tl.int32), mask=inside)
