"""What the state-machine test knows beside the scheduler: requests, plans in flight, what was told.

`World` is driven by `world_steps.StepWorld` (scheduler and model, step by step) or
`world_loop.LoopWorld` (the engine's loop on the fake device); `invariants` compares it with the
scheduler's books after every operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from deepinfer_core.cache.block_pool import Owner, PoolExhausted
from deepinfer_core.cache.block_table import num_blocks_for
from deepinfer_core.errors import DuplicateRequest, RequestError
from deepinfer_core.plans import SequenceMetadata, StepKind, StepPlan, StepResult
from deepinfer_core.scheduler.cost_model import CostModel
from deepinfer_core.testing.fake_model import FakeModel
from deepinfer_core.testing.fake_trim import Confidence, made_up_confidence
from deepinfer_core.testing.planners import Asked, RandomPlanner, RecordingPlanner
from deepinfer_core.testing.reference import logprob_of, mix
from deepinfer_core.testing.world_records import Records
from deepinfer_core.testing.world_requests import VOCAB, Known, Wish, known_request
from deepinfer_core.testing.world_watch import (
    Allocations,
    Before,
    Config,
    Fresh,
    InjectedFault,
    Named,
    Planned,
    Published,
    Settled,
    Ticket,
    WatchedScheduler,
)
from deepinfer_core.types import FinishReason, SequenceUpdate

__all__ = ["World"]


class World:
    """A scheduler and all that is known of it from outside."""

    model: FakeModel

    def __init__(self, config: Config) -> None:
        """Start with no requests."""
        self.config, self.limits = config, config.limits()
        timed = CostModel(1000, 100, 1, 1, 50) if config.step_budget_ns else None
        self.known: dict[int, Known] = {}
        self.unsettled: deque[Planned] = deque()
        self.fresh = Fresh()
        self.tables: dict[int, tuple[Owner, dict[str, list[int]]]] = {}  # by slot
        self.squeezed: dict[str, list[int]] = {}
        self.tickets: dict[int, Ticket] = {}
        self.num_tickets = 0
        self.exposed: dict[Owner, dict[str, set[int]]] = {}  # a peer may still write to these
        self.revokes = True
        self.unchecked: dict[int, Known] = {}  # live, or ended since the last check
        self.bad: set[int] = set()  # values not finite
        self.failed: set[int] = set()  # in a step that failed
        self.shared: dict[int, Published] = {}  # by number of the node
        self.stalled = 0  # steps settled since something got further
        self.num_operations = 0
        self.records = Records()
        self.num_verified = 0  # drafts of settled steps
        self.watched_planner: RecordingPlanner | None = None
        if config.tier:
            self.watched_planner = RecordingPlanner(RandomPlanner(config.blocks, config.tier))
        self.scheduler = WatchedScheduler(self, timed, self.watched_planner)
        self.allocations = Allocations(self.scheduler)

    @property
    def now_ns(self) -> int:
        """The time."""
        raise NotImplementedError

    @property
    def confidence(self) -> Confidence | None:
        """What the drafter says of its drafts, if anything."""
        return made_up_confidence if self.config.tier else None

    def live(self) -> list[int]:
        """Return the requests that have not ended."""
        return [uid for uid, known in self.unchecked.items() if known.ended is None]

    def pick(self, number: int) -> Known | None:
        """Return one of the live requests, None without any."""
        live = self.live()
        return self.known[live[number % len(live)]] if live else None

    # What the scheduler tells

    def planned(self, plan: StepPlan, before: Before, asked: Asked | None) -> None:
        """Note a plan, the blocks that it may touch, and how its drafts were budgeted."""
        previous = self.unsettled[-1].plan if self.unsettled else None
        rows = tuple(self._named(meta) for meta in plan.sequences)
        if not plan.rows.num_drafts.any():
            asked = None
        records = () if asked is None else tuple(self.records.earlier(row.owner) for row in rows)
        self.records.launched(plan)
        planned = Planned(plan, previous, rows, before, asked, records)
        self.unsettled.append(planned)
        self.fresh.planned.append(planned)

    def _named(self, meta: SequenceMetadata) -> Named:
        owner = Owner(meta.uid, meta.generation)
        if meta.admission is not None:
            self.tables[meta.slot] = (owner, {pool: [] for pool in self.limits.num_blocks})
        who, table = self.tables[meta.slot]
        assert who == owner, f"{owner} runs in slot {meta.slot} of {who}"
        assert self.known[meta.uid].ended is None, f"I13: {owner} has ended and is in a step"
        for delta in meta.blocks:
            assert delta.first == len(table[delta.pool]), f"a gap in the table of {owner}"
            table[delta.pool].extend(delta.block_ids)
        needed = num_blocks_for(meta.kv_len, self.limits.block_size)
        return Named(owner, meta, {pool: tuple(ids[:needed]) for pool, ids in table.items()})

    def settling(self, plan: StepPlan, result: StepResult) -> None:
        """Note a result before it is applied."""
        planned = self.unsettled.popleft()
        assert planned.plan is plan, "steps are settled out of order"
        settled = self.scheduler._roster.lanes.all.settled[plan.rows.slot].copy()
        self.fresh.settled.append(Settled(planned, result, settled))
        self.records.settled(plan, result)
        if plan.output.kind is StepKind.DECODE:
            self.num_verified += int(result.num_verified.sum())

    def settled(self, plan: StepPlan) -> None:
        """Note whether an applied result brought something new."""
        self.stalled += 1
        for uid, length in zip(plan.rows.uid.tolist(), self._lengths(plan), strict=True):
            known = self.known[uid]
            if known.ended is None and length > known.longest:
                known.longest, self.stalled = length, 0

    def _lengths(self, plan: StepPlan) -> list[int]:
        found: list[int] = self.scheduler._roster.lanes.all.settled[plan.rows.slot].tolist()
        return found

    def failing(self, plan: StepPlan) -> None:
        """Note a step that failed."""
        assert self.unsettled.popleft().plan is plan, "steps fail out of order"
        self.failed |= set(plan.rows.uid.tolist())

    def revoke(self, ticket: int) -> bool:
        """Shut the peer of a ticket out, if that works now."""
        owner = self.tickets.pop(ticket).owner
        if not self.revokes:
            self.exposed.setdefault(owner, {})
        return self.revokes

    # What clients are told

    def deliver(self, updates: Iterable[SequenceUpdate]) -> None:
        """Note updates, which must fit what is known of their requests."""
        for update in updates:
            known = self.known[update.uid]
            assert known.ended is None, f"I13: something follows the end of {update.uid}"
            self._take_tokens(known, update)
            if update.finish_reason is not None:
                known.ended, known.code = update.finish_reason, update.error_code
                self.stalled = 0
                self._check_end(known, update)

    def _take_tokens(self, known: Known, update: SequenceUpdate) -> None:
        """Ids, log-probabilities and scores of the prompt belong together (I12)."""
        asked = known.request.params.logprobs
        count = 0 if asked is None else len(update.token_ids)
        assert len(update.logprobs) == count, f"I12: {update} has {count} tokens"
        for place, token_id in enumerate(update.token_ids):
            if asked is not None:
                expected = logprob_of(known.state, token_id, asked, VOCAB)
                assert update.logprobs[place] == expected, f"I12: {update}, not {expected}"
            known.state = mix(known.state, token_id)
            known.output.append(token_id)
        for item in update.prompt_logprobs:
            assert item.value == known.scores.get(item.position), f"I12: {item} of {update.uid}"
            known.prompt_positions.append(item.position)

    def _check_end(self, known: Known, update: SequenceUpdate) -> None:
        """An error has a cause."""
        uid, code = update.uid, update.error_code
        assert (code is not None) is (update.finish_reason is FinishReason.ERROR), f"{update}"
        deadline = known.request.deadline_ns
        causes = {
            None: True,
            "non_finite": uid in self.bad,
            "constraint": known.fault != "",
            "device_fault": uid in self.failed,
            "deadline_exceeded": deadline is not None and deadline <= self.now_ns,
            "cache_exhausted": self._fills_cache(known),
        }
        assert causes.get(code, False), f"request {uid} ends for no reason: {update}"

    def _fills_cache(self, known: Known) -> bool:
        if self.squeezed or self.tickets or self.exposed:
            return True
        length = len(known.request.prompt_token_ids) + len(known.output)
        needed = num_blocks_for(length, self.limits.block_size)
        return needed > min(self.limits.num_blocks.values())

    # Operations; `a` and `b` are any numbers

    def submit(self, wish: Wish) -> None:
        """Submit a request, or find it refused when it can never be served."""
        uid = len(self.known) + 1
        known = known_request(uid, wish, self.limits, self.now_ns)
        blocks = num_blocks_for(wish.length, self.limits.block_size) + 1
        fits = 0 < wish.length < self.limits.max_model_len
        if fits and blocks <= min(self.limits.num_blocks.values()):
            self.scheduler.submit(known.request)
            self.known[uid] = self.unchecked[uid] = known
            self.stalled = 0
            return
        try:
            self.scheduler.submit(known.request)
        except RequestError:
            return
        raise AssertionError(f"a prompt of {wish.length} tokens is taken")

    def refuse(self, a: int, b: int) -> None:
        """Submit what can never be served."""
        self.submit(Wish(length=(0, 40, 1000)[a % 3]))

    def duplicate(self, a: int, b: int) -> None:
        """Submit a request under a name that is taken."""
        self.collect()
        known = self.pick(a)
        if known is None:
            return
        try:
            self.scheduler.submit(replace(known.request, uid=10**6 + b))
        except DuplicateRequest:
            return
        raise AssertionError(f"{known.request.client_id} is taken twice")

    def abort(self, a: int, b: int) -> None:
        """Abort a request, twice."""
        known = self.pick(a)
        if known is None:
            assert not self.scheduler.abort("nobody")
            return
        # What was settled but not told stays told: an end among it comes before the abort.
        live = known.request.client_id in self.scheduler._roster.by_client
        assert self.scheduler.abort(known.request.client_id) is live
        assert not self.scheduler.abort(known.request.client_id)
        self.collect()
        assert (known.ended is FinishReason.ABORT) is live, "an abort ends at once"

    def finish(self, a: int, b: int) -> None:
        """End a request as a stop string does, twice."""
        self.collect()  # the text is of what was told
        known = self.pick(a)
        if known is None:
            return
        update = self.scheduler.finish(known.request.uid)
        assert update is not None, f"{known.request.uid} is live and cannot be finished"
        known.cut = True
        self.deliver((update,))
        assert self.scheduler.finish(known.request.uid) is None

    def open_ticket(self, a: int, b: int) -> None:
        """Let a transfer touch what a request holds."""
        self.collect()
        known = self.pick(a)
        if known is None:
            return
        request, lease_end = known.request, self.now_ns + 10 + b % 100
        ticket = self.scheduler.open_ticket(request.client_id, lease_end)
        sequence = self.scheduler._roster.by_client[request.client_id]
        assert (ticket is None) is (sequence.slot is None), "a ticket for nothing"
        if ticket is None or sequence.slot is None:
            return
        self.num_tickets = ticket
        named = self.scheduler._roster.tables.blocks(sequence.slot)
        blocks = {pool: tuple(ids.tolist()) for pool, ids in named.items()}
        self.tickets[ticket] = Ticket(sequence.owner, lease_end, blocks)

    def complete(self, a: int, b: int) -> None:
        """Deliver the end of any transfer there ever was, or of one that never was."""
        ticket = 1 + a % (self.num_tickets + 1)
        self.scheduler.complete_ticket(ticket)
        self.tickets.pop(ticket, None)
        self.scheduler.drain(self.now_ns)
        self.collect()

    def tick(self, a: int, b: int) -> None:
        """Let time pass; overdue peers can be shut out, or not."""
        self.advance(a % 300)
        self.revokes = bool(b % 2)
        self.scheduler.drain(self.now_ns)
        self.collect()

    def squeeze(self, a: int, b: int) -> None:
        """Take blocks out of use, or give them back."""
        pools = self.scheduler._roster.pools
        self.stalled = 0
        if self.squeezed:
            self.relax()
            return
        self.allocations.calm()
        owner = Owner(-1, 0)
        taken = pools.allocate(owner, pools.num_free * (1 + a % 4) // 4)
        for name, ids in taken.items():
            pools.pools[name].defer(owner, ids)
            pools.pools[name].quarantine(owner, ids)
        self.squeezed = {name: ids.tolist() for name, ids in taken.items() if len(ids)}

    def relax(self) -> None:
        """Give back what was taken out of use."""
        for name, ids in self.squeezed.items():
            self.scheduler._roster.pools.pools[name].scrubbed(ids)
        self.squeezed = {}

    def evict(self, a: int, b: int) -> None:
        """Evict some published blocks and window states, or all that nobody uses."""
        index = self.scheduler._roster.prefixes.index
        if a % 4 == 3:
            self.scheduler.clear_cache()
        else:
            index.evict(a % 4)
            index.evict_windows(b % 2)

    def pause(self, a: int, b: int) -> None:
        """Pause, or go on."""
        self.scheduler.paused = a % 3 == 0
        self.stalled = 0

    def poison(self, a: int, b: int) -> None:
        """Let the values of a request be not finite from now on."""
        if (known := self.pick(a)) is not None:
            self.bad.add(known.request.uid)

    def fail_build(self, a: int, b: int) -> None:
        """Let an allocation fail from now on: `a` draws which one, `b` the pool and the error."""
        errors = (MemoryError("no memory"), PoolExhausted("no block"), InjectedFault("a fault"))
        self.allocations.fail(b % 3, (1, 1, 2, 3)[a % 4], errors[b // 3 % 3])

    # Left to the two kinds of worlds

    def advance(self, ns: int) -> None:
        """Let time pass."""
        raise NotImplementedError

    def collect(self) -> None:
        """Tell clients all that is known."""
        raise NotImplementedError

    def run(self) -> None:
        """Do one iteration of an engine."""
        raise NotImplementedError

    def flush(self, a: int, b: int) -> None:
        """Bring everything in flight to its end."""
        raise NotImplementedError

    def fail_step(self, a: int, b: int) -> None:
        """Let a step fail on the device."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether an iteration has something to do."""
        return self.scheduler.has_work

    def calm(self) -> None:
        """Take back all that keeps requests from ending by themselves."""
        self.relax()
        self.allocations.calm()
        self.scheduler.paused = False
        self.revokes = True
        for ticket in list(self.tickets):
            self.scheduler.complete_ticket(ticket)
            del self.tickets[ticket]
        self.scheduler.drain(self.now_ns)
