"""The loop of a rank on a device in virtual time: order of its parts, Flush, messages, records."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from deepinfer_core.engine.records import overlap_ratio
from deepinfer_core.errors import DuplicateRequest
from deepinfer_core.plans import Phase, StepKind
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.scheduler.decision import decide
from deepinfer_core.scheduler.settlement import Settlement
from deepinfer_core.testing.driven_loop import VOCAB, AnyToken, DrivenLoop, make_request
from deepinfer_core.testing.reference import serial_reference
from deepinfer_core.types import FinishReason, SequenceUpdate

LIMITS = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 64, "index": 70},
    num_slots=8,
    max_model_len=100,
    max_step_tokens=16,
    max_chunk_tokens=16,
    window=6,
    history_len=3,
    vocab_size=VOCAB,
)
STEP = 1_000_000
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def drive(depth: int = 2, host_ns: int = 0, device: dict | None = None, **changes) -> DrivenLoop:
    """Return a loop whose votes cost the host some time; `changes` are of limits."""
    limits = replace(LIMITS, **changes)

    def vote(ballot):
        driven.clock.advance(host_ns)
        return decide(ballot, limits.prefill_run_max)

    settings = {"step_time_ns": STEP, "copy_time_ns": STEP // 100, **(device or {})}
    driven = DrivenLoop(limits, depth, loop={"vote": vote}, **settings)
    return driven


def record_parts(driven: DrivenLoop, patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that the parts of iterations are noted in: a letter and a step's number."""
    parts: list[str] = []
    scheduler, device = driven.scheduler, driven.device

    def note(owner, name: str, letter: str, number) -> None:
        real = getattr(owner, name)

        def noted(*args, **named):
            value = real(*args, **named)
            if (step := number(value, *args)) is not None:
                parts.append(f"{letter}{step}")
            return value

        patch.setattr(owner, name, noted)

    note(scheduler, "settle", "S", lambda _, plan, result: result.step_seq)
    note(scheduler, "plan", "B", lambda plan, *_: plan and plan.output.step_seq)
    note(device, "launch", "L", lambda _, plan: plan.output.step_seq)
    note(device, "launch_sampling", "m", lambda _, ticket, __: ticket.plan.output.step_seq)
    note(Settlement, "updates", "s", lambda _, settlement: settlement.result.step_seq)
    return parts


# Order


@pytest.mark.parametrize(
    ("depth", "first", "steady"),
    [
        (0, "B1 L1", "S4 s4 B5 L5"),
        (1, "B1 L1", "S4 B5 L5 s4"),
        (2, "B1 L1", "S3 B5 L5 s3"),
    ],
)
def test_depth_decides_what_is_settled_before_a_step_is_planned(depth, first, steady, monkeypatch):
    driven = drive(depth)
    driven.submit(make_request(1, max_tokens=20))
    parts = record_parts(driven, monkeypatch)
    driven.iterate()
    assert parts == first.split()
    driven.iterate(3)
    parts.clear()
    driven.iterate()
    assert parts == steady.split()


@DEPTHS
def test_steps_are_settled_and_told_in_the_order_of_their_launches(depth, monkeypatch):
    driven = drive(depth)
    driven.submit(*(make_request(uid, 5 + uid, max_tokens=3 + uid) for uid in range(1, 6)))
    parts = record_parts(driven, monkeypatch)
    driven.run()
    numbers = [str(n + 1) for n in range(len(driven.plans))]
    for letter in "BLSs":
        assert [part[1:] for part in parts if part[0] == letter] == numbers


def test_sampling_that_waits_for_masks_comes_before_the_next_launch(monkeypatch):
    driven = drive()
    driven.submit(make_request(1, max_tokens=20, constraint=AnyToken()), make_request(2))
    parts = record_parts(driven, monkeypatch)
    driven.iterate(2)
    assert parts == ["B1", "L1", "m1", "B2", "L2"], "the first one has nothing to wait for"
    parts.clear()
    driven.iterate()
    assert parts == ["S1", "m2", "B3", "L3", "s1"]
    driven.run()
    driven.expect_reference()


