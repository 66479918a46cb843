"""The fake device keeps virtual time exactly and notices a host that breaks rules of buffers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer_core.engine.step_ring import DeviceTimes, WorkerStepState
from deepinfer_core.plans import Masks, Phase, RowStatus, StepPlan, TableDelta
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.fake_device import FakeDevice
from deepinfer_core.testing.hand_plans import PlanRow, make_plan
from deepinfer_core.testing.input_ring import POISON
from deepinfer_core.testing.reference import serial_reference
from deepinfer_core.testing.virtual_clock import VirtualClock
from deepinfer_core.types import Request, SamplingParams

VOCAB = 40
LIMITS = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 20, "index": 20},
    num_slots=2,
    max_model_len=60,
    max_step_tokens=64,
    max_chunk_tokens=64,
    window=6,
)
PROMPT = (5, 6, 7, 8, 9)
STEP, COPY, SAMPLING = 1000, 100, 200


def make_device(**options) -> FakeDevice:
    settings = {"step_time_ns": STEP, "copy_time_ns": COPY, "vocab_size": VOCAB} | options
    return FakeDevice(LIMITS, settings.pop("clock", VirtualClock()), **settings)


def prompt(uid: int = 1, step_seq: int = 1) -> StepPlan:
    blocks = tuple(range(10 * uid - 10, 10 * uid))
    return make_plan(step_seq, PlanRow(uid, uid - 1, PROMPT, enters=True, blocks=blocks))


def decode(step_seq: int, uid: int = 1, first: int = 1, **output) -> StepPlan:
    """Return a step that reads the carry; the prompt was step `first`."""
    start = len(PROMPT) + step_seq - first - 1
    return make_plan(step_seq, PlanRow(uid, uid - 1, (0,), start, Phase.VERIFY, source=0), **output)


def launched(device: FakeDevice, count: int) -> list[WorkerStepState]:
    """Launch a prompt and decode steps behind it, `count` steps in all, without waiting."""
    return [device.launch(prompt() if n == 1 else decode(n)) for n in range(1, count + 1)]


def token(ticket: WorkerStepState) -> int:
    return int(ticket.result().token_ids[0, 0])


def reference(count: int, uid: int = 1) -> list[int]:
    request = Request(uid, "", PROMPT, SamplingParams(max_tokens=count), seed=uid)
    return list(serial_reference(request, 60, VOCAB)[0])


# Time on the device


def test_copies_and_steps_overlap():
    device = make_device()
    first, second = launched(device, 2)
    first.result()
    assert device.clock.now_ns() == 1200
    device.clock.advance(300)
    third = device.launch(decode(3))
    third.result()
    assert [t.times() for t in (first, second, third)] == [
        DeviceTimes((0, 100), (100, 1100), (1100, 1200)),
        DeviceTimes((100, 200), (1100, 2100), (2100, 2200)),
        DeviceTimes((1500, 1600), (2100, 3100), (3100, 3200)),
    ]
    assert device.clock.now_ns() == 3200


def test_late_launch_leaves_a_gap_on_the_device():
    device = make_device()
    (first,) = launched(device, 1)
    first.result()
    device.clock.advance(900)
    assert device.launch(decode(2)).times().forward == (2200, 3200)


def test_events_pass_with_the_clock():
    device = make_device()
    (ticket,) = launched(device, 1)
    device.clock.advance(1099)
    assert not ticket.forward_done.done() and ticket.forward_done.time_ns is None
    device.clock.advance(1)
    assert ticket.forward_done.done() and ticket.forward_done.time_ns == 1100
    assert not ticket.out_done.done()
    device.clock.advance(100)
    assert ticket.out_done.done()
    assert token(ticket) == reference(1)[0]
    assert device.clock.waited_ns == 0


def test_launch_costs_the_host_what_is_set():
    device = make_device(launch_time_ns=70)
    launched(device, 2)
    assert device.clock.now_ns() == 140


def test_step_time_may_depend_on_the_plan():
    device = make_device(step_time_ns=lambda plan: 10 * plan.output.num_rows)
    launched(device, 2)
    assert device.bare_replay_ns([1, 2]) == [50, 10]


def test_jitter_depends_on_seed_and_step_alone():
    def times(seed):
        device = make_device(jitter=0.2, seed=seed, depth=6)
        launched(device, 8)
        return device.bare_replay_ns(range(1, 9))

    assert times(1) == times(1) != times(2)
    assert all(800 <= ns <= 1200 for ns in times(1)) and len(set(times(1))) > 4
    with pytest.raises(ValueError, match=r"1\.0"):
        make_device(jitter=1.0)


def test_work_of_the_fake_costs_no_host_time():
    spent = [0]

    def host_time() -> int:
        spent[0] += 1  # each look at the host's clock is work
        return spent[0]

    device = make_device(clock=VirtualClock(host_time))
    device.model.forward = _busy(device.model.forward, spent)
    (ticket,) = launched(device, 1)
    ticket.result()
    assert device.clock.now_ns() < 1300


def _busy(work, spent):
    def slow(plan):
        spent[0] += 10**6
        work(plan)

    return slow


# Sampling apart


def test_only_sampling_waits_for_masks():
    device = make_device(sampling_time_ns=SAMPLING)
    device.launch(prompt())
    ticket = device.launch(decode(2, delays_sampling=True))
    assert ticket.out_done is None and ticket.forward_done is None
    device.clock.advance(2500)
    device.launch_sampling(ticket, {})
    assert token(ticket) == reference(2)[1]
    assert ticket.times().forward == (1100, 2500 + COPY + SAMPLING)
    assert device.bare_replay_ns([2]) == [STEP]


def test_masks_in_time_cost_nothing():
    device = make_device(sampling_time_ns=SAMPLING)
    device.launch(prompt())
    ticket = device.launch(decode(2, delays_sampling=True))
    device.launch_sampling(ticket, {})
    assert ticket.times().forward == (1100, 2100)


def test_step_is_never_shorter_than_its_sampling():
    device = make_device(step_time_ns=50, sampling_time_ns=SAMPLING)
    assert device.launch(prompt()).times().forward == (100, 300)
    assert device.bare_replay_ns([1]) == [SAMPLING]


def test_masks_reach_their_row_and_must_not_change():
    for changed in (False, True):
        device = make_device()
        device.launch(prompt())
        ticket = device.launch(decode(2, delays_sampling=True))
        mask = np.array([[1 << 7, 0]], dtype=np.int32)
        device.launch_sampling(ticket, {0: Masks(mask)})
        if not changed:
            assert token(ticket) == 7
            continue
        mask[0, 0] = 1
        with pytest.raises(AssertionError, match="masks of step 2 changed"):
            ticket.result()


def test_next_step_is_not_launched_before_the_sampling():
    device = make_device()
    ticket = device.launch(make_plan(1, delays_sampling=True))
    with pytest.raises(AssertionError, match="was not launched"):
        device.launch(prompt(step_seq=2))
    device.launch_sampling(ticket, {})
    with pytest.raises(AssertionError, match="does not wait"):
        device.launch_sampling(ticket, {})


# Buffers


@pytest.mark.parametrize("name", ["rows", "token_ids", "index.block_ids", "extras"])
def test_input_is_frozen_once_it_is_launched(name):
    device = make_device()
    plan = prompt()
    numbers = plan.rows.data.copy()
    plan = replace(plan, rows=type(plan.rows)(numbers))
    ticket = device.launch(plan)
    if name == "rows":
        numbers.flags.writeable = True
        numbers[0, 0] += 1
    elif name == "token_ids":
        plan.token_ids[2] += 1
    elif name == "index.block_ids":
        plan.tables["index"].block_ids[0] += 1
    else:
        plan.extras.clear()
    with pytest.raises(AssertionError, match=f"input of step 1 changed after its launch: {name}"):
        ticket.result()


def test_ring_slots_are_poisoned_when_their_step_is_through():
    device = make_device()
    first, second = launched(device, 2)
    first.result()
    done, busy = device.ring.slots[0], device.ring.slots[1]
    assert done.step_seq is None and busy.step_seq == 2
    assert all((buffer == POISON).all() for buffer in done.buffers.values())
    assert busy.buffers["rows"][0, 0] == 1
    addresses = [buffer.ctypes.data for buffer in done.buffers.values()]
    second.result()
    for number in range(3, 6):
        device.launch(decode(number)).result()
    assert [buffer.ctypes.data for buffer in done.buffers.values()] == addresses


def test_results_are_poisoned_when_their_slot_is_taken_again():
    device = make_device(depth=0)  # two slots
    (first,) = launched(device, 1)
    result = first.result()
    second = device.launch(decode(2))
    assert result.token_ids[0, 0] == reference(1)[0]
    second.result()
    device.launch(decode(3))
    assert (result.token_ids == POISON).all() and (result.start == POISON).all()


def test_slot_of_a_step_on_the_device_is_not_taken():
    device = make_device(depth=1)
    launched(device, 3)
    with pytest.raises(AssertionError, match="step 4 takes the ring slot of step 1"):
        device.launch(decode(4))


def test_device_state_is_written_on_the_forward_queue_alone():
    device = make_device()
    (ticket,) = launched(device, 1)
    ticket.result()
    for array in device.model.arrays():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_result_is_not_read_before_its_copy_is_done():
    device = make_device()
    device.delay_copy_out(1, 5000)
    (ticket,) = launched(device, 1)
    device.clock.advance(2000)
    assert ticket.forward_done.done()
    with pytest.raises(AssertionError, match="before it is on the host"):
        ticket.collect()
    assert token(ticket) == reference(1)[0]
    assert device.clock.now_ns() == 1100 + 5000 + COPY


def test_steady_loop_waits_once_and_allocates_nothing():
    device = make_device()
    found, previous = [], device.launch(prompt())
    for number in range(2, 20):
        ticket = device.launch(decode(number))
        assert not ticket.out_done.done()
        found.append(token(previous))
        previous = ticket
    assert found == reference(18)
    assert device.counts[1].allocations > 0
    for counts in device.counts[2:-1]:
        assert (counts.waits, counts.queries, counts.allocations) == (1, 1, 0)
    intervals = np.diff([device.history[n].forward[0] for n in range(1, 19)])
    assert intervals.tolist() == [STEP] * 17


def test_larger_step_counts_as_an_allocation():
    device = make_device()
    device.launch(prompt()).result()
    device.launch(decode(2)).result()
    wide = prompt(2, 3)
    ids, names = np.arange(10, 20), np.ones(10, dtype=np.int64)
    device.launch(replace(wide, tables={"index": TableDelta(names, ids - 10, ids), **wide.tables}))
    assert device.counts[2].allocations == device.counts[3].allocations == 0
    rows = [PlanRow(1, 0, (0,), 6, Phase.VERIFY), PlanRow(2, 1, (0,), 5, Phase.VERIFY)]
    device.launch(make_plan(4, *rows))
    assert device.counts[4].allocations == 1, "two columns where one was the most"


# Faults


def test_hanging_step_runs_into_the_timeout_and_so_do_those_behind_it():
    device = make_device()
    device.hang(2)
    first, second, third = launched(device, 3)
    assert token(first) == reference(1)[0]
    for ticket in (second, third):
        before = device.clock.now_ns()
        with pytest.raises(TimeoutError, match=r"after 0\.5 s"):
            ticket.result(0.5)
        assert device.clock.now_ns() == before + 500_000_000
        assert not ticket.forward_done.done()
    with pytest.raises(AssertionError, match="step 2 forever"):
        device.close()


def test_timeout_that_is_long_enough_is_not_used_up():
    device = make_device()
    (ticket,) = launched(device, 1)
    ticket.result(1.0)
    assert device.clock.now_ns() == 1200


def test_failed_step_raises_its_error_and_its_sequences_are_lost():
    device = make_device()
    device.fail(2, RuntimeError("bus error"))
    first, second, third = launched(device, 3)
    assert token(first) == reference(1)[0]
    with pytest.raises(RuntimeError, match="bus error"):
        second.result()
    assert third.result().status.tolist() == [RowStatus.BAD_SOURCE]
    again = make_plan(4, PlanRow(3, 1, PROMPT, enters=True, blocks=(10, 11)))
    assert token(device.launch(again)) == reference(1, 3)[0], "others are not"
    device.scrub({"compressed": (1,), "index": (1,)}, (0,))
    assert token(device.launch(prompt(step_seq=5))) == reference(1)[0]


def test_what_a_failed_step_wrote_must_be_scrubbed():
    device = make_device()
    device.fail(2, RuntimeError("bus error"))
    launched(device, 2)
    with pytest.raises(RuntimeError, match="bus error"):
        device.close()
    with pytest.raises(AssertionError, match="was not scrubbed"):
        device.launch(prompt(step_seq=3)).result()


def test_poisoned_request_is_not_finite_until_scrubbed():
    device = make_device()
    device.poison(1)
    (ticket,) = launched(device, 1)
    assert ticket.result().status.tolist() == [RowStatus.NON_FINITE]
    device.scrub({"compressed": (0, 1), "index": (0, 1)}, (0,))
    again = make_plan(2, PlanRow(2, 0, PROMPT, enters=True, blocks=(0, 1)))
    assert token(device.launch(again)) == reference(1, 2)[0]


def test_scrubbing_comes_behind_what_was_launched_before():
    device = make_device()
    first, second = launched(device, 2)
    device.scrub({"compressed": (0,), "index": (0,)}, ())
    assert [token(first), token(second)] == reference(2)
    with pytest.raises(AssertionError, match="foreign content"):
        device.launch(decode(3)).result()


def test_device_out_of_order_stays_so():
    device = make_device()
    plan = prompt()
    ticket = device.launch(plan)
    for change in (1, -1):
        plan.token_ids[0] += change
        with pytest.raises(AssertionError, match="changed after its launch"):
            ticket.result()


def test_prompt_that_missed_a_chunk_is_lost():
    device = make_device()
    device.fail(1, RuntimeError("bus error"))
    row = PlanRow(1, 0, PROMPT[:3], phase=Phase.CHUNK, enters=True, blocks=(0, 1))
    device.launch(make_plan(1, row))
    ticket = device.launch(make_plan(2, PlanRow(1, 0, PROMPT[3:], 3)))
    assert ticket.result().status.tolist() == [RowStatus.BAD_SOURCE]


# Benchmarks


def test_cheap_checks_give_the_same_tokens():
    found = {}
    for checks in ("all", "window", "none"):
        device = make_device(checks=checks, depth=8)
        found[checks] = [token(ticket) for ticket in launched(device, 10)]
    assert found["all"] == found["window"] == found["none"] == reference(10)


def test_bare_replay_leaves_out_what_the_host_cost():
    device = make_device()
    for number in range(1, 5):
        ticket = device.launch(prompt() if number == 1 else decode(number))
        ticket.result()
        device.clock.advance(400)
    assert sum(device.bare_replay_ns(range(1, 5))) == 4 * STEP
    assert device.clock.now_ns() == 4 * (STEP + 2 * COPY + 400)
