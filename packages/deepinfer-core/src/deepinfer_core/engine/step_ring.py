"""The ticket of a launched step, and the ring of steps whose results are not settled yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from deepinfer_core.interfaces import Event
from deepinfer_core.types import StepPlan, StepResult

__all__ = ["StepPhase", "StepRing", "WorkerStepState"]


class StepPhase(Enum):
    """Where a launched step is."""

    LAUNCHED = "launched"
    SETTLED = "settled"


@dataclass
class WorkerStepState:
    """What `Worker.launch` returns: the plan, the work queued for it, and its events.

    Attributes:
        plan: what was launched; frozen.
        forward_done: behind the step's last work on the forward queue.
        out_done: behind the copy of its results to the host.
        collect: builds the result; called once `out_done` has passed.
    """

    plan: StepPlan
    forward_done: Event
    out_done: Event
    collect: Callable[[], StepResult]
    phase: StepPhase = field(default=StepPhase.LAUNCHED)

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for this step alone and return its result.

        An error of its device work is raised here.
        """
        self.out_done.wait(timeout_s)
        return self.collect()


class StepRing:
    """Launched steps in order, oldest first."""

    def __init__(self) -> None:
        """Start with nothing in flight."""
        self._steps: deque[WorkerStepState] = deque()

    def __len__(self) -> int:
        """Return how many steps are unsettled."""
        return len(self._steps)

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
