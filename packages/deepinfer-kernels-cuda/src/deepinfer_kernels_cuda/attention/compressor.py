"""Pooling of token pairs with a carry of unfinished groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_rows, check_tensor, check_value
from deepinfer_kernels_cuda.values import CompressorState, Rows

__all__ = ["pool_groups"]


def pool_groups(values: Tensor, gates: Tensor, state: CompressorState, rows: Rows) -> Tensor:
    """Pool the two tokens of a group by a softmax of their gates, for each channel.

    Args:
        values, gates: [B, d] float32, contiguous.
        state: `data` [slots + 1, depth, 2, d] float32, contiguous. The input before each sequence's
            first row is read from it; then those of its last `depth` rows whose `writes` is True
            are written at [slot, position % depth]. depth >= 2.
        rows: of the values; a sequence's rows lie one behind the other.
    Returns:
        [B, d] float32: rows at odd positions hold the pooled value of their group, others zero.
    Raises:
        KernelInputError: a shape, dtype or stride is not as above.
    Source: reference.compressor.pool_groups; model-v41.md 5.
    """
    check_tensor("values", values, shape=(None, None), dtype=torch.float32)
    (num_rows, channels), device = values.shape, values.device
    check_tensor("gates", gates, shape=(num_rows, channels), dtype=torch.float32, device=device)
    shape = (None, None, 2, channels)
    check_tensor("state.data", state.data, shape=shape, dtype=torch.float32, device=device)
    fields = ("positions", "sequence", "slots", "writes", "row_start", "first_position")
    check_rows(rows, num_rows, device, fields)
    depth = state.data.shape[1]
    needs = "at least 2 places, one for each token of a group"
    check_value("state.data.shape[1]", depth, depth >= 2, needs)
    out = torch.empty_like(values)
    if num_rows:
        _pool_kernel[(num_rows,)](
            values, gates, state.data, out, rows.sequence, rows.positions, rows.slots, rows.writes,
            rows.row_start, rows.first_position, depth, channels,
            triton.next_power_of_2(channels), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _pool_kernel(
    values_ptr, gates_ptr, state_ptr, out_ptr, sequence_ptr, position_ptr, slot_ptr, writes_ptr,
    row_start_ptr, first_ptr, depth,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    sequence = tl.load(sequence_ptr + row)
    if sequence < 0:
        tl.store(out_ptr + row * CHANNELS + channel, tl.zeros([BLOCK], tl.float32), mask=inside)
    else:
        position = tl.load(position_ptr + row)
        first = tl.load(first_ptr + sequence)
        start = tl.load(row_start_ptr + sequence)
        last = first + tl.load(row_start_ptr + sequence + 1) - start - 1
        ring = state_ptr + tl.load(slot_ptr + row) * depth * 2 * CHANNELS
        value = tl.load(values_ptr + row * CHANNELS + channel, mask=inside, other=0.0)
        gate = tl.load(gates_ptr + row * CHANNELS + channel, mask=inside, other=0.0)
        complete = position % 2 == 1
        begins = position == first
        # the row before this one, in this step or in the carry
        older = ring + ((first - 1 + depth) % depth) * 2 * CHANNELS + channel
        from_step = inside & complete & (position > first)
        from_carry = inside & complete & begins
        back = row * CHANNELS - CHANNELS + channel
        value_before = tl.load(values_ptr + back, mask=from_step, other=0.0)
        gate_before = tl.load(gates_ptr + back, mask=from_step, other=0.0)
        value_before += tl.load(older, mask=from_carry, other=0.0)
        gate_before += tl.load(older + CHANNELS, mask=from_carry, other=0.0)
        top = tl.maximum(gate_before, gate)
        early, late = tl.exp(gate_before - top), tl.exp(gate - top)
        pooled = tl.div_rn(value_before * early + value * late, early + late)
        pooled = tl.where(complete, pooled, 0.0)
        tl.store(out_ptr + row * CHANNELS + channel, pooled, mask=inside)

        # The place that the first row reads belongs, when enough rows follow, to one of them. The
        # first row's program writes it, behind its own reading; any other place is free at once.
        shared = last - (last - first + 1) % depth
        written = (tl.load(writes_ptr + row) != 0) & (position > last - depth)
        written &= position != shared
        own = ring + (position % depth) * 2 * CHANNELS + channel
        tl.store(own, value, mask=inside & written)
        tl.store(own + CHANNELS, gate, mask=inside & written)
        if begins & (shared >= first):
            other = start + shared - first
            if tl.load(writes_ptr + other) != 0:
                moved = tl.load(values_ptr + other * CHANNELS + channel, mask=inside)
                moved_gate = tl.load(gates_ptr + other * CHANNELS + channel, mask=inside)
                tl.store(older, moved, mask=inside)
                tl.store(older + CHANNELS, moved_gate, mask=inside)