@DEPTHS
@pytest.mark.parametrize("drafts", [0, 3])
def test_output_does_not_depend_on_depth_or_drafts(depth, drafts):
    driven = drive(depth, max_drafts=drafts, device={"accepts": 0.6, "jitter": 0.3})
    stops = frozenset({7, 11})
    driven.submit(*(make_request(u, 3 * u, max_tokens=15, stop_ids=stops) for u in range(1, 8)))
    driven.run()
    driven.expect_reference()


@DEPTHS
def test_at_most_one_step_is_in_flight_while_another_is_planned(depth):
    driven = drive(depth)
    seen = []
    driven.loop.post(lambda: None)
    driven.submit(*(make_request(uid, 9, max_tokens=8) for uid in (1, 2, 3)))
    while driven.loop.has_work:
        driven.loop.post(lambda: seen.append(driven.scheduler.counts().unsettled_steps))
        driven.iterate()
    assert max(seen) == (1 if depth == 2 else 0)
    driven.expect_reference()


def test_requests_are_told_of_a_step_in_the_order_of_its_rows():
    driven = drive(max_step_tokens=64)
    driven.submit(*(make_request(uid) for uid in (5, 3, 4)))
    driven.run()
    rows = [uid for plan in driven.plans for uid in plan.rows.uid.tolist()]
    assert [update.uid for update in driven.updates] == rows[: len(driven.updates)]


# The end of work


@DEPTHS
@pytest.mark.parametrize("num_iterations", range(7))
def test_flush_leaves_nothing_in_flight_and_loses_nothing(depth, num_iterations):
    driven = drive(depth, max_drafts=2)
    driven.submit(make_request(1, 20, max_tokens=9), make_request(2, max_tokens=12))
    driven.iterate(num_iterations)
    launched = len(driven.plans)
    driven.take(driven.loop.flush())
    counts = driven.scheduler.counts()
    assert driven.loop.num_unsettled == counts.unsettled_steps == counts.inflight_tokens == 0
    assert sum(blocks["deferred"] for blocks in counts.blocks.values()) == 0
    assert len(driven.plans) == launched, "nothing is planned meanwhile"
    driven.run()
    driven.expect_reference()


@DEPTHS
def test_flush_settles_a_step_whose_sampling_waits_for_masks(depth):
    driven = drive(depth)
    driven.submit(make_request(1, max_tokens=9, constraint=AnyToken()))
    driven.iterate(2)
    driven.take(driven.loop.flush())
    assert driven.loop.num_unsettled == 0
    driven.run()
    driven.expect_reference()


@DEPTHS
def test_end_of_the_last_request_leaves_no_step_behind(depth):
    request = make_request(1, max_tokens=30)
    tokens, _ = serial_reference(request, 100, VOCAB)
    driven = drive(depth)
    driven.submit(replace(request, stop_ids=frozenset({tokens[4]})))
    while not (driven.updates and driven.updates[-1].finish_reason):
        driven.iterate()
    assert driven.loop.num_unsettled == 0 and not driven.loop.has_work
    assert driven.scheduler.idle
    driven.audit_idle()
    driven.expect_reference()


@DEPTHS
def test_last_tokens_of_a_request_do_not_wait_for_the_next_request(depth):
    driven = drive(depth)
    driven.submit(make_request(1, max_tokens=4))
    driven.iterate(6)
    driven.expect_reference()


def test_rank_is_idle_when_nothing_is_in_flight_and_nothing_can_be_planned():
    driven = drive()
    scheduler = driven.scheduler
    assert scheduler.idle
    driven.submit(make_request(1, max_tokens=9), make_request(2, max_tokens=9))
    assert not scheduler.idle, "requests wait"
    driven.iterate(2)
    scheduler.paused = True
    assert not scheduler.idle, "steps are in flight"
    driven.take(driven.loop.flush())
    assert scheduler.idle, "paused"
    ticket = scheduler.open_ticket("r1", 10**12)
    assert not scheduler.idle, "a transfer is under way"
    scheduler.complete_ticket(ticket)
    scheduler.paused = False
    assert not scheduler.idle, "requests run"
    driven.run()
    assert scheduler.idle


