"""The scheduler of one rank: `plan()` decides a step, `settle()` applies its result.

An engine's loop, with some steps unsettled at any time or, in the serial loop, none:

    plan = scheduler.plan()                     # None: nothing can run before something happens
    ticket = worker.launch(plan)
    updates = scheduler.settle(plan, ticket.result())      # oldest first
    updates += scheduler.pop_updates()          # requests that ended outside a step
    if scrub := scheduler.scrub():              # after a request whose values were not finite
        worker.scrub(scrub.blocks, scrub.slots)
        scheduler.scrubbed(scrub)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer_core.cache.block_pool import BlockState
from deepinfer_core.errors import DuplicateRequest
from deepinfer_core.scheduler.budget import SchedulerLimits, check_prompt
from deepinfer_core.scheduler.ledger import InflightLedger
from deepinfer_core.scheduler.release import Scrub
from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.selection import Selection
from deepinfer_core.scheduler.sequence import LIVE, Sequence, State
from deepinfer_core.scheduler.settlement import apply_row
from deepinfer_core.scheduler.step import UnsettledStep, build_plan
from deepinfer_core.types import (
    FinishReason,
    Request,
    SequenceMetadata,
    SequenceUpdate,
    StepKind,
    StepPlan,
    StepResult,
)

__all__ = ["Scheduler", "SchedulerCounts"]


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """How many there are of what, for metrics.

    Args:
        waiting: requests without blocks.
        prefilling: requests whose tokens are partly computed.
        running: requests that decode.
        leaving: ended or preempted requests with steps in flight.
        unsettled_steps: launched steps without a settled result.
        inflight_tokens: rows of those steps.
        free_slots: slots that can be taken now.
        preemptions: all so far.
        blocks: pool -> state -> number of blocks.
    """

    waiting: int
    prefilling: int
    running: int
    leaving: int
    unsettled_steps: int
    inflight_tokens: int
    free_slots: int
    preemptions: int
    blocks: dict[str, dict[str, int]]


class Scheduler:
    """Continuous batching over two block pools and a slot pool."""

    def __init__(self, limits: SchedulerLimits) -> None:
        """Start with nothing to do."""
        self.limits = limits
        self._roster = Roster(limits)
        self._ledger = InflightLedger()
        self._steps: deque[UnsettledStep] = deque()
        self._step_seq = 0
        self._prefill_run = 0
        self._preempted: list[int] = []  # not yet told to a worker
        self._outbox: list[SequenceUpdate] = []

    # Requests

    def submit(self, request: Request) -> None:
        """Put a request into the waiting queue.

        Raises:
            DuplicateRequest: a live request has the same client id.
            RequestError: it is empty, too long for the context, or can never fit into the cache.
        """
        if request.client_id in self._roster.by_client:
            raise DuplicateRequest(
                f"Request id {request.client_id!r} is in use. Wait for its end or choose another.",
                param="client_id",
                code="duplicate_request",
            )
        check_prompt(len(request.prompt_token_ids), self.limits)
        self._roster.add(request)

    def abort(self, client_id: str) -> bool:
        """End a request at once; what its unsettled steps yield is thrown away.

        Returns:
            False when no live request has that id. Calling it twice is harmless.
        """
        sequence = self._roster.by_client.get(client_id)
        if sequence is None:
            return False
        self._outbox.append(self._roster.end(sequence, FinishReason.ABORT))
        return True

    def finish(self, uid: int, reason: FinishReason = FinishReason.STOP) -> SequenceUpdate | None:
        """End a request whose settled text is complete, such as by a stop string.

        Returns:
            Its terminal update, which appears nowhere else, or None when it ended before.
        """
        sequence = self._roster.find(uid)
        return None if sequence is None else self._roster.end(sequence, reason)

    def pop_updates(self) -> tuple[SequenceUpdate, ...]:
        """Return terminal updates of requests that ended outside a step, each once."""
        updates = tuple(self._outbox)
        self._outbox.clear()
        return updates

    @property
    def has_work(self) -> bool:
        """Whether a request is live, a step unsettled or an update not fetched."""
        return bool(self._roster.by_client or self._steps or self._outbox)

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all requests so far."""
        return self._roster.num_preemptions

    # Steps

    def plan(self) -> StepPlan | None:
        """Decide the next step and reserve what it needs; the caller launches it.

        Returns:
            None when nothing can run: idle, or everything waits for a settlement or for `scrubbed`.
        """
        self._roster.drain()
        previous = self._steps[-1] if self._steps else None
        while True:
            selection = Selection(self._roster, self._step_seq if previous else 0)
            try:
                kind = self._select(selection)
                plan = self._build(kind, selection, previous) if selection.rows else None
            except BaseException:
                selection.rollback()
                raise
            finally:
                self._outbox.extend(selection.ended)
                self._preempted.extend(selection.preempted)
            if plan is not None:
                self._book(plan, selection)
                return plan
            if not selection.ended:  # else somebody made room by ending: look again
                return None

    def settle(self, plan: StepPlan, result: StepResult) -> tuple[SequenceUpdate, ...]:
        """Apply the result of the oldest unsettled step.

        Returns:
            Updates in the order of the plan's rows, those that say something; then terminal updates
            of requests that ended outside a step.
        """
        assert plan.output.step_seq == result.step_seq, "the result belongs to another step"
        rows = self._close(plan)
        updates: list[SequenceUpdate] = []
        row = 0
        try:
            for row, (sequence, meta) in enumerate(rows):
                update = apply_row(self._roster, sequence, meta, result, row)
                self._roster.retire(sequence)
                if update is not None:
                    updates.append(update)
        except BaseException:  # a fault of ours, or Ctrl-C: what is known is not lost
            failed = f"Step {result.step_seq} was cut off while its results were applied."
            self._outbox += [*updates, *self._fail_rows(rows[row:], failed)]
            raise
        finally:
            self._roster.last_settled = plan.output.step_seq
            self._roster.drain()
        return (*updates, *self.pop_updates())

    def fail(self, plan: StepPlan, error: str) -> tuple[SequenceUpdate, ...]:
        """Settle the oldest unsettled step as failed: each of its live requests ends with `error`.

        For a worker that raised; what the step wrote is unknown, so its blocks are quarantined.
        """
        updates = self._fail_rows(self._close(plan), error)
        self._roster.last_settled = plan.output.step_seq
        self._roster.drain()
        return (*updates, *self.pop_updates())

    def abandon(self, error: str, known: Iterable[SequenceUpdate] = ()) -> None:
        """Settle all unsettled steps as failed, after the loop was left by an exception.

        Args:
            error: what their live requests end with.
            known: updates that could not be handed on; with the others they are fetched later.
        """
        self._outbox += known
        while self._steps:
            self._outbox += self.fail(self._steps[0].plan, error)

    def scrub(self) -> Scrub:
        """Return blocks and slots with non-finite content; false when there are none."""
        return self._roster.releases.quarantined()

    def scrubbed(self, scrub: Scrub) -> None:
        """Take back what the worker has zeroed, or queued to be zeroed before any later step."""
        self._roster.releases.scrubbed(scrub)

    # Books

    def counts(self) -> SchedulerCounts:
        """Return what is where."""
        roster = self._roster
        states = [s.state for s in roster.resident.values()]
        return SchedulerCounts(
            waiting=len(roster.waiting),
            prefilling=states.count(State.PREFILL),
            running=states.count(State.RUNNING),
            leaving=states.count(State.PREEMPTING) + len(roster.leaving),
            unsettled_steps=len(self._steps),
            inflight_tokens=self._ledger.total_inflight_tokens,
            free_slots=roster.slots.num_free,
            preemptions=roster.num_preemptions,
            blocks={
                name: {state.value: pool.count(state) for state in BlockState}
                for name, pool in roster.pools.pools.items()
            },
        )

    def audit(self) -> None:
        """Check all books against one another.

        Raises:
            AssertionError: they disagree; the message says where.
        """
        self._roster.audit()
        booked = self._ledger.inflight()
        sequences = {s for step in self._steps for s in step.sequences}
        counted = {s.owner: s.inflight for s in sequences}
        planned = sum(step.plan.output.num_rows for step in self._steps)
        if (
            booked != counted
            or not planned == sum(booked.values()) == self._ledger.total_inflight_tokens
        ):
            raise AssertionError(
                f"tokens in flight: ledger {booked}, sequences {counted}, steps {planned}"
            )
        idle = [s.uid for s in self._roster.resident.values() if s not in sequences and s.inflight]
        if idle:
            raise AssertionError(f"requests {idle} have tokens in flight but no step")

    # How a step is made

    def _select(self, selection: Selection) -> StepKind:
        """Choose the rows. Prefill goes first, but holds decoding up for a few steps only."""
        decode_first = (
            self._prefill_run >= self.limits.prefill_run_max and selection.num_decode_rows() > 0
        )
        if decode_first:
            selection.decode()
            if selection.rows:
                return StepKind.DECODE
        selection.prefill()
        if selection.rows or decode_first:
            return StepKind.PREFILL
        selection.decode()
        return StepKind.DECODE

    def _build(
        self, kind: StepKind, selection: Selection, previous: UnsettledStep | None
    ) -> StepPlan:
        return build_plan(
            self._step_seq + 1,
            kind,
            selection.rows,
            previous,
            preempted=(*self._preempted, *selection.preempted),
            history_len=self.limits.history_len,
        )

    def _book(self, plan: StepPlan, selection: Selection) -> None:
        """Make the plan a launched step. Nothing here can fail."""
        self._step_seq = plan.output.step_seq
        for row in selection.rows:
            self._roster.book(row, self._step_seq)
            self._ledger.reserve(self._step_seq, row.sequence.owner, row.num_rows)
        self._steps.append(UnsettledStep(plan, tuple(row.sequence for row in selection.rows)))
        self._preempted.clear()
        prefill = plan.output.kind is StepKind.PREFILL
        self._prefill_run = self._prefill_run + 1 if prefill else 0

    # How a result is applied

    def _fail_rows(
        self, rows: Iterable[tuple[Sequence, SequenceMetadata]], error: str
    ) -> list[SequenceUpdate]:
        """End the live sequences of a step whose content is unknown."""
        roster, updates = self._roster, []
        for sequence, _ in rows:
            if sequence.state in LIVE:
                reason, code = FinishReason.ERROR, "device_fault"
                updates.append(roster.end(sequence, reason, error, code=code, bad=True))
            else:
                roster.releases.taint(sequence.owner)
            roster.retire(sequence)
        return updates

    def _close(self, plan: StepPlan) -> list[tuple[Sequence, SequenceMetadata]]:
        """Remove the oldest unsettled step from all books; return its rows."""
        assert self._steps and self._steps[0].plan is plan, (
            "steps are settled in the order of their plans"
        )
        step = self._steps.popleft()
        rows = list(zip(step.sequences, plan.sequences, strict=True))
        for sequence, meta in rows:
            assert sequence.generation == meta.generation, f"request {meta.uid} restarted in flight"
            sequence.inflight -= self._ledger.settle(plan.output.step_seq, sequence.owner)
            sequence.unsettled.popleft()
            sequence.num_unsettled_samples -= meta.samples
        return rows
