"""The scheduler of one rank: `plan()` decides a step, `settle()` applies its result.

An engine's loop, with some steps unsettled at any time or, in the serial loop, none:

    settlement = scheduler.settle(plan, ticket.result())   # oldest step first
    scheduler.drain(now_ns)                     # resources come back, deadlines pass
    plan = scheduler.plan()                     # None: nothing can run before something happens
    ticket = worker.launch(plan)
    updates = settlement.finish()               # what clients see and the next plan does not need
    updates += scheduler.pop_updates()          # requests that ended outside a step
    if scrub := scheduler.scrub():              # after values that were not finite
        worker.scrub(scrub.blocks, scrub.slots)
        scheduler.scrubbed(scrub)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from deepinfer_core.cache.block_pool import PoolExhausted
from deepinfer_core.errors import DuplicateRequest
from deepinfer_core.interfaces import VerifyPlanner
from deepinfer_core.plans import Masks, Phase, StepKind, StepPlan, StepResult, StepRows
from deepinfer_core.scheduler.budget import SchedulerLimits, check_prompt
from deepinfer_core.scheduler.chunks import ChunkBudget
from deepinfer_core.scheduler.constraints import Window, masks_of
from deepinfer_core.scheduler.cost_model import CostModel, OnlineCostModel
from deepinfer_core.scheduler.counts import SchedulerCounts, counts_of
from deepinfer_core.scheduler.decision import Ballot, decide
from deepinfer_core.scheduler.lanes import CONSTRAINED
from deepinfer_core.scheduler.ledger import InflightLedger
from deepinfer_core.scheduler.release import Scrub, cannot_revoke
from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.selection import Selection
from deepinfer_core.scheduler.sequence import LIVE, Sequence, State
from deepinfer_core.scheduler.settlement import Settlement, settle_rows
from deepinfer_core.scheduler.step import UnsettledStep, decode_step, prefill_step
from deepinfer_core.scheduler.totals import Totals
from deepinfer_core.types import FinishReason, Request, SequenceUpdate

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching over block pools and a slot pool."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cost_model: CostModel | None = None,
        revoke: Callable[[int], bool] = cannot_revoke,
        planner: VerifyPlanner | None = None,
    ) -> None:
        """Start with nothing to do.

        Args:
            limits: what may be used.
            cost_model: predicts prefill steps; with `limits.step_budget_ns` it sizes chunks, and
                `observe` corrects it.
            revoke: shuts the peer of an overdue transfer ticket out; whether that worked.
            planner: says how many drafts a step verifies; None verifies all.
        """
        self.limits = limits
        self.paused = False
        """While set, `plan` returns None; steps in flight can be settled."""
        self._roster = Roster(limits)
        self._ledger = InflightLedger(self._roster.lanes.inflight)
        self._steps: deque[UnsettledStep] = deque()
        self._step_seq = 0
        self._prefill_run = 0
        self._preempted: list[int] = []  # not yet told to a worker
        self._outbox: list[SequenceUpdate] = []
        self._untold: list[Settlement] = []  # of the last steps; clients may not know of them
        self._revoke, self._planner = revoke, planner
        self._cost = None if cost_model is None else OnlineCostModel(cost_model)
        self._budget: ChunkBudget | None = None  # of the step that is being built

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
        if self._roster.is_known(request.uid):
            raise DuplicateRequest(
                f"Request uid {request.uid} is in use. Give every request its own.", param="uid"
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
        if sequence is None:
            return None
        for settlement in self._untold:
            settlement.finished.add(uid)
        return self._roster.end(sequence, reason)

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
    def has_requests(self) -> bool:
        """Whether a request is live."""
        return bool(self._roster.by_client)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and nothing can be planned."""
        roster = self._roster
        waits = bool(roster.by_client) and not self.paused
        return not (waits or self._steps or len(roster.releases) or len(roster.releases.tickets))

    @property
    def waits_for_others(self) -> bool:
        """Whether somebody else has to act first: to resume, or to end a transfer."""
        return self.paused or len(self._roster.releases.tickets) > 0

    @property
    def totals(self) -> Totals:
        """What was counted since the start."""
        return self._roster.totals

    # Transfers

    def open_ticket(self, client_id: str, lease_end_ns: int) -> int | None:
        """Note that a transfer touches what a request holds on the device; None if it holds none.

        Nothing of it is freed before `complete_ticket`, or before the lease ends and the peer was
        shut out; if it cannot be, the resources are quarantined.
        """
        sequence = self._roster.by_client.get(client_id)
        if sequence is None or sequence.slot is None:
            return None
        return self._roster.releases.tickets.open(sequence.owner, lease_end_ns)

    def complete_ticket(self, ticket: int) -> None:
        """Note the end of a transfer; an unknown ticket is counted and else ignored."""
        self._roster.releases.tickets.complete(ticket)

    # Steps

    def ballot(self) -> Ballot:
        """Return what this rank could do in the next step."""
        roster = self._roster
        want_prefill = len(roster.waiting) > 0 or bool(roster.lanes.prefilling.any())
        return Ballot(
            want_prefill=want_prefill,
            decode_rows=Selection(roster, self._previous).num_decodable() if want_prefill else 0,
            prefill_run=self._prefill_run,
        )

    def drain(self, now_ns: int = 0) -> None:
        """Return resources whose fence has passed, and end requests and leases that are overdue."""
        roster = self._roster
        self._outbox += roster.expired(now_ns)
        for owner in roster.releases.expire_tickets(now_ns, self._revoke):
            roster.resident[owner.uid].keeps_to_itself = True
        roster.drain()

    def plan(self, kind: StepKind | None = None) -> StepPlan | None:
        """Decide the next step and reserve what it needs; the caller launches it.

        Args:
            kind: what was decided with others; None decides alone. If nothing of that kind can run
                and there are no others, the step becomes one of the other kind.
        Returns:
            None when nothing can run: idle, paused, everything waits for a settlement or for
            `scrubbed`, or the build failed for want of memory.
        """
        if self.paused:
            return None
        if kind is None:
            kind = decide(self.ballot(), self.limits.prefill_run_max)
        while True:
            selection = Selection(self._roster, self._previous, self._planner)
            try:
                plan = self._select(selection, kind)
            except (MemoryError, PoolExhausted):
                # Without a step nothing is lost; admit more carefully and try again.
                selection.rollback()
                self._roster.growth.preempted()
                self.totals.failed_builds += 1
                if kind is StepKind.DECODE:
                    return None
                kind = StepKind.DECODE  # what runs already goes on
                continue
            except BaseException:
                selection.rollback()
                raise
            finally:
                self._outbox.extend(selection.prefill_rows.ended)
                self._preempted.extend(selection.prefill_rows.preempted)
            if plan is not None:
                self._book(plan, selection)
                return plan
            if not selection.prefill_rows.ended:  # else somebody made room by ending: look again
                return None

    def observe(self, step: UnsettledStep, forward_ns: int, cycle_ns: int) -> None:
        """Take the time that a settled step took: its forward pass, and from end to end.

        It corrects the cost model of chunks that were sized by time, and the planner's of decoding.
        """
        if self._planner is not None and step.plan.output.kind is StepKind.DECODE:
            self._planner.observe(step.plan.output.num_rows, cycle_ns * 1e-9)
        if self._cost is not None and step.work is not None:
            self.totals.predicted_ns += step.predicted_ns
            self.totals.measured_ns += forward_ns
            self._cost.update(step.work, forward_ns, padded=False)

    def masks(self, plan: StepPlan) -> dict[int, Masks]:
        """Return what constrained rows may yield, by their places in the plan.

        To be asked when all steps before `plan` are settled. A request whose grammar fails ends;
        its row stays in the step as padding.
        """
        lanes, rows = self._roster.lanes, plan.rows
        step = next(step for step in self._steps if step.plan is plan)
        constrained = (lanes.all.traits[rows.slot] & CONSTRAINED) > 0
        masked = constrained & lanes.live[rows.slot] & rows.samples
        windows = {}
        for row in np.flatnonzero(masked).tolist():
            drafts = lanes.drafts[rows.slot[row], : rows.num_drafts[row]].tolist()
            constraint = step.sequences[row].constraint
            assert constraint is not None, f"row {row} has no grammar"
            windows[row] = Window(constraint, drafts)
        found, faults = masks_of(windows, self.limits)
        for row, fault in faults.items():
            sequence = step.sequences[row]
            ended = self._roster.end(sequence, FinishReason.ERROR, fault, code="constraint")
            self._outbox.append(ended)
        return found

    def settle(self, plan: StepPlan, result: StepResult) -> Settlement:
        """Apply the result of the oldest unsettled step; what clients see is left to `finish`."""
        assert plan.output.step_seq == result.step_seq, "the result belongs to another step"
        step = self._close(plan)
        try:
            settlement = settle_rows(self._roster, step, result)
            self._untold = [*(each for each in self._untold if not each.told), settlement]
            return settlement
        except BaseException:  # a fault of ours, or Ctrl-C
            failed = f"Step {result.step_seq} was cut off while its results were applied."
            self._outbox += self._fail_rows(step, failed)
            raise
        finally:
            self._roster.last_settled = plan.output.step_seq
            self._roster.drain()

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
        updates = [*known, *self.pop_updates()]
        while self._steps:
            updates += self.fail(self._steps[0].plan, error)
        self._outbox += updates

    def scrub(self) -> Scrub:
        """Return blocks and slots with non-finite content; false when there are none."""
        return self._roster.releases.quarantined()

    def scrubbed(self, scrub: Scrub) -> None:
        """Take back what the worker has zeroed, or queued to be zeroed before any later step."""
        self._roster.releases.scrubbed(scrub)

    def clear_cache(self) -> None:
        """Forget every published prefix that no request uses."""
        self._roster.prefixes.index.clear()

    # Books

    def counts(self) -> SchedulerCounts:
        """Return what is where."""
        return counts_of(
            self._roster, len(self._steps), self._ledger.total_inflight_tokens, self._step_seq
        )

    def audit(self) -> None:
        """Check all books against one another.

        Raises:
            AssertionError: they disagree; the message says where.
        """
        self._roster.audit()
        self._ledger.audit()
        rows_of = [step.plan.rows for step in self._steps]
        planned = sum(int((rows.num_rows - rows.num_replay).sum()) for rows in rows_of)
        if planned != self._ledger.total_inflight_tokens:
            raise AssertionError(
                f"{self._ledger.total_inflight_tokens} tokens in flight, steps have {planned}"
            )
        lane = self._roster.lanes.all
        unsettled = np.zeros_like(lane.unsettled)
        for step in self._steps:
            unsettled[step.plan.rows.slot] += 1
        if not np.array_equal(unsettled, lane.unsettled):
            raise AssertionError(f"steps by slot: {unsettled}, lanes: {lane.unsettled}")

    # How a step is made

    @property
    def _previous(self) -> UnsettledStep | None:
        return self._steps[-1] if self._steps else None

    def _select(self, selection: Selection, kind: StepKind) -> StepPlan | None:
        """Choose rows of the kind, or of the other one if there are none, and build the plan."""
        if kind is StepKind.PREFILL:
            self._prefill(selection)
            if selection.empty:
                selection.decode()
        else:
            selection.decode()
            if selection.empty:
                self._prefill(selection)
        if selection.empty:
            return None
        preempted = (*self._preempted, *selection.prefill_rows.preempted)
        step_seq, roster = self._step_seq + 1, self._roster
        if selection.decode_rows is not None:
            return decode_step(step_seq, selection.decode_rows, roster, preempted)
        rows = selection.prefill_rows.rows
        return prefill_step(step_seq, rows, roster, preempted)

    def _prefill(self, selection: Selection) -> None:
        budget_ns = self.limits.step_budget_ns or None
        model = None if self._cost is None else self._cost.model
        self._budget = ChunkBudget(self.limits, model, budget_ns)
        selection.prefill(self._budget)

    def _book(self, plan: StepPlan, selection: Selection) -> None:
        """Make the plan a launched step. Nothing here can fail."""
        roster, rows, step_seq = self._roster, plan.rows, plan.output.step_seq
        self._step_seq = step_seq
        for row in selection.prefill_rows.rows:
            if row.resume is not None:
                roster.enter(row.sequence)
                self.totals.prompt_tokens += len(row.sequence.tokens)
                self.totals.hit_tokens += row.resume.plan.hit_len
                self.totals.replayed_tokens += row.num_replay
                row.sequence.replayed |= row.num_replay > 0
                if not row.sequence.generation:
                    row.sequence.num_cached = row.resume.plan.hit_len
            if row.phase is Phase.FINAL_CHUNK:
                row.sequence.move(State.RUNNING)
        slots, samples = rows.slot, rows.samples
        prefill = plan.output.kind is StepKind.PREFILL
        tokens = rows.num_rows - rows.num_replay if prefill else rows.num_rows
        roster.lanes.all.last_step[slots] = step_seq
        self._ledger.reserve(step_seq, slots, tokens, samples)
        row_of_slot = np.full(len(roster.by_slot), -1, dtype=np.int64)
        places = np.arange(len(slots))
        row_of_slot[slots] = np.where(samples, places, -1) if prefill else places
        sequences = self._sequences(rows)
        pinned = tuple(r.pinned for r in selection.prefill_rows.rows if r.pinned is not None)
        step = UnsettledStep(plan, sequences, row_of_slot, pinned)
        if prefill and self._budget is not None and self._budget.timed:
            self.totals.chunk_overruns += self._budget.overruns
            step = replace(step, work=self._budget.work, predicted_ns=self._budget.predicted_ns)
        self._steps.append(step)
        self._preempted.clear()
        self._prefill_run = self._prefill_run + 1 if prefill else 0

    def _sequences(self, rows: StepRows) -> tuple[Sequence, ...]:
        """Return whose rows they are: mostly those of the step before, in the same order."""
        previous = self._previous
        if previous is not None and np.array_equal(previous.plan.rows.data[:3], rows.data[:3]):
            return previous.sequences  # uid, generation and slot are the same in every row
        found = tuple(map(self._roster.by_slot.__getitem__, rows.slot.tolist()))
        return found  # type: ignore[return-value]

    # How a result is applied

    def _fail_rows(self, step: UnsettledStep, error: str) -> list[SequenceUpdate]:
        """End the live sequences of a step whose content is unknown."""
        roster, updates = self._roster, []
        for sequence in step.sequences:
            if sequence.state in LIVE:
                reason, code = FinishReason.ERROR, "device_fault"
                updates.append(roster.end(sequence, reason, error, code=code, bad=True))
            else:
                roster.releases.taint(sequence.owner)
            roster.retire(sequence)
        return updates

    def _close(self, plan: StepPlan) -> UnsettledStep:
        """Remove the oldest unsettled step from all books."""
        assert self._steps and self._steps[0].plan is plan, (
            "steps are settled in the order of their plans"
        )
        step = self._steps.popleft()
        same = self._roster.lanes.all.uid[plan.rows.slot] == plan.rows.uid
        assert same.all(), f"a slot of step {plan.output.step_seq} changed hands in flight"
        self._ledger.settle(plan.output.step_seq)
        for node in step.pinned:
            self._roster.prefixes.index.unpin_window(node)
        return step
