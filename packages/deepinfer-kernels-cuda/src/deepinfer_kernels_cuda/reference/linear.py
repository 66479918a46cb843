"""Twins of `linear`. The dtype of the activations tells what is rounded.

bfloat16: inputs of fp8 weights are rounded to fp8, sums are float32, the result is rounded once.
float32 and float64: nothing is rounded. `strict` changes nothing here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.quant.matrix import stored_rows
from deepinfer_kernels_cuda.reference.quant_activations import round_fp8_wide, scale_value
from deepinfer_kernels_cuda.values import Matrix

__all__ = [
    "embed",
    "fp8_linear",
    "grouped_linear",
    "linear",
    "linear_float32",
    "plain_linear",
    "widen",
]


def widen(matrix: Matrix) -> Tensor:
    """Return a weight of any format and layout as float32 [..., out, in]."""
    payload, scale = matrix.payload, matrix.scale
    rows, columns = matrix.shape
    if getattr(matrix, "layout", "rows") == "blocks":
        assert scale is not None, "weights in blocks have a scale"
        payload = stored_rows(payload)[:rows, :columns]
        scale = scale.transpose(0, 1).flatten(1)
    if scale is None:
        return payload.float()
    if matrix.format == "fp4_row":
        table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=payload.device)
        codes = torch.stack((payload & 15, payload >> 4), -1).flatten(-2).int()
        values = torch.cat((table, -table))[codes]
    else:
        values = payload.float()
    factors = scale_value(scale).repeat_interleave(32, -1)[..., :columns]
    if matrix.format == "fp8_tile":
        factors = factors.repeat_interleave(32, -2)[..., :rows, :]
    return values * factors


def _product(x: Tensor, weight: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) @ weight.to(dtype).transpose(-1, -2)


def linear(x: Tensor, weight: Matrix, *, strict: bool = True) -> Tensor:
    """See `linear.linear.linear`."""
    return plain_linear(x, weight) if weight.scale is None else fp8_linear(x, weight)


def plain_linear(x: Tensor, weight: Matrix) -> Tensor:
    """See `linear.plain_linear.plain_linear`."""
    return _product(x, widen(weight)).to(x.dtype)


def fp8_linear(x: Tensor, weight: Matrix, *, strict: bool = True) -> Tensor:
    """See `linear.fp8_linear.fp8_linear`; also for `fp4_row` weights."""
    operand = round_fp8_wide(x) if x.dtype == torch.bfloat16 else x
    return _product(operand, widen(weight)).to(x.dtype)


def linear_float32(x: Tensor, weight: Matrix) -> Tensor:
    """See `linear.float32_linear.linear_float32`; float64 x gives float64."""
    return _product(x, widen(weight))


def grouped_linear(x: Tensor, weight: Matrix, *, strict: bool = True) -> Tensor:
    """See `linear.grouped_linear.grouped_linear`."""
    blocks = widen(weight).unflatten(0, (x.shape[1], -1))
    return _product(x.transpose(0, 1), blocks).transpose(0, 1).flatten(1).to(x.dtype)


def embed(token_ids: Tensor, table: Matrix, *, dtype: torch.dtype | None = None) -> Tensor:
    """See `linear.embed.embed`; any float dtype."""
    inside = (token_ids >= 0) & (token_ids < table.shape[0])
    rows = table.payload[token_ids.clamp(0, table.shape[0] - 1)]
    return rows.masked_fill(~inside.unsqueeze(-1), 0).to(dtype or rows.dtype)
