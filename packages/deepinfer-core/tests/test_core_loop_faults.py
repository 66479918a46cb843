"""Aborts, errors and stuck steps at every point of the loop: others go on, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deepinfer_core.engine.watchdog import Watchdog
from deepinfer_core.errors import StuckStep
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.scheduler.settlement import Settlement
from deepinfer_core.testing.driven_loop import VOCAB, AnyToken, DrivenLoop, make_request
from deepinfer_core.testing.reference import serial_reference
from deepinfer_core.types import FinishReason

LIMITS = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 40, "index": 44},
    num_slots=6,
    num_stored=2,
    max_model_len=100,
    max_step_tokens=16,
    max_chunk_tokens=16,
    window=6,
    max_drafts=2,
    prefix_cache=True,
    vocab_size=VOCAB,
)
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def drive(depth: int = 2, **changes: Any) -> DrivenLoop:
    """Return a loop with work of all sorts: long and short prompts, drafts, a grammar."""
    loop = changes.pop("loop", None)
    driven = DrivenLoop(replace(LIMITS, **changes), depth, loop=loop, accepts=0.7)
    driven.submit(
        make_request(1, 21, max_tokens=7, strict=True),
        make_request(2, 19, max_tokens=18),
        make_request(3, 9, max_tokens=8, constraint=AnyToken(), replay_encoder=True),
        make_request(4, 21, max_tokens=9, logprobs=1, stop_ids=frozenset({11, 30})),
    )
    return driven


def hook(
    driven: DrivenLoop, patch: pytest.MonkeyPatch, point: str, nth: int, act: Callable[[], object]
) -> None:
    """Call `act` before or after the nth call of a part of the loop, such as "after plan"."""
    when, name = point.split()
    owner: Any = driven.scheduler
    if name in ("launch", "launch_sampling"):
        owner = driven.device
    if name in ("updates", "publish"):
        owner = Settlement
    real, calls = getattr(owner, name), 0

    def hooked(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            act()
        value = real(*args)
        if calls == nth and when == "after":
            act()
        return value

    patch.setattr(owner, name, hooked)


def prefix_of_reference(driven: DrivenLoop, uid: int) -> bool:
    expected, _ = serial_reference(driven.requests[uid], driven.limits.max_model_len, VOCAB)
    tokens = driven.tokens(uid)
    return tokens == expected[: len(tokens)]


# Aborts

POINTS = (
    "before settle", "after settle", "before drain", "after drain", "before ballot",
    "before plan", "after plan", "before launch", "after launch", "before masks", "after masks",
    "after launch_sampling", "before updates", "after updates", "after publish",
)  # fmt: skip


@DEPTHS
@pytest.mark.parametrize("point", POINTS)
def test_abort_at_any_point_of_the_loop_ends_one_request_alone(depth, point, monkeypatch):
    for nth in range(1, 6, 2):
        driven = drive(depth)
        with monkeypatch.context() as patch:
            found = []
            hook(
                driven,
                patch,
                point,
                nth,
                lambda d=driven, f=found: f.append(d.scheduler.abort("r2")),
            )
            driven.run()
        assert found == [True], f"call {nth}"
        assert driven.end(2).finish_reason is FinishReason.ABORT
        assert prefix_of_reference(driven, 2)
        driven.expect_reference(1, 3, 4)


@DEPTHS
@pytest.mark.parametrize("num_iterations", range(6))
def test_client_that_is_gone_stops_computing_within_one_iteration(depth, num_iterations):
    driven = drive(depth)
    driven.iterate(num_iterations)
    driven.loop.post(lambda: driven.scheduler.abort("r2"))
    driven.iterate()
    told = len(driven.tokens(2))
    assert 2 not in driven.plans[-1].rows.uid
    first = len(driven.plans)
    driven.run()
    assert not any(2 in plan.rows.uid for plan in driven.plans[first:])
    assert len(driven.tokens(2)) == told
    driven.expect_reference(1, 3, 4)


@DEPTHS
def test_abort_before_the_first_token_is_settled_shows_none(depth):
    driven = DrivenLoop(LIMITS, depth)
    driven.submit(make_request(1), make_request(2, max_tokens=9))
    driven.iterate()
    driven.loop.post(lambda: driven.scheduler.abort("r1"))
    if depth < 2:  # the inbox comes after the settlement there
        driven.scheduler.abort("r1")
    driven.run()
    assert driven.tokens(1) == ()
    assert driven.end(1).finish_reason is FinishReason.ABORT
    driven.expect_reference(2)


@DEPTHS
def test_cancelled_id_used_again_gets_nothing_of_the_old_request(depth):
    driven = DrivenLoop(LIMITS, depth)
    driven.submit(make_request(90, max_tokens=20))
    for uid in range(1, 8):
        driven.submit(make_request(uid, 6, client_id="same", max_tokens=20))
        driven.iterate(1 + uid % 3)
        assert driven.scheduler.abort("same")
    driven.submit(make_request(8, 6, client_id="same", max_tokens=20))
    driven.run()
    assert all(driven.end(uid).finish_reason is FinishReason.ABORT for uid in range(1, 8))
    assert all(prefix_of_reference(driven, uid) for uid in range(1, 8))
    driven.expect_reference(8, 90)


# Errors of the host

ERRORS = (
    "before settle", "before drain", "before ballot", "before plan", "after plan",
    "before launch", "after launch", "before masks", "before launch_sampling",
    "before updates", "before publish",
)  # fmt: skip


@DEPTHS
@pytest.mark.parametrize("point", ERRORS)
def test_error_at_any_point_ends_what_was_in_flight_and_nothing_else(depth, point, monkeypatch):
    for nth in range(1, 5):
        driven = drive(depth)
        error = (RuntimeError, KeyboardInterrupt)[nth % 2]

        def fail(error=error) -> None:
            raise error("cut off")

        with monkeypatch.context() as patch:
            hook(driven, patch, point, nth, fail)
            with pytest.raises(error, match="cut off"):
                driven.run()
            driven.scheduler.audit()
            assert driven.loop.num_unsettled == driven.scheduler.counts().unsettled_steps == 0
        driven.submit(make_request(9, 21))
        driven.run()
        driven.expect_reference(9)
        for uid in range(1, 5):
            if driven.end(uid).finish_reason is FinishReason.ERROR:
                assert driven.end(uid).error_code == "device_fault"
                assert prefix_of_reference(driven, uid)
            else:
                driven.expect_reference(uid)


@DEPTHS
def test_memory_that_runs_out_while_a_step_is_built_costs_a_step_and_no_request(depth, monkeypatch):
    for nth in range(1, 8, 2):
        driven = drive(depth)
        pool = driven.scheduler._roster.pools.pools["index"]
        real, calls = pool.allocate_each, 0

        def allocate(*args: Any, real=real, nth=nth) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise MemoryError("no memory")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(pool, "allocate_each", allocate)
            driven.run()
        assert driven.scheduler.totals.failed_builds == 1
        driven.expect_reference()


# Errors of the device


@DEPTHS
@pytest.mark.parametrize("step", range(1, 8))
def test_failed_step_ends_its_requests_alone(depth, step):
    driven = drive(depth)
    driven.device.fail(step, RuntimeError("out of memory"))
    driven.run()
    failed = {m.uid for plan in driven.plans[step - 1 : step] for m in plan.sequences}
    for uid in range(1, 5):
        if uid in failed:
            end = driven.end(uid)
            assert end.error_code == "device_fault" and "out of memory" in end.error
            assert prefix_of_reference(driven, uid)
        else:
            driven.expect_reference(uid)
    driven.submit(make_request(9, 21))
    driven.run()
    driven.expect_reference(9)


@DEPTHS
@pytest.mark.parametrize("num_iterations", [0, 1, 2, 4, 6])
def test_values_that_are_not_finite_end_one_request_alone(depth, num_iterations):
    driven = drive(depth)
    driven.iterate(num_iterations)
    driven.device.poison(2)
    driven.run()
    end = driven.end(2)
    assert end.finish_reason is FinishReason.ERROR and end.error_code == "non_finite"
    assert prefix_of_reference(driven, 2)
    driven.expect_reference(1, 3, 4)


def test_prompt_that_was_not_finite_is_no_prefix_for_others():
    driven = DrivenLoop(LIMITS)
    prompt = tuple(range(20))
    driven.device.poison(1)
    driven.submit(make_request(1, prompt, replay_encoder=True))
    driven.run()
    assert driven.end(1).error_code == "non_finite"
    driven.submit(make_request(2, prompt, replay_encoder=True))
    driven.run()
    assert driven.end(2).num_cached_tokens == 0
    driven.expect_reference(2)


@DEPTHS
def test_stuck_step_ends_what_was_in_flight_and_the_loop_for_good(depth, tmp_path):
    driven = drive(depth, loop={"watchdog": Watchdog(tmp_path)})
    driven.device.hang(5)
    with pytest.raises(StuckStep, match="Step 5") as caught:
        driven.run()
    assert caught.value.step_seq == 5 and caught.value.dump.exists()
    driven.take(driven.scheduler.pop_updates())
    in_flight = {m.uid for plan in driven.plans[4:] for m in plan.sequences}
    ended = {uid for uid in range(1, 5) if any(u.uid == uid and u.finish_reason for u in
             driven.updates)}  # fmt: skip
    assert in_flight <= ended
    assert all(driven.end(uid).error_code == "device_fault" for uid in in_flight)
    assert all(prefix_of_reference(driven, uid) for uid in range(1, 5))
    counts = driven.scheduler.counts()
    assert counts.unsettled_steps == counts.inflight_tokens == 0
    launched = len(driven.plans)
    for call in (driven.loop.iterate, driven.loop.flush):
        with pytest.raises(StuckStep, match="Step 5"):
            call()
    assert len(driven.plans) == launched, "nothing is launched behind a step that never ends"


@DEPTHS
def test_slow_step_within_its_deadline_is_no_fault(depth):
    driven = drive(depth)
    driven.device.delay_copy_out(4, 4_000_000_000)
    driven.run()
    assert driven.loop.watchdog.near_misses == 1
    driven.expect_reference()
