"""Root-mean-square norm over the last dimension, with or without rounding of the result to fp8."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_number, check_tensor, check_value
from deepinfer_kernels_cuda.kernel_math import as_bf16, round_bf16
from deepinfer_kernels_cuda.quant.activations import fp8_groups

__all__ = [
    "MAX_SIZE",
    "channel_of",
    "check_norm",
    "fp8_like",
    "launch_norm",
    "mean_square",
    "norm_shape",
    "rms_norm",
    "rms_norm_fp8",
    "store_normed",
]

MAX_SIZE = 8192  # channels of a row, which one program holds in registers
PROGRAM_SIZE = 1024  # channels of a piece in all rows of a program: 16 bytes a thread of 4 warps

# A program takes ROWS rows piece by piece, PIECE channels each, as groups of 32 channels:
# [ROWS * PIECE / 32, 32]. Groups are there from the load on, so that the order of a row's sum, and
# with it every bit, is the same with and without rounding to fp8, and wherever the row was made.
#
#     row 0:  piece 0 | piece 1 | ... | piece COUNT - 1 (the last one may be short)


def norm_shape(size: int) -> tuple[int, int, int]:
    """Return (rows of a program, channels of a piece, pieces) for rows of `size` channels.

    From the size alone, never from the number of rows: a row's bits do not depend on it. The piece
    is the one with least padding, and the largest of those.
    """
    pieces = [n for n in (1024, 512, 256, 128, 64, 32) if -(-size // n) <= 16]
    piece = min(pieces, key=lambda n: (-size % n, -n))
    return PROGRAM_SIZE // piece, piece, -(-size // piece)


@triton.jit
def channel_of(ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Return rows of the groups of a program, [groups], and channels of its first piece."""
    group = tl.arange(0, ROWS * PIECE // 32)
    channel = (group % (PIECE // 32))[:, None] * 32 + tl.arange(0, 32)[None, :]
    return group // (PIECE // 32), channel


@triton.jit
def mean_square(squares, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Return the mean of each row for each of its groups, [groups, 1], of sums [groups, 32]."""
    if ROWS == 1:
        return tl.div_rn(tl.sum(tl.sum(squares, axis=1), axis=0), 1.0 * SIZE)
    else:
        GROUPS: tl.constexpr = squares.shape[0]
        total = tl.sum(tl.reshape(tl.sum(squares, axis=1), (ROWS, GROUPS // ROWS)), axis=1)
        mean = tl.broadcast_to(tl.div_rn(total, 1.0 * SIZE)[:, None], (ROWS, GROUPS // ROWS))
        return tl.reshape(mean, (GROUPS,))[:, None]


@triton.jit
def store_normed(
    x,
    row,
    valid,
    channel,
    weight_ptr,
    eps,
    out_ptr,
    payload_ptr,
    scale_ptr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    COUNT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Norm pieces x[0 .. COUNT - 1], bfloat16, zero past SIZE; store them and, if asked, as fp8.

    row, valid: [groups]. channel: [groups, 32], of the first piece.
    """
    weights = ()
    if WEIGHTED:  # read before the sum, beside x: one row is done half a microsecond sooner
        for piece in tl.static_range(COUNT):
            at = channel + piece * PIECE
            weight = tl.load(weight_ptr + at, mask=at < SIZE, other=0.0)
            weights = weights + (weight,)  # type: ignore[assignment]  # noqa: RUF005
    squares = tl.zeros(channel.shape, tl.float32)
    for piece in tl.static_range(COUNT):
        wide = x[piece].to(tl.float32)
        squares += wide * wide
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean_square(squares, SIZE, ROWS) + eps))
    for piece in tl.static_range(COUNT):
        at = channel + piece * PIECE
        inside = valid[:, None] & (at < SIZE)
        normed = x[piece].to(tl.float32) * inverse
        if WEIGHTED:
            normed = normed * weights[piece].to(tl.float32)
        offset = row[:, None] * SIZE + at
        tl.store(out_ptr + offset, as_bf16(normed), mask=inside)
        if FP8:
            payload, exponent = fp8_groups(round_bf16(normed))
            tl.store(payload_ptr + offset, payload, mask=inside)
            group = tl.arange(0, ROWS * PIECE // 32) % (PIECE // 32) + piece * (PIECE // 32)
            kept = valid & (group < SIZE // 32)
            tl.store(scale_ptr + row * (SIZE // 32) + group, exponent.to(tl.uint8), mask=kept)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    payload_ptr,
    scale_ptr,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    COUNT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FP8: tl.constexpr,
):
    row, channel = channel_of(ROWS, PIECE)
    row += tl.program_id(0).to(tl.int64) * ROWS
    valid = row < num_rows
    x = ()
    for piece in tl.static_range(COUNT):
        at = channel + piece * PIECE
        inside = valid[:, None] & (at < SIZE)
        part = tl.load(x_ptr + row[:, None] * SIZE + at, mask=inside, other=0.0)
        x = x + (part,)  # type: ignore[assignment]  # noqa: RUF005
    store_normed(
        x,
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


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return `x * weight / sqrt(mean(x^2) + eps)` over the last dimension.

    Computed in float32 and rounded once.

    Args:
        x: [..., D] bfloat16, contiguous, D up to 8192.
        weight: [D] bfloat16 or float32, or None for 1.
        eps: added to the mean of squares.
    Returns:
        bfloat16 of the shape of x. Deterministic; a row depends on itself alone. D is a
        compile-time size.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.norm.rms_norm.
    """
    _check(x, weight)
    out = torch.empty_like(x)
    launch_norm(_rms_norm, out, weight, eps, x_ptr=x)
    return out


def rms_norm_fp8(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Norm rows and round them to fp8 in the same pass.

    Args:
        x: [..., D] bfloat16, contiguous; D a multiple of 32 up to 8192.
        weight: [D] bfloat16 or float32, or None for 1.
        eps: added to the mean of squares.
    Returns:
        The normed rows, bit for bit those of `rms_norm`; and what `quant.activations.round_fp8`
        makes of them: payload [..., D] float8_e4m3fn and scales [..., D / 32] uint8, UE8M0 bytes.
        Deterministic; a row depends on itself alone. D is a compile-time size.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.norm.rms_norm_fp8.
    """
    _check(x, weight)
    out = torch.empty_like(x)
    payload, scale = fp8_like(out, "x.shape[-1]")
    launch_norm(_rms_norm, out, weight, eps, (payload, scale), x_ptr=x)
    return out, payload, scale


def check_norm(name: str, size: int, weight: Tensor | None, device: torch.device) -> None:
    """Raise `KernelInputError` unless rows of `size` channels, named `name`, can be normed."""
    needs = f"1 to {MAX_SIZE} channels; its twin takes more"
    check_value(name, size, 0 < size <= MAX_SIZE, needs)
    if weight is not None:
        floats = (torch.bfloat16, torch.float32)
        check_tensor("weight", weight, shape=(size,), dtype=floats, device=device)


def fp8_like(out: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return room for payload and scales of normed rows `out`; `name` is what gave their size."""
    *rows, size = out.shape
    check_value(name, size, size % 32 == 0, "a multiple of 32")
    payload = torch.empty(out.shape, dtype=torch.float8_e4m3fn, device=out.device)
    return payload, torch.empty((*rows, size // 32), dtype=torch.uint8, device=out.device)


def launch_norm(
    kernel: Any,
    out: Tensor,
    weight: Tensor | None,
    eps: float,
    fp8: tuple[Tensor, Tensor] | None = None,
    **own: Tensor | int,
) -> None:
    """Launch a kernel that ends in `store_normed`, over rows of `out`.

    Args:
        fp8: payload and scales, where they are asked for.
        own: the kernel's other arguments, by name.
    """
    check_number("eps", eps, 0, whole=False)
    size = out.shape[-1]
    num_rows = out.numel() // size
    if num_rows == 0:
        return
    payload, scale = fp8 or (out, out)
    rows, piece, count = norm_shape(size)
    kernel[(triton.cdiv(num_rows, rows),)](
        weight_ptr=out if weight is None else weight,
        out_ptr=out,
        payload_ptr=payload,
        scale_ptr=scale,
        num_rows=num_rows,
        eps=eps,
        SIZE=size,
        ROWS=rows,
        PIECE=piece,
        COUNT=count,
        WEIGHTED=weight is not None,
        FP8=fp8 is not None,
        num_warps=4,
        **own,
    )


def _check(x: Tensor, weight: Tensor | None) -> None:
    check_tensor("x", x, dtype=torch.bfloat16)
    check_norm("x.shape[-1]", x.shape[-1] if x.dim() else 0, weight, x.device)
