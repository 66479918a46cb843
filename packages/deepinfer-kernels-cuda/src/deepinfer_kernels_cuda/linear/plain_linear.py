"""Linear layer with bfloat16 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor
from deepinfer_kernels_cuda.linear.many_rows import plain_product
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["plain_linear"]


def plain_linear(x: Tensor, weight: Matrix) -> Tensor:
    """Return `x @ weight^T`, summed in float32 and rounded once.

    Args:
        x: [B, in] bfloat16, contiguous.
        weight: `plain` [out, in], bfloat16 or float32.
    Returns:
        [B, out] bfloat16. Deterministic; a row depends on itself alone.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.linear.plain_linear.
    """
    check_tensor("x", x, shape=(None, None), dtype=torch.bfloat16)
    check_plain(weight, x)
    return plain_product(x, weight.payload, torch.bfloat16)


def check_plain(weight: Matrix, x: Tensor) -> None:
    """Raise `KernelInputError` unless `weight` is a plain matrix for rows like x."""
    check_tensor(
        "weight.payload",
        weight.payload,
        shape=(weight.shape[0], x.shape[1]),
        dtype=(torch.bfloat16, torch.float32),
        device=x.device,
    )
