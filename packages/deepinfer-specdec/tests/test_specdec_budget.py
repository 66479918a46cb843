"""How many drafts: the three planners, and the early-stopping rule of the paper."""

import numpy as np
import pytest
import torch

from deepinfer_specdec import (
    Budget,
    CostTable,
    DelayedPlanner,
    FixedPlanner,
    SettingError,
    ThresholdPlanner,
    VerifyInputError,
    early_stop_lengths,
    survival,
)
from deepinfer_specdec.budget import best_records

STEPPED = CostTable(
    tuple(range(8, 401, 8)),
    tuple(1.0 + 0.02 * ((rows - 1) // 32) ** 1.5 for rows in range(8, 401, 8)),
    tuple(range(8, 257, 8)),
)


def records(num_requests: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = survival(rng.random((num_requests, 5)) ** 0.4)
    return values, rng.random(num_requests) < 0.8, rng.integers(0, 6, num_requests)


def by_hand(
    values: np.ndarray, known: np.ndarray, available: np.ndarray, costs: CostTable
) -> Budget:
    """The delayed rule once more, draft by draft."""
    count = len(available)
    best_first = sorted(
        (
            float(values[r, j]) if known[r] else 1.0
            for r in range(count)
            for j in range(available[r])
        ),
        reverse=True,
    )
    speeds = [
        (count + sum(best_first[:total])) / costs.seconds_at(costs.tier(count + total))
        for total in range(len(best_first) + 1)
    ]
    best = max(range(len(speeds)), key=lambda total: (speeds[total], total))
    if speeds[best] <= 1.01 * speeds[-1]:
        best = len(best_first)
    rows = costs.tier(count + best)
    total = min(rows - count, len(best_first))
    return Budget(total, rows, total == len(best_first))


@pytest.mark.parametrize("num_requests", [1, 4, 30, 60])
def test_delayed_budget_is_the_best_of_all_totals(num_requests: int) -> None:
    planner = DelayedPlanner(STEPPED, full_every=0)
    full = 0
    for seed in range(20):
        case = records(num_requests, seed)
        budget = planner.budget(*case)
        assert budget == by_hand(*case, STEPPED)
        full += budget.is_full
    assert full < 20 or num_requests < 30  # the cases are not all at full length


def test_delayed_budget_looks_behind_the_edge_of_a_plateau() -> None:
    # The first draft costs a step of 30 %, the four behind it nothing.
    costs = CostTable((1, 6, 7), (1.0, 1.3, 9.0), (1, 6))
    values = np.full((1, 5), 0.25, dtype=np.float32)
    known, available = np.array([True]), np.array([5])
    assert early_stop_lengths(values, available, costs).tolist() == [0]
    assert DelayedPlanner(costs).budget(values, known, available).total == 5


def test_full_length_is_kept_for_a_gain_of_one_percent_or_less() -> None:
    known, available = np.array([True]), np.array([1])
    for gain, total in ((1.009, 1), (1.011, 0)):
        values = np.array([[0.5]], dtype=np.float32)
        costs = CostTable((1, 2), (1.0, 1.5 * gain))
        assert DelayedPlanner(costs).budget(values, known, available).total == total


def test_equal_totals_take_the_larger() -> None:
    # Survival 0 gains nothing and costs nothing up to 4 rows; full length costs much. Without
    # captured sizes nothing else would raise the total.
    costs = CostTable((1, 4, 6), (1.0, 1.0, 3.0))
    budget = DelayedPlanner(costs).budget(
        np.zeros((1, 5), dtype=np.float32), np.array([True]), np.array([5])
    )
    assert budget == Budget(3, 4, False)


def test_padding_is_filled_with_drafts() -> None:
    costs = CostTable((2, 8, 16), (1.0, 2.0, 9.0), (2, 8, 16))
    planner = ThresholdPlanner(0.5, costs)
    values = np.array([[0.9, 0.1, 0.1], [0.9, 0.8, 0.1]], dtype=np.float32)
    known = np.array([True, True])
    assert planner.budget(values, known, np.array([3, 3])) == Budget(6, 8, True)
    assert planner.budget(values, known, np.array([2, 2])) == Budget(4, 8, True)
    assert ThresholdPlanner(0.5).budget(values, known, np.array([3, 3])) == Budget(3, 5, False)


def test_threshold_counts_records_and_all_of_requests_without_one() -> None:
    planner = ThresholdPlanner(0.5)
    values = np.array([[0.9, 0.5, 0.1], [0.0, 0.0, 0.0], [0.9, 0.8, 0.7]], dtype=np.float32)
    available = np.array([3, 2, 1])
    assert planner.budget(values, np.array([True, False, True]), available).total == 5
    assert planner.budget(values, np.array([True, True, True]), available).total == 3


def test_request_without_a_record_counts_as_certain() -> None:
    values = np.zeros((2, 2), dtype=np.float32)
    tokens = best_records(values, np.array([True, False]), np.array([2, 2]))
    assert tokens.tolist() == [2, 3, 4, 4, 4]


def test_nan_in_a_record_counts_as_zero() -> None:
    values = np.array([[0.5, np.nan]], dtype=np.float32)
    tokens = best_records(values, np.array([True]), np.array([2]))
    assert tokens.tolist() == [1, 1.5, 1.5]
    costs = CostTable((1, 2, 3), (1.0, 1.2, 2.0))
    assert DelayedPlanner(costs).budget(values, np.array([True]), np.array([2])).total == 1


def test_fixed_takes_all_that_is_available() -> None:
    values, known, available = records(9)
    most = int(available.sum())
    assert FixedPlanner().budget(values, known, available) == Budget(most, 9 + most, True)
    sized = FixedPlanner(STEPPED).budget(values, known, available)
    assert sized == Budget(most, STEPPED.tier(9 + most), True)


@pytest.mark.parametrize(
    "planner", [FixedPlanner(STEPPED), ThresholdPlanner(0.2, STEPPED), DelayedPlanner(STEPPED)]
)
def test_nothing_to_verify_works(planner: DelayedPlanner) -> None:
    nothing = (np.zeros((0, 5), np.float32), np.zeros(0, bool), np.zeros(0, np.int64))
    assert planner.budget(*nothing) == Budget(0, 0, True)
    unavailable = (np.ones((3, 5), np.float32), np.ones(3, bool), np.zeros(3, np.int64))
    assert planner.budget(*unavailable) == Budget(0, 8, True)


@pytest.mark.parametrize("kind", ["threshold", "delayed"])
def test_every_so_many_calls_everything_is_verified(kind: str) -> None:
    steep = CostTable((1, 2), (1.0, 9.0))
    values = np.full((2, 5), 0.01, dtype=np.float32)
    case = (values, np.ones(2, bool), np.full(2, 5))
    for every, expected in ((3, [0, 0, 10] * 3), (0, [0] * 9), (1, [10] * 9)):
        planner = (
            DelayedPlanner(steep, full_every=every)
            if kind == "delayed"
            else ThresholdPlanner(0.5, full_every=every)
        )
        assert [planner.budget(*case).total for _ in range(9)] == expected


def test_measured_steps_change_the_delayed_budget() -> None:
    planner = DelayedPlanner(CostTable((1, 6), (1.0, 1.01), (1, 6)), full_every=0)
    case = (np.full((1, 5), 0.1, dtype=np.float32), np.array([True]), np.array([5]))
    assert planner.budget(*case).total == 5
    with pytest.warns(RuntimeWarning, match="of 6 rows"):
        for _ in range(200):
            planner.observe(6, 2.0)
            planner.observe(1, 1.0)
    assert planner.costs.table.seconds_at(6) == pytest.approx(2.0, rel=0.01)
    assert planner.budget(*case).total == 0


def test_lengths_of_a_planner_are_the_best_of_the_current_step() -> None:
    planner = ThresholdPlanner(0.5)
    values = torch.tensor([[0.9, 0.2], [0.8, 0.7]])
    assert planner.lengths(values, torch.tensor([2, 2]), 3).tolist() == [1, 2]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(SettingError, match=r"`threshold` is 1\.5"):
        ThresholdPlanner(1.5)
    with pytest.raises(SettingError, match="`full_every` is -1"):
        DelayedPlanner(STEPPED, full_every=-1)


def test_columns_that_do_not_fit_are_refused() -> None:
    values, known, available = records(4)
    for planner in (FixedPlanner(), ThresholdPlanner(), DelayedPlanner(STEPPED)):
        with pytest.raises(VerifyInputError, match=r"\(3,\)"):
            planner.budget(values, known[:3], available)
    with pytest.raises(VerifyInputError, match=r"\(3,\)"):
        early_stop_lengths(values, available[:3], STEPPED)


# ---- Algorithm 1 --------------------------------------------------------------------------------


def test_early_stop_admits_while_speed_rises() -> None:
    costs = CostTable((1, 100), (1.0, 100.0))  # each row costs 1
    smooth = CostTable((1, 2, 3, 4), (1.0, 1.3, 1.7, 2.4))
    values = np.array([[0.9, 0.6, 0.5]], dtype=np.float32)
    # 1.0, 1.9 / 1.3 = 1.46, 2.5 / 1.7 = 1.47, 3.0 / 2.4 = 1.25
    assert early_stop_lengths(values, np.array([3]), smooth).tolist() == [2]
    assert early_stop_lengths(values, np.array([1]), smooth).tolist() == [1]
    assert early_stop_lengths(values, np.array([3]), costs).tolist() == [0]
    assert early_stop_lengths(values[:0], np.zeros(0, np.int64), smooth).tolist() == []


def test_early_stop_takes_the_best_drafts_first() -> None:
    costs = CostTable((1, 2, 3, 4, 5), (1.0, 1.0, 1.0, 1.0, 9.0))
    values = np.array([[0.5, 0.4], [0.9, 0.8]], dtype=np.float32)
    # Two rows and two drafts are free; a third makes it dear.
    assert early_stop_lengths(values, np.array([2, 2]), costs).tolist() == [0, 2]


def test_draft_that_never_survives_ends_the_walk() -> None:
    free = CostTable((1, 100), (1.0, 1.0))
    values = np.array([[0.5, 0.0], [np.nan, 0.0]], dtype=np.float32)
    assert early_stop_lengths(values, np.array([2, 2]), free).tolist() == [1, 0]
