"""What steps cost, how a group is timed, and how tokens are counted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer_specdec.errors import CostTableError, SettingError
from deepinfer_specdec.simulate import (
    MeasuredPoint,
    OperatingPoint,
    Sweep,
    Traffic,
    draw,
    make_policy,
    simulate,
    sweep,
)
from deepinfer_specdec.simulate.policies import Agreed, Choice, EachRank

POINT = OperatingPoint()
TILE = 0.39 / 12


def test_a_full_length_step_of_the_operating_point_takes_one() -> None:
    assert POINT.seconds(360) == pytest.approx(1)


def test_time_rises_by_tiles_and_jumps_every_fourth() -> None:
    assert POINT.seconds(1) == POINT.seconds(32)
    assert POINT.seconds(33) - POINT.seconds(32) == pytest.approx(TILE)
    assert POINT.seconds(128) - POINT.seconds(32) == pytest.approx(3 * TILE)
    assert POINT.seconds(129) - POINT.seconds(128) == pytest.approx(TILE + 0.02)
    assert POINT.seconds(257) - POINT.seconds(256) == pytest.approx(TILE + 0.02)


def test_the_share_that_is_proportional_to_rows_is_the_one_stated() -> None:
    smooth = replace(POINT, step_share=0)
    assert smooth.seconds(360) - smooth.seconds(0) == pytest.approx(0.39)


def test_a_step_without_drafts_saves_drafting_alone() -> None:
    saved = POINT.seconds(60) - POINT.seconds(60, drafting=False)
    assert saved == pytest.approx(POINT.draft_share)


@pytest.mark.parametrize("most", [1, 32, 33, 360])
def test_the_table_says_what_steps_take(most: int) -> None:
    table = POINT.costs(most)
    for rows in range(1, most + 1):
        assert table.seconds_at(rows) == pytest.approx(POINT.seconds(rows))
        assert table.tier(rows) == -(-rows // 32) * 32


@pytest.mark.parametrize(
    "change",
    [{"tile": 0}, {"row_share": -0.1}, {"row_share": 0.95}, {"step_share": float("nan")}],
)
def test_shares_that_leave_nothing_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(SettingError, match=r"_share`|`tile`"):
        replace(POINT, **change)


@dataclass
class Stated:
    """A policy that does as it is told."""

    lengths: np.ndarray
    rows: np.ndarray
    drafts: bool = True

    def choose(self, trace: object, step: int) -> Choice:
        return Choice(self.lengths, self.rows)

    def observe(self, rows: np.ndarray, seconds: np.ndarray) -> None:
        self.seen = (rows, seconds)


def test_a_group_waits_for_its_slowest_rank_and_a_lone_rank_does_not() -> None:
    trace = draw(Traffic(), [2, 3], 12, 0)
    policy = Stated(np.array([1, 0, 5, 5, 5]), np.array([32, 96]))
    outcome = simulate(trace, policy, POINT)
    done = 1 + np.minimum(policy.lengths, trace.passed[2:])
    fast, slow = POINT.seconds(32), POINT.seconds(96)
    assert outcome.group == pytest.approx(done.sum() / 2 / (10 * slow))
    lone = done[:, :2].sum() / (10 * fast), done[:, 2:].sum() / (10 * slow)
    assert outcome.alone == pytest.approx(sum(lone) / 2)
    assert outcome.verified == pytest.approx(16 / 5)
    assert outcome.accepted_len == pytest.approx(done.mean())
    assert outcome.full == pytest.approx(1 / 2)
    assert outcome.padding == pytest.approx((128 - 3 - 18) / 128)
    assert outcome.rows == pytest.approx(64)
    assert policy.seen[1] == pytest.approx([fast, slow])


def test_a_choice_that_does_not_fit_its_step_is_a_fault() -> None:
    trace = draw(Traffic(), [20], 4, 0)
    with pytest.raises(AssertionError, match="cannot hold"):
        simulate(trace, Stated(np.full(20, 5), np.array([96])), POINT)
    with pytest.raises(AssertionError, match="out of range"):
        simulate(trace, Stated(np.full(20, 6), np.array([160])), POINT)


def test_a_trace_without_records_is_refused() -> None:
    with pytest.raises(SettingError, match="2 steps"):
        simulate(draw(Traffic(), [4], 2, 0), Stated(np.zeros(4), np.array([32])), POINT)


@pytest.mark.parametrize("name", ["fixed-5", "fixed-2", "threshold-0.2", "delayed", "group-k"])
def test_tokens_are_one_a_request_and_the_survival_of_what_is_verified(name: str) -> None:
    """Accounting holds for any policy: what is chosen tells nothing about luck."""
    trace = draw(Traffic(), [60] * 4, 120, 9)
    policy = make_policy(name, POINT.costs(360), 4, 5)
    expected, committed, whole = [], [], []
    for step in range(2, 120):
        lengths = policy.choose(trace, step).lengths
        admitted = np.arange(5) < lengths[:, None]
        expected.append((trace.survival[step] * admitted).sum(1))
        whole.append(trace.survival[step].sum(1))
        committed.append(np.minimum(lengths, trace.passed[step]))
    # Luck is independent from block to block, so blocks are, once what is expected is taken off.
    luck = np.concatenate(committed) - np.concatenate(expected)
    error = luck.std() / len(luck) ** 0.5
    assert abs(luck.mean()) < 3 * error
    if name != "fixed-5":  # to count what was not verified would show
        assert abs((np.concatenate(committed) - np.concatenate(whole)).mean()) > 4 * error


def test_all_ranks_of_an_agreeing_group_run_one_size_and_fill_it() -> None:
    trace = draw(Traffic(), [60, 20, 0], 40, 1)
    policy = make_policy("group-k", POINT.costs(360), 3, 5)
    for step in range(2, 40):
        choice = policy.choose(trace, step)
        assert len(set(choice.rows.tolist())) == 1
        rows = int(choice.rows[0])
        assert choice.lengths[:60].sum() == min(rows - 60, 300)
        assert choice.lengths[60:].sum() == min(rows - 20, 100)
    outcome = simulate(trace, policy, POINT)
    assert (
        outcome.group > simulate(trace, make_policy("fixed-5", POINT.costs(360), 3, 5), POINT).group
    )


def test_a_group_verifies_everything_at_every_hundredth_step_and_no_other() -> None:
    trace = draw(Traffic(), [60] * 2, 103, 1)
    for every, full in ((100, [False, True, False]), (0, [False] * 3)):
        policy = Agreed(POINT.costs(360), 5, full_every=every)
        found = [policy.choose(trace, step).lengths.sum() == 600 for step in (99, 100, 101)]
        assert found == full


def test_ranks_that_fill_to_the_fullest_run_its_size() -> None:
    trace = draw(Traffic(rank_spread=0.5), [60] * 8, 20, 1)
    costs = POINT.costs(360)
    apart = make_policy("threshold-0.15", costs, 8, 5).choose(trace, 5)
    filled = make_policy("group-threshold-0.15", costs, 8, 5).choose(trace, 5)
    assert len(set(apart.rows.tolist())) > 1
    assert set(filled.rows.tolist()) == {int(apart.rows.max())}
    assert (filled.lengths.reshape(8, 60).sum(1) == apart.rows.max() - 60).all()


def test_a_planner_is_told_of_its_own_steps() -> None:
    class Heard:
        def __init__(self) -> None:
            self.steps: list[tuple[int, float]] = []

        def observe(self, rows: int, seconds: float) -> None:
            self.steps.append((rows, seconds))

    planners = [Heard(), Heard()]
    EachRank(planners, POINT.costs(64), 5).observe(np.array([32, 64]), np.array([0.5, 0.75]))
    assert [each.steps for each in planners] == [[(32, 0.5)], [(64, 0.75)]]


@pytest.mark.parametrize(
    "name",
    ["best", "fixed-N", "fixed-0", "fixed-6", "fixed-", "threshold-X", "threshold-2", "threshold-"],
)
def test_unknown_policies_are_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(SettingError, match=f"'{name}' is unknown; allowed: "):
        make_policy(name, POINT.costs(360), 1, 5)


def test_measured_times_take_the_place_of_shares(tmp_path: Path) -> None:
    content = {
        "rows": [60, 120, 240, 360],
        "seconds": [0.020, 0.021, 0.030, 0.040],
        "draft_seconds": 0.002,
        "requests": 60,
        "num_drafts": 5,
        "device": "some",
    }
    file = tmp_path / "step.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    point = MeasuredPoint.load(file)
    assert point.seconds(120) == 0.021 and point.seconds(121) == 0.030  # captured sizes
    assert point.seconds(60, drafting=False) == pytest.approx(0.018)
    policies = ("off", "fixed-5", "delayed", "group-k")
    lines = sweep(Sweep(loads=(60,), policies=policies, ranks=2, steps=20, point=point))
    assert [line.policy for line in lines] == list(policies)
    delayed = lines[2].alone_to_fixed
    assert delayed is not None and delayed > 1.05  # drafts are dear in this table
    with pytest.raises(SettingError, match="measured with 60 requests, but 4"):
        Sweep(loads=(4,), point=point)


REST = '"requests": 1, "num_drafts": 5, "draft_seconds": 0}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "must have the fields"),
        ('{"rows": 1, "seconds": [1], ' + REST, "no times"),
        ('{"rows": [1], "seconds": [1], ' + REST.replace("1,", "-1,", 1), "-1"),
    ],
)
def test_a_file_without_measured_times_is_refused(
    tmp_path: Path, text: str | None, words: str
) -> None:
    file = tmp_path / "step.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(CostTableError, match=words):
        MeasuredPoint.load(file)
