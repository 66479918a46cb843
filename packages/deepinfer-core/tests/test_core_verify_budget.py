"""Budgets of drafts: what a planner may know, what a step makes of its answer, and no text changes.

The state-machine test has the same rules for any history (`testing/invariants_speculation.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deepinfer_core.engine.records import StepRecord
from deepinfer_core.plans import RowStatus, StepKind, StepPlan, StepResult
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.scheduler.lanes import Lanes
from deepinfer_core.scheduler.sequence import State
from deepinfer_core.scheduler.settlement import Settlement
from deepinfer_core.testing.driven_loop import VOCAB, AnyToken, DrivenLoop, make_request
from deepinfer_core.testing.fake_trim import (
    best_lengths,
    made_up_confidence,
    survival_of,
    trimmed,
)
from deepinfer_core.testing.hand_plans import make_plan
from deepinfer_core.testing.planners import (
    Asked,
    Budget,
    ChosenPlanner,
    RandomPlanner,
    RecordingPlanner,
)
from deepinfer_core.testing.two_requests import ENTERS, decode, entered, reference, run, tokens

LIMITS = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 90, "index": 90},
    num_slots=6,
    max_model_len=100,
    max_step_tokens=64,
    max_chunk_tokens=64,
    window=6,
    max_drafts=3,
    vocab_size=VOCAB,
)
_OF_DEVICE = frozenset({"accepts", "confidence", "step_time_ns"})
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


class Driven(DrivenLoop):
    """A driven loop with a planner; keeps which plan each question was about, and all results."""

    def __init__(self, planner, depth: int = 2, **changes: Any) -> None:
        self.planner = RecordingPlanner(planner)
        device = {"accepts": 0.6, "confidence": made_up_confidence}
        device |= {name: changes.pop(name) for name in _OF_DEVICE & changes.keys()}
        super().__init__(replace(LIMITS, **changes), depth, planner=self.planner, **device)
        self.asked: dict[int, Asked] = {}  # by step
        self.results: list[tuple[StepPlan, StepResult]] = []
        self.settlements: list[Settlement] = []
        plan, settle = self.scheduler.plan, self.scheduler.settle

        def planned(kind=None):
            self.planner.asked.clear()
            found = plan(kind)
            if found is not None and self.planner.asked:
                self.asked[found.output.step_seq] = self.planner.asked[-1]
            return found

        def settled(plan: StepPlan, result: StepResult):
            columns = ("num_verified", "num_tokens", "start")
            copies = {name: getattr(result, name).copy() for name in columns}
            self.results.append((plan, replace(result, **copies)))  # buffers are taken back
            self.settlements.append(settle(plan, result))
            return self.settlements[-1]

        self.scheduler.plan, self.scheduler.settle = planned, settled

    def known_of(self, uid: int) -> list[tuple[int, list[float] | None]]:
        """Return (generation, what was known) of a request, question by question."""
        found = []
        for plan in self.plans:
            asked = self.asked.get(plan.output.step_seq)
            for row in np.flatnonzero(plan.rows.uid == uid) if asked else ():
                known = asked.survival[row].tolist() if asked.known[row] else None
                found.append((int(plan.rows.generation[row]), known))
        return found


def survival_at(uid: int, first: int, num_drafts: int = 3) -> list[float]:
    """Return the survival of drafts for positions from `first` on."""
    positions = first + np.arange(num_drafts)
    return survival_of(made_up_confidence(np.array([[uid]]), positions[None]))[0].tolist()


# How the fake device chooses


def test_the_best_drafts_are_verified_and_ties_go_to_smaller_numbers_then_to_the_first():
    draw = np.random.default_rng(4)
    for _ in range(300):
        shape = tuple(draw.integers(1, 6, size=2))
        survival = survival_of(draw.integers(0, 5, size=shape) / 4)
        available = draw.integers(0, shape[1] + 1, size=shape[0])
        for total in range(int(available.sum()) + 1):
            pairs = [(-survival[r, j], j, r) for r in range(shape[0]) for j in range(available[r])]
            chosen = [(r, j) for _, j, r in sorted(pairs)[:total]]
            found = best_lengths(survival, available, total)
            wanted = [sorted(j for r, j in chosen if r == row) for row in range(shape[0])]
            assert wanted == [list(range(length)) for length in found]


def test_survival_multiplies_from_the_first_draft_on_and_nan_is_none():
    confidence = np.array([[1.0, 0.5, np.nan, 1.0], [0.25, 1.0, 1.0, 0.5]])
    wanted = [[1.0, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.125]]
    assert survival_of(confidence).tolist() == wanted


def by_uid(uid: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Request 2 is sure of its drafts, the others are half as sure."""
    return np.where(uid == 2, 1.0, 0.5) + 0.0 * position