def test_paused_loop_settles_what_runs_and_loses_no_token_when_it_goes_on():
    driven = drive(max_drafts=2)
    driven.submit(make_request(1, 20, max_tokens=9), make_request(2, max_tokens=12))
    driven.iterate(3)
    driven.scheduler.paused = True
    driven.iterate(4)
    launched = len(driven.plans)
    assert driven.loop.num_unsettled == 0 and driven.scheduler.idle
    driven.iterate(3)
    assert len(driven.plans) == launched
    driven.scheduler.paused = False
    driven.run()
    driven.expect_reference()


# Messages


def test_messages_of_another_thread_are_done_in_order_before_the_next_plan():
    driven = drive()
    driven.submit(make_request(1, max_tokens=12))
    driven.iterate(3)

    def client() -> None:
        driven.loop.post(lambda: driven.submit(make_request(2)))
        driven.loop.post(lambda: driven.submit(make_request(3)))
        driven.loop.post(lambda: driven.scheduler.abort("r3"))

    thread = threading.Thread(target=client)
    thread.start()
    thread.join()
    assert driven.loop.has_work and not driven.scheduler.counts().waiting
    driven.iterate()
    assert [m.uid for m in driven.plans[-1].sequences] == [2]
    assert driven.updates[-1] == SequenceUpdate(3, finish_reason=FinishReason.ABORT)
    driven.run()
    driven.expect_reference(1, 2)


def test_message_wakes_an_idle_loop():
    driven = drive()
    assert not driven.loop.has_work
    driven.loop.post(lambda: driven.submit(make_request(1)))
    assert driven.loop.has_work
    driven.run()
    driven.expect_reference()


@DEPTHS
def test_message_that_raises_harms_no_request(depth):
    driven = drive(depth)
    driven.submit(make_request(1, max_tokens=12), make_request(2, 20))
    driven.iterate(3)
    refused = driven.loop.post(lambda: driven.submit(make_request(9, client_id="r1")))
    taken = driven.loop.post(lambda: driven.submit(make_request(3)))
    given_up = driven.loop.post(lambda: driven.submit(make_request(4)))
    assert given_up.cancel()
    driven.run()
    with pytest.raises(DuplicateRequest, match="'r1'"):
        refused.result(timeout=0)
    assert taken.result(timeout=0) is None
    driven.expect_reference(1, 2, 3)


# Time


def steady(driven: DrivenLoop, count: int = 20) -> list[int]:
    """Return the places in `device.counts` of steps launched while the batch did not change."""
    driven.iterate(6)
    first = len(driven.device.counts)
    driven.iterate(count)
    return list(range(first, first + count - 1))


