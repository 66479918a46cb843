"""Twin of the compressor's pooling."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.reference.attention import newest_rows, of_sequence
from deepinfer_kernels_cuda.values import CompressorState, Rows

__all__ = ["pool_groups"]


def pool_groups(values: Tensor, gates: Tensor, state: CompressorState, rows: Rows) -> Tensor:
    """See `attention.compressor.pool_groups`; float32 or float64."""
    depth = state.data.shape[1]
    both = torch.stack((values, gates), 1)
    carried = state.data[rows.slots, (rows.positions - 1).clamp(min=0) % depth].to(values.dtype)
    begins = rows.positions == of_sequence(rows.first_position, rows.sequence)
    before = torch.where(begins[:, None, None], carried, both.roll(1, 0))
    share = torch.sigmoid(gates - before[:, 1])
    pooled = before[:, 0] * (1 - share) + values * share
    complete = (rows.sequence >= 0) & (rows.positions % 2 == 1)
    written = newest_rows(rows, depth) & rows.writes
    place = rows.slots[written], rows.positions[written] % depth
    state.data[place] = both[written].detach().to(state.data.dtype)
    return torch.where(complete.unsqueeze(-1), pooled, torch.zeros_like(pooled))
