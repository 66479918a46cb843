"""Step plumbing: rows of ragged sequences, corrections from the carry of the step before."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.errors import KernelInputError
from deepinfer_core.interfaces import Carry

__all__ = ["correct_inputs", "expand_rows"]

_BAD_SOURCE = 2


def expand_rows(num_rows: Tensor, start: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Lay sequences end to end and say for each row whose it is and where it sits.

    Args:
        num_rows: [R] int64 rows of each sequence; 0 is allowed.
        start: [R] int64 position of each sequence's first row.
        total: rows of the step, padding included.
    Returns:
        sequence [total] int64, -1 for padding; positions [total] int64, 0 for padding.
    Raises:
        KernelInputError: the sequences have more than `total` rows, or shapes differ.
    """
    if num_rows.dim() != 1 or num_rows.shape != start.shape:
        raise KernelInputError(
            f"`num_rows` is {list(num_rows.shape)} and `start` {list(start.shape)}; "
            "both must be [R], an item for each sequence."
        )
    ends = num_rows.cumsum(0)
    used = int(ends[-1]) if len(ends) else 0
    if used > total:
        raise KernelInputError(
            f"`num_rows` sums to {used}, but `total` is {total}; "
            "it must hold the rows of all sequences."
        )
    row = torch.arange(total, device=num_rows.device)
    sequence = torch.full_like(row, -1)
    positions = torch.zeros_like(row)
    sequence[:used] = torch.searchsorted(ends, row[:used], right=True)
    owner = sequence[:used]
    positions[:used] = row[:used] - (ends - num_rows)[owner] + start[owner]
    return sequence, positions


def correct_inputs(
    tokens: Tensor, start: Tensor, tag: Tensor, remap: Tensor, carry: Carry | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace host values by the carry of the previous step where `remap[s] >= 0`.

    A sequence has a bad source when it names a carry row that does not exist or has another tag, or
    when its first token is still a placeholder (a negative id) afterwards. It gets tokens 0, keeps
    the host's start, and fails alone. Placeholders in other columns become 0 as well, so none can
    reach the embedding; verification refuses them like any wrong draft.

    Args:
        tokens: [R, n] int64 host tokens, negative where the carry supplies them. Columns beyond
            those of the carry keep the host's.
        start: [R] int64 host start positions.
        tag: [R] int64 uids.
        remap: [R] int64 row of the carry, or -1 for host values.
        carry: what the previous step left, or None.
    Returns:
        tokens [R, n] int64, start [R] int64 and status [R] int32 (0, or 2 for a bad source).
    """
    linked = remap >= 0
    bad = linked
    tokens, start = tokens.clone(), start.clone()
    if carry is not None and len(carry.tag):
        row = remap.clamp(0, len(carry.tag) - 1)
        good = linked & (row == remap) & (carry.tag[row] == tag)
        width = min(tokens.shape[1], carry.tokens.shape[1])
        tokens[:, :width] = torch.where(good[:, None], carry.tokens[row, :width], tokens[:, :width])
        start = torch.where(good, carry.start[row], start)
        bad = linked & ~good
    if tokens.shape[1]:
        bad = bad | (tokens[:, 0] < 0)
    tokens = tokens.masked_fill(bad[:, None], 0).clamp(min=0)
    return tokens, start, bad.to(torch.int32) * _BAD_SOURCE
