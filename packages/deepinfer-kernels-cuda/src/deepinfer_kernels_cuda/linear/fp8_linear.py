"""Linear layer with fp8 weights in 32x32 tiles and inputs rounded to fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.linear.blocks import block_product, expand_blocks
from deepinfer_kernels_cuda.linear.many_rows import many_rows_product
from deepinfer_kernels_cuda.quant.activations import round_fp8_wide
from deepinfer_kernels_cuda.quant.matrix import PreparedMatrix
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["EXPAND_ROWS", "check_blocks", "fp8_linear"]

# Rows from which a weight is expanded to bfloat16 once a call.
EXPAND_ROWS = 768


def check_blocks(weight: Matrix, columns: int, device: torch.device) -> PreparedMatrix:
    """Return `weight` if it is a prepared fp8 matrix of this many columns on this device."""
    prepared = isinstance(weight, PreparedMatrix) and weight.layout == "blocks"
    check_value("weight", type(weight).__name__, prepared, "a `prepare_matrix` result (fp8_tile)")
    assert isinstance(weight, PreparedMatrix), "checked above"
    check_value("weight.shape[1]", weight.shape[1], weight.shape[1] == columns, f"{columns}")
    check_tensor("weight.payload", weight.payload, device=device)
    return weight


def fp8_linear(x: Tensor, weight: Matrix, *, strict: bool = True) -> Tensor:
    """Return `x @ weight^T` of rows rounded to fp8, summed in float32, rounded once.

    Args:
        x: [B, in] bfloat16, contiguous; rounded as by `quant.activations.round_fp8`.
        weight: `fp8_tile` [out, in], prepared by `quant.matrix.prepare_matrix`.
        strict: whether a row's bits may not depend on B. False lets many rows go through
            PyTorch's bfloat16 product, on the same exact factors.
    Returns:
        [B, out] bfloat16. Deterministic for a given B. Up to EXPAND_ROWS rows, and in strict form
        always, a row depends on itself alone.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above, or the weight is not
            prepared.
    Source: reference.linear.fp8_linear.
    """
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16)
    prepared = check_blocks(weight, x.shape[1], x.device)
    return wide_product(round_fp8_wide(x), prepared, strict)


def wide_product(x: Tensor, weight: PreparedMatrix, strict: bool) -> Tensor:
    """Return `x @ weight^T`, rounded once, of bfloat16 rows that are not rounded further."""
    if x.shape[0] < EXPAND_ROWS:
        return block_product(x, weight)
    expanded = expand_blocks(weight)
    return many_rows_product(x, expanded, torch.bfloat16) if strict else x @ expanded.T
