"""Any interleaving of requests, aborts, late results, faults and short memory keeps the books."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from deepinfer_core.cache import BlockState, Owner
from deepinfer_core.errors import DuplicateRequest, RequestError
from deepinfer_core.scheduler import Scheduler, SchedulerLimits
from deepinfer_core.testing.fake_worker import FakeWorker
from deepinfer_core.testing.reference import prompt_logprobs_reference, serial_reference
from deepinfer_core.types import FinishReason, Phase, Request, SamplingParams, StepPlan

VOCAB = 23
MAX_UNSETTLED = 3
RARELY = st.sampled_from([False, False, True])  # else most requests end before memory gets short


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler, a worker that checks every cache entry, and a list of all that was delivered."""

    @initialize(
        blocks=st.integers(4, 14),
        more=st.integers(0, 3),
        slots=st.integers(1, 6),
        chunk=st.sampled_from([1, 3, 7, 32]),
        budget=st.sampled_from([4, 9, 32]),
        drafts=st.sampled_from([0, 0, 1, 3, 7]),
        block_size=st.sampled_from([2, 4]),
        growth=st.sampled_from([0, 0, 400]),
    )
    def start(self, blocks, more, slots, chunk, budget, drafts, block_size, growth) -> None:
        self.limits = SchedulerLimits(
            block_size=block_size,
            num_blocks={"compressed": blocks + more, "index": blocks},
            num_slots=slots,
            max_model_len=40,
            max_step_tokens=budget,
            max_chunk_tokens=chunk,
            window=4,
            history_len=3,
            max_drafts=drafts,
            growth_permille=growth,
        )
        self.scheduler = Scheduler(self.limits)
        self.bad: set[int] = set()
        self.worker = FakeWorker(
            self.limits,
            vocab_size=VOCAB,
            accepts=lambda uid, position: (uid * 31 + position * 7) % 5 > 1,
            poison=lambda meta: meta.uid in self.bad,
        )
        self.requests: dict[int, Request] = {}
        self.output: dict[int, list[int]] = {}
        self.prompt_positions: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.cut: set[int] = set()  # ended from outside or by a fault: output is a prefix
        self.unsettled: deque[StepPlan] = deque()
        self.tables: dict[Owner, dict[str, list[int]]] = {}
        self.squeezed: dict[str, list[int]] = {}

    # Operations

    @rule(
        length=st.integers(0, 12) | st.integers(0, 26),
        cap=st.integers(1, 25),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        stops=st.sets(st.integers(0, VOCAB - 1), max_size=1),
        shown=st.booleans(),
    )
    def submit(self, length, cap, priority, stops, shown) -> None:
        uid = len(self.requests) + 1
        request = Request(
            uid=uid,
            client_id=f"r{uid}",
            prompt_token_ids=tuple((uid * 5 + i * i) % VOCAB for i in range(length)),
            params=SamplingParams(max_tokens=cap, prompt_logprobs=0 if shown else None),
            seed=uid * 1000,
            stop_ids=frozenset(stops),
            priority=priority,
        )
        size, total = self.limits.block_size, min(self.limits.num_blocks.values())
        if not length or -(-length // size) + 1 > total:
            with pytest.raises(RequestError):
                self.scheduler.submit(request)
            return
        self.scheduler.submit(request)
        self.requests[uid] = request
        self.output[uid], self.prompt_positions[uid] = [], []

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 10**6))
    def submit_duplicate(self, pick) -> None:
        request = self.requests[self.choose(pick)]
        with pytest.raises(DuplicateRequest):
            self.scheduler.submit(replace(request, uid=10**6 + pick))

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 10**6), really=RARELY)
    def abort(self, pick, really) -> None:
        if not really:
            return
        uid = self.choose(pick)
        assert self.scheduler.abort(f"r{uid}")
        self.deliver(self.scheduler.pop_updates())
        assert self.ended[uid] is FinishReason.ABORT
        assert not self.scheduler.abort(f"r{uid}")

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 10**6), really=RARELY)
    def finish(self, pick, really) -> None:
        if not really:
            return
        uid = self.choose(pick)
        update = self.scheduler.finish(uid)
        assert update is not None
        self.cut.add(uid)
        self.deliver((update,))
        assert self.scheduler.finish(uid) is None

    @precondition(lambda self: len(self.unsettled) < MAX_UNSETTLED)
    @rule()
    def plan(self) -> None:
        previous = self.unsettled[-1] if self.unsettled else None
        plan = self.scheduler.plan()
        self.deliver(self.scheduler.pop_updates())
        if plan is not None:
            self.check_sources(plan, previous)
            self.unsettled.append(plan)
            self.worker.launch(plan)
            for meta in plan.sequences:
                self.apply_blocks(meta)

    @rule(late=st.integers(0, 2), count=st.integers(1, 8))
    def iterate(self, late, count) -> None:
        """An engine's loop that keeps up to `late` steps unsettled."""
        for _ in range(count):
            while len(self.unsettled) > late:
                self.settle()
                self.check_all()
            self.plan()
            self.check_all()

    @precondition(lambda self: self.unsettled)
    @rule()
    def settle(self) -> None:
        plan = self.unsettled.popleft()
        self.deliver(self.scheduler.settle(plan, self.worker.result(plan)))

    @rule()
    def device_runs_ahead(self) -> None:
        self.worker.run_one()

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 10**6), really=RARELY)
    def inject_non_finite(self, pick, really) -> None:
        if really:
            self.bad.add(self.choose(pick))

    @rule()
    def scrub(self) -> None:
        if scrub := self.scheduler.scrub():
            self.worker.scrub(scrub)
            self.scheduler.scrubbed(scrub)
            for name, ids in self.squeezed.items():
                self.squeezed[name] = [b for b in ids if b not in scrub.blocks[name]]

    @precondition(lambda self: not self.squeezed)
    @rule(share=st.integers(1, 4))
    def squeeze(self, share) -> None:
        """Take blocks out of use for a while, as a quarantine does."""
        pools = self.scheduler._roster.pools
        count = pools.num_free * share // 4
        owner = Owner(-1, 0)
        self.squeezed = pools.allocate(owner, count)
        for name, ids in self.squeezed.items():
            pools.pools[name].defer(owner, ids)
            pools.pools[name].quarantine(owner, ids)

    @precondition(lambda self: self.squeezed)
    @rule()
    def relax(self) -> None:
        for name, ids in self.squeezed.items():
            self.scheduler._roster.pools.pools[name].scrubbed(ids)
        self.squeezed = {}

    @precondition(lambda self: len(self.unsettled) < MAX_UNSETTLED)
    @rule(nth=st.integers(1, 4), pool=st.sampled_from(["compressed", "index", "slot"]))
    def fail_inside_plan(self, nth, pool) -> None:
        roster = self.scheduler._roster
        target: Any = roster.slots if pool == "slot" else roster.pools.pools[pool]
        real, calls = target.allocate, 0

        def failing(owner: Owner, count: int) -> list[int]:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise MemoryError("no memory")
            return real(owner, count)

        target.allocate = failing
        try:
            self.plan()
        except MemoryError:
            self.deliver(self.scheduler.pop_updates())
        finally:
            target.allocate = real

    # Invariants

    def check_all(self) -> None:
        self.books_agree()
        self.unsettled_steps_own_what_they_touch()

    @invariant()
    def books_agree(self) -> None:
        """Each block is in one state, and tokens in flight are those of the unsettled steps."""
        self.scheduler.audit()
        counts = self.scheduler.counts()
        for name, total in self.limits.num_blocks.items():
            assert sum(counts.blocks[name].values()) == total
        assert counts.inflight_tokens == sum(p.output.num_rows for p in self.unsettled)
        assert counts.unsettled_steps == len(self.unsettled)

    @invariant()
    def unsettled_steps_own_what_they_touch(self) -> None:
        """All of it is held by, or deferred from, the same life of the sequence."""
        roster = self.scheduler._roster
        pools = {**roster.pools.pools, "slot": roster.slots}
        owned: dict[str, dict[int, Owner]] = {name: {} for name in pools}
        for name, pool in pools.items():
            for state in (BlockState.HELD, BlockState.DEFERRED):
                for owner, ids in pool.holders(state).items():
                    owned[name] |= dict.fromkeys(ids, owner)
        for plan in self.unsettled:
            for meta in plan.sequences:
                owner = Owner(meta.uid, meta.generation)
                assert owned["slot"][meta.slot] == owner
                for name, table in self.tables[owner].items():
                    needed = -(-meta.kv_len // self.limits.block_size)
                    assert len(table) >= needed
                    assert all(owned[name][block] == owner for block in table[:needed])

    @invariant()
    def output_is_a_prefix_of_the_reference(self) -> None:
        """Output only grows, and ends at the first stop or cap."""
        for uid, output in self.output.items():
            expected, _ = serial_reference(self.requests[uid], self.limits.max_model_len, VOCAB)
            assert tuple(output) == expected[: len(output)]

    def teardown(self) -> None:
        """Let everything end, then compare with the serial reference."""
        if not hasattr(self, "scheduler"):
            return
        self.relax()
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            before = len(self.unsettled)
            if before < MAX_UNSETTLED:
                self.plan()
            if self.unsettled and (before == MAX_UNSETTLED or len(self.unsettled) == before):
                self.settle()
            self.scrub()
            self.books_agree()
        assert not self.scheduler.has_work, "no progress"
        self.scrub()
        self.books_agree()
        counts = self.scheduler.counts()
        assert counts.leaving == 0 and counts.free_slots == self.limits.num_slots
        assert all(counts.blocks[name]["free"] == n for name, n in self.limits.num_blocks.items())
        self.compare()

    def compare(self) -> None:
        assert self.ended.keys() == self.requests.keys()
        for uid, request in self.requests.items():
            expected = serial_reference(request, self.limits.max_model_len, VOCAB)
            if self.ended[uid] in (FinishReason.STOP, FinishReason.LENGTH) and uid not in self.cut:
                assert (tuple(self.output[uid]), self.ended[uid]) == expected
                if request.params.prompt_logprobs is not None:
                    expected_positions = list(prompt_logprobs_reference(request))
                    assert self.prompt_positions[uid] == expected_positions
            self.output_is_a_prefix_of_the_reference()

    # Helpers

    def live(self) -> list[int]:
        return [uid for uid in getattr(self, "requests", ()) if uid not in self.ended]

    def choose(self, pick: int) -> int:
        live = self.live()
        return live[pick % len(live)]

    def deliver(self, updates) -> None:
        for update in updates:
            assert update.uid not in self.ended, "something follows the end"
            self.output[update.uid] += update.token_ids
            self.prompt_positions[update.uid] += [p.position for p in update.prompt_logprobs]
            if update.finish_reason is None:
                continue
            self.ended[update.uid] = update.finish_reason
            if update.finish_reason is FinishReason.ERROR:
                assert update.uid in self.bad or update.error_code == "cache_exhausted"

    def apply_blocks(self, meta) -> None:
        owner = Owner(meta.uid, meta.generation)
        table = self.tables.setdefault(owner, {"compressed": [], "index": []})
        for delta in meta.blocks:
            assert delta.first == len(table[delta.pool])
            table[delta.pool].extend(delta.block_ids)

    def check_sources(self, plan: StepPlan, previous: StepPlan | None) -> None:
        """Each row has one source, no illegal id is fed, and the budget is kept."""
        sources = [source for source in plan.output.remap if source >= 0]
        assert len(sources) == len(set(sources))
        for meta, source in zip(plan.sequences, plan.output.remap, strict=True):
            if source >= 0:
                assert previous is not None
                origin = previous.sequences[source]
                assert (origin.uid, origin.generation) == (meta.uid, meta.generation)
                assert origin.samples and meta.phase is Phase.VERIFY and not meta.token_ids
            else:
                assert meta.token_ids
                assert all(0 <= token_id < VOCAB for token_id in meta.token_ids)
            assert meta.uid not in self.ended, "an ended request is scheduled"
            assert meta.kv_len <= self.limits.max_model_len
        chunks = [m for m in plan.sequences if m.phase is not Phase.VERIFY]
        assert len(chunks) in (0, len(plan.sequences)), "one kind a step"
        assert sum(m.num_rows for m in chunks) <= self.limits.max_step_tokens
        assert all(m.num_rows <= self.limits.max_chunk_tokens for m in chunks)
        assert sum(m.phase is Phase.CHUNK for m in chunks) <= 1


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
