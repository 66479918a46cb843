"""Slots, blocks and containers come back once, and never before the last step that names them."""

from __future__ import annotations

import gc
import random
import types
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_core.cache.block_pool import BlockPool, Owner
from deepinfer_core.plans import StepKind
from deepinfer_core.scheduler import Scheduler, SchedulerLimits
from deepinfer_core.testing.driven_loop import VOCAB, DrivenLoop, make_request
from deepinfer_core.testing.reference import serial_reference
from deepinfer_core.types import FinishReason, Request

LIMITS = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 40, "index": 44},
    num_slots=4,
    max_model_len=100,
    max_step_tokens=16,
    max_chunk_tokens=16,
    window=6,
)
STEP = 1000


def drive(depth: int = 2, **changes) -> DrivenLoop:
    device = {name: changes.pop(name) for name in ("accepts", "revoke") if name in changes}
    return DrivenLoop(
        replace(LIMITS, **changes), depth, step_time_ns=STEP, copy_time_ns=10, **device
    )


def stopping(uid: int, place: int, prompt: int = 5, **changes) -> Request:
    """Return a request that ends with its token at `place`, by a stop id unknown to the plan."""
    request = make_request(uid, prompt, max_tokens=40, **changes)
    tokens, _ = serial_reference(request, LIMITS.max_model_len, VOCAB)
    return replace(request, stop_ids=frozenset({tokens[place]}))


def named_by(driven: DrivenLoop, uid: int) -> tuple[set[int], set[tuple[str, int]]]:
    """Return the slots and the blocks that launched steps gave a request."""
    slots, blocks = set(), set()
    for plan in driven.plans:
        mine = set(plan.rows.slot[plan.rows.uid == uid].tolist())
        slots |= mine
        for pool, delta in plan.tables.items():
            blocks |= {(pool, b) for s, b in zip(delta.slots.tolist(), delta.block_ids.tolist(),
                       strict=True) if s in mine}  # fmt: skip
    return slots, blocks


# Finished requests and the step behind


@pytest.mark.parametrize("drafts", [0, 3])
def test_request_admitted_beside_an_overrun_gets_nothing_of_its(drafts, monkeypatch):
    driven = drive(max_drafts=drafts)
    driven.submit(stopping(1, 7), make_request(2, max_tokens=30))
    settle, overruns = driven.scheduler.settle, []

    def settle_and_admit(plan, result):
        settled = settle(plan, result)
        if not overruns and 1 in plan.rows.uid and not driven.scheduler.finish(1):
            overruns.append(driven.plans[-1])
            driven.submit(make_request(3, 9), make_request(4, 12))
        return settled

    # Ends by its own stop id: `finish` finds nothing of it from that settlement on.
    live = driven.scheduler._roster.by_client
    monkeypatch.setattr(driven.scheduler, "finish", lambda uid: f"r{uid}" in live)
    monkeypatch.setattr(driven.scheduler, "settle", settle_and_admit)
    while not overruns:
        driven.iterate()
    assert 1 in overruns[0].rows.uid and driven.loop.num_unsettled == 2
    assert {3, 4} <= set(driven.plans[-1].rows.uid.tolist()), "they enter at once"
    slots, blocks = named_by(driven, 1)
    for uid in (3, 4):
        other_slots, other_blocks = named_by(driven, uid)
        assert not slots & other_slots and not blocks & other_blocks
    driven.run()
    driven.submit(make_request(5, 30))
    driven.run()
    assert named_by(driven, 5)[1] & blocks, "later they are used again"
    driven.expect_reference()


@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize("place", range(1, 9))
def test_stop_that_is_settled_with_the_next_step_launched_is_the_end(place, drafts):
    driven = drive(max_drafts=drafts)
    driven.submit(stopping(1, place), make_request(2, max_tokens=30, max_drafts=0))
    driven.run()
    steps = [m for plan in driven.plans for m in plan.sequences if m.uid == 1]
    assert driven.scheduler.totals.overrun_tokens == steps[-1].num_rows, "one step ran too far"
    driven.expect_reference()


def test_64_requests_whose_40_prefill_steps_come_first_drain_to_nothing():
    driven = drive(
        num_slots=64,
        num_blocks={"compressed": 500, "index": 500},
        prefill_run_max=100,
        max_drafts=2,
        accepts=0.5,
    )
    driven.submit(*(make_request(uid, 10, max_tokens=1 + uid % 14) for uid in range(1, 65)))
    driven.run()
    kinds = [plan.output.kind for plan in driven.plans]
    assert kinds[:40] == [StepKind.PREFILL] * 40
    assert max(len(plan.rows) for plan in driven.plans) > 55 and len(driven.plans[-1].rows) < 6
    driven.expect_reference()


