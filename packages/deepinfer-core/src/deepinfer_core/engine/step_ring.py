"""The ticket of a launched step, the ring of steps that are not settled, and what a worker does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from deepinfer_core.interfaces import Event
from deepinfer_core.plans import Masks, StepPlan, StepResult

__all__ = ["DeviceTimes", "StepPhase", "StepRing", "StepWorker", "WorkerStepState"]


class StepPhase(Enum):
    """Where a launched step is."""

    LAUNCHED = "launched"
    SETTLED = "settled"  # its result is in the books
    RETIRED = "retired"  # its clients were told as well; nothing refers to its buffers any more


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """When a step's parts ran on the device: (begin, end) in ns on the loop's clock.

    Args:
        stalled_ns: time inside `forward` in which it stood still: the masks were not there yet.
    """

    copy_in: tuple[int, int]
    forward: tuple[int, int]
    copy_out: tuple[int, int]
    stalled_ns: int = 0


def no_times() -> DeviceTimes | None:
    """Return None: the device does not tell."""
    return None


@dataclass
class WorkerStepState:
    """What `StepWorker.launch` returns: the plan, the work queued for it, and its events.

    Attributes:
        plan: what was launched; frozen.
        forward_done: behind the step's last work on the forward queue; None until its sampling is
            launched.
        out_done: behind the copy of its results to the host; None as long.
        collect: builds the result; called once `out_done` has passed.
        times: when its parts ran, once `out_done` has passed; None where the device does not tell.
    """

    plan: StepPlan
    forward_done: Event | None
    out_done: Event | None
    collect: Callable[[], StepResult]
    times: Callable[[], DeviceTimes | None] = no_times
    phase: StepPhase = field(default=StepPhase.LAUNCHED)

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for this step alone and return its result.

        An error of its device work is raised here.

        Raises:
            TimeoutError: it was not done after `timeout_s` seconds.
        """
        assert self.out_done is not None, (
            f"sampling of step {self.plan.output.step_seq} was never launched"
        )
        self.out_done.wait(timeout_s)
        return self.collect()


class StepWorker(Protocol):
    """Runs plans on one device, in the order of their launches."""

    def launch(self, plan: StepPlan) -> WorkerStepState:
        """Queue a step and return its ticket.

        With `plan.output.delays_sampling` all but its sampling.
        """

    def launch_sampling(self, ticket: WorkerStepState, masks: Mapping[int, Masks]) -> None:
        """Queue the sampling of a step that delays it; it is the step launched last.

        Args:
            ticket: the step's; its events are set here.
            masks: place in the plan -> what its rows may yield. Other rows may yield any token.
        """

    def scrub(self, blocks: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Queue zeroing of blocks and slots, before any later step."""

    def close(self) -> None:
        """Wait for all work and end what works in the background; later work starts it anew."""


class StepRing:
    """Launched steps in order, oldest first."""

    def __init__(self) -> None:
        """Start with nothing in flight."""
        self._steps: deque[WorkerStepState] = deque()

    def __len__(self) -> int:
        """Return how many steps are unsettled."""
        return len(self._steps)

    def __iter__(self) -> Iterator[WorkerStepState]:
        """Iterate from the oldest."""
        return iter(self._steps)

    def push(self, ticket: WorkerStepState) -> None:
        """Add the step launched last."""
        self._steps.append(ticket)

    def pop(self) -> WorkerStepState:
        """Take the oldest step; its result is to be settled now."""
        ticket = self._steps.popleft()
        ticket.phase = StepPhase.SETTLED
        return ticket

    def clear(self) -> None:
        """Forget all steps; nobody waits for their results any more."""
        self._steps.clear()
