"""Linear layer whose result stays float32: router, compressors and heads."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor
from deepinfer_kernels_cuda.linear.many_rows import plain_product
from deepinfer_kernels_cuda.linear.plain_linear import check_plain
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["linear_float32"]


def linear_float32(x: Tensor, weight: Matrix) -> Tensor:
    """Return `x @ weight^T` of operands widened to float32, not rounded.

    Args:
        x: [B, in] bfloat16 or float32, contiguous.
        weight: `plain` [out, in], bfloat16 or float32. A float32 operand keeps all its bits: such
            products run outside the matrix unit and are slow.
    Returns:
        [B, out] float32. Deterministic; a row depends on itself alone.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.linear.linear_float32.
    """
    check_tensor("x", x, shape=(None, None), dtype=(torch.bfloat16, torch.float32))
    check_plain(weight, x)
    return plain_product(x, weight.payload, torch.float32)
