"""A device in virtual time: three queues, events, and `FakeModel` for what steps compute.

copy_in   |in N|     |in N+1|
forward        |== step N ====|== step N+1 ====|
copy_out                      |out N|          |out N+1|

The times of a step are fixed by its launch. Its model runs when the clock has passed them or
somebody waits, and costs the clock nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from deepinfer_core.engine.step_ring import DeviceTimes, WorkerStepState
from deepinfer_core.plans import Masks, StepPlan, StepResult
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.fake_model import Checks, FakeModel
from deepinfer_core.testing.fake_sampler import Drafter
from deepinfer_core.testing.fake_trim import Confidence
from deepinfer_core.testing.input_ring import InputRing, InputSlot, result_arrays
from deepinfer_core.testing.reference import mix
from deepinfer_core.testing.virtual_clock import VirtualClock
from deepinfer_core.testing.virtual_event import NEVER, HostCounts, VirtualEvent

__all__ = ["FakeDevice"]


@dataclass(eq=False, slots=True)
class _Step:
    """A launched step on the device; spans are (begin, end) in ns."""

    plan: StepPlan
    held: StepPlan  # the plan as it lies in its ring slot
    slot: InputSlot
    copy_in: tuple[int, int]
    forward: tuple[int, int]  # its end is NEVER until sampling is launched
    copy_out: tuple[int, int] = (NEVER, NEVER)
    computed: int = NEVER  # end of what precedes sampling
    masks: tuple[Mapping[int, Masks], Mapping[int, Masks]] = ({}, {})  # host's, ours
    result: StepResult | None = None
    error: Exception | None = None

    @property
    def number(self) -> int:
        """The plan's `step_seq`."""
        return self.plan.output.step_seq


@dataclass(slots=True)
class _Faults:
    """What tests ordered for steps, by number."""

    late: dict[int, int] = field(default_factory=dict)
    failing: dict[int, Exception] = field(default_factory=dict)
    hanging: set[int] = field(default_factory=set)
    uids: set[int] = field(default_factory=set)


