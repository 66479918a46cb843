"""The loop of one rank: while the device runs step N, plan and launch N+1 and settle N-1.

    device forward: |== step N ==================|== step N+1 ================|== N+2
    copy-out:         |N-1 out|                     |N out|
    host:             S  D I V B L  s                S  D I V B L  s

    S  settle N-1, critical part: wait for its results, correct lengths, end what has ended
    D  drain: resources whose fence has passed      I  inbox: messages of other threads
    V  vote: the kind of N+1                        B  build the plan      L  launch it
    s  settle N-1, deferred part: what clients see and the next plan does not need

`depth` says how many steps may be unsettled: 2 is the picture; 1 settles N before it plans N+1 and
keeps only the deferred part for the time N+1 runs; 0 is the serial reference. All of them are this
code, and yield the same tokens.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from deepinfer_core.engine.records import StepRecord, StepRecords
from deepinfer_core.engine.step_ring import StepPhase, StepRing, StepWorker, WorkerStepState
from deepinfer_core.engine.watchdog import Watchdog
from deepinfer_core.errors import StuckStep
from deepinfer_core.metrics import Metrics
from deepinfer_core.plans import StepKind, StepPlan
from deepinfer_core.scheduler.decision import Ballot, decide
from deepinfer_core.scheduler.scheduler import Scheduler
from deepinfer_core.scheduler.settlement import Settlement
from deepinfer_core.types import SequenceUpdate

__all__ = ["StepLoop"]

ResultT = TypeVar("ResultT")

MAX_EMPTY = 10_000


@dataclass(slots=True)
class _Launched:
    """A step in flight and what is known of its times."""

    ticket: WorkerStepState
    record: StepRecord
    settlement: Settlement | None = None


class StepLoop:
    """Plans, launches and settles; owned by one thread, which other threads reach through `post`.

    Attributes:
        records: the last steps and their times.
        metrics: counters of what the loop did.
        watchdog: deadlines.
        watcher: called for each step whose clients were told, in order; None for nobody.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: StepWorker,
        *,
        depth: int = 2,
        clock: Callable[[], int] = time.perf_counter_ns,
        watchdog: Watchdog | None = None,
        vote: Callable[[Ballot], StepKind] | None = None,
    ) -> None:
        """Start with nothing in flight.

        Args:
            scheduler: decides; the loop alone calls it from now on.
            worker: runs steps.
            depth: steps that may be unsettled, 0 to 2.
            clock: ns; deadlines of requests are on it.
            watchdog: None makes one with its defaults.
            vote: decides the kind of a step from this rank's ballot, with others maybe.
        """
        assert 0 <= depth <= 2, f"depth {depth}"
        self.scheduler, self.worker, self.depth = scheduler, worker, depth
        self.records, self.metrics = StepRecords(), Metrics()
        self.watchdog = watchdog or Watchdog()
        self.watcher: Callable[[StepRecord, Settlement], None] | None = None
        self._clock = clock
        self._vote = vote or self._decide_alone
        self._ring = StepRing()
        self._launched: deque[_Launched] = deque()  # unsettled, oldest first: as in the ring
        self._settled: deque[_Launched] = deque()  # their clients were not told yet
        self._inbox: deque[tuple[Future[Any], Callable[[], object]]] = deque()
        self._after_idle = True
        self._last_settled_ns = 0
        self._last_forward = (0, 0)  # number and end of the last settled step, on the device
        self._fault: tuple[int, str] | None = None  # the last step that failed, and how
        self._num_empty = 0  # iterations in a row that had requests and did nothing
        self._dead: StuckStep | None = None

    # Any thread

    def post(self, message: Callable[[], ResultT]) -> Future[ResultT]:
        """Let the loop call `message` before it plans the next step; from any thread.

        Returns:
            What the call returns or raises, once it was made; an error harms nobody else.
        """
        answer: Future[ResultT] = Future()
        self._inbox.append((answer, message))
        return answer

    # The loop's thread

    @property
    def has_work(self) -> bool:
        """Whether `iterate` has something to do or to tell."""
        scheduler = self.scheduler
        return bool(self._inbox or self._settled or scheduler.has_work or not scheduler.idle)

    @property
    def num_unsettled(self) -> int:
        """Steps in flight."""
        return len(self._ring)

    def iterate(self) -> tuple[SequenceUpdate, ...]:
        """Do one iteration; returns what became known of requests, oldest first.

        A device error ends the requests of its step, and of steps launched behind it, each with an
        error; the others go on. Hold Ctrl-C back while it runs (`engine.interrupt`): one that
        strikes inside the books may leave them in disorder.

        Raises:
            StuckStep: a step did not end; the loop is of no use afterwards.
        """
        if self._dead is not None:
            raise self._dead
        updates: list[SequenceUpdate] = []
        try:
            self._iterate(updates)
            if not self.scheduler.has_requests:  # else its last results waited for the next one
                self._wind_down(updates)
        except BaseException as error:  # a fault of ours: what is known is kept
            self._abandon(error, updates)
            raise
        updates += self.scheduler.pop_updates()
        return tuple(updates)

    def flush(self) -> tuple[SequenceUpdate, ...]:
        """Bring the rank to "nothing in flight"; returns what became known of requests.

        No step is planned meanwhile. Afterwards there is no unsettled step, no token in flight and,
        but for transfers under way, no deferred release.
        """
        if self._dead is not None:
            raise self._dead
        updates: list[SequenceUpdate] = []
        try:
            self._wind_down(updates)
        except BaseException as error:
            self._abandon(error, updates)
            raise
        updates += self.scheduler.pop_updates()
        return tuple(updates)

    # One iteration

    def _iterate(self, updates: list[SequenceUpdate]) -> None:
        clock, scheduler = self._clock, self.scheduler
        begin = clock()
        while len(self._ring) >= max(self.depth, 1):
            self._settle_oldest(updates)
        if self.depth == 0:
            self._tell(updates)
        settled = clock()
        masked = self._launch_late_sampling()
        now = masked or settled
        scheduler.drain(now)
        self._scrub(updates)
        drained = clock()
        while self._inbox:
            _answer(*self._inbox.popleft())
        inbox = clock()
        kind = self._vote(scheduler.ballot())
        voted = clock()
        plan = scheduler.plan(kind)
        built = clock()
        if plan is None:
            if self._ring:  # nothing new can run before something is settled
                self._settle_oldest(updates)
            else:
                self._after_idle = True
                self._check_stall()
        else:
            self._num_empty = 0
            record = StepRecord.of(plan, begin)
            record.settled_ns, record.masked_ns, record.drained_ns = settled, masked, drained
            record.inbox_ns, record.voted_ns, record.built_ns = inbox, voted, built
            self._launch(plan, record)
        self._tell(updates)

    def _launch(self, plan: StepPlan, record: StepRecord) -> None:
        ticket, alone = self.worker.launch(plan), not self._ring
        self._ring.push(ticket)
        self._launched.append(_Launched(ticket, record))
        self.records.append(record)
        if alone and plan.output.delays_sampling:
            self.worker.launch_sampling(ticket, self.scheduler.masks(plan))
        record.launched_ns = self._clock()
        record.after_idle, self._after_idle = self._after_idle, False

    def _settle_oldest(self, updates: list[SequenceUpdate]) -> None:
        """Wait for the oldest step and apply its result; an error of its work ends its requests."""
        launched = self._launched[0]
        plan, record = launched.ticket.plan, launched.record
        record.wait_begin_ns = self._clock()
        try:
            result = launched.ticket.result(self.watchdog.timeout_s(plan.output.num_rows))
        except TimeoutError as error:
            raise self.watchdog.stuck(plan, self.records) from error
        except AssertionError:
            raise  # a fault of ours; nobody should go on as if nothing had happened
        except Exception as error:
            self._pop()
            self._tell(updates)
            updates += self.scheduler.fail(plan, self._blame(plan.output.step_seq, error))
            return
        record.wait_end_ns = self._clock()
        self._pop()
        launched.settlement = self.scheduler.settle(plan, result)
        self._settled.append(launched)
        record.settle_end_ns = self._clock()

    def _blame(self, step_seq: int, error: Exception) -> str:
        """Return what befell a step: it failed, or was dropped behind one that did."""
        what = f"{type(error).__name__}: {error}"
        if self._fault is not None and self._fault == (step_seq - 1, what):
            self._fault = (step_seq, what)
            return f"Step {step_seq} was not run: a step before it failed on the device ({what})."
        self._fault = (step_seq, what)
        return f"Step {step_seq} failed on the device ({what})."

    def _pop(self) -> None:
        self._ring.pop()
        self._launched.popleft()

    def _launch_late_sampling(self) -> int:
        """Launch the sampling that waited for the settlement of the step before; the instant."""
        oldest = next(iter(self._ring), None)
        if oldest is None or oldest.out_done is not None:
            return 0
        self.worker.launch_sampling(oldest, self.scheduler.masks(oldest.plan))
        return self._clock()

    def _tell(self, updates: list[SequenceUpdate]) -> None:
        """Do the deferred part of what is settled."""
        while self._settled:
            launched = self._settled[0]
            settlement, record = launched.settlement, launched.record
            assert settlement is not None, f"step {record.step_seq} is not settled"
            record.deferred_begin_ns = self._clock()
            updates += settlement.updates()
            self._settled.popleft()  # told: an error from here on must not tell it again
            settlement.publish()
            record.device = launched.ticket.times()
            launched.ticket.phase = StepPhase.RETIRED
            record.deferred_end_ns = self._clock()
            self._observe(launched, settlement)

    def _observe(self, launched: _Launched, settlement: Settlement) -> None:
        record, plan = launched.record, launched.ticket.plan
        if record.device is not None:
            begin, end = record.device.forward
            forward_ns = end - begin - record.device.stalled_ns
            self.scheduler.observe(
                settlement.step, forward_ns, self._cycle_ns(record) or forward_ns
            )
        self.records.judge(record)
        self.metrics.observe_step(record)
        self.metrics.observe_settled(plan, settlement.result, settlement.survival, settlement.kept)
        begin = max(self._last_settled_ns, record.built_ns)
        self._last_settled_ns = record.wait_end_ns
        self.watchdog.observed((record.wait_end_ns - begin) * 1e-9, plan.output.num_rows)
        host_ns = record.launched_ns - record.begin_ns - self.records.waited_ns(record)
        self.watchdog.host_ran(host_ns * 1e-9)
        if report := self.watchdog.settled(plan, settlement.result):
            warnings.warn(report, RuntimeWarning, stacklevel=2)
        if self.watcher is not None:
            self.watcher(record, settlement)

    def _cycle_ns(self, record: StepRecord) -> int | None:
        """Return the time from the end of the step before to the end of this one, on the device.

        None where there was none just before, or it waited for masks.
        """
        device = record.device
        assert device is not None, "asked of a step whose times are known"
        before, self._last_forward = self._last_forward, (record.step_seq, device.forward[1])
        follows = before[0] == record.step_seq - 1 and not record.after_idle
        return device.forward[1] - before[1] if follows and not device.stalled_ns else None

    def _wind_down(self, updates: list[SequenceUpdate]) -> None:
        """Settle all steps in order, tell their clients, and return every resource."""
        while self._ring:
            self._settle_oldest(updates)
            self._launch_late_sampling()
            self._tell(updates)
        self._tell(updates)
        self.scheduler.drain(self._clock())
        self._scrub(updates)
        self._after_idle = True

    def _abandon(self, error: BaseException, updates: list[SequenceUpdate]) -> None:
        """Leave the books in order: what is known is kept, what is in flight has failed."""
        if isinstance(error, StuckStep):
            self._dead = error
        while self._settled:
            settlement = self._settled.popleft().settlement
            updates += () if settlement is None else settlement.updates()
        in_flight = list(self._ring)
        self._ring.clear()
        self._launched.clear()
        sentence = f"The step was cut off ({type(error).__name__})."
        self.scheduler.abandon(sentence, updates)
        if self._dead is None:
            self._outwait(in_flight)

    def _outwait(self, tickets: list[WorkerStepState]) -> None:
        """Wait for steps whose results nobody wants, so that their buffers are free again."""
        for ticket in tickets:
            with suppress(Exception):  # their requests were told already
                if ticket.out_done is None:
                    self.worker.launch_sampling(ticket, {})
                ticket.result(self.watchdog.timeout_s(ticket.plan.output.num_rows))

    def _check_stall(self) -> None:
        """Fail rather than spin when requests wait for something that cannot happen."""
        scheduler = self.scheduler
        if scheduler.has_requests and not scheduler.waits_for_others:
            self._num_empty += 1
            assert self._num_empty < MAX_EMPTY, (
                f"nothing could be planned {MAX_EMPTY} times in a row: {scheduler.counts()}"
            )

    def _scrub(self, updates: list[SequenceUpdate]) -> None:
        """Zero what requests with non-finite values left behind, and take it back into use.

        Not behind steps in flight: where one of them fails, the device drops what follows.
        """
        if scrub := self.scheduler.scrub():
            while self._ring:
                self._settle_oldest(updates)
                self._launch_late_sampling()
            self.worker.scrub(scrub.blocks, scrub.slots)
            self.scheduler.scrubbed(scrub)

    def _decide_alone(self, ballot: Ballot) -> StepKind:
        return decide(ballot, self.scheduler.limits.prefill_run_max)


def _answer(answer: Future[Any], message: Callable[[], object]) -> None:
    """Call a message for its sender, who may have given up."""
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(message())
    except BaseException as error:
        answer.set_exception(error)
        if not isinstance(error, Exception):  # Ctrl-C is for the loop as well
            raise
