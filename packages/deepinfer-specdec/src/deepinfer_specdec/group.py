"""One budget for a group of ranks that end each step together.

A step of the group takes as long as that of its fullest rank, so a rank that verifies fewer drafts
than the others wins nothing, and one that verifies more holds all of them up. Each rank therefore
says what it expects of a step of every size (`gains`), all ranks take the same size from what all
said (`agree`), and each fills it with its own drafts (`share`).

Everything here is a pure function of what was exchanged and of the cost table, evaluated by every
rank with the same result. So the table must be the one from the file, which all ranks share, not
one that a rank has corrected by steps of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.budget import MIN_GAIN, Budget, best_records
from deepinfer_specdec.cost import CostTable
from deepinfer_specdec.errors import VerifyInputError

__all__ = ["agree", "gains", "share"]


def gains(
    survival: NDArray[np.float32],
    known: NDArray[np.bool_],
    available: NDArray[np.integer],
    tiers: NDArray[np.integer],
) -> NDArray[np.float64]:
    """Return the tokens that this rank expects of steps of given sizes.

    Args:
        survival: [R, g] float32 records two steps old, non-increasing in a row.
        known: [R] bool, False where a request has no record; its drafts count as survival 1.
        available: [R] int64, drafts of each request that may be verified.
        tiers: [T] rows of a step, ascending; the same on all ranks.
    Returns:
        [T] float64: one token a request and the survivals of the best drafts that fit. All 0
        without requests. At a size too small for the requests alone it is their number.
    """
    tokens = best_records(survival, known, available)
    expected: NDArray[np.float64] = tokens[np.clip(tiers - len(available), 0, len(tokens) - 1)]
    return expected


def agree(
    gains: NDArray[np.float64],
    rows: NDArray[np.integer],
    available: NDArray[np.integer],
    tiers: NDArray[np.integer],
    costs: CostTable,
    *,
    full: bool = False,
) -> int:
    """Return the rows of the group's next step: the size that promises most tokens per second.

    Sizes that promise the same: the larger one. The size at which every rank verifies every draft
    is left only for a promise over 1 % more. Sizes too small for the requests of some rank do not
    count.

    Args:
        gains: [ranks, T] float64, what `gains` returned on each rank.
        rows: [ranks], requests of each rank.
        available: [ranks], drafts of each rank that may be verified.
        tiers: [T] rows of a step, ascending, among them one that holds the largest step; if there
            is none, the answer is the largest step itself.
        costs: the table that all ranks share.
        full: take the size at which every draft is verified; for one of 100 steps, chosen by the
            step's number, so that some records are uncensored.
    Returns:
        The same number on all ranks; 0 where no rank has a request.
    Raises:
        VerifyInputError: shapes do not fit.
    """
    if gains.shape != (len(rows), len(tiers)) or available.shape != rows.shape:
        raise VerifyInputError(
            f"`gains` {gains.shape!r}, `rows` {rows.shape!r}, `available` {available.shape!r} and "
            f"`tiers` {tiers.shape!r} do not fit; they must be [ranks, tiers], [ranks], [ranks] "
            f"and [tiers]."
        )
    fullest = int(rows.max(initial=0))
    if not fullest:
        return 0
    largest = int((rows + available).max())
    last = int(np.searchsorted(tiers, largest))
    if last == len(tiers):
        return largest
    first = last if full else int(np.searchsorted(tiers, fullest))
    speed = gains.sum(axis=0)[first : last + 1] / costs.seconds_at(tiers[first : last + 1])
    best = len(speed) - 1 - int(speed[::-1].argmax())
    if speed[best] <= (1 + MIN_GAIN) * speed[-1]:
        best = len(speed) - 1
    return int(tiers[first + best])


def share(rows: int, num_requests: int, available: NDArray[np.integer]) -> Budget:
    """Return this rank's part of a step of agreed size.

    Args:
        rows: what `agree` returned.
        num_requests: R of this rank.
        available: [R] int64, drafts of each of its requests that may be verified.
    Returns:
        A budget of `rows` rows with as many drafts as fit. A rank without requests has none and
        runs the step all the same.
    """
    most = int(available.sum())
    total = min(max(rows - num_requests, 0), most) if num_requests else 0
    return Budget(total, rows, total == most)
