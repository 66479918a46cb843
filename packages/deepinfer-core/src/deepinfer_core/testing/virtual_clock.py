"""A clock of host and fake device together, in virtual time.

It stands still unless told otherwise: host work moves it by constants that a test sets, or by the
CPU time that the host's thread really used. Waiting for the device moves it to the device's time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["VirtualClock"]


class VirtualClock:
    """Nanoseconds since the clock was made. Used from the thread that made it."""

    def __init__(self, host_time_ns: Callable[[], int] = lambda: 0) -> None:
        """Start at 0.

        Args:
            host_time_ns: grows with the host's work; what it shows is added to the clock. The
                default never grows, so that `advance` alone counts.
        """
        self._host_time_ns = host_time_ns
        self._offset = -host_time_ns()
        self._stopped_at: int | None = None
        self._thread = threading.get_ident()
        self.waited_ns = 0

    @classmethod
    def measured(cls) -> VirtualClock:
        """Return a clock that runs with the CPU time of the calling thread."""
        return cls(time.thread_time_ns)

    def now_ns(self) -> int:
        """Return the time."""
        assert threading.get_ident() == self._thread, "a virtual clock belongs to one thread"
        if self._stopped_at is not None:
            return self._stopped_at
        return self._host_time_ns() + self._offset

    def advance(self, ns: int) -> None:
        """Let the host work for a time."""
        if ns < 0:
            raise ValueError(f"A clock cannot go back: `ns` is {ns}, it must be at least 0.")
        self._offset += ns
        if self._stopped_at is not None:
            self._stopped_at += ns

    def wait_until(self, at_ns: int) -> int:
        """Move on to an instant; nothing happens when it has passed.

        Returns:
            How long the host waited.
        """
        waited = max(at_ns - self.now_ns(), 0)
        self.advance(waited)
        self.waited_ns += waited
        return waited

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the host time used inside; `advance` and `wait_until` still count."""
        if self._stopped_at is not None:
            yield
            return
        began = self._host_time_ns()
        self._stopped_at = began + self._offset
        try:
            yield
        finally:
            self._offset -= self._host_time_ns() - began
            self._stopped_at = None
