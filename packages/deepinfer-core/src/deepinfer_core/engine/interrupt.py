"""Ctrl-C between rounds of the engine, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["undivided"]


class _Hold:
    """A handler of SIGINT that keeps the first one and passes on those after it."""

    def __init__(self, previous: Callable[[int, FrameType | None], object]) -> None:
        """Stand in for `previous`."""
        self.previous = previous
        self.pressed: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        self.pressed.append((number, frame))
        if len(self.pressed) > 1:
            self.previous(number, frame)


@contextmanager
def undivided() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, so that nothing in it is left half done.

    A second one is not held. Inside another such block, it is the outer one that holds. Only the
    main thread gets signals; elsewhere nothing changes.
    """
    previous = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()
    if not callable(previous) or isinstance(previous, _Hold) or not here:
        yield
        return
    hold = _Hold(previous)
    signal.signal(signal.SIGINT, hold)
    completed = False
    try:
        yield
        completed = True
    finally:
        signal.signal(signal.SIGINT, previous)
        # of two presses the second was passed on at once; if it raised, the first has no more to do
        if hold.pressed and (completed or len(hold.pressed) == 1):
            previous(*hold.pressed[0])
