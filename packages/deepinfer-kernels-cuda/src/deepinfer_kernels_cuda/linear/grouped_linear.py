"""Attention's first output projection: each group of heads has its own rows of the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.linear.blocks import block_product, expand_blocks
from deepinfer_kernels_cuda.linear.chunks import Cut
from deepinfer_kernels_cuda.linear.fp8_linear import EXPAND_ROWS, check_blocks
from deepinfer_kernels_cuda.linear.many_rows import many_rows_product
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["grouped_linear"]


def grouped_linear(x: Tensor, weight: Matrix, *, strict: bool = True) -> Tensor:
    """Apply block g of a weight's rows to group g of the inputs, which are not rounded.

    Args:
        x: [B, G, in] bfloat16, contiguous.
        weight: [G * out, in]: `fp8_tile`, prepared by `quant.matrix.prepare_matrix`, or `plain`.
        strict: as for `fp8_linear`.
    Returns:
        [B, G * out] bfloat16, summed in float32 and rounded once.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.linear.grouped_linear.
    """
    check_tensor("x", x, shape=(None, None, None), dtype=torch.bfloat16)
    rows, groups, columns = x.shape
    outputs = weight.shape[0]
    whole = groups > 0 and outputs % groups == 0
    check_value("weight.shape[0]", outputs, whole, f"a multiple of {groups} groups")
    if weight.scale is not None:
        prepared = check_blocks(weight, columns, x.device)
        if rows < EXPAND_ROWS and outputs // groups % 16 == 0:
            return block_product(x.flatten(1), prepared, groups)
        payload = expand_blocks(prepared)
    else:
        check_tensor(
            "weight.payload",
            weight.payload,
            shape=(outputs, columns),
            dtype=torch.bfloat16,
            device=x.device,
        )
        payload, strict = weight.payload, True
    blocks = payload.unflatten(0, (groups, -1))
    cut = Cut.of(outputs, columns)
    out = torch.empty((rows, groups, outputs // groups), dtype=x.dtype, device=x.device)
    for group in range(groups):
        if strict:
            out[:, group] = many_rows_product(x[:, group], blocks[group], x.dtype, cut)
        else:
            torch.mm(x[:, group], blocks[group].T, out=out[:, group])
    return out.flatten(1)
