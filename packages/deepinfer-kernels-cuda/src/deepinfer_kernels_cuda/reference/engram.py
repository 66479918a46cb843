"""Twins of `engram`."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.reference.attention import newest_rows, of_sequence
from deepinfer_kernels_cuda.reference.norm import rms_norm, wide
from deepinfer_kernels_cuda.reference.quant_activations import scale_value
from deepinfer_kernels_cuda.values import Matrix, Rows

__all__ = ["engram_gate", "engram_read", "engram_rows"]


def engram_rows(
    folded: Tensor,
    history: Tensor,
    rows: Rows,
    pad_id: int,
    multipliers: Tensor,
    primes: Tensor,
) -> Tensor:
    """See `engram.rows.engram_rows`."""
    count, depth = len(folded), history.shape[1]
    first = of_sequence(rows.first_position, rows.sequence)
    back = torch.arange(multipliers.shape[1], device=folded.device)
    position = rows.positions.unsqueeze(1) - back
    index = torch.arange(count, device=folded.device).unsqueeze(1) - back
    stored = history[rows.slots.unsqueeze(1), position.clamp(min=0) % depth]
    in_step = (position >= first.unsqueeze(1)) | (back == 0)
    ids = torch.where(in_step, folded[index.clamp(min=0)], stored)
    seen = ((ids >= 0) & (position >= 0)).int().cumprod(1).bool()
    ids = torch.where(seen, ids, pad_id)

    # Rows that are not kept go to a spare place at the end.
    kept = newest_rows(rows, depth)
    place = rows.slots * depth + rows.positions % depth
    flat = torch.cat((history.flatten(), history.new_zeros(1)))
    flat[torch.where(kept, place, flat.numel() - 1)] = folded
    history.copy_(flat[:-1].view_as(history))

    terms = ids * multipliers.unsqueeze(1)  # [layers, B, n]
    hashed = terms[..., 0]
    columns = []
    for n in range(1, terms.shape[-1]):
        hashed = hashed ^ terms[..., n]
        columns.append(hashed.unsqueeze(-1) % primes[:, n - 1].unsqueeze(1))
    sizes = primes.flatten(1)
    return torch.cat(columns, dim=-1) + (sizes.cumsum(1) - sizes).unsqueeze(1)


def engram_read(
    table: Matrix, row_ids: Tensor, *, max_programs: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """See `engram.read.engram_read`; the table may be anywhere, the result has `dtype`."""
    index = row_ids.flatten().to(table.payload.device)
    if table.scale is None:
        values = table.payload[index].float()
    else:
        payload = table.payload.view(torch.uint8)[index].view(torch.float8_e4m3fn).float()
        scale = scale_value(table.scale[index]).repeat_interleave(32, dim=1)
        values = payload * scale
    return values.to(row_ids.device, dtype).view(len(row_ids), -1)


def engram_gate(
    streams: Tensor,
    kv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    is_image: Tensor | None,
) -> Tensor:
    """See `engram.gate.engram_gate`; any float dtype."""
    x = wide(streams)
    parts = kv.to(x.dtype).view(len(x), x.shape[1] + 1, x.shape[2])
    keys, value = parts[:, :-1], parts[:, -1:]
    weight = query_weight.to(x.dtype) * key_weight.to(x.dtype)
    score = (rms_norm(x, None, eps) * rms_norm(keys, None, eps) * weight).sum(-1)
    score = score / x.shape[2] ** 0.5
    root = score.abs().clamp(min=1e-6).sqrt()
    gate = torch.where(score < 0, -root, root).sigmoid()
    if is_image is not None:
        gate = gate.masked_fill(is_image.unsqueeze(-1), 0)
    return (x + gate.unsqueeze(-1) * value).to(streams.dtype)
