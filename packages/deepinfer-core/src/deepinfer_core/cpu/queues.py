"""Queues of the CPU and the events in them.

Work runs inside `submit`, so that every event has happened when it is made; or, with threads, each
queue has one that runs its work in the background.

Errors are the same in both. `submit` never raises; a queue whose work failed drops what follows,
and so does a queue that waits for an event behind the failure. A wait on any event behind it raises
the error. The first such wait, or `synchronize`, takes the error: from then on the queues accept
work again. What was submitted before stays dropped and its events stay failed, even if the queue
had not come to it: it was meant to run on what the failed work did not make.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from deepinfer_core.errors import DeepInferError, KernelInputError
from deepinfer_core.interfaces import Event

__all__ = ["CpuEvent", "CpuQueue", "Failure", "Takes", "Threads"]

# Longest wait for a thread that is to end: the piece of work it is in has to return first.
_JOIN_SECONDS = 10.0


@dataclass(slots=True)
class Takes:
    """How many errors were taken from the queues of a runtime; the clock of who came first."""

    count: int = 0


@dataclass(slots=True)
class Failure:
    """An error of submitted work; it stops the queues that share it until a wait has taken it."""

    error: BaseException
    takes: Takes
    taken_at: int | None = None

    def stops(self, submitted_at: int) -> bool:
        """Whether what was submitted when so many errors had been taken is dropped."""
        return self.taken_at is None or self.taken_at > submitted_at

    def take(self) -> BaseException:
        """Let the queues go on, and return the error to raise."""
        if self.taken_at is None:
            self.takes.count += 1
            self.taken_at = self.takes.count
        return self.error


class CpuEvent:
    """A point in a queue.

    Attributes:
        failure: set when the point was passed and work before it failed.
        time_ns: `time.perf_counter_ns()` of that moment, None before it.
    """

    __slots__ = ("_gate", "_passed", "failure", "time_ns")

    def __init__(self) -> None:
        """Make an event that has not happened."""
        self.failure: Failure | None = None
        self.time_ns: int | None = None
        self._passed = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def happen(self, failure: Failure | None) -> None:
        """Say that the queue has passed the point (by the queue alone)."""
        self.failure, self.time_ns, self._passed = failure, time.perf_counter_ns(), True
        self._gate.release()

    def done(self) -> bool:
        """Whether the queue has passed the point. Never waits."""
        return self._passed

    def reach(self, timeout_s: float | None = None) -> bool:
        """Block until the queue has passed the point; False after `timeout_s` seconds."""
        if not self._passed:
            timeout = -1.0 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
            if not self._gate.acquire(timeout=timeout):
                return False
            self._gate.release()  # for whoever else waits
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the queue has passed the point; raise the error of work before it.

        Raises:
            TimeoutError: it was not passed after `timeout_s` seconds.
        """
        if not self.reach(timeout_s):
            raise TimeoutError(f"A queue of cpu did not get to an event within {timeout_s:g} s.")
        if self.failure is not None:
            raise self.failure.take()


class _Lane:
    """Runs what a queue is given, in order, and knows what stops it.

    `submitted_at` is the number of errors taken when an item was submitted.
    """

    def __init__(self, device: torch.device, takes: Takes) -> None:
        self.device, self.takes = device, takes
        self._failure: Failure | None = None

    def failure(self, submitted_at: int) -> Failure | None:
        """Return what drops an item that was submitted then."""
        if self._failure is not None and not self._failure.stops(submitted_at):
            self._failure = None
        return self._failure

    def work(self, work: Callable[[], None], submitted_at: int) -> None:
        if self.failure(submitted_at) is not None:
            return
        try:
            work()
            if self.device.type == "cuda":  # whose kernels return before they are done
                torch.cuda.synchronize(self.device)
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        self._failure = Failure(error, self.takes)

    def mark(self, event: CpuEvent, submitted_at: int) -> None:
        event.happen(self.failure(submitted_at))

    def follow(self, event: CpuEvent, submitted_at: int) -> None:
        event.reach()
        failure = event.failure
        if failure is None or self.failure(submitted_at) is not None:
            return
        # Even if a wait has taken the error: what this queue's work would read was never made.
        self._failure = (
            failure if failure.stops(submitted_at) else Failure(failure.error, self.takes)
        )


