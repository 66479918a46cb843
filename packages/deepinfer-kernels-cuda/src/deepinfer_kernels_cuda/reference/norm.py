"""Twins of `norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.reference.quant_activations import round_fp8

__all__ = ["rms_norm", "rms_norm_fp8", "rotate", "wide"]


def wide(x: Tensor) -> Tensor:
    """Return x in the type it is computed with: float64 if it is that already, else float32."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `norm.rms_norm.rms_norm`; any float dtype."""
    values = wide(x)
    values = values / (values.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        values = values * weight.to(values.dtype)
    return values.to(x.dtype)


def rms_norm_fp8(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `norm.rms_norm.rms_norm_fp8`."""
    normed = rms_norm(x, weight, eps)
    return normed, *round_fp8(normed)


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, *, inverse: bool = False) -> Tensor:
    """See `norm.rotate.rotate`; any float dtype. The angle is a float32 product in all of them."""
    values = wide(x)
    angle = torch.outer(positions.float(), inv_freq).to(values.dtype)
    turn = torch.polar(torch.ones_like(angle), -angle if inverse else angle)
    turn = turn.view(x.shape[0], *[1] * (x.dim() - 2), -1)
    still, pairs = values.split((x.shape[-1] - 2 * len(inv_freq), 2 * len(inv_freq)), dim=-1)
    pairs = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous()) * turn
    return torch.cat((still, torch.view_as_real(pairs).flatten(-2)), dim=-1).to(x.dtype)
