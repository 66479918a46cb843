"""A cost table that follows the steps measured while an engine runs.

A table is measured once, on some mix of contexts; real steps drift from it. Each size keeps the
ratio of measured to tabled time as a moving average, and the corrected table is the product.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from dataclasses import replace

from deepinfer_specdec.cost import CostTable, monotone

__all__ = ["OnlineCosts"]

_WEIGHT = 0.05
# A step that took this many times the predicted time, or this fraction of it, was disturbed.
_OUTLIER = 4.0
_WARN_ERROR = 0.10
_WARN_EVERY = 1000


class OnlineCosts:
    """Corrects a table by measured steps.

    A size that was never measured takes the average ratio of all steps, so that a drift which all
    sizes share does not make the sizes not in use look cheap.
    """

    def __init__(self, table: CostTable) -> None:
        """Start from a table as it was measured."""
        self._base = table
        self._ratios: list[float | None] = [None] * len(table.rows)
        self._counts = [0] * len(table.rows)
        self._shared = 1.0
        self._error = 0.0
        self._since_warning = _WARN_EVERY
        self._corrected: CostTable | None = table

    @property
    def base(self) -> CostTable:
        """The table this started from; the same on all ranks that loaded the same file."""
        return self._base

    @property
    def table(self) -> CostTable:
        """The corrected table, never falling. Made when it is asked for after a new measurement."""
        if self._corrected is None:
            ratios = [self._shared if ratio is None else ratio for ratio in self._ratios]
            seconds = [
                ratio * known for ratio, known in zip(ratios, self._base.seconds, strict=True)
            ]
            repaired = monotone(seconds, [1 + count for count in self._counts])
            self._corrected = replace(self._base, seconds=repaired)
        return self._corrected

    @property
    def error(self) -> float:
        """Moving average of |measured - predicted| / predicted, as a share of 1."""
        return self._error

    def observe(self, rows: int, seconds: float) -> None:
        """Take note of a measured step.

        A time further than 4 x from the prediction corrects nothing, and counts as an error of 1.
        Once in 1000 steps at most, a `RuntimeWarning` says that the average error is above 10 %.

        Args:
            rows: of the step, padding included or not.
            seconds: of the whole cycle. One that is not finite and above 0 is passed over, and one
                of a size outside the table, which says nothing about those in it.
        """
        first, last = self._base.rows[0], self._base.rows[-1]
        inside = rows <= last and (rows >= first or first in self._base.graph_rows)
        if not (math.isfinite(seconds) and seconds > 0 and inside):
            return
        tier = self._base.tier(rows)
        index = min(bisect_left(self._base.rows, tier), len(self._ratios) - 1)
        known = self._base.seconds_at(rows)
        own = self._ratios[index]
        ratio = self._shared if own is None else own
        predicted = known * ratio
        usual = 1 / _OUTLIER <= seconds / predicted <= _OUTLIER
        error = min(abs(seconds - predicted) / predicted, 1.0) if usual else 1.0
        self._error += _WEIGHT * (error - self._error)
        if usual:
            self._ratios[index] = ratio + _WEIGHT * (seconds / known - ratio)
            self._counts[index] += 1
            self._shared += _WEIGHT * (seconds / known - self._shared)
            self._corrected = None
        self._since_warning += 1
        if self._error > _WARN_ERROR and self._since_warning >= _WARN_EVERY:
            self._since_warning = 0
            warnings.warn(
                f"Steps take another time than the cost table says, by {self._error:.0%} on "
                f"average; the last one, of {tier} rows: predicted {predicted * 1e3:.3f} ms, "
                f"measured {seconds * 1e3:.3f} ms. Measure the table again.",
                RuntimeWarning,
                stacklevel=2,
            )
