"""Writing block entries: compressed KV and index keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_blocks, check_rows, check_tensor
from deepinfer_kernels_cuda.quant.entries import (
    GROUP,
    KINDS,
    entry_width,
    load_groups,
    store_entries,
)
from deepinfer_kernels_cuda.values import BlockStore, Rows

__all__ = ["write_entries"]


def write_entries(store: BlockStore, entries: Tensor, rows: Rows, kind: str) -> None:
    """Round entries to a packed format; store those of rows that complete a group.

    The row at position p completes group (p + 1) // ratio - 1 when ratio divides p + 1.

    Args:
        store: `data` [blocks + 1, entries a block, entry_width(kind, d)] uint8, contiguous, written
            through `table` [slots + 1, max blocks] int32, whose lines may lie apart.
        entries: [B, d] bfloat16, contiguous.
        rows: padding and rows whose `writes` is False write nothing.
        kind: `compressed` or `index`.
    Raises:
        KernelInputError: a shape, dtype or stride is not as above.
    Source: reference.attention.write_entries; model-v41.md 5 and 10.
    """
    check_tensor("entries", entries, shape=(None, None), dtype=torch.bfloat16)
    (num_rows, channels), device = entries.shape, entries.device
    width = entry_width(kind, channels)
    shape = (None, None, width)
    check_tensor("store.data", store.data, shape=shape, dtype=torch.uint8, device=device)
    check_tensor(
        "store.table", store.table, shape=(None, None), dtype=torch.int32, device=device,
        contiguous=False,
    )  # fmt: skip
    check_rows(rows, num_rows, device, ("positions", "sequence", "slots", "writes"))
    if num_rows == 0:
        return
    check_blocks("store", store)
    groups = triton.next_power_of_2(channels // GROUP[kind])
    tile = max(1, 2048 // (groups * GROUP[kind]))
    _write_entries_kernel[(triton.cdiv(num_rows, tile),)](
        store.data, store.table, entries, rows.sequence, rows.positions, rows.slots, rows.writes,
        num_rows, store.data.shape[1], store.table.stride(0), store.ratio,
        KINDS[kind], channels, groups, GROUP[kind], width, tile, num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_entries_kernel(
    data_ptr, table_ptr, x_ptr, sequence_ptr, position_ptr, slot_ptr, writes_ptr,
    num_rows, per_block, table_stride, ratio,
    KIND: tl.constexpr, CHANNELS: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    position = tl.load(position_ptr + row, mask=there, other=0)
    written = there & (tl.load(sequence_ptr + row, mask=there, other=-1) >= 0)
    written &= tl.load(writes_ptr + row, mask=there, other=0) != 0
    written &= (position + 1) % ratio == 0
    entry = (position + 1) // ratio - 1
    slot = tl.load(slot_ptr + row, mask=written, other=0)
    block = tl.load(table_ptr + slot * table_stride + entry // per_block, mask=written, other=0)
    x = load_groups(x_ptr, row, written, CHANNELS, G, SIZE)
    base = data_ptr + (block.to(tl.int64) * per_block + entry % per_block) * WIDTH
    store_entries(base, x, written, KIND, CHANNELS, G, SIZE)
