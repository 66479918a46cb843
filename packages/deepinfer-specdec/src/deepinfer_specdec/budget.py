"""How many drafts a step verifies: decided on the host, before the step's drafts exist.

A budget is made of records that are two steps old, so the host never waits for the device, and the
number tells nothing about the drafts of this step. Which drafts fill it is chosen on the device
from the current step (`lengths`). Given the number, draft j of a request is chosen by what was
computed before it was drawn; together that is what keeps any policy here lossless under rejection
sampling.

A record belongs to the caller: it is valid for the same request in the same generation only, and
`known` is False otherwise. A request without a record counts as if all its drafts would survive, so
that new requests start at full length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_specdec.cost import CostTable
from deepinfer_specdec.errors import SettingError, VerifyInputError
from deepinfer_specdec.lengths import best_lengths
from deepinfer_specdec.online import OnlineCosts

__all__ = [
    "MIN_GAIN",
    "Budget",
    "DelayedPlanner",
    "FixedPlanner",
    "ThresholdPlanner",
    "best_records",
]

# Full length is left only for a predicted gain above this: a table that says next to nothing must
# not cost tokens.
MIN_GAIN = 0.01
# Measured steps between two readings of the corrected table: it moves by a few percent in as many.
_REFRESH = 32


@dataclass(frozen=True)
class Budget:
    """How many drafts a step verifies.

    Attributes:
        total: drafts of all requests together, at most those available.
        rows: rows of the step, one for each request included, after rounding up to a captured size
            where the planner knows the sizes; 0 without requests.
        is_full: whether every available draft is verified, so that what is accepted is uncensored.
    """

    total: int
    rows: int
    is_full: bool


class _Planner:
    """What all policies share: sizes, the choice on the device, measured steps."""

    def __init__(self, costs: CostTable | None, full_every: int) -> None:
        if full_every < 0:
            raise SettingError(
                f"`full_every` is {full_every}; allowed: 0 (never) or more. 100 verifies all "
                f"drafts in one of 100 steps."
            )
        self._costs = None if costs is None else OnlineCosts(costs)
        self._full_every = full_every
        self._num_calls = 0

    @property
    def costs(self) -> OnlineCosts | None:
        """The table in use with its corrections, or None."""
        return self._costs

    def lengths(self, survival: Tensor, available: Tensor, total: int) -> Tensor:
        """Return the drafts to verify of each request, [R] int32: the best `total` of this step.

        survival [R, g] float32, available [R] int64; on the device, without a wait.
        """
        return best_lengths(survival, available, total)

    def observe(self, rows: int, seconds: float) -> None:
        """Take note of a measured step: rows, and seconds of its whole cycle."""
        if self._costs is not None:
            self._costs.observe(rows, seconds)

    def _is_full_turn(self) -> bool:
        self._num_calls += 1
        return self._full_every > 0 and self._num_calls % self._full_every == 0

    def _sized(self, num_requests: int, total: int, most: int) -> Budget:
        """Return a budget raised to the captured size that `total` needs anyway."""
        if not num_requests:
            return Budget(0, 0, True)
        rows = num_requests + total
        if self._costs is not None:
            rows = self._costs.base.tier(rows)
        total = min(rows - num_requests, most)
        return Budget(total, rows, total == most)


class FixedPlanner(_Planner):
    """Verifies every draft."""

    def __init__(self, costs: CostTable | None = None) -> None:
        """Round rows up to the captured sizes of a table, if one is given."""
        super().__init__(costs, 0)

    def budget(
        self,
        survival: NDArray[np.float32],
        known: NDArray[np.bool_],
        available: NDArray[np.integer],
    ) -> Budget:
        """Return a budget for all drafts.

        Args:
            survival: [R, g] float32, not looked at.
            known: [R] bool, not looked at.
            available: [R] int64, drafts of each request that may be verified.
        """
        _check(survival, known, available)
        most = int(available.sum())
        return self._sized(len(available), most, most)


class ThresholdPlanner(_Planner):
    """Verifies as many drafts as had at least a given survival two steps ago.

    For where there is no cost table. Thresholds from 0.1 to 0.2 are good ones.
    """

    def __init__(
        self, threshold: float = 0.15, costs: CostTable | None = None, *, full_every: int = 100
    ) -> None:
        """Make a planner.

        Args:
            threshold: the least survival that counts, 0 to 1.
            costs: a table whose captured sizes rows are rounded up to; the rounding is filled with
                drafts.
            full_every: every so many calls all drafts are verified, 0 for never.
        Raises:
            SettingError: a value is out of range.
        """
        if not 0 <= threshold <= 1:
            raise SettingError(f"`threshold` is {threshold!r}; allowed: 0 to 1. Try 0.15.")
        super().__init__(costs, full_every)
        self._threshold = np.float32(threshold)

    def budget(
        self,
        survival: NDArray[np.float32],
        known: NDArray[np.bool_],
        available: NDArray[np.integer],
    ) -> Budget:
        """Return a budget from records two steps old.

        Args:
            survival: [R, g] float32, non-increasing in a row.
            known: [R] bool, False where a request has no record; all its drafts are counted.
            available: [R] int64, drafts of each request that may be verified.
        Raises:
            VerifyInputError: shapes do not fit.
        """
        _check(survival, known, available)
        most = int(available.sum())
        if self._is_full_turn():
            return self._sized(len(available), most, most)
        good = (survival >= self._threshold) | ~known[:, None]
        total = int((good & _usable(survival, available)).sum())
        return self._sized(len(available), total, most)


class DelayedPlanner(_Planner):
    """Verifies as many drafts as promise the most tokens per second.

    Of all totals K from none to every draft, the one with the largest

        (R + sum of the K best recorded survivals) / seconds of a step of R + K rows

    There is no early stop: on a stepped curve the best total often stands behind several that are
    worse. Of totals that promise the same the largest is taken, since drafts that cost nothing may
    still pass. Full length is kept unless less promises over 1 % more.
    """

    def __init__(self, costs: CostTable, *, full_every: int = 100) -> None:
        """Make a planner.

        Args:
            costs: of a step, by rows; corrected by what is observed.
            full_every: every so many calls all drafts are verified, 0 for never.
        Raises:
            SettingError: `full_every` is negative.
        """
        super().__init__(costs, full_every)
        self._online = OnlineCosts(costs)
        self._costs = self._online
        self._seconds = np.zeros(0)
        self._num_observed = 0

    def budget(
        self,
        survival: NDArray[np.float32],
        known: NDArray[np.bool_],
        available: NDArray[np.integer],
    ) -> Budget:
        """Return a budget from records two steps old.

        Args:
            survival: [R, g] float32, non-increasing in a row. NaN counts as 0.
            known: [R] bool, False where a request has no record; its drafts count as survival 1.
            available: [R] int64, drafts of each request that may be verified.
        Raises:
            VerifyInputError: shapes do not fit.
        """
        _check(survival, known, available)
        num_requests = len(available)
        most = int(available.sum())
        if self._is_full_turn() or not num_requests:
            return self._sized(num_requests, most, most)
        tokens = best_records(survival, known, available)
        speed = tokens / self._seconds_of(num_requests, most)
        best = most - int(speed[::-1].argmax())
        if speed[best] <= (1 + MIN_GAIN) * speed[most]:
            best = most
        return self._sized(num_requests, best, most)

    def observe(self, rows: int, seconds: float) -> None:
        """Take note of a measured step: rows, and seconds of its whole cycle."""
        self._online.observe(rows, seconds)
        self._num_observed += 1
        if self._num_observed % _REFRESH == 0:
            self._seconds = np.zeros(0)

    def _seconds_of(self, num_requests: int, most: int) -> NDArray[np.float64]:
        """Return the time of steps with 0 to `most` drafts."""
        end = num_requests + most + 1
        if len(self._seconds) < end:
            self._seconds = self._online.table.seconds_at(np.arange(1 << end.bit_length()))
        return self._seconds[num_requests:end]


def best_records(
    survival: NDArray[np.float32], known: NDArray[np.bool_], available: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Return the tokens expected of a step with 0, 1, .. all drafts, the best recorded ones first.

    Args:
        survival: [R, g] float32 records, non-increasing in a row. NaN counts as 0.
        known: [R] bool; where it is False all drafts count as survival 1.
        available: [R], drafts of each request that may be verified.
    Returns:
        [available.sum() + 1] float64, the first being R: one token a request is always made.
    """
    records = np.where(known[:, None], survival, np.float32(1.0))
    chosen = records[_usable(survival, available)]
    np.fmax(chosen, 0.0, out=chosen)
    chosen.sort()
    tokens = np.empty(len(chosen) + 1)
    tokens[0] = len(available)
    tokens[1:] = chosen[::-1]
    total: NDArray[np.float64] = tokens.cumsum()
    return total


def _usable(survival: NDArray[np.float32], available: NDArray[np.integer]) -> NDArray[np.bool_]:
    usable: NDArray[np.bool_] = np.arange(survival.shape[1]) < available[:, None]
    return usable


def _check(
    survival: NDArray[np.float32], known: NDArray[np.bool_], available: NDArray[np.integer]
) -> None:
    if survival.ndim != 2 or not known.shape == available.shape == survival.shape[:1]:
        raise VerifyInputError(
            f"`survival` {survival.shape!r}, `known` {known.shape!r} and `available` "
            f"{available.shape!r} do not fit; they must be [requests, drafts], [requests] and "
            f"[requests]."
        )
