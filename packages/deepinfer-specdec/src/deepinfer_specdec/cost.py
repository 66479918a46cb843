"""What a step costs, by the number of rows that the target computes.

A table is measured on real steps, at every captured size and at some sizes above. Up to the largest
captured size time is a staircase, since a step is padded to the next one; above, a line joins the
measured points.

    seconds |             /        rows      measured sizes, ascending
            |        ____/         seconds   of each, never falling
            |   ____|              graphs    those of `rows` that were captured
            |__|____|____|_ rows

A table made up from nothing would be a policy in disguise, so there is none: without a measured
table an engine verifies every draft.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import overload

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import CostTableError

__all__ = ["CostTable", "monotone"]

_FIELDS = ("rows", "seconds", "graph_rows", "fingerprint")


@dataclass(frozen=True)
class CostTable:
    """Seconds of a whole cycle, draft and sampler included, by rows.

    Attributes:
        rows: at least two sizes, ascending.
        seconds: of each size, above 0 and never falling.
        graph_rows: those of `rows` at which graphs were captured, ascending; empty where steps are
            not padded.
        fingerprint: what was measured: model, checkpoint, quantisation, parallel layout, device,
            list of graphs, number of drafts, under names of the engine's choice.
    Raises:
        CostTableError: a field is not as described.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    graph_rows: tuple[int, ...] = ()
    fingerprint: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is no table."""
        for name, sizes in (("rows", self.rows), ("graph_rows", self.graph_rows)):
            if any(b <= a for a, b in zip((0, *sizes), sizes, strict=False)):
                raise CostTableError(f"`{name}` is {sizes!r}; it must ascend from 1 or more.")
        if len(self.rows) < 2 or len(self.seconds) != len(self.rows):
            raise CostTableError(
                f"A table has {len(self.rows)} sizes in `rows` and {len(self.seconds)} times in "
                f"`seconds`; there must be as many of both, and at least 2. Measure more sizes."
            )
        if not all(math.isfinite(each) and each > 0 for each in self.seconds):
            raise CostTableError(f"`seconds` is {self.seconds!r}; each must be finite and above 0.")
        if any(b < a for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise CostTableError(
                f"`seconds` is {self.seconds!r}; it must never fall. `CostTable.of` repairs that."
            )
        unknown = sorted(set(self.graph_rows) - set(self.rows))
        if unknown:
            raise CostTableError(
                f"`graph_rows` has {unknown!r}, which are not in `rows`. Measure every captured "
                f"size, or leave it out of `graph_rows`."
            )

    @classmethod
    def of(
        cls,
        samples: Mapping[int, Sequence[float]],
        *,
        graph_rows: Sequence[int] = (),
        fingerprint: Mapping[str, str | int] | None = None,
    ) -> CostTable:
        """Make a table of measured steps: the median of each size, then never falling.

        Args:
            samples: rows -> seconds of timed steps of that size, at least one of each.
            graph_rows: the captured sizes among them.
            fingerprint: what was measured.
        Raises:
            CostTableError: a size has no sample, or the result is no table.
        """
        rows = tuple(sorted(samples))
        empty = [size for size in rows if not len(samples[size])]
        if empty:
            raise CostTableError(f"Sizes {empty!r} have no sample. Time each at least once.")
        seconds = monotone(
            [median(samples[size]) for size in rows], [len(samples[size]) for size in rows]
        )
        return cls(rows, seconds, tuple(sorted(graph_rows)), dict(fingerprint or {}))

    @overload
    def seconds_at(self, rows: int) -> float: ...
    @overload
    def seconds_at(self, rows: NDArray[np.integer]) -> NDArray[np.float64]: ...
    def seconds_at(self, rows: int | NDArray[np.integer]) -> float | NDArray[np.float64]:
        """Return the time of a step with a given number of rows, padding paid for.

        Args:
            rows: a number, or an array of any shape.
        Returns:
            Seconds. Below the first size that of the first; beyond the last one, by the slope
            between the last two.
        """
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        if isinstance(rows, int):
            return self._seconds_at(self.tier(rows), slope)
        graphs = np.array((*self.graph_rows, 0))
        # The last entry stands for "no graph".
        padded = np.maximum(rows, graphs[np.searchsorted(graphs[:-1], rows)])
        beyond = np.maximum(padded - self.rows[-1], 0) * slope
        found: NDArray[np.float64] = np.interp(padded, self.rows, self.seconds) + beyond
        return found

    def _seconds_at(self, padded: int, slope: float) -> float:
        """The same of one number, without arrays: a step is observed often."""
        index = bisect_left(self.rows, padded)
        if index == len(self.rows):
            return self.seconds[-1] + (padded - self.rows[-1]) * slope
        if index == 0 or self.rows[index] == padded:
            return self.seconds[index]
        below, above = self.rows[index - 1], self.rows[index]
        rise = (self.seconds[index] - self.seconds[index - 1]) / (above - below)
        return self.seconds[index - 1] + (padded - below) * rise

    def tier(self, rows: int) -> int:
        """Return the rows a step really has: the next captured size, or as many as asked above."""
        index = bisect_left(self.graph_rows, rows)
        return self.graph_rows[index] if index < len(self.graph_rows) else rows

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        content = {name: getattr(self, name) for name in _FIELDS}
        content["fingerprint"] = dict(self.fingerprint)
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, fingerprint: Mapping[str, str | int]) -> CostTable:
        """Read a table and check that it was measured on this engine.

        Args:
            path: the file.
            fingerprint: of the engine in use; the file's must have the same names and values.
        Raises:
            CostTableError: the file cannot be read or is no table, or the fingerprints differ; the
                message names each field that does, with both values.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise CostTableError(f"`{path}` cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise _fault(path, f"is not JSON: {error}") from error
        if not isinstance(content, dict) or set(content) != set(_FIELDS):
            raise _fault(path, f"must be one object with exactly these fields: {_FIELDS}")
        for name in ("rows", "graph_rows", "seconds"):
            allowed = (int, float) if name == "seconds" else (int,)
            items = content[name]
            if not isinstance(items, list) or not all(type(each) in allowed for each in items):
                raise _fault(path, f"has `{name}` {items!r}; it must be a list of numbers")
        if not isinstance(content["fingerprint"], dict):
            raise _fault(path, "has a `fingerprint` that is no object")
        _compare(path, content["fingerprint"], fingerprint)
        try:
            return cls(
                tuple(content["rows"]),
                tuple(map(float, content["seconds"])),
                tuple(content["graph_rows"]),
                content["fingerprint"],
            )
        except (CostTableError, OverflowError) as error:
            raise _fault(path, f"holds no table. {error}") from error


def monotone(values: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """Return the nearest sequence that never falls: neighbours that do are averaged.

    Args:
        values: as measured.
        weights: above 0, the number of measurements behind each.
    Source: pool adjacent violators.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = float(value), float(weight), 1
        while pools and pools[-1][0] > mean:
            other, other_weight, other_count = pools.pop()
            mean = (mean * total + other * other_weight) / (total + other_weight)
            total, count = total + other_weight, count + other_count
        pools.append((mean, total, count))
    return tuple(mean for mean, _, count in pools for _ in range(count))


def _compare(
    path: str | Path, stored: Mapping[str, object], wanted: Mapping[str, str | int]
) -> None:
    differing = [
        f"`{name}` {_shown(stored, name)} there, {_shown(wanted, name)} here"
        for name in sorted({*stored, *wanted})
        if _shown(stored, name) != _shown(wanted, name)
    ]
    if differing:
        raise CostTableError(
            f"`{path}` was measured on another engine: {'; '.join(differing)}. "
            f"Measure again, or leave the table out."
        )


def _shown(fingerprint: Mapping[str, object], name: str) -> str:
    return repr(fingerprint[name]) if name in fingerprint else "absent"


def _fault(path: str | Path, sentence: str) -> CostTableError:
    return CostTableError(f"`{path}` {sentence}. Measure again, or leave the table out.")