@pytest.mark.parametrize("source", [-1, 0])
def test_fake_device_runs_the_lengths_it_chose(source):
    model = entered(1, 2, confidence=by_uid)
    run(model, make_plan(2, decode(1, 0), decode(2, 0)))
    rows = [
        decode(1, 1, 3, source=source),
        decode(2, 1, 3, source=1 if source == 0 else -1),
    ]
    for room, lengths in ((2, [0, 2]), (3, [1, 2]), (0, [0, 0])):
        model = entered(1, 2, confidence=by_uid)
        run(model, make_plan(2, decode(1, 0), decode(2, 0)))
        result = run(model, make_plan(3, *rows, num_rows=2 + room))
        assert result.num_verified.tolist() == lengths
        assert result.survival.tolist() == [[0.5, 0.25], [1.0, 1.0]]
        for uid, row in ((1, 0), (2, 1)):
            assert tokens(result, row) == reference(uid)[2 : 3 + lengths[row]]


def test_steps_with_more_or_fewer_rows_than_can_be_are_refused():
    both = decode(1, 0, 3), decode(2, 0, 2)
    for num_rows in (1, 6):
        with pytest.raises(AssertionError, match="counts"):
            run(entered(1, 2), make_plan(2, *both, num_rows=num_rows))
    with pytest.raises(AssertionError, match="counts"):  # a prompt has no drafts to trim
        run(entered(2), make_plan(2, ENTERS[1], decode(2, 0, 3), num_rows=11))


def test_lengths_that_reach_past_the_blocks_of_a_sequence_are_found():
    """Request 1 has 16 positions; its drafts are for 15 and 16."""
    for room, fits in ((1, True), (2, False)):
        model = entered(1)
        run(model, make_plan(2, decode(1, 0, 3)))
        run(model, make_plan(3, decode(1, 3, 2)))
        plan = make_plan(4, decode(1, 5, 3), num_rows=1 + room)
        if fits:
            assert run(model, plan).num_verified.tolist() == [1]
        else:
            with pytest.raises(AssertionError, match="writes past its blocks"):
                run(model, plan)


def test_device_that_verifies_something_else_than_there_is_room_for_is_found(monkeypatch):
    def more(plan: StepPlan, lengths: np.ndarray) -> StepPlan:
        return trimmed(plan, np.minimum(lengths + 1, plan.rows.num_drafts))

    monkeypatch.setattr("deepinfer_core.testing.fake_model.trimmed", more)
    with pytest.raises(AssertionError, match="chose other numbers"):
        run(entered(1), make_plan(2, decode(1, 0, 3), num_rows=2))


# What a step makes of a budget


@DEPTHS
@pytest.mark.parametrize("tier", [1, 4])
def test_a_step_verifies_as_many_drafts_as_the_budget_has(depth, tier):
    driven = Driven(RandomPlanner(7, tier), depth)
    driven.submit(*(make_request(uid, 3 * uid, max_tokens=25) for uid in range(1, 7)))
    driven.run()
    totals = []
    for plan, result in driven.results:
        asked, rows = driven.asked.get(plan.output.step_seq), plan.rows
        if asked is None:
            assert plan.output.kind is StepKind.PREFILL and not result.num_verified.any()
            continue
        assert asked.available.tolist() == rows.num_drafts.tolist()
        assert plan.output.num_rows == len(rows) + asked.budget.total
        assert plan.trims == (asked.budget.total < rows.num_drafts.sum())
        assert result.num_verified.sum() == asked.budget.total
        assert (result.num_verified <= rows.num_drafts).all()
        full = asked.budget.total == rows.num_drafts.sum()
        assert full or plan.output.num_rows % tier == 0
        totals.append((asked.budget.total, full))
    assert len({total for total, _ in totals}) > 4 and {full for _, full in totals} == {True, False}
    assert driven.scheduler.totals.verified_tokens == sum(total for total, _ in totals)
    driven.expect_reference()


