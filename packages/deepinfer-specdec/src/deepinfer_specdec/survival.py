"""Survival: the chance that a draft and all drafts before it are accepted.

It is the key by which drafts are ordered, on the host and on the device, so both must get the same
bits: the product is made in float32 from left to right, one multiplication a draft. `cumprod` of
torch does not say in which order it multiplies. In bfloat16 products would tie often.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_specdec.errors import VerifyInputError

__all__ = ["survival", "survival_of"]


def survival(confidence: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return the survival of each draft from confidences in an array.

    Args:
        confidence: [R, g] of any float dtype, each from 0 to 1, the chance that a draft is accepted
            where all before it were. NaN counts as 0.
    Returns:
        [R, g] float32, non-increasing in a row; the same bits as `survival_of`.
    Raises:
        VerifyInputError: the array does not have two dimensions.
    """
    _check(confidence.shape)
    chance = confidence.astype(np.float32)
    chance[np.isnan(chance)] = 0.0
    for j in range(1, chance.shape[1]):
        chance[:, j] *= chance[:, j - 1]
    return chance


def survival_of(confidence: Tensor) -> Tensor:
    """Return the survival of each draft from confidences in a tensor, on its device.

    Args:
        confidence: [R, g] of any float dtype, each from 0 to 1. NaN counts as 0.
    Returns:
        [R, g] float32, non-increasing in a row; the same bits as `survival`. Waits for nothing.
    Raises:
        VerifyInputError: the tensor does not have two dimensions.
    """
    _check(confidence.shape)
    chance = confidence.to(torch.float32)
    chance = torch.where(chance.isnan(), torch.zeros_like(chance), chance)
    columns = list(chance.unbind(1))
    for j in range(1, len(columns)):
        columns[j] = columns[j - 1] * columns[j]
    return torch.stack(columns, dim=1) if columns else chance


def _check(shape: tuple[int, ...]) -> None:
    if len(shape) != 2:
        raise VerifyInputError(
            f"`confidence` has shape {tuple(shape)!r}; it must be [requests, drafts]. "
            f"Give a single request one row."
        )
