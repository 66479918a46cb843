"""Collapse of the residual streams into one, with or without the norm that follows."""

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

__all__ = ["mhc_collapse", "mhc_collapse_norm", "mhc_collapse_norm_fp8"]


@triton.jit
def _collapse(
    coefficient_ptr,
    stream_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(STREAMS):
        coefficient = tl.load(coefficient_ptr + row * STREAMS + s)
        stream = tl.load(stream_ptr + (row * STREAMS + s) * SIZE + channel, mask=inside, other=0.0)
        total += coefficient * stream.to(tl.float32)
    tl.store(out_ptr + row * SIZE + channel, as_bf16(total), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _collapse_norm(
    coefficient_ptr,
    stream_ptr,
    weight_ptr,
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
    collapsed = ()
    for piece in tl.static_range(COUNT):
        at = channel + piece * PIECE
        inside = valid[:, None] & (at < SIZE)
        total = tl.zeros(channel.shape, tl.float32)
        for s in tl.static_range(STREAMS):
            coefficient = tl.load(coefficient_ptr + row * STREAMS + s, mask=valid, other=0.0)
            offset = (row * STREAMS + s)[:, None] * SIZE + at
            stream = tl.load(stream_ptr + offset, mask=inside, other=0.0)
            total += coefficient[:, None] * stream.to(tl.float32)
        collapsed = collapsed + (as_bf16(total),)  # type: ignore[assignment]  # noqa: RUF005
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


def mhc_collapse(coefficient: Tensor, streams: Tensor) -> Tensor:
    """Return `sum_s coefficient[s] * streams[s]` of every row, added in the order of the streams.

    Args:
        coefficient: [B, S] float32.
        streams: [B, S, D] bfloat16, contiguous.
    Returns:
        [B, D] bfloat16. Deterministic; a row depends on itself alone. S and D are compile-time
        sizes.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.mhc.mhc_collapse.
    """
    rows, count, size = _check(coefficient, streams)
    out = torch.empty((rows, size), dtype=streams.dtype, device=streams.device)
    if rows and size:
        block = min(1024, triton.next_power_of_2(size))
        _collapse[(rows, triton.cdiv(size, block))](
            coefficient, streams, out, SIZE=size, STREAMS=count, BLOCK=block, num_warps=4
        )
    return out


def mhc_collapse_norm(
    coefficient: Tensor, streams: Tensor, weight: Tensor | None, eps: float
) -> Tensor:
    """Return `rms_norm(mhc_collapse(coefficient, streams), weight, eps)` in one pass.

    The same bits; the collapsed stream does not go through memory.

    Args:
        coefficient: [B, S] float32.
        streams: [B, S, D] bfloat16, contiguous, D up to 8192.
        weight: [D] bfloat16 or float32, or None for 1.
        eps: added to the mean of squares.
    Returns:
        [B, D] bfloat16. Deterministic; a row depends on itself alone. S and D are compile-time
        sizes.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.mhc.mhc_collapse_norm.
    """
    out = _check_norm(coefficient, streams, weight)
    _launch_norm(coefficient, streams, weight, eps, out)
    return out


def mhc_collapse_norm_fp8(
    coefficient: Tensor, streams: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `rms_norm_fp8(mhc_collapse(coefficient, streams), weight, eps)` in one pass.

    Arguments and errors as of `mhc_collapse_norm`; 32 divides D.

    Returns:
        Normed rows [B, D] bfloat16, payload [B, D] float8_e4m3fn, scales [B, D / 32] uint8.
    Source: reference.mhc.mhc_collapse_norm_fp8.
    """
    out = _check_norm(coefficient, streams, weight)
    payload, scale = fp8_like(out, "streams.shape[-1]")
    _launch_norm(coefficient, streams, weight, eps, out, (payload, scale))
    return out, payload, scale


def _check(coefficient: Tensor, streams: Tensor) -> tuple[int, int, int]:
    check_tensor("streams", streams, shape=(None, None, None), dtype=torch.bfloat16)
    rows, count, size = streams.shape
    check_tensor(
        "coefficient", coefficient, shape=(rows, count), dtype=torch.float32, device=streams.device
    )
    return rows, count, size


def _check_norm(coefficient: Tensor, streams: Tensor, weight: Tensor | None) -> Tensor:
    """Return room for the normed rows."""
    rows, _, size = _check(coefficient, streams)
    check_norm("streams.shape[-1]", size, weight, streams.device)
    return torch.empty((rows, size), dtype=streams.dtype, device=streams.device)


def _launch_norm(
    coefficient: Tensor,
    streams: Tensor,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> None:
    launch_norm(
        _collapse_norm,
        out,
        weight,
        eps,
        fp8,
        coefficient_ptr=coefficient,
        stream_ptr=streams,
        STREAMS=streams.shape[1],
    )
