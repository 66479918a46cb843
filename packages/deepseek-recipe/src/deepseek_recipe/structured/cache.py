"""`BoundedCache`: results by key, least recently used out first, each made once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["BoundedCache"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class _Entry(Generic[V]):
    result: Future[V]
    weight: int


class BoundedCache(Generic[K, V]):
    """A mapping bounded by entries and by weight. May be used from several threads.

    A key that several threads ask for at once is made by one of them; the others wait for it. What
    failed is not kept.
    """

    def __init__(self, max_entries: int, max_weight: int) -> None:
        """Take the bounds; an entry that is heavier than `max_weight` is made, but not kept."""
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many entries there are, those in the making included."""
        return len(self._entries)

    @property
    def weight(self) -> int:
        """Sum of the weights of all entries."""
        return self._weight

    def get(self, key: K, weight: int, make: Callable[[], V]) -> V:
        """Return the value of a key, made by `make` unless it is there.

        What `make` raises is raised here, also where another thread called it.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            else:
                mine = _Entry[V](Future(), weight)
                self._entries[key] = mine
                self._weight += weight
                self._shrink()
        if entry is not None:
            return entry.result.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                if self._entries.get(key) is mine:
                    self._drop(key)
            mine.result.set_exception(error)
            raise
        mine.result.set_result(value)
        return value

    def drop(self, key: K) -> None:
        """Forget a key, so that it is made again."""
        with self._lock:
            if key in self._entries:
                self._drop(key)

    def _shrink(self) -> None:
        while self._entries and (
            len(self._entries) > self._max_entries or self._weight > self._max_weight
        ):
            self._drop(next(iter(self._entries)))

    def _drop(self, key: K) -> None:
        self._weight -= self._entries.pop(key).weight
