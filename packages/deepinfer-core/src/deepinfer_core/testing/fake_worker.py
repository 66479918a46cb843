"""A device that runs steps when it is told to: a thin face of `FakeModel` for unit tests.

It trusts nothing: see `fake_model`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from deepinfer_core.plans import Masks, SequenceMetadata, StepPlan, StepResult
from deepinfer_core.scheduler import SchedulerLimits, Scrub
from deepinfer_core.testing.fake_model import FakeModel
from deepinfer_core.testing.fake_trim import Confidence

__all__ = ["FakeWorker"]


class FakeWorker:
    """Runs steps in the order of their launch, when told to."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        vocab_size: int = 50,
        accepts: Callable[[int, int], bool] = lambda uid, position: True,
        confidence: Confidence | None = None,
        poison: Callable[[SequenceMetadata], bool] = lambda meta: False,
    ) -> None:
        """Make a worker with an empty cache.

        Args:
            limits: the scheduler's.
            vocab_size: tokens are below this.
            accepts: whether the draft for a position of a request is right.
            confidence: as of `FakeModel`.
            poison: whether a sequence's values are not finite in a step.
        """
        self._accepts, self._poison = accepts, poison
        self.model = FakeModel(
            limits,
            vocab_size=vocab_size,
            accepts=lambda uid, position: self._accepts(uid, position),
            confidence=confidence,
            poison=lambda meta: self._poison(meta),
        )
        self._queue: deque[StepPlan] = deque()
        self._open: StepPlan | None = None  # its forward ran, its sampling waits for masks
        self._masks: dict[int, Mapping[int, Masks]] = {}
        self._results: dict[int, StepResult] = {}

    @property
    def num_rows(self) -> int:
        """Rows run so far."""
        return self.model.num_rows

    def launch(self, plan: StepPlan) -> None:
        """Queue a step; with `delays_sampling` all but its sampling."""
        self._queue.append(plan)
        if not plan.output.delays_sampling:
            self._masks[plan.output.step_seq] = {}

    def launch_sampling(self, plan: StepPlan, masks: Mapping[int, Masks]) -> None:
        """Queue the sampling of a step that delays it."""
        assert plan.output.delays_sampling and plan.output.step_seq not in self._masks, (
            f"sampling of step {plan.output.step_seq} is launched already"
        )
        self._masks[plan.output.step_seq] = masks

    def run_one(self) -> bool:
        """Let the device run the oldest queued step, as far as it is launched.

        Returns:
            False when nothing could be run.
        """
        ran = False
        if self._open is None and self._queue:
            self._open, ran = self._queue.popleft(), True
            self.model.forward(self._open)
        if self._open is not None and self._open.output.step_seq in self._masks:
            step_seq, ran = self._open.output.step_seq, True
            self._open = None
            self._results[step_seq] = self.model.sample(self._masks.pop(step_seq))
        return ran

    def result(self, plan: StepPlan) -> StepResult:
        """Return the result of a launched step, running what is queued before it."""
        while plan.output.step_seq not in self._results:
            assert self.run_one(), f"step {plan.output.step_seq} was never launched"
        return self._results.pop(plan.output.step_seq)

    def scrub(self, scrub: Scrub) -> None:
        """Zero blocks and slots, behind everything launched before."""
        while self.run_one():
            pass
        self.model.scrub(scrub.blocks, scrub.slots)
