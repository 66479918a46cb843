"""Twins of `mhc`."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels_cuda.reference.norm import rms_norm, rms_norm_fp8, wide

__all__ = [
    "mhc_collapse",
    "mhc_collapse_norm",
    "mhc_collapse_norm_fp8",
    "mhc_merge",
    "mhc_merge_norm",
    "mhc_merge_norm_fp8",
    "mhc_mix",
]


def mhc_mix(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `mhc.mix.mhc_mix`; any float dtype. float64 streams give float64 coefficients."""
    count = streams.shape[1]
    flat = wide(streams).flatten(1)
    mixed = rms_norm(flat, None, norm_eps) @ fn.to(flat.dtype).T
    sizes = (count, count, count * count)
    pre, post, comb = (
        part * factor.to(flat.dtype) + offset.to(flat.dtype)
        for part, factor, offset in zip(
            mixed.split(sizes, -1), scale, base.split(sizes), strict=True
        )
    )
    comb = comb.unflatten(-1, (count, count)).softmax(-1) + eps
    for axis in [-2] + [-1, -2] * (iterations - 1):
        comb = comb / (comb.sum(axis, keepdim=True) + eps)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), comb


def mhc_collapse(coefficient: Tensor, streams: Tensor) -> Tensor:
    """See `mhc.collapse.mhc_collapse`; any float dtype."""
    return (wide(streams) * coefficient.unsqueeze(-1)).sum(1).to(streams.dtype)


def mhc_collapse_norm(
    coefficient: Tensor, streams: Tensor, weight: Tensor | None, eps: float
) -> Tensor:
    """See `mhc.collapse.mhc_collapse_norm`; any float dtype."""
    return rms_norm(mhc_collapse(coefficient, streams), weight, eps)


def mhc_collapse_norm_fp8(
    coefficient: Tensor, streams: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `mhc.collapse.mhc_collapse_norm_fp8`."""
    return rms_norm_fp8(mhc_collapse(coefficient, streams), weight, eps)


def mhc_merge(y: Tensor, post: Tensor, comb: Tensor, streams: Tensor) -> Tensor:
    """See `mhc.merge.mhc_merge`; any float dtype."""
    old = wide(streams)
    carried = comb.to(old.dtype).transpose(1, 2) @ old
    return (post.unsqueeze(-1) * wide(y).unsqueeze(1) + carried).to(streams.dtype)


def mhc_merge_norm(
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    streams: Tensor,
    coefficient: Tensor,
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `mhc.merge_norm.mhc_merge_norm`; any float dtype."""
    new = mhc_merge(y, post, comb, streams)
    return new, mhc_collapse_norm(coefficient, new, weight, eps)


def mhc_merge_norm_fp8(
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    streams: Tensor,
    coefficient: Tensor,
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `mhc.merge_norm.mhc_merge_norm_fp8`."""
    new = mhc_merge(y, post, comb, streams)
    return new, *mhc_collapse_norm_fp8(coefficient, new, weight, eps)
