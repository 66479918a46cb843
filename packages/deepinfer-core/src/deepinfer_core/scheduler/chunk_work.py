"""What prefill chunks compute, as a few numbers, and least squares over measurements of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

__all__ = ["ChunkWork", "Sample", "least_squares", "non_negative", "to_columns"]


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """What chunks compute, as the numbers that their time is linear in; a step's is the sum.

    Attributes:
        num_rows: new and replayed rows.
        num_pairs: pairs of a new row and what it looks at, counted twice: 2 * c * x + x * x.
        context: tokens before the first new row.
        num_tail: rows that run the late layers.
    """

    num_rows: int = 0
    num_pairs: int = 0
    context: int = 0
    num_tail: int = 0

    @classmethod
    def of(
        cls, context: int, num_tokens: int, *, replay_rows: int = 0, tail_rows: int = 0
    ) -> ChunkWork:
        """Return the work of one chunk of `num_tokens` new tokens."""
        pairs = (2 * context + num_tokens) * num_tokens
        return cls(num_tokens + replay_rows, pairs, context, tail_rows)

    def __add__(self, other: ChunkWork) -> ChunkWork:
        """Return the work of both."""
        return ChunkWork(
            self.num_rows + other.num_rows,
            self.num_pairs + other.num_pairs,
            self.context + other.context,
            self.num_tail + other.num_tail,
        )

    def columns(self) -> tuple[int, int, int, int, int]:
        """Return what each coefficient of a step is multiplied with, in the order k0 .. kt."""
        return (1, self.num_rows, self.num_pairs, self.context, self.num_tail)


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured step: what it computed, and the time of its forward pass in ns."""

    work: ChunkWork
    time_ns: int


def to_columns(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return columns [n, 5] and times [n], both float64."""
    columns = np.array([sample.work.columns() for sample in samples], dtype=np.float64)
    return columns, np.array([sample.time_ns for sample in samples], dtype=np.float64)


def non_negative(relative: np.ndarray) -> np.ndarray:
    """Return k >= 0 [5] that brings `relative` [n, 5] @ k closest to 1.

    The solution is the plain one over the columns it uses, so with five columns all sets are tried.
    """
    best, smallest = np.zeros(relative.shape[1]), math.inf
    for used in _subsets(relative.shape[1]):
        found = least_squares(relative, used)
        error = float(np.square(relative @ found - 1).sum())
        if (found >= 0).all() and error < smallest:
            best, smallest = found, error
    return best


def _subsets(count: int) -> Iterator[Sequence[int]]:
    for size in range(1, count + 1):
        yield from combinations(range(count), size)


def least_squares(relative: np.ndarray, used: Sequence[int]) -> np.ndarray:
    """Return k [5], 0 outside columns `used`, that brings `relative` [n, 5] @ k closest to 1."""
    columns = relative[:, list(used)]
    sizes = np.abs(columns).max(axis=0)
    sizes[sizes == 0] = 1  # the column of a coefficient that nothing was measured of
    found = np.zeros(relative.shape[1])
    solved = np.linalg.lstsq(columns / sizes, np.ones(len(columns)), rcond=None)[0]
    found[list(used)] = solved / sizes
    return found
