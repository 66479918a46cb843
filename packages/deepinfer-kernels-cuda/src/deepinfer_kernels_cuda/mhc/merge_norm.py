"""Merge of a layer's output into the streams, and what the next layer starts with, in one pass.

The coefficient that the next layer collapses the streams with was handed over by an earlier mix, so
nothing stands between merge, collapse and norm: a program has all new streams of its rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor
from deepinfer_kernels_cuda.kernel_math import as_bf16
from deepinfer_kernels_cuda.norm.rms_norm import (
    channel_of,
    check_norm,
    fp8_like,
    launch_norm,
    store_normed,
)

__all__ = ["mhc_merge_norm", "mhc_merge_norm_fp8"]


@triton.jit(do_not_specialize=["num_rows"])
def _merge_norm(
    y_ptr,
    post_ptr,
    comb_ptr,
    stream_ptr,
    coefficient_ptr,
    weight_ptr,
    new_ptr,
    out_ptr,
    payload_ptr,
    scale_ptr,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    STREAMS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    COUNT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FP8: tl.constexpr,
):
    row, channel = channel_of(ROWS, PIECE)
    row += tl.program_id(0).to(tl.int64) * ROWS
    valid = row < num_rows
    # One number for a row each: post, comb by destination, coefficient.
    factors = ()
    for o in tl.static_range(STREAMS):
        post = tl.load(post_ptr + row * STREAMS + o, mask=valid, other=0.0)[:, None]
        factors = factors + (post,)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(STREAMS):
            place = (row * STREAMS + i) * STREAMS + o
            comb = tl.load(comb_ptr + place, mask=valid, other=0.0)[:, None]
            factors = factors + (comb,)  # type: ignore[assignment]  # noqa: RUF005
        place = row * STREAMS + o
        coefficient = tl.load(coefficient_ptr + place, mask=valid, other=0.0)[:, None]
        factors = factors + (coefficient,)  # type: ignore[assignment]  # noqa: RUF005
    # All is read before the first store, which the compiler may not pass.
    parts = ()
    for piece in tl.static_range(COUNT):
        at = channel + piece * PIECE
        inside = valid[:, None] & (at < SIZE)
        y = tl.load(y_ptr + row[:, None] * SIZE + at, mask=inside, other=0.0)
        parts = parts + (y,)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(STREAMS):
            offset = (row * STREAMS + i)[:, None] * SIZE + at
            stream = tl.load(stream_ptr + offset, mask=inside, other=0.0)
            parts = parts + (stream,)  # type: ignore[assignment]  # noqa: RUF005
    collapsed = ()
    for piece in tl.static_range(COUNT):
        at = channel + piece * PIECE
        inside = valid[:, None] & (at < SIZE)
        y = parts[piece * (STREAMS + 1)].to(tl.float32)
        total = tl.zeros(channel.shape, tl.float32)
        for o in tl.static_range(STREAMS):
            merged = factors[o * (STREAMS + 2)] * y
            for i in tl.static_range(STREAMS):
                stream = parts[piece * (STREAMS + 1) + 1 + i].to(tl.float32)
                merged += factors[o * (STREAMS + 2) + 1 + i] * stream
            new = as_bf16(merged)
            tl.store(new_ptr + (row * STREAMS + o)[:, None] * SIZE + at, new, mask=inside)
            total += factors[o * (STREAMS + 2) + 1 + STREAMS] * new.to(tl.float32)
        collapsed = collapsed + (as_bf16(total),)  # noqa: RUF005
    store_normed(
        collapsed,
        row,
        valid,
        channel,
        weight_ptr,
        eps,
        out_ptr,
        payload_ptr,
        scale_ptr,
        SIZE,
        ROWS,
        PIECE,
        COUNT,
        WEIGHTED,
        FP8,
    )


def mhc_merge_norm(
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    streams: Tensor,
    coefficient: Tensor,
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return `mhc_merge(y, post, comb, streams)` and `mhc_collapse_norm` of it.

    The same bits as of the two ops; the new streams are not read again.

    Args:
        y: [B, D] bfloat16, contiguous, D up to 8192.
        post: [B, S] float32. comb: [B, source, destination] float32.
        streams: [B, S, D] bfloat16, contiguous.
        coefficient: [B, S] float32, of the collapse.
        weight: [D] bfloat16 or float32, or None for 1. eps: added to the mean of squares.
    Returns:
        New streams [B, S, D] and normed rows [B, D], bfloat16. Deterministic; a row depends on
        itself alone. S and D are compile-time sizes.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.mhc.mhc_merge_norm.
    """
    _check(y, post, comb, streams, coefficient, weight)
    out = torch.empty_like(y)
    new = _launch(y, post, comb, streams, coefficient, weight, eps, out)
    return new, out


def mhc_merge_norm_fp8(
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    streams: Tensor,
    coefficient: Tensor,
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `mhc_merge(y, post, comb, streams)` and `mhc_collapse_norm_fp8` of it.

    Arguments and errors as of `mhc_merge_norm`; 32 divides D.

    Returns:
        New streams [B, S, D] and normed rows [B, D], bfloat16; payload [B, D] float8_e4m3fn,
        scales [B, D / 32] uint8.
    Source: reference.mhc.mhc_merge_norm_fp8.
    """
    _check(y, post, comb, streams, coefficient, weight)
    out = torch.empty_like(y)
    payload, scale = fp8_like(out, "y.shape[1]")
    new = _launch(y, post, comb, streams, coefficient, weight, eps, out, (payload, scale))
    return new, out, payload, scale


def _check(
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    streams: Tensor,
    coefficient: Tensor,
    weight: Tensor | None,
) -> None:
    check_tensor("streams", streams, shape=(None, None, None), dtype=torch.bfloat16)
    (rows, count, size), device = streams.shape, streams.device
    check_norm("streams.shape[2]", size, weight, device)
    check_tensor("y", y, shape=(rows, size), dtype=torch.bfloat16, device=device)
    shape, dtype = (rows, count), torch.float32
    check_tensor("post", post, shape=shape, dtype=dtype, device=device)
    check_tensor("coefficient", coefficient, shape=shape, dtype=dtype, device=device)
    check_tensor("comb", comb, shape=(rows, count, count), dtype=dtype, device=device)


def _launch(
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    streams: Tensor,
    coefficient: Tensor,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Write `out` and, if asked for, `fp8`; return the new streams."""
    new = torch.empty_like(streams)
    launch_norm(
        _merge_norm,
        out,
        weight,
        eps,
        fp8,
        y_ptr=y,
        post_ptr=post,
        comb_ptr=comb,
        stream_ptr=streams,
        coefficient_ptr=coefficient,
        new_ptr=new,
        STREAMS=streams.shape[1],
    )
    return new
