"""Rounding of activations to fp8 with a power-of-two scale for each row and 32 channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor
from deepinfer_kernels_cuda.kernel_math import (
    INVERSE_448,
    as_bf16,
    as_e4m3,
    ceil_ue8m0,
    e4m3_value,
    ue8m0_value,
)
from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin

__all__ = ["fp8_group_exponent", "fp8_groups", "fp8_groups_wide", "round_fp8", "round_fp8_wide"]

GROUP = tl.constexpr(32)
# Groups a program rounds. 128 (8 KB in) leave enough programs for one row, and enough loads in
# flight for many.
GROUPS_A_PROGRAM = 128


@triton.jit
def fp8_group_exponent(groups):
    """Return the scale bytes (int32) of groups along the last axis of float32 [M, 32].

    2^ceil(log2(max(amax, 1e-4) / 448)), by exponent arithmetic; 255 (NaN) where a group holds NaN
    or infinity.
    """
    # Magnitudes compared as integers: a NaN is the largest of them and is not dropped.
    magnitude = groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.maximum(tl.max(magnitude, axis=1), 0x38D1B717)  # the bits of 1e-4
    return ceil_ue8m0(amax.to(tl.float32, bitcast=True) * INVERSE_448)


@triton.jit
def fp8_groups(groups):
    """Return payload (E4M3 [M, 32]) and scale bytes (int32 [M]) of float32 groups [M, 32]."""
    exponent = fp8_group_exponent(groups)
    # The reciprocal of a power of two is exact, and so is the product.
    inverse = tl.where(exponent == 255, float("nan"), ue8m0_value(254 - exponent))
    return as_e4m3(groups * inverse[:, None]), exponent


@triton.jit
def fp8_groups_wide(groups):
    """Return float32 groups [M, 32] as they read back from fp8, bfloat16: no bit is lost."""
    payload, exponent = fp8_groups(groups)
    return as_bf16(e4m3_value(payload) * ue8m0_value(exponent)[:, None])


@triton.jit(do_not_specialize=["num_groups"])
def _round_fp8(
    x_ptr,
    payload_ptr,
    scale_ptr,
    num_groups,
    groups_a_row,
    width,
    WIDE: tl.constexpr,
    EVEN: tl.constexpr,
    GROUPS: tl.constexpr,
):
    begin()
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = (group < num_groups)[:, None]
    channel = tl.arange(0, GROUP)[None, :]
    if EVEN:
        offset = group[:, None] * GROUP + channel
    else:
        column = (group % groups_a_row)[:, None] * GROUP + channel
        offset = (group // groups_a_row)[:, None] * width + column
        inside = inside & (column < width)
    values = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if WIDE:
        tl.store(payload_ptr + offset, fp8_groups_wide(values), mask=inside)
    else:
        payload, exponent = fp8_groups(values)
        tl.store(payload_ptr + offset, payload, mask=inside)
        tl.store(scale_ptr + group, exponent.to(tl.uint8), mask=group < num_groups)


def round_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to fp8 with a scale for each 32 channels.

    The scale of a group is the smallest power of two that brings its largest magnitude (1e-4 at
    least) to 448 or below; values over it are rounded to nearest, ties to even.

    Args:
        x: [B, D] bfloat16, contiguous. The last group of a row is short unless 32 divides D.
    Returns:
        Payload [B, D] float8_e4m3fn, and scales [B, ceil(D / 32)] uint8, UE8M0 bytes: 255 (NaN)
        for a group that holds NaN or infinity. Deterministic; a row depends on itself alone.
    Raises:
        KernelInputError: a shape, dtype or stride is not as above.
    Source: reference.quant_activations.round_fp8.
    """
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16)
    rows, width = x.shape
    payload = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, -(-width // 32)), dtype=torch.uint8, device=x.device)
    _launch(x, payload, scale)
    return payload, scale


def round_fp8_wide(x: Tensor) -> Tensor:
    """Return rows as they read back from `round_fp8`: [B, D] bfloat16 -> [B, D] bfloat16.

    Exact: a payload has 4 significant bits and its scale is a power of two.

    Raises:
        KernelInputError: a shape, dtype or stride is not as above.
    Source: reference.quant_activations.round_fp8_wide.
    """
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16)
    out = torch.empty_like(x)
    _launch(x, out, None)
    return out


def _launch(x: Tensor, payload: Tensor, scale: Tensor | None) -> None:
    rows, width = x.shape
    groups_a_row = -(-width // 32)
    num_groups = rows * groups_a_row
    if num_groups == 0:
        return
    _round_fp8[(triton.cdiv(num_groups, GROUPS_A_PROGRAM),)](
        x,
        payload,
        payload if scale is None else scale,
        num_groups,
        groups_a_row,
        width,
        WIDE=scale is None,
        EVEN=width % 32 == 0,
        GROUPS=GROUPS_A_PROGRAM,
        num_warps=4,
        **OVERLAP,
    )
