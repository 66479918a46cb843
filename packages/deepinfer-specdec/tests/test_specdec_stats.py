"""Statistics: sums by hand, calibrated traffic, what a cut request does not say."""

import numpy as np
import pytest
import torch

from deepinfer_specdec import VerifyInputError, VerifyStats, best_lengths, survival

Array = np.ndarray


def step(stats: VerifyStats, **changes: object) -> None:
    """Take in a step of two requests and three drafts."""
    columns = dict(
        available=np.array([3, 2]),
        lengths=np.array([3, 1]),
        accepted=np.array([2, 1]),
        survival=np.array([[0.9, 0.5, 0.25], [0.8, 0.1, 0.0]], dtype=np.float32),
        rows=8,
        asked=3,
    )
    stats.observe_step(**(columns | changes))


def test_counts_of_a_step_are_those_by_hand() -> None:
    stats = VerifyStats(3)
    step(stats, known=np.array([True, False]), record_age=np.array([2, 0]), own=6)
    found = stats.snapshot()
    assert (found.num_steps, found.requests, found.rows, found.padding_rows) == (1, 2, 8, 2)
    assert (found.asked, found.used, found.own, found.own_used) == (3, 4, 6, 4)
    assert (found.available, found.verified, found.accepted, found.committed) == (2.5, 2, 1.5, 2.5)
    assert found.verified_histogram == (0, 1, 0, 1)
    assert found.accepted_histogram == (0, 1, 1, 0)
    assert found.acceptance == (1.0, 1.0, 0.0)
    assert found.predicted_committed == pytest.approx((1 + 0.9 + 0.5 + 0.25 + 1 + 0.8) / 2)
    assert found.measured_committed == 2.5
    assert (found.record_age, found.without_record, found.full_share) == (2, 1, 0)
    assert found.num_full_records == (0, 0, 0) and np.isnan(found.ece).all()


def test_means_are_over_steps_and_an_interval_can_start_anew() -> None:
    stats = VerifyStats(3)
    step(stats, predicted_seconds=1.0, measured_seconds=1.2, part_seconds={"draft": 0.1})
    step(stats, predicted_seconds=2.0, measured_seconds=1.8, part_seconds={"draft": 0.3})
    step(stats, rows=11)
    found = stats.snapshot()
    assert found.num_steps == 3 and found.rows == 9
    assert found.predicted_seconds == 1.5 and found.measured_seconds == 1.5
    assert found.seconds_error == pytest.approx(0.15)
    assert found.part_seconds == {"draft": pytest.approx(0.2)}
    assert np.isnan(found.own) and np.isnan(found.record_age)
    stats.clear()
    assert stats.snapshot().num_steps == 0 and np.isnan(stats.snapshot().rows)


def test_calibration_error_is_of_steps_at_full_length_alone() -> None:
    stats = VerifyStats(3)
    step(stats)
    full = dict(lengths=np.array([3, 2]), accepted=np.array([2, 0]))
    step(stats, **full)
    found = stats.snapshot()
    assert found.full_share == 0.5
    assert found.num_full_records == (2, 2, 1)
    # By position: bins of 0.9 and 0.8 differ, of 0.5 and 0.1 too.
    assert found.ece == pytest.approx([(0.1 + 0.8) / 2, (0.5 + 0.1) / 2, 0.25])


def test_request_that_ends_inside_its_run_says_nothing_behind_its_end() -> None:
    stats = VerifyStats(3)
    step(
        stats,
        lengths=np.array([3, 2]),
        accepted=np.array([3, 1]),
        committed=np.array([2, 2]),
    )
    found = stats.snapshot()
    assert found.verified_histogram == (0, 0, 2, 0)
    assert found.accepted_histogram == (0, 1, 1, 0)
    assert found.committed == 2 and found.acceptance[:2] == (1.0, 0.5)
    assert found.predicted_committed == pytest.approx(1 + 0.8 + 0.1)
    assert found.measured_committed == 2
    assert found.num_full_records == (1, 1, 0)


def test_step_without_requests_counts_nowhere() -> None:
    stats = VerifyStats(3)
    none = np.zeros(0, np.int64)
    stats.observe_step(
        available=none,
        lengths=none,
        accepted=none,
        survival=np.zeros((0, 3), np.float32),
        rows=0,
        asked=0,
    )
    assert stats.snapshot().num_steps == 0


def test_columns_that_do_not_fit_are_refused() -> None:
    stats = VerifyStats(3)
    with pytest.raises(VerifyInputError, match="`accepted` is of"):
        step(stats, accepted=np.array([1]))
    with pytest.raises(VerifyInputError, match="of 2 drafts; it must be of 3"):
        step(stats, survival=np.zeros((2, 2), np.float32))
    with pytest.raises(VerifyInputError, match=r"\['copy'\]; allowed: 'draft'"):
        step(stats, part_seconds={"copy": 0.1})


# ---- test 8 of the losslessness tests -----------------------------------------------------------


def traffic(stats: VerifyStats, claimed: float, num_steps: int = 400) -> tuple[Array, Array]:
    """Run synthetic traffic; return predicted and measured tokens of each request of each step.

    Drafts pass with the chance c; the drafter says c ** claimed, so with 1 it is calibrated.
    """
    rng = np.random.default_rng(3)
    predicted, measured = [], []
    for number in range(num_steps):
        chance = rng.beta(4, 1.2, (60, 5))
        values = survival(chance**claimed)
        available = np.full(60, 5)
        total = 300 if number % 4 == 0 else int(rng.integers(60, 240))
        lengths = best_lengths(torch.tensor(values), torch.tensor(available), total).numpy()
        verified = np.arange(5) < lengths[:, None]
        passed = np.cumprod((rng.random((60, 5)) < chance) & verified, axis=1)
        accepted = passed.sum(axis=1)
        stats.observe_step(
            available=available,
            lengths=lengths,
            accepted=accepted,
            survival=values,
            rows=60 + total,
            asked=total,
        )
        predicted.append(1 + (values * verified).sum(axis=1, dtype=np.float64))
        measured.append(1 + accepted)
    return np.concatenate(predicted), np.concatenate(measured)


def test_committed_tokens_are_one_and_the_survivals_of_calibrated_traffic() -> None:
    stats = VerifyStats(5)
    predicted, measured = traffic(stats, claimed=1.0)
    error = (measured - predicted).std() / np.sqrt(len(measured))
    assert abs(measured.mean() - predicted.mean()) < 2 * error
    found = stats.snapshot()
    assert found.predicted_committed == pytest.approx(predicted.mean())
    assert found.measured_committed == found.committed == pytest.approx(measured.mean())
    assert max(found.ece) < 0.03
    assert found.num_full_records == (6000,) * 5


def test_traffic_that_is_not_calibrated_shows() -> None:
    stats = VerifyStats(5)
    predicted, measured = traffic(stats, claimed=0.8)
    error = (measured - predicted).std() / np.sqrt(len(measured))
    assert abs(measured.mean() - predicted.mean()) > 10 * error
    assert max(stats.snapshot().ece) > 0.05
