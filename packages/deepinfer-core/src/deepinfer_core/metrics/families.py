"""Numbers by name and labels: counters, histograms, and the plain values read off them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

import numpy as np

__all__ = [
    "Counter",
    "Family",
    "FamilyKind",
    "Histogram",
    "HistogramValues",
    "Labels",
    "by_label",
    "counter",
    "gauge",
    "label",
    "plain",
]

Labels = tuple[str, ...]


class FamilyKind(StrEnum):
    """How the values of a family behave."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class HistogramValues:
    """A histogram as plain numbers.

    Attributes:
        buckets: (upper bound, how many values are at most that), bounds ascending; the rest of the
            values is above the last.
        count, total: how many values, and their sum.
    """

    buckets: tuple[tuple[int, int], ...]
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class Family:
    """All values of one name.

    Attributes:
        kind: how they behave.
        help: what they say, with the unit.
        labels: names of the labels, such as ("pool", "state").
        values: values of these labels, in the same order -> number.
    """

    kind: FamilyKind
    help: str
    labels: Labels
    values: Mapping[Labels, int | float | HistogramValues]


class Counter:
    """A number that grows, for each value of its labels."""

    def __init__(self) -> None:
        """Start with nothing counted."""
        self._counts: dict[Labels, int] = {}

    def add(self, num: int = 1, *labels: str) -> None:
        """Count `num` more."""
        self._counts[labels] = self._counts.get(labels, 0) + num

    def values(self) -> dict[Labels, int]:
        """Return a copy of all counts."""
        return dict(self._counts)


class Histogram:
    """How many values fall between powers of two: 0, 1, 2..3, 4..7 and so on, below 2^63."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        """Start empty."""
        self._counts = [0] * 64
        self._total = 0

    def observe(self, value: int) -> None:
        """Add a value; a negative one (two clocks that disagree) counts as 0."""
        if value < 0:
            value = 0
        self._counts[value.bit_length()] += 1
        self._total += value

    def observe_all(self, values: np.ndarray) -> None:
        """Add small values, [n] int64, none negative."""
        for value, num in enumerate(np.bincount(values).tolist()):
            self._counts[value.bit_length()] += num
            self._total += value * num

    def values(self) -> HistogramValues:
        """Return what was seen, buckets as far as there are values."""
        count, buckets = 0, []
        for bits in range(max((i for i, num in enumerate(self._counts) if num), default=-1) + 1):
            count += self._counts[bits]
            buckets.append((2**bits - 1, count))
        return HistogramValues(tuple(buckets), count, self._total)


def plain(histogram: Histogram, text: str) -> Family:
    """Return a histogram without labels."""
    return Family(FamilyKind.HISTOGRAM, text, (), {(): histogram.values()})


def gauge(value: float, text: str) -> Family:
    """Return a number without labels that goes up and down."""
    return Family(FamilyKind.GAUGE, text, (), {(): value})


def counter(value: int, text: str) -> Family:
    """Return a number without labels that only grows."""
    return Family(FamilyKind.COUNTER, text, (), {(): value})


def by_label(histograms: Iterable[tuple[str, Histogram]]) -> dict[Labels, HistogramValues]:
    """Return the values of histograms that have one label."""
    return {(label(value),): histogram.values() for value, histogram in histograms}


def label(value: object) -> str:
    """Return a value as a label: the name of a member of an enumeration, in small letters."""
    return value.name.lower() if isinstance(value, Enum) else str(value)
