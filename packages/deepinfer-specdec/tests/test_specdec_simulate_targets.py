"""The shipped planners gain what they promise on the published operating point, and never lose."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from deepinfer_specdec.budget import DelayedPlanner, ThresholdPlanner
from deepinfer_specdec.errors import SettingError
from deepinfer_specdec.lengths import best_lengths
from deepinfer_specdec.simulate import (
    Line,
    OperatingPoint,
    Sweep,
    Traffic,
    draw,
    make_policy,
    simulate,
    sweep,
)
from deepinfer_specdec.simulate.policies import EachRank

POINT = OperatingPoint()
SEEDS = (1, 2, 3)
SHIPPED = (
    *("threshold-0.1", "threshold-0.2", "group-threshold-0.1", "group-threshold-0.2"),
    *("delayed", "group-k"),
)


@cache
def at_the_point(seed: int) -> dict[str, Line]:
    names = ("fixed-5", "threshold-0.15", "algorithm-1", "delayed", "own-k", "group-k")
    asked = Sweep(loads=(60,), policies=names, ranks=16, steps=80, seed=seed)
    return {line.policy: line for line in sweep(asked)}


@pytest.mark.parametrize("seed", SEEDS)
def test_delayed_gains_ten_percent_on_one_rank(seed: int) -> None:
    line = at_the_point(seed)["delayed"]
    assert line.alone_to_fixed is not None and line.alone_to_fixed >= 1.10
    assert 3.0 <= line.verified <= 4.4


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agreed_budget_gains_eight_percent_and_beats_each_for_itself(seed: int) -> None:
    lines = at_the_point(seed)
    agreed, own = lines["group-k"].group_to_fixed, lines["own-k"].group_to_fixed
    assert agreed is not None and own is not None
    assert agreed >= 1.08
    assert agreed > own


def test_an_agreed_budget_gains_eight_percent_on_64_ranks() -> None:
    asked = Sweep(loads=(60,), policies=("own-k", "group-k"), ranks=64, steps=40, seed=4)
    own, agreed = (line.group_to_fixed for line in sweep(asked))
    assert agreed is not None and own is not None
    assert agreed >= 1.08
    assert agreed > own + 0.02


@pytest.mark.parametrize("seed", SEEDS)
def test_a_threshold_is_a_few_percent_behind_on_one_rank(seed: int) -> None:
    lines = at_the_point(seed)
    best, threshold = lines["delayed"].alone_to_fixed, lines["threshold-0.15"].alone_to_fixed
    assert best is not None and threshold is not None
    assert best - 0.06 < threshold < best


@pytest.mark.parametrize("seed", SEEDS)
def test_the_early_stop_admits_next_to_nothing_on_a_stepped_curve(seed: int) -> None:
    line = at_the_point(seed)["algorithm-1"]
    assert line.verified < 0.1
    assert line.alone_to_fixed is not None and line.alone_to_fixed < 0.6


def test_on_a_curve_without_stairs_the_early_stop_goes_on() -> None:
    asked = Sweep(loads=(60,), policies=("algorithm-1-smooth",), ranks=4, steps=30, seed=1)
    (line,) = sweep(asked)
    assert line.verified > 2.5
    assert line.alone_to_fixed is not None and line.alone_to_fixed > 1.05


@pytest.mark.parametrize("seed", SEEDS)
def test_no_shipped_setting_loses_at_low_load(seed: int) -> None:
    asked = Sweep(loads=(1, 4, 16, 32), policies=SHIPPED, ranks=8, steps=30, seed=seed)
    for line in sweep(asked):
        alone, group = line.alone_to_fixed, line.group_to_fixed
        # A threshold that each rank of a group applies alone is not what a group runs.
        of_interest = alone if alone is not None else group
        assert of_interest is not None and of_interest >= 0.99, line
        against_none = line.alone_to_off if alone is not None else line.group_to_off
        assert against_none is not None and against_none >= 1.5, line


def gain(planners: list[object], requests: int, seed: int = 1) -> float:
    """Tokens per second of lone ranks against full length."""
    ranks = len(planners)
    costs = POINT.costs(requests * 6)
    trace = draw(Traffic(), [requests] * ranks, 80, seed)
    full = simulate(trace, make_policy("fixed-5", costs, ranks, 5), POINT)
    return simulate(trace, EachRank(planners, costs, 5), POINT).alone / full.alone  # type: ignore[arg-type]


def test_a_threshold_that_leaves_padding_empty_is_caught() -> None:
    assert gain([ThresholdPlanner(0.15, None) for _ in range(16)], 4) < 0.99
    assert gain([ThresholdPlanner(0.15, POINT.costs(24)) for _ in range(16)], 4) >= 0.99


class WrongOrder(DelayedPlanner):
    """Gives each request the drafts that another one deserves."""

    def lengths(self, survival: torch.Tensor, available: torch.Tensor, total: int) -> torch.Tensor:
        return best_lengths(survival.flip(0), available, total)


class Hasty(DelayedPlanner):
    """Believes that time is proportional to rows, and so verifies too little."""

    def _seconds_of(self, num_requests: int, most: int) -> np.ndarray:
        return np.arange(num_requests, num_requests + most + 1, dtype=np.float64)


@pytest.mark.parametrize("broken", [WrongOrder, Hasty])
def test_a_broken_planner_misses_the_target(broken: type[DelayedPlanner]) -> None:
    costs = POINT.costs(360)
    assert gain([DelayedPlanner(costs) for _ in range(8)], 60) >= 1.10
    assert gain([broken(costs) for _ in range(8)], 60) < 1.08


def test_a_planner_without_the_margin_leaves_full_length_more_often_at_low_load() -> None:
    """The margin is what the low-load promise rests on where records tell little."""
    lines = {}
    for margin in (0.01, 0.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deepinfer_specdec.budget.MIN_GAIN", margin)
            asked = Sweep(loads=(16,), policies=("delayed",), ranks=16, steps=60, seed=2)
            (lines[margin],) = sweep(asked)
    assert lines[0.01].full > lines[0.0].full + 0.03


def test_a_sweep_is_a_function_of_its_arguments() -> None:
    asked = Sweep(loads=(4, 20), policies=("fixed-5", "delayed", "group-k"), ranks=2, steps=12)
    first = sweep(asked)
    assert first == sweep(asked)
    assert first != sweep(Sweep(asked.loads, asked.policies, 2, 12, seed=1))


def test_a_load_does_not_depend_on_the_others_of_the_sweep() -> None:
    both = sweep(Sweep(loads=(4, 20), policies=("delayed",), ranks=2, steps=12))
    alone = sweep(Sweep(loads=(20,), policies=("delayed",), ranks=2, steps=12))
    assert both[1:] == alone


def test_full_length_is_the_measure_and_groups_and_ranks_are_kept_apart() -> None:
    names = ("off", "fixed-5", "delayed", "own-k", "group-k", "group-threshold-0.1")
    asked = Sweep(loads=(20,), policies=names, ranks=3, steps=12)
    lines = {line.policy: line for line in sweep(asked)}
    full, none = lines["fixed-5"], lines["off"]
    assert full.alone_to_fixed == full.group_to_fixed == 1
    assert none.alone_to_off == none.group_to_off == 1 and none.verified == 0
    # Without drafts a step saves drafting and all rows of drafts: 120 rows against 20.
    step = POINT.seconds(20, drafting=False) / POINT.seconds(120)
    assert full.alone_to_off == pytest.approx(full.accepted_len * step)
    assert lines["delayed"].group_to_fixed is None is lines["delayed"].group_to_off
    for name in ("own-k", "group-k", "group-threshold-0.1"):
        assert lines[name].alone_to_fixed is None is lines[name].alone_to_off
    assert lines["delayed"].verified == lines["own-k"].verified


def test_progress_hears_of_every_line_as_it_comes() -> None:
    heard: list[Line] = []
    asked = Sweep(loads=(2, 3), policies=("fixed-5", "off"), ranks=1, steps=3)
    assert sweep(asked, heard.append) == heard
    assert len(heard) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loads": ()}, "`loads`"),
        ({"loads": (0,)}, "`loads`"),
        ({"ranks": 0}, "`ranks` is 0"),
        ({"steps": 2}, "`steps` is 2"),
        ({"seed": -1}, "`seed` is -1"),
        ({"policies": ()}, "`policies` is empty"),
        ({"policies": ("best",)}, "'best' is unknown"),
        ({"policies": ("off",), "traffic": Traffic(3, 2.0)}, "point has 5 drafts .* traffic 3"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Sweep(**change)  # type: ignore[arg-type]
