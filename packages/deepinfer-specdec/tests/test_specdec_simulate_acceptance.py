"""Synthetic traffic is what it says: length, calibration, correlation, records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer_specdec.calibrate import auc, ece
from deepinfer_specdec.errors import SettingError
from deepinfer_specdec.simulate import Trace, Traffic, draw

# Ranks of one request: nothing is shared, so the blocks of one step are independent.
LONE = [1] * 40_000


def blocks(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """All blocks of a trace: survival [n, g], drafts that pass [n]."""
    return trace.survival.reshape(-1, trace.survival.shape[2]), trace.passed.reshape(-1)


def errors_of_mean(values: np.ndarray, expected: float) -> float:
    """How many standard errors the mean of independent values is away from what is expected."""
    return abs(values.mean() - expected) / (values.std() / len(values) ** 0.5)


@pytest.mark.parametrize(
    "traffic",
    [
        Traffic(),
        Traffic(accepted_len=1.4, noise=0),
        Traffic(num_drafts=2, accepted_len=2.8, request_spread=2, draft_spread=0),
        Traffic(num_drafts=7, accepted_len=4.0, rank_spread=1.5, noise=2),
    ],
)
def test_mean_length_is_the_one_asked_for(traffic: Traffic) -> None:
    survival, passed = blocks(draw(traffic, LONE, 1, 11))
    assert errors_of_mean(1 + passed, traffic.accepted_len) < 4
    assert errors_of_mean(1 + survival.sum(1, dtype=np.float64), traffic.accepted_len) < 4


def test_the_check_of_the_length_sees_two_percent() -> None:
    _, passed = blocks(draw(Traffic(accepted_len=3.29 * 1.02), LONE, 1, 11))
    assert errors_of_mean(1 + passed, 3.29) > 4


def test_confidences_are_calibrated_and_as_sharp_as_published() -> None:
    survival, passed = blocks(draw(Traffic(), [60] * 32, 60, 3))
    for k in range(5):
        assert ece(survival[:, k], passed > k) < 0.01
        # The same check catches confidences that are a little off.
        assert ece(survival[:, k] ** 1.2, passed > k) > 0.015
        assert 0.81 <= auc(survival[:, k], passed > k) <= 0.90


def test_noise_makes_confidences_say_less_but_not_lie() -> None:
    areas = []
    for noise in (0.0, 0.7, 3.0):
        survival, passed = blocks(draw(Traffic(noise=noise), LONE, 1, 5))
        assert ece(survival[:, 1], passed > 1) < 0.01
        areas.append(auc(survival[:, 1], passed > 1))
    assert areas[0] > areas[1] + 0.01 > areas[2] + 0.1


def test_records_two_steps_old_correlate_as_stated() -> None:
    rows = [60] * 16
    default = draw(Traffic(), rows, 200, 0).autocorrelation(2)
    assert default == pytest.approx(0.55, abs=0.04)
    forgetful = replace(Traffic(), drift_correlation=0.0)
    assert draw(forgetful, rows, 200, 0).autocorrelation(2) == pytest.approx(0.31, abs=0.05)
    none = Traffic(request_spread=0, drift_spread=0, rank_spread=0)
    assert abs(draw(none, rows, 200, 0).autocorrelation(2)) < 0.02


def test_ranks_share_what_rank_spread_says() -> None:
    def spread_of_ranks(traffic: Traffic) -> float:
        sums = draw(traffic, [60] * 40, 20, 2).survival.sum(2).mean(0)
        return float(sums.reshape(40, 60).mean(1).std())

    assert spread_of_ranks(Traffic(rank_spread=0.5)) > 2 * spread_of_ranks(Traffic(rank_spread=0))


def test_requests_last_as_long_as_asked() -> None:
    trace = draw(Traffic(request_steps=20), [500], 200, 4)
    assert (trace.age == 0).mean() == pytest.approx(1 / 20, rel=0.1)
    assert trace.age[0].mean() == pytest.approx(20, rel=0.2)


def test_a_trace_is_a_function_of_its_seed() -> None:
    first, again, other = (draw(Traffic(), [3, 2], 9, seed) for seed in (7, 7, 8))
    for name in ("survival", "passed", "age", "first_row"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.survival, other.survival)


def test_survival_is_float32_and_never_rises() -> None:
    trace = draw(Traffic(), [50], 20, 1)
    assert trace.survival.dtype == np.float32
    assert (np.diff(trace.survival, axis=2) <= 0).all()


def test_a_record_is_of_the_same_request_two_steps_before() -> None:
    trace = draw(Traffic(request_steps=5), [200], 30, 6)
    for step in (2, 17):
        survival, known = trace.records(step)
        assert np.array_equal(known, trace.age[step] >= 2)
        assert np.array_equal(survival[known], trace.survival[step - 2][known])
        assert np.isnan(survival[~known]).all() and 0 < known.sum() < 200


def test_there_is_no_record_in_the_first_two_steps() -> None:
    trace = draw(Traffic(), [4], 3, 0)
    for step in (0, 1):
        survival, known = trace.records(step)
        assert not known.any() and np.isnan(survival).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_drafts", 0),
        ("accepted_len", 1.0),
        ("accepted_len", 6.0),
        ("accepted_len", float("nan")),
        ("noise", -0.1),
        ("block_spread", 11.0),
        ("drift_correlation", 1.01),
        ("rank_correlation", -0.5),
        ("request_steps", 0.5),
    ],
)
def test_values_that_are_no_traffic_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(SettingError, match=f"`{name}` is .*allowed"):
        replace(Traffic(), **{name: value})


@pytest.mark.parametrize(("rows", "steps"), [([], 5), ([0, 0], 5), ([-1, 3], 5), ([3], 0)])
def test_a_trace_of_nothing_is_refused(rows: list[int], steps: int) -> None:
    with pytest.raises(SettingError, match=r"`(rows|steps)` is"):
        draw(Traffic(), rows, steps, 0)
