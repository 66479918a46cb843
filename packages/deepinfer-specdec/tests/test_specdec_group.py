"""One budget for a group of ranks."""

import numpy as np
import pytest

from deepinfer_specdec import (
    Budget,
    CostTable,
    DelayedPlanner,
    VerifyInputError,
    agree,
    gains,
    share,
    survival,
)

TIERS = np.arange(8, 401, 8)
COSTS = CostTable(
    tuple(TIERS.tolist()),
    tuple(1.0 + 0.1 * ((rows - 1) // 32) for rows in TIERS.tolist()),
    tuple(TIERS.tolist()),
)


def rank(seed: int, num_requests: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = survival(rng.random((num_requests, 5)) ** (0.2 + 0.6 * rng.random()))
    return values, rng.random(num_requests) < 0.9, rng.integers(3, 6, num_requests)


def ballots(cases: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([gains(*case, TIERS) for case in cases]),
        np.array([len(case[2]) for case in cases]),
        np.array([case[2].sum() for case in cases]),
    )


def test_gains_are_the_tokens_expected_of_each_size() -> None:
    values = np.array([[0.9, 0.5], [0.8, 0.1]], dtype=np.float32)
    found = gains(values, np.array([True, True]), np.array([2, 1]), np.array([1, 2, 3, 4, 5, 9]))
    assert found == pytest.approx([2, 2, 2.9, 3.7, 4.2, 4.2])


def test_rank_without_requests_expects_nothing() -> None:
    nothing = (np.zeros((0, 5), np.float32), np.zeros(0, bool), np.zeros(0, np.int64))
    assert gains(*nothing, TIERS).tolist() == [0.0] * len(TIERS)


def test_a_group_of_one_does_what_the_rank_does_alone() -> None:
    short = 0
    for seed in range(30):
        case = rank(seed, 40)
        agreed = agree(*ballots([case]), TIERS, COSTS)
        alone = DelayedPlanner(COSTS, full_every=0).budget(*case)
        assert share(agreed, 40, case[2]) == alone
        short += not alone.is_full
    assert short > 5


def test_every_rank_agrees_on_the_same_size() -> None:
    cases = [rank(seed, 20 + seed % 5) for seed in range(16)]
    gathered = ballots(cases)
    # Each rank evaluates its own copy of what was exchanged.
    answers = {
        agree(*(each.copy() for each in gathered), TIERS.copy(), COSTS) for _ in range(len(cases))
    }
    assert len(answers) == 1


def test_agreed_size_has_the_most_tokens_per_second_of_the_group() -> None:
    for seed in range(10):
        cases = [rank(100 * seed + each, 30 + each) for each in range(6)]
        gathered, rows, available = ballots(cases)
        agreed = agree(gathered, rows, available, TIERS, COSTS)
        speed = gathered.sum(axis=0) / COSTS.seconds_at(TIERS)
        allowed = (rows.max() <= TIERS) & (COSTS.tier((rows + available).max()) >= TIERS)
        best = speed[allowed].max()
        assert agreed in TIERS[allowed]
        assert speed[agreed == TIERS][0] >= best / 1.01


def test_one_rank_that_would_gain_does_not_hold_up_many_that_would_not() -> None:
    costs = CostTable((8, 16), (1.0, 1.5), (8, 16))
    tiers = np.array([8, 16])
    eager = (np.full((8, 1), 0.9, np.float32), np.ones(8, bool), np.ones(8, np.int64))
    poor = (np.full((8, 1), 0.1, np.float32), np.ones(8, bool), np.ones(8, np.int64))
    for cases, expected in (([eager], 16), ([eager] + [poor] * 7, 8)):
        gathered = np.array([gains(*case, tiers) for case in cases])
        count = np.full(len(cases), 8)
        assert agree(gathered, count, count, tiers, costs) == expected


def test_sizes_too_small_for_the_fullest_rank_do_not_count() -> None:
    # Seven ranks are best off at 8 rows; the eighth has 9 requests.
    steep = CostTable((8, 16, 64), (1.0, 9.0, 99.0), (8, 16, 64))
    tiers = np.array([8, 16, 64])
    cases = [rank(each, 2) for each in range(7)] + [rank(9, 9)]
    gathered = np.array([gains(*case, tiers) for case in cases])
    rows = np.array([2] * 7 + [9])
    available = np.array([case[2].sum() for case in cases])
    assert agree(gathered, rows, available, tiers, steep) == 16


def test_full_length_is_left_for_over_one_percent_only() -> None:
    tiers = np.array([1, 2])
    for gain, expected in ((1.009, 2), (1.011, 1)):
        costs = CostTable((1, 2), (1.0, 1.5 * gain), (1, 2))
        gathered = np.array([[1.0, 1.5], [1.0, 1.5]])
        one = np.array([1, 1])
        assert agree(gathered, one, one, tiers, costs) == expected


def test_step_at_full_length_holds_the_drafts_of_every_rank() -> None:
    cases = [rank(each, 60) for each in range(4)]
    gathered, rows, available = ballots(cases)
    assert agree(gathered, rows, available, TIERS, COSTS) < COSTS.tier(60 + available.max())
    agreed = agree(gathered, rows, available, TIERS, COSTS, full=True)
    assert agreed == COSTS.tier(60 + available.max())
    assert all(share(agreed, 60, case[2]).is_full for case in cases)


def test_sizes_that_promise_the_same_take_the_larger() -> None:
    costs = CostTable((1, 2, 3, 6), (1.0, 1.0, 1.0, 9.0))
    gathered, tiers = np.array([[1.0, 1.0, 1.0, 1.0]]), np.array([1, 2, 3, 6])
    assert agree(gathered, np.array([1]), np.array([5]), tiers, costs) == 3


def test_sizes_that_end_too_early_leave_full_length() -> None:
    gathered = np.array([[4.0, 5.0]])
    agreed = agree(gathered, np.array([4]), np.array([20]), np.array([8, 16]), COSTS)
    assert agreed == 24


def test_group_without_requests_has_no_rows() -> None:
    zeros = np.zeros(3, np.int64)
    assert agree(np.zeros((3, len(TIERS))), zeros, zeros, TIERS, COSTS) == 0


def test_share_fills_the_size_with_what_the_rank_has() -> None:
    available = np.array([5, 5])
    assert share(8, 2, available) == Budget(6, 8, False)
    assert share(16, 2, available) == Budget(10, 16, True)
    assert share(8, 0, available[:0]) == Budget(0, 8, True)


def test_columns_that_do_not_fit_are_refused() -> None:
    two = np.array([1, 2])
    with pytest.raises(VerifyInputError, match=r"`gains` \(2, 3\)"):
        agree(np.zeros((2, 3)), two, two, two, COSTS)
