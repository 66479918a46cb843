"""Matrix products: plain, fp8-tile and fp4-row weights.

All have one form whose rows do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.cpu.ops.formats import e2m1_values, round_fp8, scale_value, unpack_nibbles
from deepinfer_core.interfaces import Matrix

__all__ = [
    "ROW_TILE",
    "Part",
    "grouped_linear",
    "linear",
    "linear_float32",
    "product",
    "tiles",
    "widen",
]

# A BLAS picks its kernel by the shape of the call, so a row's bits may change with the number of
# rows beside it. In strict form every product is made of calls with exactly this many rows; then
# they do not (tested).
ROW_TILE = 8
TILE = 32


@dataclass(frozen=True)
class Part:
    """Some rows or slots of a matrix, or a copy of it elsewhere; satisfies `interfaces.Matrix`."""

    payload: Tensor
    scale: Tensor | None
    format: str
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: Matrix, change: Callable[[Tensor], Tensor]) -> Part:
        """Apply the same change to payload and scale of a matrix."""
        scale = None if matrix.scale is None else change(matrix.scale)
        return cls(change(matrix.payload), scale, matrix.format, matrix.shape)


def widen(matrix: Matrix) -> Tensor:
    """Return the weight as float32 [..., out, in]."""
    payload, scale = matrix.payload, matrix.scale
    if scale is None:
        return payload.float()
    if matrix.format == "fp4_row":
        values = e2m1_values(unpack_nibbles(payload))
        scaled: Tensor = values.unflatten(-1, (-1, TILE)) * scale_value(scale).unsqueeze(-1)
        return scaled.flatten(-2)
    factors = scale_value(scale).repeat_interleave(TILE, dim=-1)[..., : payload.shape[-1]]
    if matrix.format == "fp8_tile":
        factors = factors.repeat_interleave(TILE, dim=-2)[..., : payload.shape[-2], :]
    return payload.float() * factors


def tiles(count: int, size: int) -> list[slice]:
    """Return the slices that cut `count` rows into pieces of `size`.

    The last one may run past the end.
    """
    return [slice(start, start + size) for start in range(0, count, size)]


def pad_rows(x: Tensor, size: int) -> Tensor:
    """Return x with zero rows added until `size` divides their number."""
    missing = -x.shape[0] % size
    return x if missing == 0 else torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


def product(x: Tensor, weight: Tensor, strict: bool) -> Tensor:
    """Return `x @ weight^T`, float32 [rows, in] and [out, in]."""
    if not strict or x.shape[0] == 0:
        return x @ weight.T
    padded = pad_rows(x, ROW_TILE)
    pieces = [padded[tile] @ weight.T for tile in tiles(x.shape[0], ROW_TILE)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[: x.shape[0]]


def linear_float32(x: Tensor, weight: Matrix, strict: bool) -> Tensor:
    """See `KernelBackend.linear_float32`."""
    return product(x.float(), widen(weight), strict)


def linear(x: Tensor, weight: Matrix, strict: bool, round_input: bool) -> Tensor:
    """See `KernelBackend.linear`; `round_input` is True in release numerics."""
    operand = round_fp8(x) if round_input and weight.scale is not None else x.float()
    return product(operand, widen(weight), strict).to(x.dtype)


def grouped_linear(x: Tensor, weight: Matrix, strict: bool) -> Tensor:
    """See `KernelBackend.grouped_linear`."""
    groups = x.shape[1]
    blocks = widen(weight).unflatten(0, (groups, -1))
    parts = [product(x[:, g].float(), blocks[g], strict) for g in range(groups)]
    return torch.cat(parts, dim=-1).to(x.dtype)
