"""Splits of a map: water-filling, linear programmes, bounds, and whole numbers."""

from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest

from deepinfer_eplb.balance import (
    MOST_HITS,
    even_split,
    largest_remainder,
    lower_bound,
    water_fill,
)
from deepinfer_eplb.errors import PlanInputError
from deepinfer_eplb.lp import lp_bound, lp_split, scenario_split
from deepinfer_eplb.maps import Layout, check_map, imbalance, num_replicas_of, rank_loads

MANY = 20000


def random_map(rng: np.random.Generator, num_experts: int, layout: Layout) -> np.ndarray:
    """A whole map of one layer, [1, P]: random replicas, the most replicated placed first."""
    ranks, slots = layout.active, layout.slots_per_rank
    counts = np.ones(num_experts, np.int64)
    for _ in range(len(ranks) * slots - num_experts):
        counts[rng.choice(np.flatnonzero(counts < len(ranks)))] += 1
    held: dict[int, list[int]] = {int(rank): [] for rank in ranks}
    for expert in np.lexsort((rng.random(num_experts), -counts)):
        roomy = sorted(held, key=lambda rank: (len(held[rank]), rng.random()))
        for rank in roomy[: counts[expert]]:
            held[rank].append(int(expert))
    found = np.full((1, layout.num_physical), -1)
    for rank, experts in held.items():
        found[0, rank * slots : (rank + 1) * slots] = rng.permutation(experts)
    return check_map(found, num_experts, layout)