def test_a_plan_shares_no_memory_with_the_books():
    driven = drive(max_drafts=2)
    driven.submit(*(make_request(uid, 7, max_tokens=20) for uid in (1, 2, 3)))
    lanes, tables = driven.scheduler._roster.lanes, driven.scheduler._roster.tables
    books = [*lanes.all, lanes.drafts, lanes.stops, tables.num_blocks, *tables.ids.values()]
    driven.run()
    for plan in driven.plans:
        arrays = [plan.rows.data, plan.token_ids]
        for delta in plan.tables.values():
            arrays += [delta.slots, delta.places, delta.block_ids]
        assert not any(np.may_share_memory(a, b) for a in arrays for b in books)


# Everything comes back, once


@pytest.mark.parametrize("depth", [0, 2])
def test_every_block_that_was_taken_is_given_back_once(depth, monkeypatch):
    taken, given = Counter(), Counter()
    move = BlockPool._move

    def counting(pool, name, blocks, *owners):
        kind = {"allocate": taken, "cancel": given, "free": given, "evict": given}.get(name)
        if name == "scrubbed":
            kind = given
        if kind is not None:
            kind.update((pool.name, int(block)) for block in np.asarray(blocks))
        move(pool, name, blocks, *owners)

    monkeypatch.setattr(BlockPool, "_move", counting)
    driven = drive(depth, num_blocks={"compressed": 10, "index": 9}, growth_permille=0)
    driven.submit(*(stopping(uid, 5 + uid, prompt=2 + uid) for uid in range(1, 7)))
    driven.iterate(5)
    driven.scheduler.abort("r2")
    driven.device.poison(3)
    driven.run()
    assert driven.scheduler.totals.preemptions, "memory is short"
    assert taken == given and sum(taken.values()) > 30


def test_blocks_come_back_though_nothing_can_be_scheduled():
    driven = drive(num_blocks={"compressed": 4, "index": 4}, num_slots=2)
    driven.submit(make_request(1, 12, max_tokens=4), make_request(2, 11, max_tokens=3))
    driven.iterate(2)
    assert driven.scheduler.counts().blocks["index"]["free"] == 0
    launched = len(driven.plans)
    driven.scheduler.paused = True
    driven.scheduler.abort("r1")
    driven.iterate(3)
    assert len(driven.plans) == launched
    assert driven.scheduler.counts().blocks["index"]["free"] == 4
    driven.scheduler.paused = False
    driven.run()
    driven.expect_reference(2)


def reachable(root: object) -> int:
    """Return how many objects are reachable from one, types and modules left out."""
    seen, found = {id(root)}, [root]
    skipped = (type, types.ModuleType, types.FunctionType, types.CodeType)
    for each in found:
        for other in gc.get_referents(each):
            if id(other) not in seen and not isinstance(other, skipped):
                seen.add(id(other))
                found.append(other)
    return len(found)


def test_100_000_cancels_leave_nothing_behind():
    scheduler = Scheduler(LIMITS)

    def cancel(first: int, count: int) -> None:
        for uid in range(first, first + count):
            deadline_ns = 10**15 if uid % 2 else None
            scheduler.submit(request := make_request(uid, (1, 2), deadline_ns=deadline_ns))
            assert scheduler.abort(request.client_id)
            assert not scheduler.abort("unknown")
            scheduler.pop_updates()
        scheduler.drain(0)

    cancel(1, 100)
    before = reachable(scheduler)
    cancel(101, 100_000)
    assert reachable(scheduler) <= before + 2000
    scheduler.audit()


def test_cancels_of_running_requests_leave_nothing_behind():
    driven = drive(prefix_cache=True, num_stored=1, max_drafts=1)
    sizes = []
    for uid in range(1, 121):
        driven.submit(make_request(uid, 3 + uid % 9, max_tokens=30, deadline_ns=10**15))
        driven.iterate(uid % 4)
        driven.scheduler.abort(f"r{uid}")
        if uid in (60, 120):
            driven.run()
            driven.updates.clear()
            sizes.append(reachable(driven.scheduler))
    assert sizes[1] <= sizes[0] + 200, sizes


# Transfers


