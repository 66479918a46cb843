"""Where a weight goes when it is loaded, and in which layout."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.moe.prepare import prepare_experts
from deepinfer_kernels_cuda.quant.matrix import PreparedMatrix, prepare_matrix
from deepinfer_kernels_cuda.values import Matrix

__all__ = ["TABLE_SHARE", "prepare"]

# An Engram table of up to this share of the free memory goes onto the device: what it takes is
# missing for the cache of every request. The released ones, 101 GB each, stay in host memory.
TABLE_SHARE = 0.125


def prepare(matrix: Matrix, device: torch.device, *, kernels: bool) -> Matrix:
    """Return a weight on the device, as kernels or as twins read it.

    Args:
        matrix: `plain`, `fp8_tile`, a stack of `fp4_row` experts, or an Engram table, `fp8_row`:
            that may lie in host memory, page-locked, from where the device reads rows itself.
        kernels: lay it out for kernels; else it stays as stored.
    """
    if matrix.format == "fp8_row":
        return _place_table(matrix, device)
    if not kernels:
        return _moved(matrix, device)
    if matrix.payload.dim() == 3:
        return prepare_experts(matrix, device)
    return prepare_matrix(matrix, device)


def _moved(matrix: Matrix, device: torch.device) -> PreparedMatrix:
    scale = None if matrix.scale is None else matrix.scale.to(device)
    return PreparedMatrix(matrix.payload.to(device), scale, matrix.format, matrix.shape)


def _place_table(matrix: Matrix, device: torch.device) -> PreparedMatrix:
    assert matrix.scale is not None, "an Engram table has scales"
    if device.type != "cuda":
        return _moved(matrix, device)
    size = matrix.payload.nbytes + matrix.scale.nbytes
    if size <= TABLE_SHARE * torch.cuda.mem_get_info(device)[0]:
        return _moved(matrix, device)
    return PreparedMatrix(
        _page_locked(matrix.payload), _page_locked(matrix.scale), matrix.format, matrix.shape
    )


def _page_locked(stored: Tensor) -> Tensor:
    """Return a copy that the device can read; bytes, as not every dtype can be pinned."""
    locked = torch.empty(stored.shape, dtype=torch.uint8, pin_memory=True)
    locked.copy_(stored.view(torch.uint8))
    return locked.view(stored.dtype)