class FakeDevice:
    """A `StepWorker` whose device is virtual."""

    def __init__(
        self,
        limits: SchedulerLimits,
        clock: VirtualClock,
        *,
        step_time_ns: int | Callable[[StepPlan], int] = 1_000_000,
        copy_time_ns: int = 10_000,
        sampling_time_ns: int = 0,
        launch_time_ns: int = 0,
        jitter: float = 0.0,
        seed: int = 0,
        depth: int = 2,
        vocab_size: int = 50,
        accepts: Drafter = 1.0,
        confidence: Confidence | None = None,
        checks: Checks = "all",
    ) -> None:
        """Make an idle device.

        Args:
            limits: the scheduler's.
            clock: shared with the host.
            step_time_ns: forward with sampling, or what it is for a plan.
            copy_time_ns: each copy of a step, in and out, and that of masks.
            sampling_time_ns: the end of `step_time_ns` that waits for delayed sampling.
            launch_time_ns: host time of a launch.
            jitter: step times vary by up to this share of themselves, below 1.
            seed: of the jitter.
            depth: steps the loop leaves unsettled; the ring has two slots more.
            vocab_size, accepts, confidence, checks: as of `FakeModel`; `checks="none"` is for
                benchmarks.
        """
        if not 0 <= jitter < 1:
            raise ValueError(f"`jitter` is {jitter}; it must be at least 0 and below 1.")
        self.clock, self.counts = clock, [HostCounts(0)]
        self.ring = InputRing(depth + 2)
        self.history: dict[int, DeviceTimes] = {}
        self._step_time_ns = step_time_ns
        self._copy_ns, self._sampling_ns = copy_time_ns, sampling_time_ns
        self._launch_ns, self._jitter, self._seed = launch_time_ns, jitter, seed
        self._free = {"copy_in": 0, "forward": 0, "copy_out": 0}  # when each queue is idle again
        self._work_ns: dict[int, int] = {}
        self._faults = _Faults()
        self._queue: deque[_Step | Callable[[], None]] = deque()  # forward queue, not run yet
        self._busy: deque[_Step] = deque()  # steps whose ring slot is in use
        self._unsampled: _Step | None = None
        self._fault: AssertionError | None = None
        self.model = FakeModel(
            limits, vocab_size=vocab_size, accepts=accepts, confidence=confidence, checks=checks
        )
        self._set_writable(False)

    # What a worker does

    def launch(self, plan: StepPlan) -> WorkerStepState:
        """Queue a step and return its ticket; with `delays_sampling` all but its sampling."""
        self.clock.advance(self._launch_ns)
        with self.clock.paused():
            assert self._unsampled is None, "the sampling of the step before was not launched"
            self.catch_up()
            self.counts.append(HostCounts(plan.output.step_seq))
            step = self._place(plan)
            ticket = WorkerStepState(
                plan, None, None, lambda: self._collect(step), lambda: self.history[step.number]
            )
            self._unsampled = step
            if not plan.output.delays_sampling:
                self._finish(ticket, {}, self._free["copy_in"])
        return ticket

    def launch_sampling(self, ticket: WorkerStepState, masks: Mapping[int, Masks]) -> None:
        """Queue the sampling of the step launched last."""
        with self.clock.paused():
            assert self._unsampled is not None and self._unsampled.plan is ticket.plan, (
                f"step {ticket.plan.output.step_seq} does not wait for its sampling"
            )
            before = self.ring.num_allocations
            self.ring.reserve("masks", sum(mask.rows.size for mask in masks.values()))
            self.counts[-1].allocations += self.ring.num_allocations - before
            _, copied = self._span("copy_in", self.clock.now_ns(), self._copy_ns)
            self._finish(ticket, masks, copied)

    def scrub(self, blocks: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Queue zeroing of blocks and slots, before any later step; it takes no time."""
        held, named = {pool: tuple(ids) for pool, ids in blocks.items()}, tuple(slots)
        self._queue.append(lambda: self.model.scrub(held, named))
        self.catch_up()

    def close(self) -> None:
        """Wait for all work; raise the error of work that failed."""
        for step in tuple(self._busy):
            self._event(step, step.copy_out[1]).wait()

    # What tests order; for steps that are not launched yet

    def delay_copy_out(self, step_seq: int, ns: int) -> None:
        """Let the copy of a step's results to the host take longer."""
        self._faults.late[step_seq] = ns

    def fail(self, step_seq: int, error: Exception) -> None:
        """Let the device work of a step fail; waiting for it raises the error.

        Its sequences are lost: later rows of the same generation end as BAD_SOURCE.
        """
        self._faults.failing[step_seq] = error

    def hang(self, step_seq: int) -> None:
        """Let a step, and all behind it, never end."""
        self._faults.hanging.add(step_seq)

    def poison(self, uid: int) -> None:
        """Let all values of a request be not finite, in steps that have not run yet."""
        self._faults.uids.add(uid)
        self.model.poison = lambda meta: meta.uid in self._faults.uids

    # What tests and benchmarks read

    def bare_replay_ns(self, step_seqs: Iterable[int]) -> list[int]:
        """Return what each of these steps takes when they run back to back without a host."""
        return [self._work_ns[number] for number in step_seqs]

    def catch_up(self) -> None:
        """Run what the clock has passed, and take back the ring slots of steps that are through."""
        with self.clock.paused():
            now = self.clock.now_ns()
            while self._queue and self._reached(self._queue[0]) <= now:
                if self._fault is not None:
                    raise self._fault  # a device that is out of order stays so
                try:
                    self._run(self._queue[0])
                except AssertionError as fault:
                    self._fault = fault
                    raise
                self._queue.popleft()
            while self._busy and self._busy[0].copy_out[1] <= now:
                self._busy.popleft().slot.release()

    # Inside

    def _span(self, queue: str, earliest: int, ns: int) -> tuple[int, int]:
        """Occupy a queue as soon as it is free."""
        begin = max(earliest, self._free[queue])
        self._free[queue] = min(begin + ns, NEVER)
        return begin, self._free[queue]

    def _place(self, plan: StepPlan) -> _Step:
        """Copy a plan into the ring and find the times of all but its sampling."""
        number, before = plan.output.step_seq, self.ring.num_allocations
        slot, held = self.ring.take(plan)
        self.counts[-1].allocations = self.ring.num_allocations - before
        work = self._step_time_ns(plan) if callable(self._step_time_ns) else self._step_time_ns
        drawn = mix(mix(1, self._seed), number) % 2**20 / 2**19 - 1  # in [-1, 1)
        work = max(work + int(work * self._jitter * drawn), self._sampling_ns)
        self._work_ns[number] = work
        copy_in = self._span("copy_in", self.clock.now_ns(), self._copy_ns)
        hangs = NEVER if number in self._faults.hanging else 0
        begin, end = self._span("forward", copy_in[1], work - self._sampling_ns + hangs)
        step = _Step(plan, held, slot, copy_in, (begin, NEVER), computed=end)
        self._queue.append(step)
        self._busy.append(step)
        return step

    def _finish(self, ticket: WorkerStepState, masks: Mapping[int, Masks], ready: int) -> None:
        """Find the times of a step's sampling and of its copy to the host."""
        step, self._unsampled = self._unsampled, None
        assert step is not None
        step.masks = (
            masks,
            {row: Masks(mask.rows.copy(), mask.forced) for row, mask in masks.items()},
        )
        begin, end = self._span("forward", max(step.computed, ready), self._sampling_ns)
        step.forward = step.forward[0], end
        late = self._faults.late.get(step.number, 0)
        step.copy_out = self._span("copy_out", end, self._copy_ns + late)
        self.history[step.number] = DeviceTimes(
            step.copy_in, step.forward, step.copy_out, begin - step.computed
        )
        ticket.forward_done = self._event(step, end)
        ticket.out_done = self._event(step, step.copy_out[1])

    def _event(self, step: _Step, at_ns: int) -> VirtualEvent:
        return VirtualEvent(self, step.number, at_ns, lambda: step.error)

    @staticmethod
    def _reached(work: _Step | Callable[[], None]) -> int:
        return work.forward[1] if isinstance(work, _Step) else 0

    def _run(self, work: _Step | Callable[[], None]) -> None:
        if isinstance(work, _Step):
            self._run_step(work)
        else:
            with self._forward_queue():
                work()

    def _run_step(self, step: _Step) -> None:
        self.ring.check_frozen(step.plan, step.held)
        given, ours = step.masks
        same = given.keys() == ours.keys()
        assert same and all(np.array_equal(given[row].rows, ours[row].rows) for row in ours), (
            f"masks of step {step.number} changed after their launch"
        )
        with self._forward_queue():
            if (error := self._faults.failing.get(step.number)) is not None:
                step.error = error
                self.model.lose(step.held)
                return
            self.model.forward(step.held)
            step.result = self.model.sample(ours)
        step.slot.results = result_arrays(step.result)

    def _collect(self, step: _Step) -> StepResult:
        assert self.clock.now_ns() >= step.copy_out[1], (
            f"the result of step {step.number} is read before it is on the host"
        )
        self.catch_up()
        assert step.result is not None, f"step {step.number} failed and has no result"
        return step.result

    @contextmanager
    def _forward_queue(self) -> Iterator[None]:
        """Let device state be written: nothing else than work of the forward queue may."""
        self._set_writable(True)
        try:
            yield
        finally:
            self._set_writable(False)

    def _set_writable(self, value: bool) -> None:
        for array in self.model.arrays():
            array.flags.writeable = value
