"""The stored formats as arithmetic with a straight-through gradient.

Each function returns what a value reads back as, in the format of `cpu/ops/formats.py`; its
gradient is that of the identity. Unlike packing they compile into a few fused kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano.training.fused import fused

__all__ = [
    "as_fp4_compressed",
    "as_fp4_rows",
    "as_fp8_rows",
    "as_fp8_tiles",
    "blend",
    "fp4_compressed",
    "fp4_rows",
    "fp8_rows",
    "fp8_tiles",
]

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_TILE = 32


def blend(x: Tensor, rounded: Tensor, strength: Tensor) -> Tensor:
    """Return x where `strength` is 0 and its rounded value where it is 1; gradient of x."""
    return x + (rounded.to(x.dtype) - x).detach() * strength.to(x.dtype)


def _power_of_two(x: Tensor) -> Tensor:
    """Return the least power of two >= x, for normal positive float32 x."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()


def _e2m1(x: Tensor) -> Tensor:
    """Return the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with x's sign; ties to the even code."""
    size = x.abs()
    # evenly spaced by 0.5, 1 and 2 in three stretches; `round` sends ties to even multiples
    fine = torch.round(size * 2) / 2
    middle = torch.round(size)
    coarse = torch.round(size / 2) * 2
    value = torch.where(size <= 2, fine, torch.where(size <= 4, middle, coarse))
    return torch.copysign(value.clamp(max=_E2M1_MAX), x)


def fp8_tiles(weight: Tensor) -> Tensor:
    """Round [out, in] to fp8 with a scale for each 32 x 32 tile; both divisible by 32."""
    tiles = weight.detach().float().unflatten(-1, (-1, _TILE)).unflatten(0, (-1, _TILE))
    scale = _power_of_two(tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-30) / _E4M3_MAX)
    return (_e4m3(tiles / scale) * scale).reshape(weight.shape)


def fp8_rows(x: Tensor) -> Tensor:
    """Round [.., d] to fp8 with a scale for each 32 channels (activations, windows, Engram)."""
    groups = x.detach().float().unflatten(-1, (-1, _TILE))
    scale = _power_of_two(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / _E4M3_MAX)
    return (_e4m3(groups / scale) * scale).flatten(-2)


def fp4_rows(x: Tensor) -> Tensor:
    """Round [.., d] to E2M1 with a power of two for each 32 channels (experts, index keys)."""
    groups = x.detach().float().unflatten(-1, (-1, _TILE))
    scale = _power_of_two(groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / _E2M1_MAX)
    return (_e2m1(groups / scale) * scale).flatten(-2)


def fp4_compressed(x: Tensor) -> Tensor:
    """Round [.., d] to E2M1 with an E4M3 scale for each 16 channels (compressed KV)."""
    groups = x.detach().float().unflatten(-1, (-1, 16))
    limit = groups.abs().amax(-1, keepdim=True).clamp(min=_E2M1_MAX * 2.0**-9)
    scale = _e4m3(limit / _E2M1_MAX)
    return (_e2m1(groups / scale) * scale).flatten(-2)


@fused
def as_fp8_tiles(weight: Tensor, strength: Tensor) -> Tensor:
    """Blend a weight with what it is as fp8 tiles."""
    return blend(weight, fp8_tiles(weight), strength)


@fused
def as_fp8_rows(x: Tensor, strength: Tensor) -> Tensor:
    """Blend x with what it is as fp8 rows."""
    return blend(x, fp8_rows(x), strength)


@fused
def as_fp4_rows(x: Tensor, strength: Tensor) -> Tensor:
    """Blend x with what it is as fp4 rows."""
    return blend(x, fp4_rows(x), strength)


@fused
def as_fp4_compressed(x: Tensor, strength: Tensor) -> Tensor:
    """Blend x with what it is as an entry of compressed KV."""
    return blend(x, fp4_compressed(x), strength)
