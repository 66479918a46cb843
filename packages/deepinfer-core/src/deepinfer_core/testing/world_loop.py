"""The state-machine test's world around the engine's `StepLoop` on the fake device."""

from __future__ import annotations

from deepinfer_core.engine.loop import StepLoop
from deepinfer_core.testing.fake_device import FakeDevice
from deepinfer_core.testing.virtual_clock import VirtualClock
from deepinfer_core.testing.world import World
from deepinfer_core.testing.world_requests import VOCAB
from deepinfer_core.testing.world_steps import right_drafts
from deepinfer_core.testing.world_watch import Config, InjectedFault

__all__ = ["LoopWorld"]


class LoopWorld(World):
    """Loop, scheduler and a device in virtual time, with `depth` steps unsettled."""

    def __init__(self, config: Config) -> None:
        """Start with no requests."""
        super().__init__(config)
        self._clock = VirtualClock()
        self._device = FakeDevice(
            self.limits,
            self._clock,
            step_time_ns=20,
            copy_time_ns=3,
            sampling_time_ns=5,
            launch_time_ns=2,
            jitter=0.5,
            depth=2,
            vocab_size=VOCAB,
            accepts=right_drafts,
            confidence=self.confidence,
        )
        self.model = self._device.model
        self.loop = StepLoop(
            self.scheduler, self._device, depth=min(config.depth, 2), clock=self._clock.now_ns
        )

    @property
    def now_ns(self) -> int:
        """The time."""
        return self._clock.now_ns()

    def advance(self, ns: int) -> None:
        """Let time pass."""
        self._clock.advance(ns)

    def run(self) -> None:
        """Do one iteration; a fault of ours in it ends what is in flight."""
        self._clock.advance(1)
        try:
            self.deliver(self.loop.iterate())
        except InjectedFault:
            self.collect()

    def collect(self) -> None:
        """Tell clients all that is known."""
        self.deliver(self.scheduler.pop_updates())

    def flush(self, a: int = 0, b: int = 0) -> None:
        """Bring everything in flight to its end; go on at another depth."""
        self.deliver(self.loop.flush())
        self.loop.depth = b % 3

    def poison(self, a: int, b: int) -> None:
        """Let the values of a request be not finite from now on."""
        super().poison(a, b)
        for uid in self.bad:
            self._device.poison(uid)

    def fail_step(self, a: int, b: int) -> None:
        """Let the next step to be launched fail, or only its results be late."""
        step = self.scheduler._step_seq + 1
        if b % 2:
            self._device.fail(step, RuntimeError("the device failed"))
        else:
            self._device.delay_copy_out(step, a)

    @property
    def has_work(self) -> bool:
        """Whether an iteration has something to do."""
        return self.loop.has_work
