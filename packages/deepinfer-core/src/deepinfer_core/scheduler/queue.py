"""The waiting requests in the order of admission."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from deepinfer_core.scheduler.sequence import Order, Sequence

__all__ = ["WaitingQueue"]


def _order(sequence: Sequence) -> Order:
    return sequence.order


class WaitingQueue:
    """Sequences by priority, then arrival.

    Nobody is overtaken by a later arrival of the same priority, so a preempted sequence, which was
    admitted before everything that waits, comes back to the head of its priority by its arrival.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in order of admission."""
        return iter(self._items)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at its place."""
        insort(self._items, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it is in the queue."""
        index = bisect_left(self._items, sequence.order, key=_order)
        assert self._items[index] is sequence, f"request {sequence.uid} is not waiting"
        del self._items[index]

    def head(self, count: int) -> list[Sequence]:
        """Return the first `count` sequences, fewer when fewer wait."""
        return self._items[:count]
