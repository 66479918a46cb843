"""Linear layer for a weight of any format."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels_cuda.linear.fp8_linear import fp8_linear
from deepinfer_kernels_cuda.linear.plain_linear import plain_linear
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["linear"]


def linear(x: Tensor, weight: Matrix, *, strict: bool = True) -> Tensor:
    """Return `x @ weight^T`, summed in float32 and rounded once: [B, in] -> [B, out] bfloat16.

    Input of an `fp8_tile` weight is rounded to fp8 first. See `fp8_linear` and `plain_linear` for
    shapes, `strict` and errors.

    Source: reference.linear.linear.
    """
    if weight.scale is None:
        return plain_linear(x, weight)
    return fp8_linear(x, weight, strict=strict)
