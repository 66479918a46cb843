"""Engram: rows of hashed n-grams, table reads, gated addition."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.cpu.ops.attention import last_rows
from deepinfer_core.cpu.ops.linear import Part, widen
from deepinfer_core.cpu.ops.streams import rms_norm, sigmoid
from deepinfer_core.interfaces import Matrix, Rows

__all__ = ["engram_gate", "engram_read", "engram_rows", "layer_rows"]


def engram_rows(
    folded: Tensor, history: Tensor, rows: Rows, pad_id: int, multipliers: Tensor, primes: Tensor
) -> Tensor:
    """See `KernelBackend.engram_rows`."""
    depth = history.shape[1]
    sequence = rows.sequence.clamp(min=0)
    age = rows.positions - rows.first_position[sequence]  # rows of this sequence before this one
    alive = folded >= 0  # an image position ends the look-back, its own included
    tokens = [torch.where(alive, folded, pad_id)]
    for back in range(1, multipliers.shape[1]):
        position = rows.positions - back
        older = history[rows.slots, position.clamp(min=0) % depth]
        token = torch.where(age >= back, folded.roll(back, 0), older)
        alive = alive & (position >= 0) & (token >= 0)
        tokens.append(torch.where(alive, token, pad_id))
    chosen = last_rows(rows, depth)  # replayed rows too: later ones look back at them
    history[rows.slots[chosen], rows.positions[chosen] % depth] = folded[chosen]
    return torch.stack(
        [layer_rows(tokens, *layer) for layer in zip(multipliers, primes, strict=True)]
    )


def layer_rows(tokens: list[Tensor], multipliers: Tensor, primes: Tensor) -> Tensor:
    """Return the table rows [B, columns] of one layer.

    tokens[k] is the folded id k positions back.
    """
    sizes = primes.flatten()
    hashed = tokens[0] * multipliers[0]
    columns = []
    for back in range(1, len(tokens)):
        hashed = hashed ^ (tokens[back] * multipliers[back])
        columns.append(hashed.unsqueeze(-1) % primes[back - 1])
    return torch.cat(columns, dim=-1) + (sizes.cumsum(0) - sizes)


def engram_read(table: Matrix, row_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather and widen table rows: [B, c] int64 -> [B, c * width]; the table may lie elsewhere."""
    index = row_ids.flatten().to(table.payload.device)

    def rows(stored: Tensor) -> Tensor:
        if stored.dtype == torch.float8_e4m3fn:  # gathers know bytes, not fp8
            return stored.view(torch.uint8)[index].view(stored.dtype)
        return stored[index]

    values = widen(Part.of(table, rows))
    width = row_ids.shape[1] * values.shape[1]
    return values.to(device=row_ids.device, dtype=dtype).view(row_ids.shape[0], width)


def engram_gate(
    streams: Tensor,
    kv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    is_image: Tensor | None,
) -> Tensor:
    """See `KernelBackend.engram_gate`."""
    count, size = streams.shape[1], streams.shape[2]
    keys, value = kv.float().unflatten(-1, (count + 1, size)).split((count, 1), dim=1)
    wide = streams.float()
    terms = (
        rms_norm(wide, None, eps)
        * rms_norm(keys, None, eps)
        * query_weight.float()
        * key_weight.float()
    )
    d = terms.sum(-1) / size**0.5
    root = d.abs().clamp(min=1e-6).sqrt()
    gate = sigmoid(torch.where(d < 0, -root, root))
    if is_image is not None:
        gate = gate.masked_fill(is_image.unsqueeze(-1), 0.0)
    out: Tensor = wide + gate.unsqueeze(-1) * value
    return out.to(streams.dtype)
