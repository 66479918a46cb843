"""The published early-stopping rule, for smooth cost curves.

It is here for simulations and tests. On a stepped curve it stops at the first edge of a plateau and
admits next to nothing; `budget.DelayedPlanner` is what engines use.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.cost import CostTable
from deepinfer_specdec.errors import VerifyInputError

__all__ = ["early_stop_lengths"]


def early_stop_lengths(
    survival: NDArray[np.float32], available: NDArray[np.integer], costs: CostTable
) -> NDArray[np.int32]:
    """Return verify lengths: drafts are admitted from the best on, until speed no longer rises.

    Drafts are ordered as in `lengths`. Each in turn is admitted if with it the expected tokens of
    the step per second are above the best so far; the first that fails ends the walk. This end is
    what makes the rule lossless under rejection sampling: all that the decision about a draft looks
    at stands at or before it in the order, so it was computed before the draft was drawn.

    Args:
        survival: [R, g] float32 of the current step, non-increasing in a row.
        available: [R], drafts of each request that may be verified.
        costs: of a step, by rows.
    Returns:
        [R] int32.
    Raises:
        VerifyInputError: shapes do not fit.
    Source: Algorithm 1 of the published method.
    """
    if survival.ndim != 2 or available.shape != survival.shape[:1]:
        raise VerifyInputError(
            f"`survival` {survival.shape!r} and `available` {available.shape!r} do not fit; they "
            f"must be [requests, drafts] and [requests]."
        )
    num_requests, num_drafts = survival.shape
    lengths = np.zeros(num_requests, dtype=np.int32)
    if not num_requests:
        return lengths
    usable = np.arange(num_drafts)[:, None] < available
    by_draft = np.nan_to_num(survival, nan=0.0).T
    # Draft numbers first, requests within them: the sort is stable.
    order = np.argsort(np.where(usable, -by_draft, 1.0).reshape(-1), kind="stable")
    order = order[: int(usable.sum())]
    seconds = costs.seconds_at(num_requests + np.arange(len(order) + 1))
    tokens = float(num_requests)
    best = tokens / float(seconds[0])
    for count, place in enumerate(order, start=1):
        tokens += float(by_draft.reshape(-1)[place])
        speed = tokens / float(seconds[count])
        if not speed > best:
            break
        best = speed
        lengths[place % num_requests] += 1
    return lengths