def test_a_budget_beyond_what_is_available_is_all_of_it():
    class Generous(ChosenPlanner):
        def budget(self, survival, known, available):
            return Budget(int(available.sum()) + 5, 64)

    driven = Driven(Generous(lambda most: most))
    driven.submit(make_request(1, max_tokens=20))
    driven.run()
    assert driven.asked and not any(plan.trims for plan in driven.plans)
    driven.expect_reference()


@DEPTHS
def test_blocks_are_reserved_for_every_length_that_the_device_may_choose(depth):
    """Every draft of one request is verified, whichever it is, and none of the others."""
    planner = ChosenPlanner(lambda most: min(most, 3))
    driven = Driven(planner, depth, confidence=by_uid, accepts=1.0)
    driven.submit(*(make_request(uid, 8, max_tokens=30) for uid in (1, 2, 3)))
    tables = driven.scheduler._roster.tables
    for _ in range(12):
        driven.iterate()
        if driven.loop.num_unsettled:
            rows = driven.plans[-1].rows
            held = tables.num_blocks[rows.slot] * LIMITS.block_size
            assert (held >= rows.start + rows.num_rows).all()
    driven.run()
    lengths = {
        tuple(result.num_verified.tolist()) for _, result in driven.results if len(result.start) > 2
    }
    assert (0, 3, 0) in lengths
    driven.expect_reference()


def test_nobody_asks_for_a_budget_where_there_are_no_drafts():
    driven = Driven(RandomPlanner(1), max_drafts=0)
    driven.submit(make_request(1, max_tokens=9))
    driven.run()
    assert not driven.asked
    # drafts are given up before anybody is preempted
    driven = Driven(RandomPlanner(1), num_blocks={"compressed": 10, "index": 10}, growth_permille=0)
    driven.submit(*(make_request(uid, 12, max_tokens=24) for uid in (1, 2)))
    driven.run()
    decoding = [plan for plan in driven.plans if plan.output.kind is StepKind.DECODE]
    unasked = [plan for plan in decoding if plan.output.step_seq not in driven.asked]
    assert unasked and not any(plan.rows.num_drafts.any() for plan in unasked)
    driven.expect_reference()


def test_masks_are_made_for_all_drafts_that_may_be_verified(monkeypatch):
    driven, seen = Driven(RandomPlanner(3)), []
    launch = driven.device.launch_sampling

    def keep(ticket, masks):
        rows = ticket.plan.rows
        seen.extend((len(masks[row].rows), int(rows.num_drafts[row])) for row in masks)
        launch(ticket, masks)

    monkeypatch.setattr(driven.device, "launch_sampling", keep)
    requests = [make_request(uid, 5, max_tokens=25) for uid in (1, 2, 3)]
    driven.submit(*requests[:2], replace(requests[2], constraint=AnyToken()))
    driven.run()
    assert any(plan.trims and plan.output.delays_sampling for plan in driven.plans)
    assert all(count == 1 + num_drafts for count, num_drafts in seen)
    assert {count for count, _ in seen} >= {1, 4}
    driven.expect_reference()


def test_planner_is_told_what_decode_steps_took():
    driven = Driven(RandomPlanner(5), depth=2, step_time_ns=300_000)
    driven.submit(make_request(1, max_tokens=20), make_request(2, max_tokens=20))
    driven.run()
    wanted = [p.output.num_rows for p in driven.plans if p.output.kind is StepKind.DECODE]
    assert [rows for rows, _ in driven.planner.observed] == wanted
    times = [round(seconds * 1e9) for _, seconds in driven.planner.observed]
    assert min(times) == 300_000  # from the end of one step to the end of the next: gaps count
    assert times.count(300_000) > len(times) / 2


def test_record_of_a_trimmed_step_has_the_drafts_that_it_verifies():
    driven = Driven(RandomPlanner(4))
    driven.submit(*(make_request(uid, 5, max_tokens=20) for uid in (1, 2, 3)))
    driven.run()
    plan = next(plan for plan in driven.plans if plan.trims)
    record = StepRecord.of(plan, 0)
    assert record.num_drafts == record.num_rows - record.num_sequences


