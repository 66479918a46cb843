"""The scheduler rule by rule, on a fake worker that reads every cache entry back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from deepinfer_core.cache import BlockState
from deepinfer_core.errors import ConfigError, DuplicateRequest, RequestError
from deepinfer_core.plans import Phase, RowStatus, StepKind, StepPlan, StepResult
from deepinfer_core.scheduler import Scheduler, SchedulerLimits
from deepinfer_core.scheduler.budget import GrowthEstimate
from deepinfer_core.scheduler.chunks import ChunkBudget
from deepinfer_core.scheduler.prefill import PrefillRows
from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.sequence import TRANSITIONS, Sequence, State
from deepinfer_core.testing.fake_worker import FakeWorker
from deepinfer_core.testing.reference import prompt_logprobs_reference, serial_reference
from deepinfer_core.types import FinishReason, Request, SamplingParams, SequenceUpdate

VOCAB = 50
BASE = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 64, "index": 70},
    num_slots=8,
    max_model_len=100,
    max_step_tokens=16,
    max_chunk_tokens=16,
    window=6,
    history_len=3,
)


def make_request(uid: int, prompt: int | tuple[int, ...] = 5, **changes: Any) -> Request:
    """Return a request; `prompt` is its length or its ids, other words are settings or fields."""
    names = ("stop_ids", "strict", "replay_decoder", "priority", "seed", "client_id")
    fields = {name: changes.pop(name) for name in names if name in changes}
    fields.setdefault("seed", uid)
    fields.setdefault("client_id", f"r{uid}")
    changes.setdefault("max_tokens", 6)
    ids = (
        prompt if isinstance(prompt, tuple) else tuple((uid * 7 + i) % VOCAB for i in range(prompt))
    )
    return Request(uid=uid, prompt_token_ids=ids, params=SamplingParams(**changes), **fields)


def break_building(patch: pytest.MonkeyPatch) -> None:
    """Let every step fail after its rows were reserved."""
    for name in ("decode_step", "prefill_step"):
        patch.setattr(f"deepinfer_core.scheduler.scheduler.{name}", lambda *a, **k: 1 / 0)


def waiting_sequences(count: int) -> list[Sequence]:
    roster = Roster(BASE)
    for uid in range(1, count + 1):
        roster.add(make_request(uid))
    return list(roster.waiting)


@dataclass
class Loop:
    """A scheduler and a worker; `late` steps stay unsettled while the next one is planned."""

    limits: SchedulerLimits = BASE
    late: int = 0
    worker: FakeWorker = field(init=False)
    plans: list[StepPlan] = field(default_factory=list)
    updates: list[SequenceUpdate] = field(default_factory=list)
    unsettled: deque[StepPlan] = field(default_factory=deque)
    requests: dict[int, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.worker = FakeWorker(self.limits, vocab_size=VOCAB)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.submit(request)
            self.requests[request.uid] = request

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.unsettled.append(plan)
            self.worker.launch(plan)
        self.scheduler.audit()
        return plan

    def take(self, plan: StepPlan, result: StepResult) -> None:
        self.updates += self.scheduler.settle(plan, result).finish()
        self.updates += self.scheduler.pop_updates()

    def settle(self) -> None:
        plan = self.unsettled.popleft()
        self.take(plan, self.worker.result(plan))
        self.scheduler.audit()

    def scrub(self) -> None:
        if scrub := self.scheduler.scrub():
            self.worker.scrub(scrub)
            self.scheduler.scrubbed(scrub)

    def step(self) -> StepPlan | None:
        """One iteration of an engine."""
        plan = self.plan()
        while self.unsettled and (plan is None or len(self.unsettled) > self.late):
            self.settle()
            if plan is None:
                break
        self.updates += self.scheduler.pop_updates()
        self.scrub()
        return plan

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "the loop does not end"
        self.audit_idle()

    def audit_idle(self) -> None:
        self.scheduler.audit()
        counts = self.scheduler.counts()
        assert counts.inflight_tokens == counts.unsettled_steps == counts.leaving == 0
        assert counts.free_slots == self.limits.num_slots
        for name, total in self.limits.num_blocks.items():
            assert counts.blocks[name]["free"] == total

    def tokens(self, uid: int) -> tuple[int, ...]:
        return tuple(t for u in self.updates if u.uid == uid for t in u.token_ids)

    def end(self, uid: int) -> SequenceUpdate:
        ends = [u for u in self.updates if u.uid == uid and u.finish_reason]
        assert len(ends) == 1, f"request {uid} has {len(ends)} terminal updates"
        assert [u for u in self.updates if u.uid == uid][-1] is ends[0]
        return ends[0]

    def expect_reference(self, *uids: int) -> None:
        for uid in uids or tuple(self.requests):
            expected = serial_reference(self.requests[uid], self.limits.max_model_len, VOCAB)
            assert (self.tokens(uid), self.end(uid).finish_reason) == expected


@pytest.fixture
def loops() -> Iterator[list[Loop]]:
    """Loops whose books are checked after the test, whatever state it left them in."""
    made: list[Loop] = []
    yield made
    for loop in made:
        loop.scheduler.audit()


@pytest.fixture
def make(loops: list[Loop]) -> Any:
    def build(late: int = 0, **changes: Any) -> Loop:
        loops.append(Loop(replace(BASE, **changes), late))
        return loops[-1]

    return build


# Prefill


def test_prompt_is_cut_into_chunks_of_the_set_size(make):
    loop = make(max_chunk_tokens=7)
    loop.submit(make_request(1, 23))
    loop.run()
    prefill = [p for p in loop.plans if p.output.kind is StepKind.PREFILL]
    assert [p.sequences[0].num_rows for p in prefill] == [7, 7, 7, 2]
    assert [p.sequences[0].start for p in prefill] == [0, 7, 14, 21]
    assert [p.sequences[0].phase for p in prefill] == [Phase.CHUNK] * 3 + [Phase.FINAL_CHUNK]
    loop.expect_reference()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_output_does_not_depend_on_chunk_size(make, chunk, late):
    loop = make(late, max_chunk_tokens=chunk, max_step_tokens=64)
    loop.submit(*(make_request(uid, 3 * uid) for uid in range(1, 8)))
    loop.run()
    loop.expect_reference()


def test_one_step_carries_several_prompts_and_leaves_one_partial(make):
    loop = make()
    loop.submit(*(make_request(uid, 6) for uid in (1, 2, 3)))
    plan = loop.step()
    assert [(m.uid, m.num_rows, m.phase) for m in plan.sequences] == [
        (1, 6, Phase.FINAL_CHUNK),
        (2, 6, Phase.FINAL_CHUNK),
        (3, 4, Phase.CHUNK),
    ]
    assert plan.output.num_rows == 16
    loop.run()
    loop.expect_reference()


def test_a_prompt_cut_by_the_chunk_size_is_the_last_of_its_step(make):
    loop = make(max_chunk_tokens=4)
    loop.submit(make_request(1, 9), make_request(2, 9))
    steps = [[(m.uid, m.num_rows) for m in loop.step().sequences] for _ in range(3)]
    assert steps[:2] == [[(1, 4)], [(1, 4)]]
    assert steps[2] == [(1, 1), (2, 4)]


def test_tail_of_a_prompt_shares_its_step_with_the_next(make):
    loop = make()
    loop.submit(make_request(1, 18), make_request(2, 5))
    loop.step()
    assert [(m.uid, m.num_rows) for m in loop.step().sequences] == [(1, 2), (2, 5)]


def test_budget_bounds_every_prefill_step(make):
    loop = make(max_step_tokens=5)
    loop.submit(*(make_request(uid, 9) for uid in (1, 2, 3)))
    loop.run()
    assert all(p.output.num_rows <= 5 for p in loop.plans if p.output.kind is StepKind.PREFILL)
    loop.expect_reference()


def test_decoding_waits_for_at_most_prefill_run_max_steps(make):
    loop = make(max_step_tokens=4, prefill_run_max=2)
    loop.submit(make_request(1, 4, max_tokens=20))
    loop.step()
    loop.submit(make_request(2, 40))
    kinds = [loop.step().output.kind.value for _ in range(9)]
    assert kinds == ["prefill", "decode"] + ["prefill", "prefill", "decode"] * 2 + ["prefill"]


def test_prefill_is_not_held_up_when_nobody_decodes(make):
    loop = make(max_step_tokens=4, prefill_run_max=1)
    loop.submit(make_request(1, 20))
    assert [loop.step().output.kind for _ in range(5)] == [StepKind.PREFILL] * 5


def test_larger_priority_enters_first(make):
    loop = make(num_slots=1)
    loop.submit(make_request(1), make_request(2, priority=1), make_request(3, priority=1))
    loop.run()
    ends = [u.uid for u in loop.updates if u.finish_reason]
    assert ends == [2, 3, 1]


def test_waiting_requests_enter_as_slots_become_free(make):
    loop = make(num_slots=2)
    loop.submit(*(make_request(uid, max_tokens=uid) for uid in range(1, 7)))
    loop.run()
    assert max(len(p.sequences) for p in loop.plans) == 2
    loop.expect_reference()


# What a plan tells the device


def test_first_step_of_a_generation_carries_the_admission(make):
    loop = make(max_chunk_tokens=4)
    loop.submit(make_request(1, 6, presence_penalty=1.0), make_request(2, 6))
    loop.run()
    metas = [m for p in loop.plans for m in p.sequences]
    for uid in (1, 2):
        own = [m for m in metas if m.uid == uid]
        assert own[0].admission is not None
        assert own[0].admission.history == ()
        assert own[0].admission.prompt_len == 6
        assert all(m.admission is None for m in own[1:])
    prompt = loop.requests[1].prompt_token_ids
    assert next(m for m in metas if m.uid == 1).admission.token_ids == prompt
    assert next(m for m in metas if m.uid == 2).admission.token_ids == ()


def test_blocks_are_named_once_and_cover_the_rows_in_both_pools(make):
    loop = make()
    loop.submit(make_request(1, 6, max_tokens=12))
    loop.run()
    covered = {"compressed": 0, "index": 0}
    for plan in loop.plans:
        for delta in plan.sequences[0].blocks:
            assert delta.first == covered[delta.pool]
            covered[delta.pool] += len(delta.block_ids)
        assert all(n * 4 >= plan.sequences[0].kv_len for n in covered.values())
        assert all((n - 1) * 4 < plan.sequences[0].kv_len for n in covered.values())


def test_decode_row_feeds_the_last_token_at_the_first_unwritten_position(make):
    loop = make()
    loop.submit(make_request(1, 5))
    loop.step()
    first = loop.tokens(1)
    meta = loop.step().sequences[0]
    assert (meta.phase, meta.start, meta.num_rows, meta.kv_len) == (Phase.VERIFY, 5, 1, 6)
    assert meta.token_ids == first
    assert meta.remaining == 5


def test_replayed_tail_starts_a_window_before_the_end_of_the_prompt(make):
    loop = make(max_chunk_tokens=5)
    loop.submit(make_request(1, 14, replay_decoder=True), make_request(2, 14), make_request(3, 4))
    loop.run()
    tails = {m.uid: m.tail_start for p in loop.plans for m in p.sequences}
    assert tails == {1: 14 - 6, 2: 0, 3: 0}


def test_one_strict_row_makes_its_step_strict(make):
    loop = make()
    loop.submit(make_request(1, max_tokens=2), make_request(2, strict=True, max_tokens=4))
    loop.run()
    assert [p.output.strict for p in loop.plans] == [True] * 4
    loop.submit(make_request(3))
    assert not loop.step().output.strict


def test_step_numbers_increase_by_one(make):
    loop = make()
    loop.submit(make_request(1), make_request(2))
    loop.run()
    assert [p.output.step_seq for p in loop.plans] == list(range(1, len(loop.plans) + 1))


def test_late_rows_read_the_carry_of_the_step_before(make):
    loop = make(1)
    loop.submit(make_request(1, 5), make_request(2, 5))
    loop.run()
    first, second, third = loop.plans[:3]
    assert first.rows.source.tolist() == [-1, -1]
    assert second.rows.source.tolist() == third.rows.source.tolist() == [0, 1]
    assert all(m.token_ids == () for m in second.sequences)
    loop.expect_reference()


def test_serial_rows_are_supplied_by_the_host(make):
    loop = make(0)
    loop.submit(make_request(1), make_request(2))
    loop.run()
    assert {source for p in loop.plans for source in p.rows.source.tolist()} == {-1}


# Log-probabilities


@pytest.mark.parametrize("late", [0, 2])
def test_prompt_logprobs_are_delivered_once_for_every_position_but_the_first(make, late):
    loop = make(late, max_chunk_tokens=4)
    loop.submit(make_request(1, 11, prompt_logprobs=0), make_request(2, 1, prompt_logprobs=0))
    loop.run()
    found = [item for u in loop.updates for item in u.prompt_logprobs]
    assert [item.position for item in found] == list(range(1, 11))
    assert {i.position: i.value for i in found} == prompt_logprobs_reference(loop.requests[1])
    assert all(m.prompt_logprobs is None for p in loop.plans for m in p.sequences if m.uid == 2)


def test_logprobs_are_cut_with_the_tokens(make):
    request = make_request(1, 5, max_tokens=30, logprobs=0)
    tokens, _ = serial_reference(request, 100, VOCAB)
    loop = make(max_drafts=4)
    loop.submit(replace(request, stop_ids=frozenset({tokens[7]})))
    loop.run()
    for update in loop.updates:
        assert [item.token_id for item in update.logprobs] == list(update.token_ids)
    assert loop.end(1).finish_reason is FinishReason.STOP


# Preemption


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_preempted_requests_continue_exactly(make, late, drafts):
    loop = make(late, num_blocks={"compressed": 12, "index": 11}, max_drafts=drafts)
    loop.worker._accepts = lambda uid, position: (uid * 31 + position) % 3 > 0
    loop.submit(*(make_request(uid, 5 + uid, max_tokens=20) for uid in range(1, 6)))
    loop.run()
    assert loop.scheduler.counts().preemptions > 0
    assert any(loop.end(uid).num_preemptions for uid in range(1, 6))
    assert loop.end(1).num_preemptions == 0, "the oldest is never preempted"
    loop.expect_reference()


def test_recompute_feeds_prompt_and_output_and_samples_only_the_next_token(make):
    loop = make(num_blocks={"compressed": 6, "index": 6}, growth_permille=0)
    loop.submit(make_request(1, 7, max_tokens=12), make_request(2, 7, max_tokens=12))
    loop.run()
    again = [m for p in loop.plans for m in p.sequences if m.uid == 2 and m.generation == 1]
    first = again[0]
    known = len(first.token_ids)
    assert known > 7
    assert first.start == 0 and first.phase is Phase.FINAL_CHUNK and first.admission is not None
    assert first.token_ids == loop.requests[2].prompt_token_ids + loop.tokens(2)[: known - 7]
    assert first.admission.prompt_len == 7
    assert any(2 in p.output.preempted for p in loop.plans)
    loop.expect_reference()


def test_recompute_does_not_deliver_prompt_logprobs_again(make):
    loop = make(num_blocks={"compressed": 6, "index": 6}, growth_permille=0, max_chunk_tokens=5)
    loop.submit(*(make_request(u, 7, max_tokens=12, prompt_logprobs=0) for u in (1, 2)))
    loop.run()
    assert loop.end(2).num_preemptions > 0
    for uid in (1, 2):
        found = [i.position for u in loop.updates if u.uid == uid for i in u.prompt_logprobs]
        assert found == list(range(1, 7))
    again = [m for p in loop.plans for m in p.sequences if m.generation]
    assert all(m.prompt_logprobs is None and m.prompt_targets == () for m in again)


def test_victim_has_the_lowest_priority_and_then_the_latest_arrival(make):
    loop = make(num_blocks={"compressed": 12, "index": 12}, growth_permille=0, max_step_tokens=64)
    loop.submit(
        make_request(1, 7, max_tokens=30),
        make_request(2, 7, max_tokens=30, priority=1),
        make_request(3, 7, max_tokens=30),
        make_request(4, 7, max_tokens=30, priority=1),
    )
    loop.run()
    order = [uid for p in loop.plans for uid in p.output.preempted]
    assert order[0] == 3, "lowest priority, latest arrival"
    assert 2 not in order, "the first in order is never preempted"
    loop.expect_reference()


def test_preempted_request_waits_until_all_of_it_and_a_block_fit(make):
    loop = make(num_blocks={"compressed": 9, "index": 9}, growth_permille=0)
    loop.submit(make_request(1, 14, max_tokens=14), make_request(2, 13, max_tokens=10))
    loop.run()
    assert loop.end(2).num_preemptions == 1, "it would thrash"
    loop.expect_reference()


def test_growth_term_keeps_a_request_out_that_would_be_preempted_soon(make):
    changes = {"num_blocks": {"compressed": 9, "index": 9}, "max_step_tokens": 64}
    eager, careful = make(growth_permille=0, **changes), make(growth_permille=1000, **changes)
    for loop in (eager, careful):
        loop.submit(*(make_request(uid, 7, max_tokens=16) for uid in (1, 2, 3)))
        loop.run()
        loop.expect_reference()
    assert eager.scheduler.counts().preemptions > 0
    assert careful.scheduler.counts().preemptions == 0


@pytest.mark.parametrize("late", [0, 1, 2])
def test_request_that_outgrows_the_cache_alone_ends_with_cache_exhausted(make, late):
    loop = make(late, num_blocks={"compressed": 5, "index": 5})
    loop.submit(make_request(1, 10, max_tokens=40), make_request(2, 3, max_tokens=4))
    loop.run()
    end = loop.end(1)
    assert end.finish_reason is FinishReason.ERROR and end.error_code == "cache_exhausted"
    expected, _ = serial_reference(loop.requests[1], 100, VOCAB)
    # 20 positions fit; the token sampled at the last of them is delivered too
    assert loop.tokens(1) == expected[:11]
    loop.expect_reference(2)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_request_that_fits_exactly_completes(make, late):
    loop = make(late, num_blocks={"compressed": 5, "index": 5})
    loop.submit(make_request(1, 10, max_tokens=11))  # the last token is never fed
    loop.run()
    loop.expect_reference()


def test_blocks_on_their_way_back_are_counted_before_another_victim_is_chosen(make):
    loop = make(num_blocks={"compressed": 12, "index": 12}, growth_permille=0, max_step_tokens=64)
    loop.submit(*(make_request(uid, 8, max_tokens=30) for uid in (1, 2, 3, 4)))
    loop.plan()  # 8 blocks; the first decode step takes the other 4, the fifth needs 4 more
    for _ in range(4):
        loop.plan()
        loop.settle()
    assert loop.plan() is None, "one victim gives 3 blocks to 3 rows, once its step is settled"
    assert loop.scheduler.counts().preemptions == 1
    loop.settle()
    assert [m.uid for m in loop.plan().sequences] == [1, 2, 3]
    assert loop.scheduler.counts().preemptions == 1
    loop.run()
    loop.expect_reference()


def test_victim_with_a_chunk_in_flight_is_not_scheduled_again(make):
    loop = make(2, num_blocks={"compressed": 7, "index": 7}, max_chunk_tokens=8)
    loop.submit(make_request(1, 22, max_tokens=2))
    loop.plan()
    loop.submit(make_request(2, 22, max_tokens=2, priority=1))
    for _ in range(2):
        loop.plan()
    assert [p.sequences[0].uid for p in loop.plans] == [1, 2, 2]
    loop.settle()
    loop.run()
    assert loop.end(1).num_preemptions == 1 and loop.end(2).num_preemptions == 0
    loop.expect_reference()


def test_request_is_not_exhausted_by_one_that_enters_in_the_same_step(make):
    loop = make(num_blocks={"compressed": 6, "index": 6}, max_chunk_tokens=12, max_step_tokens=24)
    loop.submit(make_request(1, 16, max_tokens=3))
    loop.step()
    loop.submit(make_request(2, 12, max_tokens=3, priority=1))
    plan = loop.step()
    assert [m.uid for m in plan.sequences] == [2]
    loop.run()
    loop.expect_reference()


def test_preempted_uids_are_told_with_the_next_plan_that_is_launched(make, monkeypatch):
    loop = make(num_blocks={"compressed": 6, "index": 6}, growth_permille=0)
    loop.submit(make_request(1, 7, max_tokens=12), make_request(2, 7, max_tokens=12))
    while not loop.scheduler.counts().preemptions:
        with monkeypatch.context() as patch:
            break_building(patch)
            with pytest.raises(ZeroDivisionError):
                loop.plan()
        if not loop.scheduler.counts().preemptions:
            loop.step()
    assert loop.step().output.preempted == (2,)
    loop.run()
    assert sum(len(p.output.preempted) for p in loop.plans) == loop.end(2).num_preemptions
    loop.expect_reference()


def test_exhausted_request_makes_room_within_the_same_plan(make):
    loop = make(num_blocks={"compressed": 3, "index": 3}, num_slots=1)
    loop.submit(make_request(1, 8, max_tokens=40), make_request(2, 8, max_tokens=4))
    while loop.scheduler.has_work:
        assert loop.step() is not None
    assert [m.uid for p in loop.plans for m in p.sequences] == [1] * 5 + [2] * 4
    assert loop.end(1).error_code == "cache_exhausted"
    loop.expect_reference(2)


def test_prefill_waits_for_blocks_on_their_way_back_instead_of_preempting(make):
    loop = make(num_blocks={"compressed": 7, "index": 7}, max_step_tokens=8)
    loop.worker._poison = lambda meta: meta.uid == 2
    loop.submit(make_request(1, 22, max_tokens=2))
    loop.plan()
    loop.settle()
    loop.submit(
        make_request(2, 8, priority=2),
        make_request(3, 22, max_tokens=2, priority=1),
    )
    while loop.plan() is not None:
        loop.settle()
    assert loop.end(2).error is not None
    assert [p.sequences[-1].uid for p in loop.plans] == [1, 2, 3, 3]
    assert loop.scheduler.counts().preemptions == 0, "the quarantined blocks are enough for now"
    loop.run()
    loop.expect_reference(1, 3)


def test_requests_that_enter_together_leave_room_for_each_other(make):
    loop = make(
        num_blocks={"compressed": 20, "index": 20}, growth_permille=1000, max_step_tokens=64
    )
    # each is 1 block now and 4 in the end; the fifth would fit only without the growth of others
    loop.submit(*(make_request(uid, 4, max_tokens=12) for uid in range(1, 8)))
    assert [m.uid for m in loop.step().sequences] == [1, 2, 3, 4, 5]
    loop.run()
    assert loop.scheduler.counts().preemptions == 0


def test_expected_growth_rises_with_preemptions_and_decays():
    growth = GrowthEstimate(replace(BASE, growth_horizon=100, growth_permille=400))
    assert growth.tokens(1000) == 40 and growth.tokens(10) == 4
    growth.preempted()
    assert growth.tokens(100) == 50
    for _ in range(10):
        growth.preempted()
    assert growth.tokens(100) == 100
    for _ in range(500):
        growth.decoded()
    assert growth.tokens(100) == 50
    for _ in range(5000):
        growth.decoded()
    assert growth.tokens(100) == 10


def test_admission_learns_from_preemptions(make):
    loop = make(num_blocks={"compressed": 6, "index": 6}, growth_permille=40)
    growth = loop.scheduler._roster.growth
    loop.submit(make_request(1, 7, max_tokens=12), make_request(2, 7, max_tokens=12))
    while not loop.scheduler.counts().preemptions:
        before = growth.tokens(500)
        loop.step()
    assert growth.tokens(500) > before
    peak = growth.tokens(500)
    loop.run()
    assert growth.tokens(500) < peak


def test_a_generation_is_released_once():
    roster = Roster(BASE)
    roster.add(make_request(1))
    (sequence,) = roster.waiting
    rows = PrefillRows(roster, 0)
    rows.choose(ChunkBudget(BASE))
    roster.lanes.all.last_step[sequence.slot] = 3
    assert len(rows.rows) == 1 and roster.pools.num_free == 62
    assert roster.releases.release(sequence)
    assert not roster.releases.release(sequence)
    assert len(roster.releases) == 1
    assert roster.releases.drain(2) == []
    assert roster.releases.drain(3) == [sequence.owner]
    assert roster.pools.num_free == 64
    roster.pools.audit()


@pytest.mark.parametrize("state", list(State))
def test_states_change_only_along_the_table(state):
    for target in State:
        (sequence,) = waiting_sequences(1)
        sequence.state = state
        if target in TRANSITIONS[state]:
            sequence.move(target)
        else:
            with pytest.raises(AssertionError, match="cannot go"):
                sequence.move(target)


# Ends


def test_verify_length_never_passes_the_cap(make):
    loop = make(max_drafts=5)
    loop.worker._accepts = lambda uid, position: False
    loop.submit(make_request(1, 5, max_tokens=8))
    loop.run()
    drafts = [m.num_drafts for p in loop.plans for m in p.sequences if m.phase is Phase.VERIFY]
    assert drafts == [5, 5, 4, 3, 2, 1, 0]


def test_stop_id_ends_the_output_and_is_part_of_it(make):
    request = make_request(1, 5, max_tokens=30)
    tokens, _ = serial_reference(request, 100, VOCAB)
    loop = make()
    loop.submit(replace(request, stop_ids=frozenset({tokens[4]})))
    loop.run()
    assert loop.end(1).finish_reason is FinishReason.STOP
    assert loop.tokens(1)[-1] == tokens[4] and len(loop.tokens(1)) <= 5


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("drafts", range(8))
def test_first_stop_in_position_order_ends_an_accepted_run(make, late, drafts):
    request = make_request(1, 5, max_tokens=9)
    tokens, _ = serial_reference(request, 100, VOCAB)
    loop = make(late, max_drafts=drafts)
    loop.submit(replace(request, stop_ids=frozenset({tokens[6], tokens[4], tokens[7]})))
    loop.run()
    loop.expect_reference()


@pytest.mark.parametrize("cap", range(1, 9))
@pytest.mark.parametrize("late", [0, 1, 2])
def test_cap_cuts_an_accepted_run(make, cap, late):
    loop = make(late, max_drafts=5)
    loop.submit(make_request(1, 5, max_tokens=cap))
    loop.run()
    assert len(loop.tokens(1)) == cap
    loop.expect_reference()


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_context_limit_ends_with_length(make, late, drafts):
    loop = make(late, max_model_len=13, max_drafts=drafts)
    loop.submit(make_request(1, 9, max_tokens=50), make_request(2, 12, max_tokens=50))
    loop.run()
    assert len(loop.tokens(1)) == 4 and len(loop.tokens(2)) == 1
    assert max(m.kv_len for p in loop.plans for m in p.sequences) <= 13
    loop.expect_reference()


def test_no_step_is_planned_for_a_request_that_ends_for_certain(make):
    loop = make(1)
    loop.submit(make_request(1, 5, max_tokens=3))
    loop.run()
    assert len(loop.plans) == 3


@pytest.mark.parametrize("late", [0, 1, 2])
def test_finish_ends_a_request_from_outside(make, late):
    loop = make(late)
    loop.submit(make_request(1, max_tokens=30), make_request(2, max_tokens=8))
    for _ in range(4):
        loop.step()
    update = loop.scheduler.finish(1, FinishReason.STOP)
    assert update == SequenceUpdate(1, finish_reason=FinishReason.STOP)
    assert loop.scheduler.finish(1, FinishReason.STOP) is None
    seen = len(loop.tokens(1))
    loop.run()
    assert len(loop.tokens(1)) == seen, "nothing follows the end"
    loop.expect_reference(2)


def test_finish_of_a_preempted_waiting_request(make):
    loop = make(num_blocks={"compressed": 6, "index": 6}, growth_permille=0)
    loop.submit(make_request(1, 7, max_tokens=12), make_request(2, 7, max_tokens=12))
    while not loop.scheduler.counts().preemptions:
        loop.step()
    update = loop.scheduler.finish(2, FinishReason.STOP)
    assert update is not None and update.num_preemptions == 1
    loop.run()
    loop.expect_reference(1)


# Abort


def test_abort_while_waiting_ends_at_once(make):
    loop = make(num_slots=1)
    loop.submit(make_request(1), make_request(2))
    loop.step()
    assert loop.scheduler.abort("r2")
    assert loop.scheduler.pop_updates() == (SequenceUpdate(2, finish_reason=FinishReason.ABORT),)
    loop.run()
    loop.expect_reference(1)


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("steps", range(6))
def test_abort_in_each_phase_leaves_neighbours_alone(make, steps, late):
    loop = make(late, max_chunk_tokens=5)
    loop.submit(make_request(1, 12), make_request(2, 11, max_tokens=20), make_request(3, 8))
    for _ in range(steps):
        loop.step()
    assert loop.scheduler.abort("r2")
    assert not loop.scheduler.abort("r2"), "the second abort finds nothing"
    loop.run()
    assert loop.end(2).finish_reason is FinishReason.ABORT
    loop.expect_reference(1, 3)


def test_abort_between_plan_and_settle_wins_over_the_tokens(make):
    loop = make()
    loop.submit(make_request(1))
    loop.plan()
    assert loop.scheduler.abort("r1")
    loop.settle()
    assert loop.updates == [SequenceUpdate(1, finish_reason=FinishReason.ABORT)]
    loop.audit_idle()


def test_aborted_blocks_are_not_reused_before_their_step_is_settled(make):
    loop = make(num_blocks={"compressed": 3, "index": 3})
    loop.submit(make_request(1, 8))
    loop.plan()
    loop.scheduler.abort("r1")
    loop.submit(make_request(2, 8, max_tokens=4))
    assert loop.scheduler.counts().blocks["index"][BlockState.DEFERRED.value] == 2
    second = loop.plan()
    assert second is not None and second.sequences[0].num_rows == 4, "only the free block is used"
    loop.run()
    loop.expect_reference(2)


def test_abort_of_an_unknown_id_is_ignored(make):
    loop = make()
    assert not loop.scheduler.abort("nobody")
    assert not loop.scheduler.has_work


def test_client_id_can_be_used_again_after_the_end(make):
    loop = make(1)
    loop.submit(make_request(1, client_id="a"))
    loop.plan()
    loop.scheduler.abort("a")
    loop.submit(make_request(2, client_id="a"))
    loop.run()
    assert loop.end(1).finish_reason is FinishReason.ABORT
    loop.expect_reference(2)


# Refusals


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (make_request(9, 0), "invalid_request"),
        (make_request(9, 100), "context_length_exceeded"),
        (make_request(9, 28), "never_fits"),
    ],
)
def test_impossible_requests_are_refused_at_once(make, request_, code):
    loop = make(num_blocks={"compressed": 30, "index": 7})
    with pytest.raises(RequestError) as caught:
        loop.scheduler.submit(request_)
    assert caught.value.code == code and caught.value.param == "prompt"
    assert not loop.scheduler.has_work


def test_a_prompt_that_fills_all_blocks_but_one_is_accepted(make):
    loop = make(num_blocks={"compressed": 30, "index": 7})
    loop.submit(make_request(1, 24, max_tokens=5), make_request(2, 24, max_tokens=3))
    loop.run()
    loop.expect_reference()


def test_a_prompt_one_below_the_context_yields_one_token(make):
    loop = make()
    loop.submit(make_request(1, 99))
    loop.run()
    assert len(loop.tokens(1)) == 1


def test_duplicate_client_id_is_refused_while_the_first_lives(make):
    loop = make()
    loop.submit(make_request(1, client_id="same"))
    with pytest.raises(DuplicateRequest):
        loop.scheduler.submit(make_request(2, client_id="same"))
    loop.run()
    loop.submit(make_request(3, client_id="same"))
    loop.run()
    loop.expect_reference()


@pytest.mark.parametrize(
    "changes",
    [{"block_size": 3}, {"num_blocks": {}}, {"num_blocks": {"index": 0}}, {"num_slots": 0}],
)
def test_limits_outside_their_range_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes)).removeprefix("num_") + "|block"):
        replace(BASE, **changes)


# Faults


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("start", [0, 5, 11, 13])
def test_non_finite_row_ends_its_request_alone_and_its_cache_is_scrubbed(make, late, start):
    loop = make(late, max_chunk_tokens=5)
    loop.worker._poison = lambda meta: meta.uid == 2 and meta.kv_len > start
    loop.submit(*(make_request(uid, 11) for uid in (1, 2, 3)))
    loop.run()
    end = loop.end(2)
    assert end.finish_reason is FinishReason.ERROR and "not finite" in end.error
    loop.expect_reference(1, 3)


def test_quarantined_blocks_stay_out_of_use_until_scrubbed(make):
    loop = make(num_blocks={"compressed": 4, "index": 4}, num_slots=1)
    loop.worker._poison = lambda meta: meta.uid == 1
    loop.submit(make_request(1, 10))
    loop.plan()
    loop.settle()
    loop.submit(make_request(2, 2))
    assert loop.scheduler.plan() is None, "its slot is not clean"
    scrub = loop.scheduler.scrub()
    assert scrub.slots == (0,) and all(len(ids) == 3 for ids in scrub.blocks.values())
    assert loop.scheduler.has_work
    loop.run()
    assert not loop.scheduler.scrub()
    loop.expect_reference(2)


def test_non_finite_overrun_of_a_finished_request_is_quarantined_too(make):
    loop = make(1)
    loop.worker._poison = lambda meta: meta.start >= 6
    loop.submit(make_request(1, 5, max_tokens=30))
    loop.plan()
    loop.plan()
    loop.settle()
    loop.plan()
    assert loop.scheduler.finish(1) is not None
    while loop.unsettled:
        loop.settle()
    assert loop.scheduler.scrub()
    loop.scrub()
    loop.audit_idle()


def test_wrong_start_position_ends_the_request_as_a_bad_source(make):
    loop = make()
    loop.submit(make_request(1), make_request(2))
    loop.step()
    plan = loop.scheduler.plan()
    loop.worker.launch(plan)
    result = loop.worker.result(plan)
    loop.take(plan, replace(result, start=result.start + np.array([1, 0])))
    assert loop.end(1).finish_reason is FinishReason.ERROR
    assert "fault of the engine" in loop.end(1).error
    loop.run()
    loop.expect_reference(2)


def test_bad_source_status_ends_the_request(make):
    loop = make()
    loop.submit(make_request(1))
    plan = loop.plan()
    loop.unsettled.clear()
    loop.take(plan, replace(loop.worker.result(plan), status=np.array([RowStatus.BAD_SOURCE])))
    assert loop.end(1).finish_reason is FinishReason.ERROR
    assert loop.end(1).error_code == "bad_source"
    loop.scrub()
    loop.audit_idle()


@pytest.mark.parametrize("late", [0, 1])
def test_failed_step_ends_its_requests_and_nobody_else(make, late):
    loop = make(late, num_slots=2)
    loop.submit(*(make_request(uid) for uid in (1, 2, 3)))
    for _ in range(3):
        loop.plan()
        if not late:
            break
    while loop.unsettled:
        plan = loop.unsettled.popleft()
        loop.updates += loop.scheduler.fail(plan, "The worker failed.")
        loop.scheduler.audit()
    loop.worker = FakeWorker(loop.limits, vocab_size=VOCAB)
    assert loop.end(1).error == loop.end(2).error == "The worker failed."
    assert loop.end(1).error_code == "device_fault"
    loop.run()
    loop.expect_reference(3)


@pytest.mark.parametrize("nth", range(8))
@pytest.mark.parametrize("target", ["pools", "slots"])
def test_failure_inside_a_plan_rolls_everything_back(make, monkeypatch, nth, target):
    loop = make(max_step_tokens=40)
    loop.submit(*(make_request(uid, 3, max_tokens=20) for uid in (1, 2)))
    for _ in range(2):
        loop.step()
    loop.submit(*(make_request(uid, 9) for uid in (3, 4, 5)))
    before = loop.scheduler.counts()
    roster = loop.scheduler._roster
    pool = roster.pools.pools["index"] if target == "pools" else roster.slots
    real, calls = pool.allocate_each, 0

    def failing(*args):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise MemoryError("no memory")
        return real(*args)

    monkeypatch.setattr(pool, "allocate_each", failing)
    for _ in range(12):
        try:
            loop.step()
        except MemoryError:
            loop.scheduler.audit()
            if nth <= 3:
                assert loop.scheduler.counts() == before
    loop.run()
    loop.expect_reference()


def test_failure_while_a_plan_is_built_rolls_everything_back(make, monkeypatch):
    loop = make()
    loop.submit(make_request(1), make_request(2))
    before = loop.scheduler.counts()
    with monkeypatch.context() as patch:
        break_building(patch)
        with pytest.raises(ZeroDivisionError):
            loop.scheduler.plan()
    loop.scheduler.audit()
    assert loop.scheduler.counts() == before
    loop.run()
    assert loop.plans[0].output.step_seq == 1
    loop.expect_reference()


def test_accepted_runs_yield_several_tokens_a_step(make):
    plain, drafted = make(max_drafts=0), make(max_drafts=5)
    for loop in (plain, drafted):
        loop.submit(make_request(1, 5, max_tokens=25))
        loop.run()
        loop.expect_reference()
    assert len(drafted.plans) < len(plain.plans) / 3


def test_counts_tell_where_requests_are(make):
    loop = make(num_slots=2, max_step_tokens=6)
    loop.submit(make_request(1, 5), make_request(2, 9), make_request(3))
    loop.plan()
    counts = loop.scheduler.counts()
    assert (counts.waiting, counts.prefilling, counts.running) == (1, 1, 1)
    assert counts.inflight_tokens == 6 and counts.unsettled_steps == 1
    assert counts.blocks["compressed"] == {
        "free": 61,
        "held": 3,
        "shared": 0,
        "deferred": 0,
        "quarantined": 0,
    }
    loop.settle()
    loop.run()


def test_a_uid_in_use_is_refused(make):
    loop = make()
    loop.submit(make_request(1))
    with pytest.raises(DuplicateRequest, match="uid 1"):
        loop.submit(make_request(1, client_id="other"))
    loop.run()
    loop.expect_reference(1)


def test_nothing_follows_the_update_of_a_request_that_was_finished_before_it_was_told(make):
    loop = make()
    loop.submit(make_request(1), make_request(2))
    loop.step()
    plan = loop.plan()
    loop.unsettled.clear()
    settlement = loop.scheduler.settle(plan, loop.worker.result(plan))
    assert loop.scheduler.finish(1) is not None
    assert [update.uid for update in settlement.finish()] == [2]
    loop.scheduler.abort("r2")
    loop.scheduler.pop_updates()


def test_nothing_to_do_is_none(make):
    loop = make()
    assert loop.scheduler.plan() is None
    assert loop.scheduler.pop_updates() == ()
