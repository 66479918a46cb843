"""Which drafts are verified, once it is known how many.

All drafts of a step in one order:

    1. larger survival first
    2. of equal ones the smaller draft number first
    3. of equal ones the smaller request first

and the first ones of it are taken. Whether draft j of request r is among them depends on other
requests and on survival[r, :j + 1] only, which was computed before draft j was drawn. Rule 2 is
what keeps that true: where confidence j + 1 is exactly 1 the survivals of j and j + 1 tie, and an
order that put j + 1 first would let the value of draft j decide whether draft j is verified. Under
rejection sampling such a choice changes the distribution of the text.

Nothing here waits for the device or has a shape that depends on values, so it can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_specdec.errors import VerifyInputError

__all__ = ["best_lengths", "threshold_lengths"]

# Below any survival, so that drafts which are not available come last.
_UNAVAILABLE = -1.0


def best_lengths(survival: Tensor, available: Tensor, total: int | Tensor) -> Tensor:
    """Return how many drafts of each request are among the best `total` ones of the step.

    Args:
        survival: [R, g] float32 from 0 to 1, non-increasing in a row. NaN counts as 0.
        available: [R] int32 or int64, drafts of each request that may be verified, 0 to g.
        total: drafts of all requests together, clipped by the caller to `available.sum()`; a
            number, or a tensor of one int64 on the device, for a captured graph that serves several
            totals. A larger one takes all that is available.
    Returns:
        [R] int32, each at most what is available, the sum being the smaller of `total` and
        `available.sum()`.
    Raises:
        VerifyInputError: shapes do not fit, or survival is not float32.
    """
    num_requests, num_drafts = _check(survival, available)
    # One draft number after the other, requests in order within it: a stable sort then breaks ties
    # as stated above.
    usable = _usable(num_drafts, available).t()
    # The sum makes -0.0 to 0.0, which some sorts take for two values.
    keys = torch.where(usable, survival.t().nan_to_num(nan=0.0) + 0.0, _UNAVAILABLE).reshape(-1)
    order = keys.sort(descending=True, stable=True).indices
    place = torch.arange(len(order), device=order.device)
    taken = torch.zeros_like(usable).reshape(-1).scatter(0, order, place < total)
    return (taken.view(num_drafts, num_requests) & usable).sum(0).to(torch.int32)


def threshold_lengths(survival: Tensor, available: Tensor, threshold: float) -> Tensor:
    """Return how many drafts of each request have at least a given survival.

    Args:
        survival: [R, g] float32 from 0 to 1, non-increasing in a row. NaN counts as 0.
        available: [R] int32 or int64, drafts of each request that may be verified.
        threshold: the least survival that is verified.
    Returns:
        [R] int32, at most what is available. What each request gets depends on its own survival
        alone, so this sum cannot be known before the drafts are.
    Raises:
        VerifyInputError: shapes do not fit, or survival is not float32.
    """
    _, num_drafts = _check(survival, available)
    good = survival.nan_to_num(nan=0.0) >= threshold
    return (good & _usable(num_drafts, available)).sum(1).to(torch.int32)


def _usable(num_drafts: int, available: Tensor) -> Tensor:
    """Return which drafts are available, [R, g] bool."""
    return torch.arange(num_drafts, device=available.device) < available[:, None]


def _check(survival: Tensor, available: Tensor) -> tuple[int, int]:
    if survival.dim() != 2 or survival.dtype != torch.float32:
        raise VerifyInputError(
            f"`survival` is {tuple(survival.shape)!r} {survival.dtype}; it must be [requests, "
            f"drafts] float32. `survival_of` makes it from confidences."
        )
    if available.shape != survival.shape[:1]:
        raise VerifyInputError(
            f"`available` has shape {tuple(available.shape)!r}, but `survival` has "
            f"{survival.shape[0]} requests. Give one number a request."
        )
    return survival.shape[0], survival.shape[1]
