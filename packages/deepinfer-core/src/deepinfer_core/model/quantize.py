"""Weights into the stored formats: the inverse of what kernel backends read.

Every group of values gets the least power of two that fits them into its format; each value is
rounded to the nearest code, ties to the even one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer_core.model.tensors import SCALE_GROUP, TensorKind

__all__ = ["quantize"]

_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
_SMALLEST = 1e-30  # a group of zeros has a scale too


def quantize(kind: TensorKind, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return payload and scales of a matrix as they are stored.

    Args:
        kind: `FP8_TILE`, `FP8_ROW` or `FP4_ROW`.
        values: [out, in] float32; for the row formats `in` is a multiple of 32.
    Returns:
        float8_e4m3fn [out, in], or int8 [out, in / 2] with two codes a byte; and exponent bytes,
        uint8 [ceil(out / 32), ceil(in / 32)] for tiles and [out, in / 32] for rows.
    """
    return _QUANTIZERS[kind](values)


def _exponent_bytes(limit: Tensor, largest: float) -> Tensor:
    """Return bytes of the least powers of two that bring `limit` down to `largest`."""
    mantissa, exponent = torch.frexp(limit.clamp(min=_SMALLEST) / largest)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)  # it is a power of two itself
    return (exponent + 127).clamp(0, 254).to(torch.uint8)


def _two_to(exponent_bytes: Tensor) -> Tensor:
    exponents = exponent_bytes.to(torch.int32) - 127
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def _tiles(values: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = values.shape
    padding = (0, -width % SCALE_GROUP, 0, -rows % SCALE_GROUP)
    padded = torch.nn.functional.pad(values.abs(), padding)
    tiles = padded.view(-1, SCALE_GROUP, padded.shape[1] // SCALE_GROUP, SCALE_GROUP)
    scale = _exponent_bytes(tiles.amax(dim=(1, 3)), _E4M3_MAX)
    spread = _two_to(scale).repeat_interleave(SCALE_GROUP, 0).repeat_interleave(SCALE_GROUP, 1)
    return _e4m3(values / spread[:rows, :width]), scale


def _fp8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    scaled, scale = _scaled_rows(values, _E4M3_MAX)
    return _e4m3(scaled), scale


def _fp4_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    scaled, scale = _scaled_rows(values, _E2M1_MAX)
    size = scaled.abs().clamp(max=_E2M1_MAX)
    # codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6: evenly spaced in three stretches, and in each of
    # them rounding to the even number is rounding to the even code
    upper = torch.where(size <= 4, size.round() + 2, (size / 2).round() + 4)
    codes = torch.where(size <= 2, (size * 2).round(), upper).to(torch.uint8)
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed.view(torch.int8), scale


def _scaled_rows(values: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return values over the scale of their row and 32 channels, and the scales' bytes."""
    groups = values.reshape(len(values), -1, SCALE_GROUP)
    scale = _exponent_bytes(groups.abs().amax(dim=2), largest)
    return (groups / _two_to(scale).unsqueeze(2)).flatten(1), scale


def _e4m3(scaled: Tensor) -> Tensor:
    # a limit divided by its scale may come out one rounding above the largest code
    return scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


_QUANTIZERS: dict[TensorKind, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    TensorKind.FP8_TILE: _tiles,
    TensorKind.FP8_ROW: _fp8_rows,
    TensorKind.FP4_ROW: _fp4_rows,
}
