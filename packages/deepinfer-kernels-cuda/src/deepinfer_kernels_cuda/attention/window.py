"""Writing keys into window rings."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_rows, check_tensor, check_value
from deepinfer_kernels_cuda.quant.entries import (
    GROUP,
    WINDOW,
    entry_width,
    load_groups,
    store_entries,
)
from deepinfer_kernels_cuda.values import Rows, WindowStore

__all__ = ["is_newest", "write_window"]


@triton.jit
def is_newest(row_start_ptr, first_ptr, sequence, position, real, depth):
    """Return which rows are among the last `depth` of their sequence; False where not `real`.

    No two of them share a place of a ring of `depth`.
    """
    first = tl.load(first_ptr + sequence, mask=real, other=0)
    count = tl.load(row_start_ptr + sequence + 1, mask=real, other=0) - tl.load(
        row_start_ptr + sequence, mask=real, other=0
    )
    return real & (position >= first + count - depth)


def write_window(store: WindowStore, keys: Tensor, rows: Rows) -> None:
    """Write keys into the rings of their sequences, packed.

    Only the last `ring_len` rows of each sequence are written, so no two rows share a place.

    Args:
        store: `data` [slots + 1, ring_len, entry_width("window", d)] uint8, contiguous; written at
            [slot, position % ring_len].
        keys: [B, d] bfloat16, contiguous.
        rows: of the keys; `row_start` and `first_position` tell each sequence's last position.
            Padding writes nothing; `writes` is not asked, since replay refills windows.
    Raises:
        KernelInputError: a shape, dtype or stride is not as above.
    Source: reference.attention.write_window; model-v41.md 10.
    """
    check_tensor("keys", keys, shape=(None, None), dtype=torch.bfloat16)
    (num_rows, channels), device = keys.shape, keys.device
    width = entry_width("window", channels)
    shape = (None, None, width)
    check_tensor("store.data", store.data, shape=shape, dtype=torch.uint8, device=device)
    fields = ("positions", "sequence", "slots", "row_start", "first_position")
    check_rows(rows, num_rows, device, fields)
    ring_len = store.data.shape[1]
    check_value("store.data.shape[1]", ring_len, ring_len > 0, "a ring of at least one entry")
    if num_rows == 0:
        return
    groups = triton.next_power_of_2(channels // GROUP["window"])
    tile = max(1, 2048 // (groups * GROUP["window"]))
    _write_window_kernel[(triton.cdiv(num_rows, tile),)](
        store.data, keys, rows.sequence, rows.positions, rows.slots, rows.row_start,
        rows.first_position, num_rows, ring_len, channels, groups, GROUP["window"], width, tile,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_window_kernel(
    data_ptr, keys_ptr, sequence_ptr, position_ptr, slot_ptr, row_start_ptr, first_ptr,
    num_rows, ring_len,
    CHANNELS: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence = tl.load(sequence_ptr + row, mask=row < num_rows, other=-1)
    real = sequence >= 0
    position = tl.load(position_ptr + row, mask=real, other=0)
    written = is_newest(row_start_ptr, first_ptr, sequence, position, real, ring_len)
    slot = tl.load(slot_ptr + row, mask=written, other=0)
    x = load_groups(keys_ptr, row, written, CHANNELS, G, SIZE)
    base = data_ptr + (slot * ring_len + position % ring_len) * WIDTH
    store_entries(base, x, written, WINDOW, CHANNELS, G, SIZE)