def started(depth: int = 2, **changes) -> DrivenLoop:
    """Return a loop in which request 1 runs and leaves two blocks to others."""
    driven = drive(depth, num_blocks={"compressed": 6, "index": 6}, num_slots=2, **changes)
    driven.submit(make_request(1, 14, max_tokens=10))
    driven.iterate(2)
    return driven


@pytest.mark.parametrize("ending", ["abort", "finish"])
def test_blocks_under_transfer_are_kept_until_its_completion(ending):
    driven = started()
    first = driven.scheduler.open_ticket("r1", 10**12)
    second = driven.scheduler.open_ticket("r1", 10**12)
    if ending == "abort":
        driven.scheduler.abort("r1")
    else:
        driven.updates.append(driven.scheduler.finish(1, FinishReason.STOP))
    driven.submit(make_request(2, 14, max_tokens=4))
    driven.iterate(4)
    held = named_by(driven, 1)[1]
    assert not held & named_by(driven, 2)[1]
    for ticket in (second, second, 77):  # in any order, twice, and one that never was
        driven.scheduler.complete_ticket(ticket)
        driven.iterate(2)
        assert not held & named_by(driven, 2)[1]
    driven.scheduler.complete_ticket(first)
    driven.run()
    assert held & named_by(driven, 2)[1]
    assert driven.scheduler._roster.releases.tickets.num_unknown == 2
    driven.expect_reference(2)


@pytest.mark.parametrize("revoked", [True, False])
def test_completion_that_is_lost_ends_with_the_lease(revoked):
    asked = []
    driven = started(revoke=lambda ticket: bool(asked.append(ticket)) or revoked)
    ticket = driven.scheduler.open_ticket("r1", 10**6)
    driven.scheduler.abort("r1")
    driven.submit(make_request(2, 14, max_tokens=4))
    driven.iterate(4)
    held = named_by(driven, 1)[1]
    assert not asked and not held & named_by(driven, 2)[1]
    driven.clock.advance(10**6)
    driven.scheduler.drain(driven.clock.now_ns())
    assert asked == [ticket]
    assert bool(driven.scheduler.scrub()) is not revoked, "a peer that may still write: scrubbed"
    driven.scheduler.complete_ticket(ticket)  # comes after all
    driven.run()
    driven.expect_reference(2)


def test_completion_that_comes_before_the_end_changes_nothing():
    driven = started()
    driven.scheduler.complete_ticket(driven.scheduler.open_ticket("r1", 10**12))
    driven.run()
    driven.expect_reference()


def test_ticket_of_a_request_that_holds_nothing_is_none():
    driven = drive()
    driven.submit(make_request(1))
    assert driven.scheduler.open_ticket("r1", 10**12) is None
    assert driven.scheduler.open_ticket("nobody", 10**12) is None
    driven.run()


@pytest.mark.parametrize("seed", range(4))
def test_random_late_writers_never_touch_blocks_of_others(seed):
    rng = random.Random(f"late writers {seed}")
    driven = drive(num_blocks={"compressed": 16, "index": 18}, growth_permille=0)
    roster = driven.scheduler._roster
    writers: dict[int, tuple[Owner, set[tuple[str, int]]]] = {}
    for uid in range(1, 40):
        driven.submit(make_request(uid, rng.randint(1, 12), max_tokens=rng.randint(1, 15)))
        for sequence in list(roster.resident.values()):
            if rng.random() < 0.3:
                ticket = driven.scheduler.open_ticket(sequence.request.client_id, 10**12)
                blocks = {(n, b) for n, ids in roster.tables.blocks(sequence.slot).items()
                          for b in ids.tolist()}  # fmt: skip
                writers[ticket] = sequence.owner, blocks
        if rng.random() < 0.3:
            driven.scheduler.abort(f"r{rng.randint(1, uid)}")
        for ticket in [t for t in writers if rng.random() < 0.4]:
            driven.scheduler.complete_ticket(ticket)
            del writers[ticket]
        for _ in range(rng.randint(0, 3)):
            driven.iterate()
            for sequence in roster.resident.values():
                mine = {(n, b) for n, ids in roster.tables.blocks(sequence.slot).items()
                        for b in ids.tolist()}  # fmt: skip
                for owner, blocks in writers.values():
                    assert owner == sequence.owner or not blocks & mine
    for ticket in writers:
        driven.scheduler.complete_ticket(ticket)
    driven.run()
    for uid in range(1, 40):
        if driven.end(uid).finish_reason is not FinishReason.ABORT:
            driven.expect_reference(uid)
