"""Twins of `quant.activations`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["round_fp8", "round_fp8_wide", "scale_value"]


def scale_value(scale: Tensor) -> Tensor:
    """Return 2^(e - 127) of UE8M0 bytes, float32; byte 255 is NaN."""
    power = (scale.int() << 23).view(torch.float32)
    return power.masked_fill(scale == 0, 2.0**-127).masked_fill(scale == 255, float("nan"))


def _grouped(x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 32))
    groups: Tensor = padded.unflatten(-1, (-1, 32))
    return groups


def round_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `quant.activations.round_fp8`; x may have any leading dimensions and float dtype."""
    groups = _grouped(x)
    largest = groups.abs().amax(-1).clamp(min=1e-4) * (1 / 448)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa >= 1/2
    exponent = exponent - (mantissa == 0.5).int()
    scale = torch.where(largest.isfinite(), exponent + 127, 255).to(torch.uint8)
    scaled = (groups / scale_value(scale).unsqueeze(-1)).clamp(-448, 448)
    return scaled.to(torch.float8_e4m3fn).flatten(-2)[..., : x.shape[-1]], scale


def round_fp8_wide(x: Tensor) -> Tensor:
    """See `quant.activations.round_fp8_wide`; the dtype of x is kept."""
    payload, scale = round_fp8(x)
    values = _grouped(payload) * scale_value(scale).unsqueeze(-1)
    return values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)
