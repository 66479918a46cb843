"""Runs the mask engine's compiler where its recursion has room.

The engine walks from rule to rule by recursion, about 5 kB of stack for each, and a stack that
overflows kills the process. Threads of a server may have 2 MiB, which 400 schemas inside one
another use up, so grammars are built in a thread of its own that has room for as many rules as the
front ends write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["STACK_BYTES", "on_a_deep_stack"]

# Address space, which is memory only as far as it is used. 20,000 rules need about 100 MiB.
STACK_BYTES = 256 * 2**20

_size_lock = threading.Lock()
_Result = TypeVar("_Result")


def on_a_deep_stack(work: Callable[[], _Result]) -> _Result:
    """Return what `work` returns, or raise what it raises, from a thread with a deep stack."""
    call = _Call(work)
    thread = threading.Thread(target=call.run, name="constraint-compiler", daemon=True)
    with _size_lock:  # the size is one for the whole process, and only the next thread wants this
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return call.result()


class _Call(Generic[_Result]):
    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        self._results: list[_Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # raised where it was asked for
            self._error = error

    def result(self) -> _Result:
        if self._error is not None:
            raise self._error
        return self._results[0]