@pytest.mark.parametrize("drafts", [0, 3])
def test_steady_iteration_waits_once_and_makes_no_buffer(drafts):
    driven = drive(max_drafts=drafts, max_step_tokens=64, device={"accepts": 0.0})
    driven.submit(*(make_request(uid, 4 + uid, max_tokens=60) for uid in (1, 2, 3)))
    for place in steady(driven):
        counts = driven.device.counts[place]
        assert (counts.waits, counts.queries, counts.allocations) == (1, 0, 0)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_host_work_shorter_than_a_step_costs_the_device_nothing(logprobs):
    driven = drive(2, host_ns=STEP * 9 // 10, max_step_tokens=64)
    driven.submit(*(make_request(u, max_tokens=40, logprobs=logprobs) for u in (1, 2, 3)))
    driven.run()
    assert overlap_ratio(driven.loop.records) == 1.0
    assert not any(record.bubble for record in driven.loop.records)
    driven.expect_reference()


@pytest.mark.parametrize("depth", [0, 1])
def test_host_work_of_the_serial_loop_leaves_the_device_idle(depth):
    driven = drive(depth, host_ns=STEP // 2)
    driven.submit(make_request(1, max_tokens=30))
    driven.run()
    # A step, then the copies and half a step of host work.
    assert 0.6 < overlap_ratio(driven.loop.records) < 0.7
    bubbles = [record.bubble for record in driven.loop.records]
    assert bubbles == [None] + ["vote"] * (len(bubbles) - 1)


def test_late_copy_of_results_holds_up_their_settlement_and_no_launch():
    driven = drive()
    driven.device.delay_copy_out(5, 20 * STEP)
    driven.submit(make_request(1, max_tokens=12), make_request(2, max_tokens=9))
    driven.run()
    history = driven.device.history
    assert history[6].forward[0] == history[5].forward[1], "6 was launched while 5 ran"
    record = next(r for r in driven.loop.records if r.step_seq == 5)
    assert record.settle_end_ns >= history[5].copy_out[1] > history[6].copy_in[1] + 19 * STEP
    driven.expect_reference()


def test_wait_for_masks_is_recorded_apart():
    driven = drive()
    driven.submit(make_request(1, max_tokens=6, constraint=AnyToken()))
    driven.run()
    records = list(driven.loop.records)
    assert all(record.masked_ns >= record.settled_ns for record in records[2:-1])
    assert not records[0].masked_ns and not records[1].masked_ns
    driven.expect_reference()


# Records and metrics


@DEPTHS
def test_instants_of_a_record_are_in_order(depth):
    driven = drive(depth, host_ns=1000, device={"launch_time_ns": 500})
    driven.submit(make_request(1, 20), make_request(2, max_tokens=9))
    driven.run()
    assert [r.step_seq for r in driven.loop.records] == list(range(1, len(driven.plans) + 1))
    for record, plan in zip(driven.loop.records, driven.plans, strict=True):
        instants = [
            record.begin_ns, record.settled_ns, record.drained_ns, record.inbox_ns,
            record.voted_ns, record.built_ns, record.launched_ns, record.wait_begin_ns,
            record.wait_end_ns, record.settle_end_ns, record.deferred_begin_ns,
            record.deferred_end_ns,
        ]  # fmt: skip
        assert instants == sorted(instants), f"step {record.step_seq}"
        assert record.wait_end_ns >= record.device.copy_out[1]
        assert record.device == driven.device.history[record.step_seq]
        assert record.num_rows == plan.output.num_rows
        assert record.uids.tolist() == plan.rows.uid.tolist()


def test_step_after_a_pause_is_marked_as_after_idling():
    driven = drive()
    driven.submit(make_request(1, max_tokens=3))
    driven.run()
    first = len(driven.plans)
    driven.clock.advance(50 * STEP)
    driven.submit(make_request(2, max_tokens=3))
    driven.run()
    assert [r.step_seq for r in driven.loop.records if r.after_idle] == [1, first + 1]
    assert overlap_ratio(driven.loop.records) == 1.0, "idling is no lost overlap"


def test_metrics_count_steps_by_kind_and_accepted_drafts():
    driven = drive(max_drafts=3)
    driven.submit(make_request(1, 20, max_tokens=25), make_request(2, max_tokens=25))
    driven.run()
    scheduler = driven.scheduler
    families = driven.loop.metrics.snapshot(scheduler.counts(), scheduler.totals)
    kinds = [plan.output.kind for plan in driven.plans]
    counted = {labels: value.count for labels, value in families["step_time_ns"].values.items()}
    for kind in StepKind:
        assert counted[(kind.value,)] == kinds.count(kind)
    totals = scheduler.totals
    verify = [m for p in driven.plans for m in p.sequences if m.phase is Phase.VERIFY]
    assert totals.decode_rows == len(verify)
    assert totals.verified_tokens == sum(m.num_drafts for m in verify)
    assert totals.chunk_tokens == 20 + 5


def test_slow_host_is_counted_as_a_stall():
    driven = drive(host_ns=200_000_000)
    driven.submit(make_request(1, max_tokens=4))
    driven.run()
    assert driven.loop.watchdog.stalls == len(driven.plans)
