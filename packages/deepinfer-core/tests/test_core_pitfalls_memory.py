"""Memory that runs short: preemption at any point, what is recomputed, and who has to wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_core.cache.block_pool import BlockState, Owner
from deepinfer_core.plans import Phase
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.scheduler.sequence import Sequence, State
from deepinfer_core.testing.driven_loop import VOCAB, DrivenLoop, make_request
from deepinfer_core.testing.reference import serial_reference
from deepinfer_core.types import FinishReason

LIMITS = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 40, "index": 44},
    num_slots=4,
    max_model_len=100,
    max_step_tokens=16,
    max_chunk_tokens=16,
    window=6,
    growth_permille=0,
)
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def drive(depth: int = 2, accepts=1.0, **changes) -> DrivenLoop:
    if "blocks" in changes:
        changes["num_blocks"] = dict.fromkeys(("compressed", "index"), changes.pop("blocks"))
    return DrivenLoop(
        replace(LIMITS, **changes), depth, accepts=accepts, step_time_ns=1000, copy_time_ns=10
    )


def resident(driven: DrivenLoop, uid: int) -> Sequence:
    return driven.scheduler._roster.resident[uid]


def preempt(driven: DrivenLoop, uid: int) -> None:
    """Take a request off the device if it is there, as a plan does that is short of blocks."""

    def message() -> None:
        sequence = driven.scheduler._roster.resident.get(uid)
        if sequence is not None and sequence.state in (State.PREFILL, State.RUNNING):
            driven.scheduler._roster.preempt(sequence)

    driven.loop.post(message)


class Hostages:
    """Blocks out of use for a while, as those of a quarantine: they come back by themselves."""

    def __init__(self, driven: DrivenLoop, count: int) -> None:
        self._pools = driven.scheduler._roster.pools
        owner = Owner(-7, 0)
        self._blocks = self._pools.allocate(owner, count)
        for name, ids in self._blocks.items():
            self._pools.pools[name].defer(owner, ids)
            self._pools.pools[name].quarantine(owner, ids)

    def free(self) -> None:
        for name, ids in self._blocks.items():
            self._pools.pools[name].scrubbed(ids)


# Preemption at any point


@DEPTHS
@pytest.mark.parametrize("drafts", [0, 3])
def test_output_is_the_same_for_a_preemption_at_any_position(depth, drafts):
    preemptions = 0
    for num_iterations in range(2, 13):
        driven = drive(depth, 0.6, max_drafts=drafts, max_chunk_tokens=5)
        driven.submit(make_request(1, 7, max_tokens=12), make_request(2, 13, max_tokens=9))
        driven.iterate(num_iterations)
        preempt(driven, 2)
        driven.run()
        preemptions += driven.end(2).num_preemptions
        driven.expect_reference()
    assert preemptions > 5


@DEPTHS
def test_tokens_in_flight_at_a_preemption_are_delivered_and_not_computed_again(depth, monkeypatch):
    """Without stops and drafts each token that a step yields is delivered, and only once."""
    driven = drive(depth, blocks=9)
    yielded: Counter[int] = Counter()
    settle = driven.scheduler.settle

    def count(plan, result):
        for uid, tokens in zip(plan.rows.uid.tolist(), result.num_tokens.tolist(), strict=True):
            yielded[uid] += tokens
        return settle(plan, result)

    monkeypatch.setattr(driven.scheduler, "settle", count)
    driven.submit(*(make_request(uid, 5, max_tokens=20) for uid in range(1, 5)))
    driven.run()
    totals = driven.scheduler.totals
    assert totals.preemptions > 2
    assert yielded == {uid: 20 for uid in range(1, 5)}
    assert totals.recomputed_tokens < 4 * 20, "less than what was delivered"
    driven.expect_reference()


@pytest.mark.parametrize("drafts", [0, 3])
def test_preempted_request_keeps_its_blocks_until_its_step_is_settled(drafts):
    driven = drive(2, max_drafts=drafts)
    driven.submit(make_request(1, max_tokens=30), make_request(2, max_tokens=30))
    driven.iterate(4)
    sequence, tables = resident(driven, 2), driven.scheduler._roster.tables
    held = int(tables.num_blocks[sequence.slot])
    told = len(driven.tokens(2))
    preempt(driven, 2)
    driven.iterate()
    assert sequence.state is State.PREEMPTING and sequence.unsettled == 1
    assert int(tables.num_blocks[sequence.slot]) == held
    assert 2 not in driven.plans[-1].rows.uid, "it is not scheduled any more"
    driven.iterate()
    assert sequence.slot is None or sequence.generation == 1
    assert len(driven.tokens(2)) > told, "what was in flight is told"
    driven.run()
    driven.expect_reference()


@pytest.mark.parametrize("ending", ["stop", "cap", "abort", "finish"])
def test_request_that_ends_while_it_is_being_preempted_does_not_come_back(ending):
    driven = drive(2)
    request = make_request(2, max_tokens=6 if ending == "cap" else 30)
    tokens, _ = serial_reference(request, 100, VOCAB)
    if ending == "stop":
        request = replace(request, stop_ids=frozenset({tokens[5]}))
    driven.submit(make_request(1, max_tokens=30), request)
    while len(driven.tokens(2)) < 4:
        driven.iterate()
    preempt(driven, 2)  # its sixth token is in flight
    driven.iterate()
    assert resident(driven, 2).state is State.PREEMPTING
    if ending == "abort":
        driven.scheduler.abort("r2")
    if ending == "finish":
        driven.updates.append(driven.scheduler.finish(2, FinishReason.STOP))
    launched = len(driven.plans)
    driven.run()
    assert not any(2 in plan.rows.uid for plan in driven.plans[launched:])
    driven.expect_reference(1)
    if ending in ("stop", "cap"):
        driven.expect_reference(2)


@DEPTHS
def test_recompute_that_is_preempted_between_its_chunks_loses_nothing(depth):
    driven = drive(depth, max_chunk_tokens=4)
    driven.submit(make_request(1, 6, max_tokens=40), make_request(2, 9, max_tokens=20))
    while len(driven.tokens(2)) < 7:
        driven.iterate()
    preempt(driven, 2)
    for generation in (1, 2):
        while not any(
            m.generation == generation and m.phase is Phase.CHUNK
            for m in driven.plans[-1].sequences
        ):
            driven.iterate()
        if resident(driven, 2).state is State.PREFILL:
            preempt(driven, 2)
            driven.iterate()
    driven.run()
    assert driven.end(2).num_preemptions == 3
    driven.expect_reference()


# Rows left out


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_row_that_was_left_out_of_steps_goes_on_from_settled_tokens(num_steps, drafts):
    size = 32
    driven = drive(2, max_drafts=drafts, block_size=size, max_step_tokens=80, max_chunk_tokens=80)
    full = size - 2 * (1 + drafts)  # its block is full after a prompt and two steps
    driven.submit(make_request(1, full, max_tokens=40), make_request(2, full + 1, max_tokens=40))
    driven.iterate(3)
    hostages = Hostages(driven, driven.scheduler._roster.pools.num_free)
    scrub, driven.scheduler.scrub = driven.scheduler.scrub, lambda: ()
    driven.iterate(num_steps)
    driven.scheduler.scrub = scrub
    hostages.free()
    driven.iterate()
    uids = [sorted(plan.rows.uid.tolist()) for plan in driven.plans]
    assert uids == [[1, 2]] * 3 + [[2]] * num_steps + [[1, 2]]
    resumed, other = sorted(driven.plans[-1].sequences, key=lambda m: m.uid)
    assert resumed.source == -1 and resumed.num_drafts == drafts
    tokens = serial_reference(driven.requests[1], 100, VOCAB)[0]
    told = len(driven.tokens(1))
    assert resumed.token_ids == tokens[told - 1 : told + drafts], "drafts are right here"
    assert driven.plans[-2].rows.uid[other.source] == 2
    driven.run()
    assert driven.scheduler.counts().preemptions == 0
    driven.expect_reference()


# The edge of the pool


@DEPTHS
@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_request_that_fits_to_the_last_position_completes_for_any_drafts(depth, drafts):
    for accepts in (0.0, 1.0):
        driven = drive(depth, accepts, blocks=5, max_drafts=drafts)
        driven.submit(make_request(1, 10, max_tokens=11))  # the last token is never fed
        driven.run()
        driven.expect_reference()


@DEPTHS
@pytest.mark.parametrize("drafts", [0, 3])
def test_request_that_needs_one_block_more_than_there_is_ends_alone(depth, drafts):
    driven = drive(depth, blocks=5, max_drafts=drafts)
    driven.submit(make_request(1, 10, max_tokens=40), make_request(2, 3, max_tokens=4))
    driven.run()
    assert driven.end(1).error_code == "cache_exhausted"
    tokens, _ = serial_reference(driven.requests[1], 100, VOCAB)
    told = driven.tokens(1)
    assert told == tokens[: len(told)]
    assert len(told) >= 11 - drafts, "it was stopped before its blocks were full"
    driven.expect_reference(2)


# Victims whose blocks cannot be had yet


def test_blocks_of_a_victim_under_transfer_cost_no_second_victim():
    driven = drive(2, blocks=12, max_step_tokens=64)
    driven.submit(*(make_request(uid, 8, max_tokens=30) for uid in (1, 2, 3, 4)))
    driven.iterate(3)
    tickets = [driven.scheduler.open_ticket(f"r{uid}", 10**12) for uid in (3, 4)]
    for _ in range(20):
        driven.iterate()
    assert driven.scheduler.counts().preemptions == 1, "its blocks are counted though they are held"
    assert driven.scheduler.counts().pending_free >= 3
    for ticket in tickets:
        driven.scheduler.complete_ticket(ticket)
    driven.run()
    driven.expect_reference()


@DEPTHS
def test_two_long_prompts_in_a_small_pool_take_turns_without_thrashing(depth):
    driven = drive(depth, blocks=12, max_chunk_tokens=8)
    driven.submit(*(make_request(uid, 30, max_tokens=12) for uid in (1, 2, 3)))
    driven.run()
    rows = sum(plan.output.num_rows for plan in driven.plans)
    assert rows <= 3 * (30 + 12) * 2, "less than every token twice"
    driven.expect_reference()


@DEPTHS
def test_many_requests_in_a_pool_for_few_all_complete(depth):
    driven = drive(depth, 0.5, blocks=14, max_drafts=2, num_slots=8, prefill_run_max=1)
    driven.submit(
        *(make_request(uid, 3 + uid % 7, max_tokens=14, priority=uid % 3) for uid in range(1, 13))
    )
    driven.run()
    totals = driven.scheduler.totals
    assert totals.preemptions > 0 and totals.recomputed_tokens < 12 * 14
    driven.expect_reference()


def test_every_state_of_every_block_adds_up_while_memory_is_short():
    driven = drive(2, 0.5, blocks=11, max_drafts=3)
    driven.submit(*(make_request(uid, 4 + uid, max_tokens=15) for uid in range(1, 8)))
    while driven.loop.has_work:
        driven.iterate()
        counts = driven.scheduler.counts()
        for states in counts.blocks.values():
            assert sum(states.values()) == 11 and set(states) == {s.value for s in BlockState}
        reserved = sum(int(np.sum(p.rows.num_rows)) for p in unsettled(driven))
        assert counts.inflight_tokens == reserved
    driven.audit_idle()
    driven.expect_reference()


def unsettled(driven: DrivenLoop) -> list:
    """Return the plans of the steps in flight: the last ones that were launched."""
    return driven.plans[len(driven.plans) - driven.loop.num_unsettled :]
