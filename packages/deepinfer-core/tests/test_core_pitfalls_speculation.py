"""Accepted runs: where they end, what is told of them, and drafts that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_core.plans import Phase, StepKind, StepResult
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.driven_loop import VOCAB, DrivenLoop, make_request
from deepinfer_core.testing.fake_trim import made_up_confidence
from deepinfer_core.testing.planners import ChosenPlanner, RandomPlanner
from deepinfer_core.testing.reference import serial_reference
from deepinfer_core.types import FinishReason, Request

LIMITS = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 60, "index": 60},
    num_slots=6,
    max_model_len=100,
    max_step_tokens=32,
    max_chunk_tokens=32,
    window=6,
)
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def drive(depth: int, drafts: int, accepts=1.0, planner=None, **changes) -> DrivenLoop:
    limits = replace(LIMITS, max_drafts=drafts, **changes)
    confidence = None if planner is None else made_up_confidence
    return DrivenLoop(limits, depth, accepts=accepts, planner=planner, confidence=confidence)


def request_whose(wanted: Callable[[tuple[int, ...]], bool], **changes) -> Request:
    """Return a request whose tokens are as wanted; without stop ids they are 40."""
    for seed in range(10_000):
        request = make_request(1, seed=seed, max_tokens=40, **changes)
        if wanted(serial_reference(request, 100, VOCAB)[0]):
            return request
    raise AssertionError("no seed serves")


def results(driven: DrivenLoop, monkeypatch: pytest.MonkeyPatch) -> list[StepResult]:
    """Return a list that results are put into as they are settled."""
    seen: list[StepResult] = []
    settle = driven.scheduler.settle

    def keep(plan, result):
        arrays = ("token_ids", "num_tokens", "status", "start")
        copies = {name: getattr(result, name).copy() for name in arrays}
        seen.append(replace(result, **copies))  # the device takes its buffers back
        return settle(plan, result)

    monkeypatch.setattr(driven.scheduler, "settle", keep)
    return seen


# Ends within a run. A token, a run of 6, and one of 6 with 5 tokens left: it was planned when the
# run before it counted as one token.

BEFORE, LEFT, RUN = 7, 5, 6


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("place", range(1, 7))
def test_stop_before_the_cap_in_a_run_past_it_is_the_end(place, many, monkeypatch):
    request = request_whose(lambda tokens: len(set(tokens[: BEFORE + RUN])) == BEFORE + RUN)
    tokens, _ = serial_reference(request, 100, VOCAB)
    stops = {tokens[BEFORE + place - 1]}
    if many:  # more stop ids than stand in a lane
        stops |= set(range(VOCAB)) - set(tokens[: BEFORE + RUN])
    capped = replace(request.params, max_tokens=BEFORE + LEFT)
    driven = drive(2, RUN - 1)
    seen = results(driven, monkeypatch)
    driven.submit(replace(request, params=capped, stop_ids=frozenset(stops)))
    driven.run()
    assert [int(r.num_tokens[0]) for r in seen[:3]] == [1, RUN, RUN], "the run went past the cap"
    reason = FinishReason.STOP if place <= LEFT else FinishReason.LENGTH
    assert driven.end(1).finish_reason is reason
    assert len(driven.tokens(1)) == BEFORE + min(place, LEFT)
    driven.expect_reference()


@DEPTHS
@pytest.mark.parametrize("lower_first", [False, True])
@pytest.mark.parametrize("pair", [(1, 2), (1, 5), (2, 3), (4, 5)])
def test_first_of_two_stops_in_a_run_is_the_end_whatever_their_ids(depth, pair, lower_first):
    def wanted(tokens: tuple[int, ...]) -> bool:
        first, second = (tokens[place] for place in pair)
        return len(set(tokens[:7])) == 7 and (first < second) is lower_first

    request = request_whose(wanted)
    tokens, _ = serial_reference(request, 100, VOCAB)
    driven = drive(depth, 5)
    driven.submit(replace(request, stop_ids=frozenset(tokens[place] for place in pair)))
    driven.run()
    assert len(driven.tokens(1)) == pair[0] + 1
    driven.expect_reference()


@DEPTHS
@pytest.mark.parametrize("accepts", [0.0, 0.6, 1.0])
def test_ids_logprobs_and_counts_tell_of_the_same_tokens(depth, accepts):
    driven = drive(depth, 5, accepts)
    for uid in range(1, 6):
        request = make_request(uid, max_tokens=8, logprobs=1)
        tokens, _ = serial_reference(request, 100, VOCAB)
        driven.submit(replace(request, stop_ids=frozenset({tokens[uid + 1]})))
    driven.run()
    driven.expect_reference()
    for update in driven.updates:
        assert tuple(item.token_id for item in update.logprobs) == update.token_ids
    assert all(len(driven.tokens(uid)) <= 8 for uid in range(1, 6))


# Any number of drafts, right or wrong


@pytest.mark.parametrize("accepts", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("drafts", range(8))
def test_output_is_the_same_for_every_number_of_drafts(drafts, accepts):
    driven = drive(2, drafts, accepts)
    stops = frozenset({4, 9})
    driven.submit(
        *(make_request(uid, 2 * uid, max_tokens=20, stop_ids=stops) for uid in range(1, 5)),
        make_request(5, 9, max_tokens=11, max_drafts=drafts // 2),
    )
    driven.run()
    driven.expect_reference()


@pytest.mark.parametrize("accepts", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("drafts", range(1, 8))
def test_output_is_the_same_for_every_number_of_drafts_whatever_is_verified(drafts, accepts):
    driven = drive(2, drafts, accepts, planner=RandomPlanner(drafts))
    driven.submit(
        *(
            make_request(uid, 2 * uid, max_tokens=20, stop_ids=frozenset({4, 9}))
            for uid in range(1, 5)
        ),
        make_request(5, 9, max_tokens=11, max_drafts=drafts // 2),
    )
    driven.run()
    assert any(plan.trims for plan in driven.plans)
    driven.expect_reference()


@DEPTHS
@pytest.mark.parametrize("tier", [1, 8])
def test_64_requests_whose_drafts_are_trimmed_drain_to_nothing(depth, tier):
    blocks = {"num_slots": 64, "num_blocks": {"compressed": 500, "index": 500}}
    driven = drive(depth, 3, 0.5, planner=RandomPlanner(64, tier), **blocks)
    driven.submit(*(make_request(uid, 10, max_tokens=1 + uid % 14) for uid in range(1, 65)))
    driven.run()
    decoding = [plan for plan in driven.plans if plan.output.kind is StepKind.DECODE]
    sizes = {len(plan.rows) for plan in decoding if plan.trims}
    assert max(sizes) > 30 and min(sizes) < 8
    driven.expect_reference()


@DEPTHS
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_request_that_fits_to_the_last_position_completes_for_any_budget(depth, drafts):
    for accepts in (0.0, 1.0):
        blocks = {"compressed": 5, "index": 5}
        driven = drive(depth, drafts, accepts, planner=RandomPlanner(3), num_blocks=blocks)
        driven.submit(make_request(1, 10, max_tokens=11))  # the last token is never fed
        driven.run()
        driven.expect_reference()


@DEPTHS
@pytest.mark.parametrize("budget", [None, 0, 5])
@pytest.mark.parametrize("window", [1, 2, 6])
def test_windows_outlive_drafts_that_are_all_refused(depth, window, budget):
    planner = None if budget is None else ChosenPlanner(lambda most: budget)
    driven = drive(depth, 7, 0.0, planner=planner, window=window)
    driven.submit(make_request(1, 3, max_tokens=30), make_request(2, 20, max_tokens=30))
    driven.run()
    refused = driven.scheduler.totals.rollback_tokens
    assert refused > 100 if budget is None else refused >= 20 * budget
    driven.expect_reference()


@pytest.mark.parametrize("drafts", [0, 2, 5])
def test_positions_on_the_device_stay_between_the_settled_and_the_planned_length(
    drafts, monkeypatch
):
    driven = drive(2, drafts, 0.5)
    lanes, settle, spans = driven.scheduler._roster.lanes, driven.scheduler.settle, []

    def check(plan, result):
        settled = lanes.all.settled[plan.rows.slot]
        start = result.start + plan.rows.num_replay
        spans.append((settled <= start).all() and (result.start <= plan.rows.start).all())
        return settle(plan, result)

    monkeypatch.setattr(driven.scheduler, "settle", check)
    driven.submit(*(make_request(uid, 5 * uid, max_tokens=20) for uid in range(1, 5)))
    driven.run()
    assert all(spans) and len(spans) == len(driven.plans)
    driven.expect_reference()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("drafts", [1, 4])
def test_row_of_drafts_that_is_not_finite_ends_its_request_alone(depth, drafts):
    for num_iterations in range(2, 6):
        driven = drive(depth, drafts, 0.7)
        driven.submit(*(make_request(uid, 6, max_tokens=25) for uid in (1, 2, 3)))
        driven.iterate(num_iterations)
        assert driven.plans[-1].output.kind is StepKind.DECODE
        driven.device.poison(2)
        driven.run()
        assert driven.end(2).error_code == "non_finite"
        expected, _ = serial_reference(driven.requests[2], 100, VOCAB)
        assert driven.tokens(2) == expected[: len(driven.tokens(2))]
        driven.expect_reference(1, 3)


def test_overrun_of_an_aborted_request_is_no_fault_of_the_engine():
    driven = drive(2, 3)
    driven.submit(make_request(1, max_tokens=40), make_request(2, max_tokens=40))
    driven.iterate(4)
    assert driven.loop.num_unsettled == 2
    driven.scheduler.abort("r1")  # two steps of it run on
    driven.run()
    assert driven.scheduler.totals.row_status == {}
    driven.expect_reference(2)


@pytest.mark.parametrize("depth", [0, 2])
def test_drafts_of_the_host_are_those_behind_the_last_token(depth):
    driven = drive(depth, 3, 0.8)
    driven.submit(make_request(1, max_tokens=25), make_request(2, max_tokens=25))
    for _ in range(40):
        driven.iterate()
        if depth:  # every decode step after one of these reads what the host knows
            driven.take(driven.loop.flush())
    driven.run()
    rows = [m for p in driven.plans for m in p.sequences if m.phase is Phase.VERIFY]
    assert any(m.num_drafts == 3 for m in rows) and all(m.source == -1 for m in rows)
    assert all(np.array(m.token_ids).min() >= 0 for m in rows)
    driven.expect_reference()
