"""Comparison of a kernel with its twin."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_same_bits", "relative_error"]


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return |result - expected| / |expected| (2-norms, float64); NaN counts as infinite."""
    wide, truth = result.double().cpu(), expected.double().cpu()
    if wide.shape != truth.shape:
        raise AssertionError(f"shapes differ: {list(wide.shape)} and {list(truth.shape)}")
    if not torch.equal(wide.isnan(), truth.isnan()):
        return float("inf")
    difference = (wide - truth).nan_to_num(nan=0.0).norm()
    size = truth.nan_to_num(nan=0.0).norm()
    return float(difference / size) if size > 0 else float(difference)


def assert_same_bits(result: Tensor, expected: Tensor, what: str = "result") -> None:
    """Raise unless two tensors are equal bit for bit; says where the first difference is."""
    assert result.dtype == expected.dtype and result.shape == expected.shape, (
        f"{what}: {result.dtype} {list(result.shape)} and {expected.dtype} {list(expected.shape)}"
    )
    a, b = (t.contiguous().view(torch.uint8).cpu() for t in (result, expected))
    if not torch.equal(a, b):
        place = (a != b).nonzero()[0].tolist()
        count = int((a != b).any(-1).sum())
        raise AssertionError(f"{what}: {count} lines differ; first at byte {place}")
