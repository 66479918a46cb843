"""Twins of packed cache entries."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode_entry", "encode_entry", "entry_width", "round_entry"]

_GROUP = {"window": 32, "compressed": 16, "index": 32}
_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbours of the grid


def entry_width(kind: str, channels: int) -> int:
    """See `quant.entries.entry_width`."""
    payload = channels if kind == "window" else channels // 2
    return payload + channels // _GROUP[kind]


def _power_above(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest power of two >= x, and its UE8M0 byte; NaN and 255 where x is neither."""
    fraction, exponent = torch.frexp(x)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    finite = x.isfinite()
    byte = torch.where(finite, exponent + 127, 255).clamp(0, 255).to(torch.uint8)
    power = torch.ldexp(torch.ones_like(x), torch.where(finite, exponent, 0))
    return torch.where(finite, power, torch.nan), byte


def encode_entry(kind: str, x: Tensor) -> Tensor:
    """See `quant.entries.encode_entry`; x may have any float dtype, and is taken as float32."""
    groups = x.float().unflatten(-1, (-1, _GROUP[kind]))
    largest = groups.abs().amax(-1, keepdim=True)
    if kind == "window":
        power, byte = _power_above(largest.clamp(min=1e-4) * (1 / 448))
        scaled = (groups / power).clamp(-448, 448)
        payload = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
        return torch.cat((payload, byte.squeeze(-1)), -1)
    if kind == "compressed":
        stored = (largest.clamp(min=6 * 2.0**-9) / 6).clamp(max=448).to(torch.float8_e4m3fn)
        power, byte = stored.float(), stored.view(torch.uint8)
    else:
        power, byte = _power_above(largest.clamp(min=6 * 2.0**-126) / 6)
    scaled = groups / power
    edges = torch.tensor(_EDGES, device=x.device)
    # A tie belongs to the neighbour with the even code: below at even edges, above at odd ones.
    below = torch.bucketize(scaled.abs(), edges, right=False)
    above = torch.bucketize(scaled.abs(), edges, right=True)
    code = torch.where(below % 2 == 0, below, above).masked_fill(scaled.isnan(), 0)
    code = (code + 8 * scaled.signbit()).to(torch.uint8).flatten(-2)
    return torch.cat((code[..., ::2] + 16 * code[..., 1::2], byte.squeeze(-1)), -1)


def decode_entry(kind: str, entry: Tensor, channels: int) -> Tensor:
    """See `quant.entries.decode_entry`."""
    size = channels if kind == "window" else channels // 2
    payload, byte = entry.split((size, channels // _GROUP[kind]), -1)
    if kind == "window":
        value = payload.contiguous().view(torch.float8_e4m3fn).float()
    else:
        grid = torch.tensor(_GRID, device=entry.device)
        table = torch.cat((grid, -grid))
        value = table[torch.stack((payload % 16, payload // 16), -1).flatten(-2).int()]
    if kind == "compressed":
        scale = byte.contiguous().view(torch.float8_e4m3fn).float()
    else:
        scale = torch.ldexp(torch.ones(byte.shape, device=byte.device), byte.int() - 127)
        scale = scale.masked_fill(byte == 255, torch.nan)
    grouped: Tensor = value.unflatten(-1, (-1, _GROUP[kind])) * scale.unsqueeze(-1)
    return grouped.flatten(-2)


def round_entry(kind: str, x: Tensor) -> Tensor:
    """See `quant.entries.round_entry`; the dtype of x."""
    return decode_entry(kind, encode_entry(kind, x), x.shape[-1]).to(x.dtype)