class _Thread(_Lane):
    """A lane with a thread of its own. It knows nothing of queue and runtime: they can go away."""

    def __init__(self, name: str, device: torch.device, takes: Takes) -> None:
        super().__init__(device, takes)
        self.inbox: SimpleQueue[tuple[Callable[..., None], object, int, int] | None] = SimpleQueue()
        self.process_id = os.getpid()
        self._num_threads = 0
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"deepinfer-{name}", daemon=True)
        self._thread.start()

    def work(self, work: Callable[[], None], submitted_at: int) -> None:
        try:
            super().work(work, submitted_at)
        except BaseException as error:  # nobody is above to see it: it surfaces at a wait too
            self.fail(error)

    def follow(self, event: CpuEvent, submitted_at: int) -> None:
        if not self.closing.is_set():
            super().follow(event, submitted_at)

    def close(self) -> None:
        """Drop what is queued, and let the thread end after the work it is in."""
        self.closing.set()
        self.inbox.put(None)

    def join(self) -> None:
        self._thread.join(_JOIN_SECONDS)

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def _serve(self) -> None:
        while (item := self.inbox.get()) is not None:
            self._handle(*item)
            item = None  # it may hold the last reference to the runtime while this thread sleeps

    def _handle(
        self, action: Callable[..., None], value: object, submitted_at: int, num_threads: int
    ) -> None:
        if self.closing.is_set():
            self.fail(DeepInferError("The queues of cpu were closed before this work ran."))
        # OpenMP keeps the number for each thread; torch tells it to new ones only.
        if num_threads and num_threads != self._num_threads:
            torch.set_num_threads(num_threads)
            self._num_threads = num_threads
        action(value, submitted_at)


class Threads:
    """The threads of a runtime's queues; they end when nothing refers to this any more."""

    def __init__(self) -> None:
        """Start none."""
        self._running: dict[str, _Thread] = {}
        weakref.finalize(self, _end, self._running)  # before the interpreter's end at the latest

    def get(self, name: str, device: torch.device, takes: Takes) -> _Thread:
        """Return the thread of that queue, which may have to be started."""
        thread = self._running.get(name)
        if thread is None or thread.process_id != os.getpid():  # a fork takes no threads along
            thread = self._running[name] = _Thread(name, device, takes)
        return thread

    def close(self) -> None:
        """End the threads: what is queued is dropped, and its events fail."""
        _end(self._running)


def _end(running: dict[str, _Thread]) -> None:
    ending = [thread for thread in running.values() if thread.process_id == os.getpid()]
    running.clear()
    for thread in ending:
        thread.close()
    # The last reference may go in one of them, which the others may wait for.
    if not any(thread.is_current for thread in ending):
        for thread in ending:
            thread.join()


class CpuQueue:
    """Work in order.

    Attributes:
        background: whether its work runs in a thread, which starts with the first work, or in
            `submit`.
    """

    def __init__(self, name: str, device: torch.device, takes: Takes, threads: Threads) -> None:
        """Make a queue without work for tensors on `device`; all three share the last two."""
        self.name, self.background = name, False
        self._device, self._takes, self._threads = device, takes, threads
        self._lane = _Lane(device, takes)

    def submit(self, work: Callable[[], None]) -> None:
        """Run the work, or hand it to the thread; drop it while an error has not been taken.

        An error of the work surfaces at a wait. Without a thread KeyboardInterrupt and its like
        leave at once.
        """
        if self.background:
            thread = self._thread()
            thread.inbox.put((thread.work, work, self._takes.count, torch.get_num_threads()))
        else:
            self._lane.work(work, self._takes.count)

    def record(self) -> CpuEvent:
        """Return an event behind everything submitted so far."""
        event = CpuEvent()
        if self.background:
            thread = self._thread()
            thread.inbox.put((thread.mark, event, self._takes.count, 0))
        else:
            self._lane.mark(event, self._takes.count)
        return event

    def wait_for(self, event: Event) -> None:
        """Let later work wait for the event; drop it if work before the event failed."""
        if self.background:
            thread = self._thread()
            thread.inbox.put((thread.follow, _own(event), self._takes.count, 0))
        else:
            self._lane.follow(_own(event), self._takes.count)

    def _thread(self) -> _Thread:
        return self._threads.get(self.name, self._device, self._takes)


def _own(event: Event) -> CpuEvent:
    if not isinstance(event, CpuEvent):
        raise KernelInputError(
            f"`event` is a {type(event).__name__}; queues of cpu wait for events of cpu only."
        )
    return event