# What a budget may know


@DEPTHS
def test_a_budget_knows_what_was_told_one_step_before_the_drafts_it_is_about(depth):
    driven = Driven(ChosenPlanner(lambda most: 2), depth)
    driven.submit(*(make_request(uid, 4 + uid, max_tokens=30) for uid in (1, 2)))
    driven.run()
    for uid in (1, 2):
        told = []  # by each step: its drafts are for the positions behind the next token's
        for plan, result in driven.results:
            for row in np.flatnonzero(plan.rows.uid == uid):
                first = plan.output.kind is StepKind.PREFILL
                final = plan.rows.num_rows if first else result.num_tokens
                told.append(survival_at(uid, int(result.start[row] + final[row]) + 1))
        known = [values for _, values in driven.known_of(uid)]
        assert len(known) > 8
        # the first verify step has no earlier one; the step after it knows what the prompt told
        assert known == [None, *told[: len(known) - 1]]
        assert len({tuple(each) for each in told}) > 4


def test_a_budget_knows_the_same_at_every_depth():
    found = []
    for depth in range(3):
        driven = Driven(ChosenPlanner(lambda most: most // 2), depth)
        driven.submit(*(make_request(uid, 4 + uid, max_tokens=60) for uid in (1, 2, 3)))
        driven.run()
        found.append([driven.known_of(uid)[:10] for uid in (1, 2, 3)])
    assert found[0] == found[1] == found[2]


@DEPTHS
def test_a_settled_step_comes_with_what_was_told_of_the_drafts_it_fed(depth):
    driven = Driven(RandomPlanner(6), depth)
    driven.submit(*(make_request(uid, 4 + uid, max_tokens=25) for uid in (1, 2, 3)))
    for _ in range(30):
        driven.iterate()
        if depth and len(driven.plans) % 5 == 0:
            driven.take(driven.loop.flush())
    driven.run()
    count = 0
    for (plan, result), settlement in zip(driven.results, driven.settlements, strict=True):
        if plan.output.kind is StepKind.PREFILL:
            assert settlement.survival is None
            continue
        survival, known = settlement.survival
        assert known.all()
        for row, uid in enumerate(plan.rows.uid.tolist()):
            if result.num_tokens[row]:
                assert survival[row].tolist() == survival_at(uid, int(result.start[row]) + 1)
                count += 1
    assert count > 30


class Confident(ChosenPlanner):
    """Verifies as many drafts as are likelier than not, by what is known."""

    def __init__(self) -> None:
        super().__init__(lambda most: most)

    def budget(self, survival, known, available):
        total = int(np.where(known, (survival > 0.5).sum(1), available).clip(0, available).sum())
        return Budget(total, len(available) + total)


def first_difference(depth: int, changed: int) -> tuple[int, int]:
    """Return the step that feeds a position, and the first whose budget differs.

    Of two runs, of which in one the drafts from that position of request 1 on are called hopeless.
    """
    runs = []
    for hopeless_from in (10**6, changed):

        def confidence(uid, position, first=hopeless_from):
            return np.where((uid == 1) & (position >= first), 0.0, 1.0 - position / 1000)

        driven = Driven(Confident(), depth, confidence=confidence, accepts=1.0)
        driven.submit(*(make_request(uid, 8, max_tokens=50) for uid in (1, 2)))
        driven.run()
        driven.expect_reference()
        runs.append(driven)
    totals = [{step: asked.budget.total for step, asked in driven.asked.items()} for driven in runs]
    differs = min(step for step in totals[0] if totals[0][step] != totals[1][step])
    # the first step one of whose drafts is called hopeless; both runs have it
    feeds = min(
        plan.output.step_seq
        for plan, result in runs[1].results
        for row in np.flatnonzero(plan.rows.uid == 1)
        if plan.output.step_seq in runs[1].asked and result.start[row] + 3 >= changed
    )
    return feeds, differs


@DEPTHS
@pytest.mark.parametrize("changed", [17, 22, 31])
def test_a_budget_does_not_depend_on_what_is_said_of_its_own_drafts(depth, changed):
    feeds, differs = first_difference(depth, changed)
    assert differs == feeds + 1


@pytest.mark.parametrize("changed", [17, 22, 31])
def test_a_budget_that_does_is_found(monkeypatch, changed):
    def newest(self, slots):
        return self.survival[0, slots], self.all.num_records[slots] > 0

    monkeypatch.setattr(Lanes, "earlier_survival", newest)
    feeds, differs = first_difference(0, changed)
    assert differs == feeds


@DEPTHS
def test_a_request_that_comes_back_is_unknown_until_it_has_told_something(depth):
    driven = Driven(RandomPlanner(2), depth)
    driven.submit(*(make_request(uid, 6, max_tokens=30) for uid in (1, 2)))
    driven.iterate(6)

    def preempt() -> None:
        sequence = driven.scheduler._roster.resident[1]
        assert sequence.state is State.RUNNING
        driven.scheduler._roster.preempt(sequence)

    driven.loop.post(preempt)
    driven.run()
    asked = driven.known_of(1)
    for generation in (0, 1):
        known = [values is not None for number, values in asked if number == generation]
        assert len(known) > 2 and not known[0] and all(known[1:])
    driven.expect_reference()


@DEPTHS
@pytest.mark.parametrize("ending", ["abort", "end"])
def test_a_request_in_the_slot_of_another_is_unknown(depth, ending):
    driven = Driven(RandomPlanner(2), depth, num_slots=1)
    driven.submit(make_request(1, 6, max_tokens=40 if ending == "abort" else 9))
    if ending == "abort":
        driven.iterate(6)
        driven.scheduler.abort("r1")
        driven.take(driven.scheduler.pop_updates())
    else:
        driven.run()
    driven.submit(make_request(2, 6, max_tokens=20, client_id="r1"))
    driven.run()
    known = [values is not None for _, values in driven.known_of(2)]
    assert len(known) > 2 and not known[0] and all(known[1:])
    assert {int(slot) for plan in driven.plans for slot in plan.rows.slot} == {0}
    driven.expect_reference(2)


def test_records_stay_with_the_drafts_where_a_drafter_tells_nothing():
    driven = Driven(RandomPlanner(2), confidence=None)
    driven.submit(*(make_request(uid, 6, max_tokens=20) for uid in (1, 2)))
    driven.run()
    assert driven.asked and not any(asked.known.any() for asked in driven.asked.values())
    for plan, result in driven.results:  # all drafts are alike: small numbers first
        if plan.trims:
            assert np.ptp(result.num_verified) <= max(1, np.ptp(plan.rows.num_drafts))
    driven.expect_reference()


# Nobody's text changes


@DEPTHS
@pytest.mark.parametrize(
    "planner",
    [
        ChosenPlanner(lambda most: 0),
        ChosenPlanner(lambda most: 1),
        ChosenPlanner(lambda most: most - 1),
        ChosenPlanner(lambda most: 0, tier=8),
        RandomPlanner(11),
        RandomPlanner(12, tier=4),
    ],
    ids=["none", "one", "all but one", "padding", "random", "random tiers"],
)
@pytest.mark.parametrize("blocks", [20, 90])
def test_output_is_the_same_for_every_budget(depth, planner, blocks):
    driven = Driven(planner, depth, num_blocks=dict.fromkeys(("compressed", "index"), blocks))
    stops = frozenset({4, 9})
    driven.submit(
        *(make_request(uid, 2 * uid, max_tokens=20, stop_ids=stops) for uid in range(1, 5)),
        make_request(5, 9, max_tokens=11, max_drafts=1, logprobs=2),
    )
    driven.run()
    assert any(plan.trims for plan in driven.plans)
    driven.expect_reference()


@DEPTHS
def test_sequence_that_is_not_finite_in_a_trimmed_step_ends_alone(depth):
    driven = Driven(RandomPlanner(9), depth)
    driven.submit(*(make_request(uid, 6, max_tokens=25) for uid in (1, 2, 3)))
    driven.iterate(5)
    driven.device.poison(2)
    driven.run()
    assert driven.end(2).error_code == "non_finite"
    assert sum(driven.scheduler.totals.row_status.values()) >= 1
    assert RowStatus.NON_FINITE in driven.scheduler.totals.row_status
    driven.expect_reference(1, 3)