def random_cases(count: int, seed: int, excluded: bool = True) -> list[tuple]:
    """(map, loads, layout): up to 5 ranks, some excluded, some experts without load."""
    rng = np.random.default_rng(seed)
    cases = []
    while len(cases) < count:
        ranks, slots = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        out = (int(rng.integers(ranks)),) if excluded and ranks > 2 and rng.random() < 0.3 else ()
        layout = Layout(ranks, 1, slots, out)
        most = len(layout.active) * slots
        experts = int(rng.integers(max(slots, most // 2), most + 1))
        loads = rng.lognormal(0, 1, (1, experts)) * (rng.random((1, experts)) < 0.9)
        cases.append((random_map(rng, experts, layout), loads, layout))
    return cases


def planned_map(loads: np.ndarray, layout: Layout) -> np.ndarray:
    """Replicate the largest load per replica, then the heaviest into the lightest rank: [1, P]."""
    ranks, slots = layout.num_ranks, layout.slots_per_rank
    counts = np.ones(len(loads), np.int64)
    for _ in range(layout.num_physical - len(loads)):
        counts[np.where(counts < ranks, loads / counts, -1).argmax()] += 1
    found, used, sums = np.full((ranks, slots), -1), np.zeros(ranks, int), np.zeros(ranks)
    for expert in np.argsort(-loads / counts, kind="stable"):
        for _ in range(counts[expert]):
            fits = (used < slots) & ~(found == expert).any(1)
            rank = np.where(fits, sums, np.inf).argmin()
            found[rank, used[rank]] = expert
            used[rank] += 1
            sums[rank] += loads[expert] / counts[expert]
    return check_map(found.reshape(1, -1), len(loads), layout)


def heaviest(slots: np.ndarray, loads: np.ndarray, layout: Layout, split: np.ndarray) -> float:
    return float(rank_loads(slots, loads, layout.num_ranks, split).max())


def best_by_subsets(slots: np.ndarray, loads: np.ndarray, layout: Layout) -> float:
    """The lightest that the heaviest rank can be: some set of ranks holds what only it can."""
    by_rank = slots.reshape(layout.num_ranks, -1)
    homes = [set(np.flatnonzero((by_rank == e).any(1))) for e in range(loads.shape[1])]
    return max(
        sum(load for load, home in zip(loads[0], homes, strict=True) if home <= set(some)) / size
        for size in range(1, len(layout.active) + 1)
        for some in combinations(layout.active, size)
    )


def sums_by_expert(slots: np.ndarray, split: np.ndarray, num_experts: int) -> np.ndarray:
    held = slots[0] >= 0
    assert (split[0, ~held] == 0).all() and (split >= 0).all()
    return np.bincount(slots[0, held], split[0, held], minlength=num_experts)


# ---- water-filling ------------------------------------------------------------------------------


def test_one_pouring_by_hand() -> None:
    # Rank loads without expert 0: 4, 1, 9. Its 5 fill rank 1 up to 4, then both up to 5.
    layout = Layout(3, 1, 2)
    slots, loads = np.array([[0, 1, 2, 0, 0, 3]]), np.array([[5.0, 4, 1, 9]])
    split = water_fill(slots, loads, layout, sweeps=1)
    assert split == pytest.approx(np.array([[0.2, 1, 1, 0.8, 0, 1]]))


def test_the_heaviest_expert_is_poured_first() -> None:
    layout = Layout(2, 1, 2)
    slots = np.array([[0, 1, 0, 1]])
    start = np.array([[1, 1, 0, 0]])
    # 0 leaves for the empty rank but for what levels, then 1 finds both ranks level without it.
    split = water_fill(slots, np.array([[6.0, 2]]), layout, sweeps=1, start=start)
    assert split == pytest.approx(np.array([[1 / 3, 1, 2 / 3, 0]]))
    split = water_fill(slots, np.array([[2.0, 6]]), layout, sweeps=1, start=start)
    assert split == pytest.approx(np.array([[1, 1 / 3, 0, 2 / 3]]))


def test_shares_are_whole_for_every_expert() -> None:
    for slots, loads, layout in random_cases(60, 1):
        for sweeps in (0, 1, 4):
            split = water_fill(slots, loads, layout, sweeps=sweeps)
            assert sums_by_expert(slots, split, loads.shape[1]) == pytest.approx(1, abs=1e-12)


def test_many_sweeps_end_at_the_best_split() -> None:
    for slots, loads, layout in random_cases(60, 2):
        split = water_fill(slots, loads, layout, sweeps=MANY)
        best = best_by_subsets(slots, loads, layout)
        assert heaviest(slots, loads, layout, split) == pytest.approx(best, rel=1e-6)


def test_no_sweep_makes_the_heaviest_rank_heavier() -> None:
    for slots, loads, layout in random_cases(60, 3):
        split = even_split(slots, loads.shape[1])
        for _ in range(4):
            before = heaviest(slots, loads, layout, split)
            split = water_fill(slots, loads, layout, sweeps=1, start=split)
            assert heaviest(slots, loads, layout, split) <= before * (1 + 1e-12)


def test_levelling_the_best_split_keeps_its_heaviest_rank() -> None:
    for slots, loads, layout in random_cases(40, 4):
        best = lp_split(slots, loads, layout)
        level = water_fill(slots, loads, layout, start=best)
        before, after = (rank_loads(slots, loads, layout.num_ranks, s)[0] for s in (best, level))
        assert after.max() <= before.max() * (1 + 1e-12)
        assert (after**2).sum() <= (before**2).sum() * (1 + 1e-12)


@pytest.mark.parametrize(("ranks", "slots_per_rank"), [(64, 7), (4, 100), (2, 196)])
def test_few_sweeps_are_close_to_the_best_split(ranks: int, slots_per_rank: int) -> None:
    rng = np.random.default_rng(5)
    layout = Layout(ranks, 1, slots_per_rank)
    gaps = []
    for _ in range(6):
        planned = rng.lognormal(0, 0.8, 384)
        slots = planned_map(planned, layout)
        now = (planned * rng.lognormal(0, 0.3, (3, 384)))[:, None]
        split = water_fill(slots, now, layout)
        found = imbalance(rank_loads(slots, now, ranks, split), ranks)[:, 0]
        gaps += list(found - [lp_bound(slots, loads, layout)[0] for loads in now])
    assert min(gaps) > -1e-6
    assert np.mean(gaps) < 0.005


def test_pieces_and_layers_do_not_influence_one_another() -> None:
    rng = np.random.default_rng(6)
    layout = Layout(4, 1, 3)
    slots = np.concatenate([random_map(rng, 8, layout) for _ in range(3)])
    loads = rng.lognormal(0, 1, (5, 3, 8)) * np.array([1.0, 1e6, 0.0])[:, None]
    start = lp_split(slots, loads[0], layout)
    together = water_fill(slots, loads, layout, start=start)
    assert together.shape == (5, 3, 12)
    for h, layer in product(range(5), range(3)):
        alone = water_fill(slots[[layer]], loads[h, [layer]], layout, start=start[[layer]])
        assert np.array_equal(alone[0], together[h, layer])


def test_a_split_does_not_depend_on_the_unit_of_loads() -> None:
    for slots, loads, layout in random_cases(10, 7):
        want = water_fill(slots, loads, layout)
        for unit in (2.0**-80, 2.0**80):
            assert np.array_equal(water_fill(slots, loads * unit, layout), want)


def test_experts_without_load_keep_their_shares() -> None:
    layout = Layout(2, 1, 2)
    slots, start = np.array([[0, 1, 1, 0]]), np.array([[0.9, 0.3, 0.7, 0.1]])
    zero = np.zeros((1, 2))
    assert water_fill(slots, zero, layout).tolist() == [[0.5] * 4]
    assert water_fill(slots, zero, layout, start=start).tolist() == start.tolist()
    some = water_fill(slots, np.array([[0.0, 3]]), layout, start=start)
    assert some == pytest.approx(np.array([[0.9, 0.5, 0.5, 0.1]]))


def test_a_load_that_rounding_swallows_is_still_whole() -> None:
    layout = Layout(2, 1, 2)
    slots = np.array([[0, 1, 0, 2]])
    for tiny in (1e-3, 1e-12, 1e-17, 1e-30):
        split = water_fill(slots, np.array([[tiny, 1.0, 1.0]]), layout)
        assert sums_by_expert(slots, split, 3) == pytest.approx(1, abs=1e-12)


def test_a_single_rank_with_spare_slots_is_split() -> None:
    split = water_fill(np.array([[0, 1, 0]]), np.array([[2.0, 1]]), Layout(1, 1, 3))
    assert split == pytest.approx(np.array([[0.5, 1, 0.5]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sweeps": -1}, "`sweeps` is -1"),
        ({"sweeps": 1.5}, "`sweeps` is 1.5"),
        ({"start": [[0.5] * 3]}, r"`start` has shape \[1, 3\] and dtype float64; needed: \[1, 4\]"),
        ({"start": [["a", "b", "c", "d"]]}, r"`start` has shape \[1, 4\] and dtype <U1; needed"),
        ({"start": [[0.5, 0.5, 0.5, np.nan]]}, r"`start`\[0, 3\] is nan; allowed: 0 to 1"),
        ({"start": [[0.5, 0.5, 0.5, -0.5]]}, r"`start`\[0, 3\] is -0.5; allowed: 0 to 1"),
        ({"start": [[1.5, 0.5, 0.5, -0.5]]}, r"`start`\[0, 0\] is 1.5; allowed: 0 to 1"),
        ({"start": [[0.5, 0.5, 0.4, 0.5]]}, "`start` of expert 1 of layer 0 sums to 0.9"),
        ({"loads": [[1.0, np.nan]]}, r"`loads`\[0, 1\] is nan"),
        ({"loads": [[1.0, -1]]}, r"`loads`\[0, 1\] is -1"),
        ({"loads": [[1.0, 1, 1]]}, "loses expert 2"),
        ({"loads": [[1.0, 1]] * 2}, r"needed: \[2, 4\]"),
    ],
)
def test_bad_input_of_water_filling_is_refused(change: dict, message: str) -> None:
    given = {"physical_to_logical": [[0, 1, 1, 0]], "loads": [[1.0, 2]], "layout": Layout(2, 1, 2)}
    water_fill(**given)
    with pytest.raises(PlanInputError, match=message):
        water_fill(**(given | change))


def test_an_empty_slot_takes_no_share() -> None:
    given = ([[0, 1, -1, -1, 1, 0]], [[1.0, 2]], Layout(3, 1, 2, (1,)))
    for share, fits in ((0.0, True), (0.1, False)):
        start = [[0.5, 0.5, share, 0, 0.5, 0.5]]
        if fits:
            water_fill(*given, start=start)
        else:
            with pytest.raises(PlanInputError, match=r"`start`\[0, 2\] is 0.1; allowed: 0, since"):
                water_fill(*given, start=start)


# ---- linear programmes --------------------------------------------------------------------------


def test_the_programme_finds_the_best_split() -> None:
    for slots, loads, layout in random_cases(80, 8):
        split = lp_split(slots, loads, layout)
        assert sums_by_expert(slots, split, loads.shape[1]) == pytest.approx(1, abs=1e-12)
        best = best_by_subsets(slots, loads, layout)
        assert heaviest(slots, loads, layout, split) == pytest.approx(best, rel=1e-6)
        mean = loads.sum() / len(layout.active)
        assert lp_bound(slots, loads, layout) == pytest.approx(best / mean if mean else 1, rel=1e-6)


def test_a_map_without_replicas_leaves_nothing_to_split() -> None:
    slots, loads = np.array([[0, 1, 2, 3]]), np.array([[1.0, 2, 3, 4]])
    assert lp_split(slots, loads, Layout(2, 1, 2)).tolist() == [[1.0] * 4]
    assert lp_bound(slots, loads, Layout(2, 1, 2)).tolist() == [1.4]
    assert lp_split(np.array([[0, 1, 1, 0]]), np.zeros((1, 2)), Layout(2, 1, 2)).tolist() == [
        [0.5] * 4
    ]


def test_the_split_of_scenarios_is_the_best_of_a_fine_grid() -> None:
    rng = np.random.default_rng(9)
    layout = Layout(2, 1, 2)
    slots = np.array([[0, 1, 0, 2]])
    grid = np.linspace(0, 1, 2001)
    for _ in range(20):
        scenarios = rng.lognormal(0, 1, (4, 1, 3))
        weights = rng.random(4)
        left = scenarios[:, 0, [0]] * grid + scenarios[:, 0, [1]]
        right = scenarios[:, 0, [0]] * (1 - grid) + scenarios[:, 0, [2]]
        best = (weights @ np.maximum(left, right)).min()
        split = scenario_split(slots, scenarios, weights, layout)
        ranks = rank_loads(slots, scenarios, 2, split).max(-1)[:, 0]
        assert weights @ ranks == pytest.approx(best, rel=2e-3)
        assert weights @ ranks <= best * (1 + 1e-6)


def test_the_split_of_scenarios_is_no_worse_than_others() -> None:
    for slots, loads, layout in random_cases(30, 10):
        rng = np.random.default_rng(slots.size)
        scenarios = loads * rng.lognormal(0, 1, (6, *loads.shape))
        weights = 0.9 ** np.arange(6)

        def cost(split: np.ndarray) -> float:
            ranks = rank_loads(slots, scenarios, layout.num_ranks, split)  # noqa: B023
            return float(weights @ ranks.max(-1)[:, 0])  # noqa: B023

        found = cost(scenario_split(slots, scenarios, weights, layout))
        mean = np.einsum("h,hle->le", weights, scenarios)
        for other in (
            even_split(slots, loads.shape[1]),
            lp_split(slots, mean, layout),
            *(lp_split(slots, each, layout) for each in scenarios),
        ):
            assert found <= cost(other) * (1 + 1e-6)


def test_a_scenario_of_weight_0_does_not_matter() -> None:
    slots, layout = np.array([[0, 1, 0, 2]]), Layout(2, 1, 2)
    scenarios = np.array([[[4.0, 1, 3]], [[4.0, 1e9, 0]], [[0.0, 1, 0]]])
    with_it = scenario_split(slots, scenarios, [2.0, 0.0, 0.0], layout)
    assert with_it == pytest.approx(lp_split(slots, scenarios[0], layout))
    assert with_it == pytest.approx(np.array([[0.75, 1, 0.25, 1]]))
    without_load = scenario_split(slots, scenarios, [0.0, 0.0, 1.0], layout)
    assert without_load.tolist() == [[0.5, 1, 0.5, 1]]


@pytest.mark.parametrize(
    ("scenarios", "weights", "message"),
    [
        ([[[1.0, 2]]], [1.0, 1.0], r"`weights` has shape \[2\] and sum 2.0; needed: \[1\]"),
        ([[[1.0, 2]]], [0.0], "sum 0.0"),
        ([[[1.0, 2]]], [-1.0], r"`weights`\[0\] is -1.0"),
        ([[1.0, 2]], [1.0], r"`scenarios` has shape \[1, 2\]"),
        ([[[1.0, np.inf]]], [1.0], r"`scenarios`\[0, 0, 1\] is inf"),
    ],
)
def test_bad_scenarios_are_refused(scenarios: list, weights: list, message: str) -> None:
    with pytest.raises(PlanInputError, match=message):
        scenario_split([[0, 1, 1, 0]], scenarios, weights, Layout(2, 1, 2))


# ---- bounds -------------------------------------------------------------------------------------


def all_maps(num_experts: int, layout: Layout) -> list[np.ndarray]:
    sets = list(combinations(range(num_experts), layout.slots_per_rank))
    return [
        np.array(sum(chosen, ()))[None]
        for chosen in product(sets, repeat=layout.num_ranks)
        if len(set(sum(chosen, ()))) == num_experts
    ]


@pytest.mark.parametrize(
    ("ranks", "slots", "experts"), [(2, 2, 3), (3, 2, 4), (2, 3, 5), (2, 3, 4), (4, 1, 2)]
)
def test_no_map_goes_below_the_bound(ranks: int, slots: int, experts: int) -> None:
    rng = np.random.default_rng(11)
    layout = Layout(ranks, 1, slots)
    maps = all_maps(experts, layout)
    tight = 0
    for _ in range(12):
        loads = rng.lognormal(0, 1.2, (1, experts))
        mean = loads.sum() / ranks
        best = min(best_by_subsets(each, loads, layout) for each in maps) / mean
        bound = lower_bound(loads, layout)
        assert bound.shape == (1,) and bound[0] <= best * (1 + 1e-9)
        tight += bound[0] == pytest.approx(best)
    assert tight  # it says something
    if slots == 1:
        assert tight == 12


def test_the_bound_of_special_layers() -> None:
    loads = np.array([[0.0, 0, 0, 0], [8, 0, 0, 0], [1, 1, 1, 1], [9e29, 9e29, 9e29, 0]])
    assert lower_bound(loads, Layout(3, 1, 2)) == pytest.approx([1, 1, 1, 1])
    assert lower_bound(loads[:2], Layout(4, 1, 1)).tolist() == [1, 4]
    assert lower_bound(loads[:2], Layout(8, 1, 1, (0, 1, 7))).tolist() == [1, 2.5]


def test_the_bound_refuses_what_does_not_fit() -> None:
    with pytest.raises(PlanInputError, match="9 experts do not fit"):
        lower_bound(np.ones((1, 9)), Layout(4, 1, 2))


# ---- whole numbers ------------------------------------------------------------------------------


def by_fractions(shares: list[float], total: int) -> list[int]:
    exact = [Fraction(share) * total / sum(map(Fraction, shares)) for share in shares]
    found = [int(each) for each in exact]
    order = sorted(range(len(shares)), key=lambda i: (found[i] - exact[i], i))
    for i in order[: total - sum(found)]:
        found[i] += 1
    return found


def test_remainders_match_exact_arithmetic() -> None:
    rng = np.random.default_rng(12)
    shares = rng.integers(0, 200, (300, 5)) + (np.arange(5) == 2)
    total = rng.integers(0, 10**6, 300)
    found = largest_remainder(shares / 1024, total)
    assert found.dtype == np.int64
    assert found.tolist() == [
        by_fractions(row, int(each)) for row, each in zip(shares / 1024, total, strict=True)
    ]


def test_quotas_sum_to_the_total_within_one_of_their_share() -> None:
    rng = np.random.default_rng(13)
    shares = rng.dirichlet(np.full(7, 0.3), (40, 25)) * (rng.random((40, 25, 7)) < 0.7)
    shares[..., 3] += 1e-9
    total = 10 ** rng.integers(0, 13, (40, 25))
    total[0] = MOST_HITS
    found = largest_remainder(shares, total)
    assert np.array_equal(found.sum(-1), total)
    exact = shares / shares.sum(-1, keepdims=True) * total[..., None]
    assert (np.abs(found - exact) < 1).all()
    assert (found[shares == 0] == 0).all()


def test_rounding_of_shares_makes_no_hit_too_many_or_few() -> None:
    # With totals of 2^52 twenty of the first ones have one too many.
    rng = np.random.default_rng(14)
    for shape in ((100000, 2), (20000, 6), (50, 4096)):
        shares = rng.dirichlet(np.full(shape[1], 10.0), shape[0]) * rng.random((shape[0], 1))
        total = MOST_HITS - rng.integers(0, 1000, shape[0])
        assert np.array_equal(largest_remainder(shares, total).sum(-1), total)


def test_shares_that_overflow_or_vanish_in_sum_are_divided_too() -> None:
    assert largest_remainder([[1e308] * 3], [7]).tolist() == [[3, 2, 2]]
    assert largest_remainder([5e-324, 0, 5e-324], 5).tolist() == [3, 0, 2]
    assert largest_remainder([1e308, 5e-324], 5).tolist() == [5, 0]


def test_ties_go_to_the_lower_index_and_nothing_to_a_share_of_0() -> None:
    assert largest_remainder([1.0, 1.0, 1.0], 4).tolist() == [2, 1, 1]
    assert largest_remainder([0.0, 1.0, 0.0, 1.0], 3).tolist() == [0, 2, 0, 1]
    assert largest_remainder([1.0, 2.0], 0).tolist() == [0, 0]
    assert largest_remainder([0.0, 0.0], 0).tolist() == [0, 0]
    assert largest_remainder(np.zeros((0, 3)), np.zeros(0, np.int64)).shape == (0, 3)
    assert largest_remainder(np.zeros((2, 0)), np.zeros(2, np.int64)).shape == (2, 0)


@pytest.mark.parametrize(
    ("shares", "total", "message"),
    [
        ([1.0, -1.0], 1, "negative"),
        ([1.0, np.nan], 1, "not finite"),
        ([0.0, 0.0], 1, "all 0"),
        ([1.0], -1, "`total` has -1; allowed: 0 to 1099511627776"),
        ([[1.0]] * 2, [5, 2**53], f"`total` has {2**53}; allowed"),
        ([1.0], 1.0, "float64; needed"),
        ([[1.0]], 1, r"shape \[1, 1\]"),
        (1.0, 1, r"shape \[\]"),
    ],
)
def test_bad_shares_are_refused(shares: object, total: object, message: str) -> None:
    with pytest.raises(PlanInputError, match=message):
        largest_remainder(shares, total)  # type: ignore[arg-type]


def test_even_shares_of_a_map() -> None:
    slots = np.array([[0, 1, 0, -1], [2, 1, 0, 0]], np.int32)
    assert even_split(slots, 3).tolist() == [[0.5, 1, 0.5, 0], [1, 1, 0.5, 0.5]]
    assert num_replicas_of(slots, 3).tolist() == [[2, 1, 0], [2, 1, 1]]
