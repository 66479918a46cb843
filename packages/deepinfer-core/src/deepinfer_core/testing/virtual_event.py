"""Events of the fake device, and counts of what the host does with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deepinfer_core.testing.virtual_clock import VirtualClock

__all__ = ["NEVER", "HostCounts", "VirtualDevice", "VirtualEvent"]

NEVER = 2**62  # an instant that does not come
_NS_PER_S = 10**9


@dataclass(slots=True)
class HostCounts:
    """What the host did from the launch of a step to the next launch.

    Attributes:
        step_seq: the step that was launched.
        waits: calls of `Event.wait`.
        blocked_ns: how long they waited, in all.
        queries: calls of `Event.done`.
        allocations: buffers that its launch, or that of its sampling, had to make or enlarge.
    """

    step_seq: int
    waits: int = 0
    blocked_ns: int = 0
    queries: int = 0
    allocations: int = 0


class VirtualDevice(Protocol):
    """What events need of a device."""

    clock: VirtualClock
    counts: list[HostCounts]

    def catch_up(self) -> None:
        """Run what the clock has passed."""


class VirtualEvent:
    """A point in a queue of the fake device."""

    def __init__(
        self,
        device: VirtualDevice,
        step_seq: int,
        at_ns: int,
        error: Callable[[], Exception | None],
    ) -> None:
        """Make an event of a step that is passed at an instant; `error` is that of its work."""
        self._device, self._step_seq, self._error = device, step_seq, error
        self.at_ns = at_ns

    @property
    def time_ns(self) -> int | None:
        """When the clock passed it; None before that."""
        return self.at_ns if self._device.clock.now_ns() >= self.at_ns else None

    def done(self) -> bool:
        """Whether the clock has passed it."""
        self._device.counts[-1].queries += 1
        self._device.catch_up()
        return self._device.clock.now_ns() >= self.at_ns

    def wait(self, timeout_s: float | None = None) -> None:
        """Move the clock on to it.

        Raises:
            TimeoutError: it was not passed after `timeout_s` seconds, which have gone by.
            AssertionError: it never comes and no timeout was given.
            Exception: the error of the step.
        """
        clock, counts = self._device.clock, self._device.counts[-1]
        counts.waits += 1
        limit = NEVER if timeout_s is None else clock.now_ns() + int(timeout_s * _NS_PER_S)
        assert min(limit, self.at_ns) < NEVER, f"the host waits for step {self._step_seq} forever"
        counts.blocked_ns += clock.wait_until(min(self.at_ns, limit))
        self._device.catch_up()
        if self.at_ns > limit:
            raise TimeoutError(f"Step {self._step_seq} was not done after {timeout_s} s.")
        if (error := self._error()) is not None:
            raise error
