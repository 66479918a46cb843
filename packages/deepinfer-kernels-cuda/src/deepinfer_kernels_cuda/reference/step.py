"""Twins of the step's plumbing."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.values import Carry

__all__ = ["apply_deltas", "correct_inputs", "expand_rows", "write_carry"]


def expand_rows(num_rows: Tensor, start: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """See `step.expand_rows`."""
    place = torch.arange(total, device=num_rows.device).unsqueeze(1)
    num_rows = num_rows.clamp(min=0)
    end = num_rows.cumsum(0)
    own = (place < end) & (place >= end - num_rows)  # [total, R], one sequence a row at most
    number = torch.arange(len(start), device=start.device)
    sequence = (own * (number + 1)).sum(1) - 1
    return sequence, (own * (place - (end - num_rows) + start)).sum(1)


def correct_inputs(
    tokens: Tensor, start: Tensor, tag: Tensor, remap: Tensor, carry: Carry | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `step.correct_inputs`."""
    num_carried = 0 if carry is None else len(carry.tag)
    good = torch.zeros_like(remap, dtype=torch.bool)
    if carry is not None and num_carried:
        source = remap.clamp(0, num_carried - 1)
        good = (remap == source) & (carry.tag[source] == tag)
        kept = tokens[:, carry.tokens.shape[1] :]
        wide = torch.cat((carry.tokens[source], kept), 1)[:, : tokens.shape[1]]
        tokens = torch.where(good.unsqueeze(1), wide, tokens)
        start = torch.where(good, carry.start[source], start)
    bad = (remap >= 0) & ~good | (tokens[:, :1] < 0).any(1)
    return tokens.clamp(min=0) * ~bad.unsqueeze(1), start.clone(), bad.int() * 2


def apply_deltas(table: Tensor, slots: Tensor, places: Tensor, block_ids: Tensor) -> None:
    """See `step.apply_deltas`, but for places outside the table, which must not be named."""
    table[slots, places] = block_ids.to(table.dtype)


def write_carry(tokens: Tensor, start: Tensor, tag: Tensor, out: Carry) -> None:
    """See `step.write_carry`."""
    count, width = tokens.shape
    out.tokens[:count] = 0
    out.tokens[:count, :width] = tokens
    out.start[:count] = start
    out.tag.fill_(-1)
    out.tag[:count] = tag
