"""Compressed KV: pooling of token pairs and writes into blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.cpu.ops.attention import last_rows
from deepinfer_core.cpu.ops.formats import encode_entry
from deepinfer_core.interfaces import BlockStore, CompressorState, Rows

__all__ = ["pool_groups", "pool_pair", "write_entries"]


def pool_pair(values: Tensor, gates: Tensor) -> Tensor:
    """Return `sum_t values_t * softmax_t(gates_t)` for each channel.

    Values and gates [B, 2, d] float32 -> [B, d].
    """
    first, second = gates.unbind(1)
    top = torch.maximum(first, second).detach()
    early, late = torch.exp(first - top), torch.exp(second - top)
    return (values[:, 0] * early + values[:, 1] * late) / (early + late)


def pool_groups(values: Tensor, gates: Tensor, state: CompressorState, rows: Rows) -> Tensor:
    """See `KernelBackend.pool_groups`."""
    depth = state.data.shape[1]
    own = torch.stack((values, gates), dim=1)
    older = state.data[rows.slots, (rows.positions - 1).clamp(min=0) % depth]
    sequence = rows.sequence.clamp(min=0)
    here = rows.positions > rows.first_position[sequence]
    before = torch.where(here[:, None, None], own.roll(1, 0), older)
    pair = torch.stack((before, own), dim=1)
    pooled = pool_pair(pair[:, :, 0], pair[:, :, 1])
    complete = (rows.positions % 2 == 1) & (rows.sequence >= 0)
    pooled = torch.where(complete.unsqueeze(-1), pooled, 0.0)
    chosen = last_rows(rows, depth, rows.writes)
    state.data[rows.slots[chosen], rows.positions[chosen] % depth] = own[chosen].detach()
    return pooled


def write_entries(store: BlockStore, entries: Tensor, rows: Rows, kind: str, packed: bool) -> None:
    """See `KernelBackend.write_entries`."""
    complete = rows.writes & (rows.sequence >= 0) & ((rows.positions + 1) % store.ratio == 0)
    chosen = complete.nonzero().squeeze(-1)
    if chosen.numel() == 0:
        return
    index = (rows.positions[chosen] + 1) // store.ratio - 1
    per_block = store.data.shape[1]
    block = store.table[rows.slots[chosen], index // per_block].long()
    values = entries[chosen]
    store.data[block, index % per_block] = (
        encode_entry(kind, values) if packed else values.to(store.data.dtype)
    )
