"""Norms, rotary embedding and hyper-connections (residual streams)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.cpu.ops.linear import product

__all__ = ["mhc_collapse", "mhc_merge", "mhc_mix", "rms_norm", "rotate", "sigmoid", "sinkhorn"]


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)).

    `torch.sigmoid` gives other bits in the last few elements of a tensor than inside it.
    """
    return 1.0 / (1.0 + torch.exp(-x))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `KernelBackend.rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool) -> Tensor:
    """See `KernelBackend.rotate`."""
    size = 2 * inv_freq.shape[0]
    angle = positions.to(torch.float32).unsqueeze(-1) * inv_freq
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (inv_freq.shape[0],)
    cos, sin = angle.cos().view(shape), angle.sin().view(shape)
    if inverse:
        sin = -sin
    real, imag = x[..., -size:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((real * cos - imag * sin, real * sin + imag * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-size], turned.to(x.dtype)), dim=-1)


def sinkhorn(
    logits: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre [B, S], post [B, S], comb [B, S, S], all float32.

    logits: mixing logits [B, S * (2 + S)].
    """
    # S * (2 + S) numbers: pre, post, then comb row by row
    streams = round((1 + logits.shape[-1]) ** 0.5) - 1
    pre, post, comb = logits.split((streams, streams, streams * streams), dim=-1)
    pre = sigmoid(pre * scale[0] + base[:streams]) + eps
    post = 2 * sigmoid(post * scale[1] + base[streams : 2 * streams])
    comb = (comb * scale[2] + base[2 * streams :]).unflatten(-1, (streams, streams))
    comb = torch.exp(comb - comb.amax(-1, keepdim=True))
    comb = comb / comb.sum(-1, keepdim=True) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def mhc_mix(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
    strict: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `KernelBackend.mhc_mix`."""
    flat = streams.float().flatten(1)
    statistic = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return sinkhorn(product(flat, fn, strict) * statistic, scale, base, eps, iterations)


def mhc_collapse(coefficient: Tensor, streams: Tensor) -> Tensor:
    """See `KernelBackend.mhc_collapse`."""
    total = coefficient[:, 0, None] * streams[:, 0].float()
    for s in range(1, streams.shape[1]):
        total = total + coefficient[:, s, None] * streams[:, s].float()
    return total.to(streams.dtype)


def mhc_merge(y: Tensor, post: Tensor, comb: Tensor, streams: Tensor) -> Tensor:
    """See `KernelBackend.mhc_merge`."""
    wide, update = streams.float(), y.float()
    merged = []
    for o in range(streams.shape[1]):
        total = post[:, o, None] * update
        for i in range(streams.shape[1]):
            total = total + comb[:, i, o, None] * wide[:, i]
        merged.append(total)
    return torch.stack(merged, dim=1).to(streams.dtype)
