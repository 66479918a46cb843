"""The state-machine test's world around `Scheduler` alone: each part of a step is an operation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from deepinfer_core.plans import Masks, StepPlan, StepResult
from deepinfer_core.scheduler.settlement import Settlement
from deepinfer_core.testing.fake_model import FakeModel
from deepinfer_core.testing.world import World
from deepinfer_core.testing.world_requests import VOCAB
from deepinfer_core.testing.world_watch import Config, InjectedFault

__all__ = ["StepWorld", "right_drafts"]

MAX_UNSETTLED = 3


def right_drafts(uid: int, position: int) -> bool:
    """Whether a draft is right: most are."""
    return (uid * 31 + position * 7) % 5 > 1


class _Device:
    """Runs steps of a model in order, when told to; some of them fail."""

    def __init__(self, model: FakeModel) -> None:
        """Start with nothing to run."""
        self.failing: set[int] = set()
        self.losing: set[int] = set()  # they run, but their results do not arrive
        self._model = model
        self._queue: deque[StepPlan] = deque()
        self._open: StepPlan | None = None  # its forward ran, its sampling waits for masks
        self._masks: dict[int, Mapping[int, Masks]] = {}
        self._results: dict[int, StepResult | None] = {}

    def launch(self, plan: StepPlan) -> None:
        self._queue.append(plan)
        if not plan.output.delays_sampling:
            self._masks[plan.output.step_seq] = {}

    def launch_sampling(self, plan: StepPlan, masks: Mapping[int, Masks]) -> None:
        assert not self.sampled(plan), "sampling is launched twice"
        self._masks[plan.output.step_seq] = masks

    def sampled(self, plan: StepPlan) -> bool:
        """Whether the sampling of a step, the last one launched, is launched."""
        step = plan.output.step_seq
        return step in self._masks or step in self._results

    def run_one(self) -> bool:
        """Run the oldest step, as far as it is launched."""
        ran = False
        if self._open is None and self._queue:
            plan, ran = self._queue.popleft(), True
            if plan.output.step_seq in self.failing:
                self._model.lose(plan)
                self._results[plan.output.step_seq] = None
                return True
            self._model.forward(plan)
            self._open = plan
        if self._open is not None and self._open.output.step_seq in self._masks:
            step, ran = self._open.output.step_seq, True
            self._open = None
            self._results[step] = self._model.sample(self._masks.pop(step))
        return ran

    def result(self, plan: StepPlan) -> StepResult | None:
        """Return the result of the oldest step not asked for, None when it failed."""
        while plan.output.step_seq not in self._results:
            assert self.run_one(), f"step {plan.output.step_seq} was never launched"
        self._masks.pop(plan.output.step_seq, None)
        result = self._results.pop(plan.output.step_seq)
        return None if plan.output.step_seq in self.losing else result


class StepWorld(World):
    """Scheduler and model, with up to three steps unsettled."""

    def __init__(self, config: Config) -> None:
        """Start with no requests."""
        super().__init__(config)
        self.model = FakeModel(
            self.limits,
            vocab_size=VOCAB,
            accepts=right_drafts,
            confidence=self.confidence,
            poison=lambda meta: meta.uid in self.bad,
        )
        self._device = _Device(self.model)
        self._settlements: deque[Settlement] = deque()
        self._now_ns = 0

    @property
    def now_ns(self) -> int:
        """The time."""
        return self._now_ns

    def advance(self, ns: int) -> None:
        """Let time pass."""
        self._now_ns += ns

    def run(self) -> None:
        """Do one iteration as the engine's loop does it."""
        self.advance(5)
        while len(self.unsettled) >= max(self.config.depth, 1):
            self.settle()
        if self.config.depth == 0:
            self.tell()
        self.sample()
        self.scheduler.drain(self.now_ns)
        self.scrub()
        if not self.plan() and self.unsettled:
            self.settle()
        self.collect()

    def plan(self, a: int = 0, b: int = 0) -> bool:
        """Plan and launch a step; its sampling too unless it has to wait."""
        if len(self.unsettled) >= MAX_UNSETTLED or self._waits_for_masks:
            return False
        before = self.scheduler.counts()
        try:
            plan = self.scheduler.plan()
        except InjectedFault:
            after = self.scheduler.counts()
            assert after.inflight_tokens == before.inflight_tokens, "half a step is booked"
            return False
        if plan is not None:
            self._device.launch(plan)
            self.sample()
        return plan is not None

    @property
    def _waits_for_masks(self) -> bool:
        return bool(self.unsettled) and not self._device.sampled(self.unsettled[-1].plan)

    def sample(self, a: int = 0, b: int = 0) -> None:
        """Launch the sampling that waits, once all steps before are settled."""
        if len(self.unsettled) == 1 and self._waits_for_masks:
            plan = self.unsettled[0].plan
            self._device.launch_sampling(plan, self.scheduler.masks(plan))

    def settle(self, a: int = 0, b: int = 0) -> None:
        """Apply the result of the oldest step; its clients are told later."""
        if not self.unsettled:
            return
        self.sample()
        plan = self.unsettled[0].plan
        result = self._device.result(plan)
        if result is None:
            self.tell()
            self.deliver(self.scheduler.fail(plan, "the device failed"))
            return
        if len(self._settlements) > 1:
            self.tell()
        self._settlements.append(self.scheduler.settle(plan, result))

    def tell(self, a: int = 0, b: int = 0) -> None:
        """Do the deferred part of what is settled."""
        while self._settlements:
            settlement = self._settlements.popleft()
            self.deliver(settlement.updates())
            settlement.publish()

    def collect(self) -> None:
        """Tell clients all that is known."""
        self.tell()
        self.deliver(self.scheduler.pop_updates())

    def device(self, a: int, b: int) -> None:
        """Let the device finish some steps."""
        for _ in range(1 + a % 3):
            self._device.run_one()

    def scrub(self, a: int = 0, b: int = 0) -> None:
        """Zero what holds values that are not finite."""
        if scrub := self.scheduler.scrub():
            while self._device.run_one():
                pass
            if not self._waits_for_masks:  # else it would run behind that step
                self.model.scrub(scrub.blocks, scrub.slots)
                self.scheduler.scrubbed(scrub)

    def flush(self, a: int = 0, b: int = 0) -> None:
        """Bring everything in flight to its end."""
        while self.unsettled:
            self.settle()
            self.sample()
            self.tell()
        self.collect()
        self.scheduler.drain(self.now_ns)
        self.scrub()
        self.collect()

    def fail_step(self, a: int, b: int) -> None:
        """Let the next step to be launched fail, or only its result be lost."""
        faults = self._device.failing if b % 2 else self._device.losing
        faults.add(self.scheduler._step_seq + 1)

    def calm(self) -> None:
        """Take back all that keeps requests from ending by themselves."""
        super().calm()
        self._device.failing.clear()
        self._device.losing.clear()
