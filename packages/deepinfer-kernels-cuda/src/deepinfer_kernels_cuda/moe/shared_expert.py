"""The expert that every row passes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.kernel_math import as_bf16, round_bf16
from deepinfer_kernels_cuda.linear.fp8_linear import check_blocks, wide_product
from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin
from deepinfer_kernels_cuda.linear.plain_linear import plain_linear
from deepinfer_kernels_cuda.moe.tiles import clamped_product
from deepinfer_kernels_cuda.quant.activations import fp8_groups_wide, round_fp8_wide
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["shared_expert"]

GROUPS_A_PROGRAM = 32


@triton.jit
def _activate_rows(
    gate_ptr,
    up_ptr,
    out_ptr,
    num_groups,
    groups_a_row,
    width,
    limit,
    ROUND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    begin()
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    column = (group % groups_a_row)[:, None] * 32 + tl.arange(0, 32)[None, :]
    place = (group // groups_a_row)[:, None] * width + column
    inside = (group < num_groups)[:, None] & (column < width)
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    value = clamped_product(gate, up, limit)
    if ROUND:
        tl.store(out_ptr + place, fp8_groups_wide(round_bf16(value)), mask=inside)
    else:
        tl.store(out_ptr + place, as_bf16(value), mask=inside)


def shared_expert(
    x: Tensor, w1: Matrix, w3: Matrix, w2: Matrix, *, limit: float, strict: bool = True
) -> Tensor:
    """Return `w2(silu(min(w1 x, limit)) * clip(w3 x, +-limit))`.

    Outputs of products and the activation are rounded to bfloat16, inputs of fp8 weights to fp8
    with a scale for 32 channels; sums are float32.

    Args:
        x: [B, D] bfloat16, contiguous.
        w1, w3: [I, D] of `prepare_matrix`; w2: [D, I]. All `fp8_tile` or all `plain`.
        limit: of the clamps.
        strict: whether a row's bits may not depend on B, as in `linear.fp8_linear`.
    Returns:
        [B, D] bfloat16. Deterministic for a given B. B == 0 launches nothing.
    Raises:
        KernelInputError: a shape, dtype, stride, device or format is not as above.
    Source: reference.moe.shared_expert.
    """
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16)
    formats = (w1.format, w3.format, w2.format)
    same = w1.format == w3.format == w2.format and w1.shape == w3.shape == w2.shape[::-1]
    check_value("w1, w3, w2", (*formats, w1.shape, w3.shape, w2.shape), same, "shapes that fit")
    if w1.scale is None:
        inner = _activated(plain_linear(x, w1), plain_linear(x, w3), limit, rounded=False)
        return plain_linear(inner, w2)
    first, third = (check_blocks(w, x.shape[1], x.device) for w in (w1, w3))
    second = check_blocks(w2, w1.shape[0], x.device)
    operand = round_fp8_wide(x)
    gate, up = (wide_product(operand, w, strict) for w in (first, third))
    return wide_product(_activated(gate, up, limit, rounded=True), second, strict)


def _activated(gate: Tensor, up: Tensor, limit: float, *, rounded: bool) -> Tensor:
    rows, width = gate.shape
    out = torch.empty_like(gate)
    groups_a_row = triton.cdiv(width, 32)
    num_groups = rows * groups_a_row
    if num_groups:
        _activate_rows[(triton.cdiv(num_groups, GROUPS_A_PROGRAM),)](
            gate,
            up,
            out,
            num_groups,
            groups_a_row,
            width,
            float(limit),
            ROUND=rounded,
            GROUPS=GROUPS_A_PROGRAM,
            num_warps=4,
            **OVERLAP,
        )
    return out
