"""Plans: what holds of every one, how good they are, that they repeat, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

from deepinfer_eplb import PlanInputError, Planner, SettingError, balance, plan
from deepinfer_eplb.maps import imbalance, rank_loads
from deepinfer_eplb.policies import flat, greedy, search
from deepinfer_eplb.simulate import Traffic, generate

sys.path.insert(0, str(Path(__file__).parent))

from published_greedy import published_greedy

Array = NDArray[np.float64]
RANKS = (1, 2, 4, 8, 64, 128)


@dataclass(frozen=True)
class Instance:
    """Arguments of a plan."""

    ranks: int
    nodes: int
    slots: int
    loads: Array
    history: Array | None


def instances(number: int, seed: int) -> Iterator[Instance]:
    """Yield random arguments: few and many ranks, one slot, zeros, one expert with everything."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        ranks = int(rng.choice(RANKS, p=[0.2, 0.2, 0.25, 0.25, 0.07, 0.03]))
        slots = int(rng.integers(1, 7 if ranks < 64 else 4))
        most = ranks * slots
        least = 1 if ranks == 1 else slots
        experts = int(rng.integers(least, most + 1))
        if rng.random() < 0.2:
            experts = most  # no spare slot
        shape = (int(rng.integers(1, 3)), experts)
        loads = rng.lognormal(0, rng.choice([0.0, 0.3, 1.0, 3.0]), shape) * 1000
        kind = rng.integers(5)
        if kind == 0:
            loads *= rng.random(shape) < 0.3
        if kind == 1:
            loads[:] = 0
            loads[:, rng.integers(experts)] = rng.integers(1, 10**9)
        if kind == 2:
            loads = np.floor(loads)
        loads[loads.sum(1) == 0, -1] = 1
        nodes = int(rng.choice([n for n in (1, 2, 4, 8) if ranks % n == 0]))
        history = None
        if rng.random() < 0.4:
            pieces = int(rng.integers(1, 7))
            history = loads * rng.lognormal(0, 0.5, (pieces, *shape))
            history *= rng.random((pieces, 1, 1)) < 0.8
        yield Instance(ranks, nodes, slots, loads, history)


def check(physical_to_logical: NDArray[np.int32], given: Instance) -> None:
    """Assert what holds of every map (see the package's README), written anew for the test."""
    layers, experts = given.loads.shape
    assert physical_to_logical.shape == (layers, given.ranks * given.slots)
    assert physical_to_logical.dtype == np.int32
    for layer in physical_to_logical:
        assert sorted(set(layer.tolist())) == list(range(experts))
        if given.ranks > 1:
            for held in layer.reshape(given.ranks, given.slots):
                assert len(set(held.tolist())) == given.slots


@pytest.mark.parametrize("seed", range(4))
def test_every_map_is_whole_over_random_instances(seed: int) -> None:
    planner, rng = Planner(move_budget=5, pieces_per_window=2), np.random.default_rng(seed)
    for given in instances(2500, seed):
        sizes = {"ranks": given.ranks, "nodes": given.nodes, "slots_per_rank": given.slots}
        first = planner.plan(given.loads, history=given.history, **sizes)
        check(first.physical_to_logical, given)
        assert (first.num_replicas.sum(1) == given.ranks * given.slots).all()
        found = first.logical_to_physical
        layer, expert, k = np.nonzero(found >= 0)
        assert (first.physical_to_logical[layer, found[layer, expert, k]] == expert).all()
        assert len(layer) == first.physical_to_logical.size

        loads = given.loads * rng.lognormal(0, 0.5, given.loads.shape)
        live = first.physical_to_logical
        second = planner.plan(loads, prev=live, history=given.history, **sizes)
        check(second.physical_to_logical, given)
        held = [
            {(r, e) for r in range(given.ranks) for e in m.reshape(given.ranks, -1)[r].tolist()}
            for m in (*second.physical_to_logical, *live)
        ]
        layers = len(loads)
        moves = [len(held[i] - held[i + layers]) for i in range(layers)]
        assert second.moves_per_layer.tolist() == moves
        assert max(moves) <= 5


def test_a_plan_is_never_worse_than_replicate_then_longest_first() -> None:
    rng = np.random.default_rng(5)
    worse = []
    for _ in range(200):
        ranks, slots = int(rng.choice([4, 8, 16])), int(rng.integers(2, 7))
        experts = int(rng.integers(max(slots, ranks * slots // 2), ranks * slots + 1))
        loads = rng.lognormal(0, rng.choice([0.3, 1.0, 2.0]), (5, experts))
        ours = Planner().plan(loads, ranks=ranks, nodes=1, slots_per_rank=slots).imbalance(loads)
        base = [longest_first(layer, ranks, slots) for layer in loads]
        worse += [ratio - was for ratio, was in zip(ours, base, strict=True)]
    assert len(worse) == 1000
    assert max(worse) <= 1e-9
    assert np.mean(worse) < -0.01


def longest_first(load: Array, ranks: int, slots: int) -> float:
    """Return slowest/mean of the plain greedy: an expert twice on a rank only where it is stuck."""
    counts = np.ones(len(load), int)
    for _ in range(ranks * slots - len(load)):
        counts[np.argmax(np.where(counts < ranks, load / counts, -1))] += 1
    held: list[list[int]]
    total, held = np.zeros(ranks), [[] for _ in range(ranks)]
    for expert in np.argsort(-load / counts, kind="stable").tolist():
        for _ in range(counts[expert]):
            free = [r for r in range(ranks) if len(held[r]) < slots and expert not in held[r]]
            free = free or [r for r in range(ranks) if len(held[r]) < slots]
            rank = min(free, key=lambda r: (total[r], r))
            held[rank].append(expert)
            total[rank] += load[expert] / counts[expert]
    return float(total.max() / (load.sum() / ranks))


def test_small_plans_are_close_to_the_best_of_all_maps() -> None:
    rng = np.random.default_rng(6)
    gaps = []
    for _ in range(40):
        loads = rng.lognormal(0, 0.8, (1, 5))
        ours = Planner().plan(loads, ranks=3, nodes=1, slots_per_rank=2).ratio_after
        best = min(ratios_of_all(loads[0], 3, 2))
        gaps.append(ours / best - 1)
    assert min(gaps) >= -1e-12
    assert np.mean(gaps) < 0.02
    assert max(gaps) < 0.2


def ratios_of_all(load: Array, ranks: int, slots: int) -> Iterator[float]:
    """Yield slowest/mean of every whole map."""
    for held in product(combinations(range(len(load)), slots), repeat=ranks):
        layer = np.array(held, np.int32).reshape(1, -1)
        if len(set(layer[0].tolist())) == len(load):
            yield float(imbalance(rank_loads(layer, load[None], ranks), ranks)[0])


def drifting(seed: int, layers: int = 3) -> tuple[Array, Array]:
    """Return loads [L, 64] and pieces [30, L, 64] of windows that differ."""
    rng = np.random.default_rng(seed)
    base = rng.lognormal(0, 0.8, (layers, 64))
    windows = base * rng.lognormal(0, 0.5, (3, 1, layers, 64))
    pieces = (windows * rng.lognormal(0, 0.3, (3, 10, layers, 64))).reshape(30, layers, 64) * 1000
    return pieces[-10:].sum(0), pieces


SIZES = {"ranks": 16, "nodes": 2, "slots_per_rank": 5}


def scenario_cost(physical_to_logical: NDArray[np.int32], pieces: Array) -> float:
    """Return the mean over pieces of slowest/mean, mean over layers."""
    return float(imbalance(rank_loads(physical_to_logical, pieces, 16), 16).mean())


def test_history_is_planned_on_as_scenarios() -> None:
    loads, pieces = drifting(7)
    plain = plan(loads, 16, 2, 5)
    hedged = plan(loads, 16, 2, 5, history=pieces)
    assert scenario_cost(hedged, pieces) < scenario_cost(plain, pieces) - 0.01


def test_recent_pieces_count_for_more() -> None:
    loads, pieces = drifting(8)
    forth = plan(loads, 16, 2, 5, history=pieces)
    back = plan(loads, 16, 2, 5, history=pieces[::-1])
    assert scenario_cost(forth, pieces[-10:]) < scenario_cost(back, pieces[-10:])


def test_an_expert_that_rose_for_good_is_planned_at_its_new_level() -> None:
    pieces = np.full((30, 1, 64), 100.0)
    pieces[20:, 0, 3] = 2000.0
    steady = Planner().plan(pieces[-10:].sum(0), history=pieces, **SIZES)
    # In spite of 20 pieces in which it was small: replicas as by the last window alone.
    by_window = Planner().plan(pieces[-10:].sum(0), **SIZES)
    assert steady.num_replicas[0, 3] == by_window.num_replicas[0, 3] > 4
    # One that bursts in the same window is not taken to have changed for good.
    pieces[20:27, 0, 3] = 100.0
    bursts = Planner().plan(pieces[-10:].sum(0), history=pieces, **SIZES)
    assert bursts.num_replicas[0, 3] < steady.num_replicas[0, 3]


def test_an_expert_that_fell_for_good_is_planned_at_its_new_level() -> None:
    rng = np.random.default_rng(34)
    pieces = 100.0 * rng.lognormal(0, 0.3, (30, 1, 64))
    pieces[:20, 0, 3] *= 20
    pieces[20:, 0, 3] *= 2
    pieces[10:20] *= rng.lognormal(0, 0.5, 64)  # so that there is no break
    made = Planner().plan(pieces[-10:].sum(0), history=pieces, **SIZES)
    by_window = Planner().plan(pieces[-10:].sum(0), **SIZES)
    assert made.num_replicas[0, 3] <= by_window.num_replicas[0, 3] + 1
    assert made.num_replicas[0, 3] < 5


def test_experts_that_vary_get_replicas_before_steady_ones_of_the_same_mean() -> None:
    pieces = np.full((10, 1, 64), 100.0)
    pieces[:, 0, :16] = np.where(np.arange(10) % 2, 190.0, 10.0)[:, None]
    made = Planner(pieces_per_window=10).plan(pieces.sum(0), history=pieces, **SIZES)
    assert (made.num_replicas[0, :16] >= 2).all()
    assert (made.num_replicas[0, 16:] == 1).all()


def test_few_moves_do_most_of_what_a_shift_asks_for() -> None:
    rng = np.random.default_rng(36)
    before, after = rng.lognormal(0, 0.7, (2, 4, 128)) * 1000
    live = plan(before, 16, 1, 9)
    made = Planner(move_budget=12).plan(after, prev=live, ranks=16, nodes=1, slots_per_rank=9)
    assert made.ratio_before > 1.4
    assert made.ratio_after < 1.05


@pytest.mark.parametrize("with_history", [False, True])
def test_incremental_plans_gain_within_their_budget(with_history: bool) -> None:
    loads, _ = drifting(9)
    live = plan(loads, 16, 2, 5)
    new_loads, new_pieces = drifting(10)
    history = new_pieces if with_history else None
    ratios = []
    for budget in (0, 2, 8, 80):
        made = Planner(move_budget=budget).plan(new_loads, prev=live, history=history, **SIZES)
        assert made.moves_per_layer.max() <= budget
        ratios.append(
            scenario_cost(made.physical_to_logical, new_pieces)
            if with_history
            else made.ratio_after
        )
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < ratios[2] < ratios[1] < ratios[0]
    if not with_history:
        none = Planner(min_gain=0.9).plan(new_loads, prev=live, **SIZES)
        assert none.moves == 0
    zero = Planner(move_budget=0).plan(new_loads, prev=live, history=history, **SIZES)
    assert (zero.physical_to_logical == live).all()


def test_full_plans_are_named_so_that_little_moves() -> None:
    loads, _ = drifting(11)
    live = plan(loads, 16, 2, 5)
    again = Planner(mode="full").plan(loads, prev=live, **SIZES)
    assert again.moves == 0
    assert (again.physical_to_logical == live).all()
    near = loads * np.random.default_rng(11).lognormal(0, 0.02, loads.shape)
    named = Planner(mode="full").plan(near, prev=live, **SIZES)
    fresh = Planner().plan(near, **SIZES).physical_to_logical
    unnamed = sum(
        len(set(now) - set(was))
        for new, old in zip(fresh, live, strict=True)
        for now, was in zip(new.reshape(16, 5).tolist(), old.reshape(16, 5).tolist(), strict=True)
    )
    assert named.moves < unnamed
    # what stays on a rank stays in its slot
    kept = (named.physical_to_logical == live).sum()
    assert kept == live.size - named.moves


def test_slack_replans_layers_that_the_budget_leaves_behind() -> None:
    loads, _ = drifting(12)
    live = plan(loads, 16, 2, 5)
    new_loads = drifting(13)[0]
    new_loads[1] = loads[1]  # this layer is as it was
    tight = Planner(move_budget=2).plan(new_loads, prev=live, **SIZES)
    loose = Planner(move_budget=2, replan_slack=0.01).plan(new_loads, prev=live, **SIZES)
    full = Planner(mode="full").plan(new_loads, prev=live, **SIZES)
    never = Planner(move_budget=2, replan_slack=1e9).plan(new_loads, prev=live, **SIZES)
    assert never.digest == tight.digest
    assert (loose.imbalance(new_loads) <= full.imbalance(new_loads) + 0.01).all()
    assert loose.ratio_after < tight.ratio_after
    assert loose.moves_per_layer[1] <= 2 < loose.moves_per_layer[0]


def test_nothing_moves_while_traffic_stays_as_it_is() -> None:
    rng = np.random.default_rng(30)
    share = rng.lognormal(0, 0.8, (2, 64))
    share /= share.sum(1, keepdims=True)
    live = None
    moves = []
    for _ in range(4):
        pieces = rng.poisson(share * 10**7, (30, 2, 64))
        made = Planner().plan(pieces[-10:].sum(0), prev=live, history=pieces, **SIZES)
        moves.append(made.moves)
        live = made
    assert moves[2:] == [0, 0]
    restless = Planner(min_gain=0).plan(pieces[-10:].sum(0), prev=live, history=pieces, **SIZES)
    assert restless.moves > 0


def test_what_is_older_than_a_break_is_not_planned_for() -> None:
    rng = np.random.default_rng(31)
    old, new = rng.lognormal(0, 0.8, (2, 1, 64)) * 1000
    noise = rng.lognormal(0, 0.05, (30, 1, 64))
    pieces = np.concatenate([old * noise[:20], new * noise[20:]])
    by_all = Planner().plan(pieces[-10:].sum(0), history=pieces, **SIZES)
    by_last = Planner().plan(pieces[-10:].sum(0), history=pieces[-10:], **SIZES)
    assert by_all.digest == by_last.digest
    # what comes and goes by a little is no break
    other = old * rng.lognormal(0, 0.3, (1, 64))
    noise = rng.lognormal(0, 0.2, (30, 1, 64))
    pieces = np.concatenate([old * noise[:10], other * noise[10:20], old * noise[20:]])
    hedged = Planner().plan(pieces[-10:].sum(0), history=pieces, **SIZES)
    alone = Planner().plan(pieces[-10:].sum(0), history=pieces[-10:], **SIZES)
    assert scenario_cost(hedged.physical_to_logical, pieces[10:20]) < (
        scenario_cost(alone.physical_to_logical, pieces[10:20]) - 0.05
    )


def test_a_plan_is_a_live_map_and_has_a_short_text() -> None:
    loads, _ = drifting(32)
    first = Planner().plan(loads, **SIZES)
    later = drifting(33)[0]
    made = Planner().plan(later, prev=first, **SIZES)
    assert made.digest == Planner().plan(later, prev=first.physical_to_logical, **SIZES).digest
    assert (first.mode, made.mode) == ("full", "incremental")
    assert f"{made.ratio_before:.3f} -> {made.ratio_after:.3f}, {made.moves} moves" in repr(made)
    assert len(repr(made)) < 200


# ---- groups and nodes ---------------------------------------------------------------------------


def nodes_of_groups(physical_to_logical: NDArray[np.int32], groups: int) -> list[list[set[int]]]:
    """Return the groups on each of two nodes, for each layer, of 64 experts."""
    return [
        [set((node // (64 // groups)).tolist()) for node in layer.reshape(2, -1)]
        for layer in physical_to_logical
    ]


def test_hierarchical_plans_keep_groups_on_nodes() -> None:
    loads, pieces = drifting(14)
    planner = Planner(policy="hierarchical")
    first = planner.plan(loads, groups=8, **SIZES)
    for left, right in nodes_of_groups(first.physical_to_logical, 8):
        assert len(left) == len(right) == 4
        assert not left & right
    check(first.physical_to_logical, Instance(16, 2, 5, loads, None))
    new_loads = drifting(15)[0]
    live = first.physical_to_logical
    second = planner.plan(new_loads, groups=8, prev=live, history=pieces, **SIZES)
    check(second.physical_to_logical, Instance(16, 2, 5, loads, None))
    assert nodes_of_groups(second.physical_to_logical, 8) == nodes_of_groups(live, 8)
    assert 0 < second.moves_per_layer.max() <= 40
    few = Planner(policy="hierarchical", move_budget=3).plan(
        new_loads, groups=8, prev=live, **SIZES
    )
    assert few.moves_per_layer.max() <= 3
    third = Planner(policy="hierarchical", mode="full").plan(loads, groups=8, prev=live, **SIZES)
    assert third.moves == 0


def test_auto_is_hierarchical_where_groups_divide() -> None:
    loads, _ = drifting(16)
    by_groups = Planner(policy="hierarchical").plan(loads, groups=8, **SIZES)
    freely = Planner(policy="global").plan(loads, **SIZES)
    assert Planner().plan(loads, groups=8, **SIZES).digest == by_groups.digest
    assert Planner().plan(loads, groups=1, **SIZES).digest == freely.digest
    assert Planner(policy="global").plan(loads, groups=8, **SIZES).digest == freely.digest
    assert by_groups.digest != freely.digest


def test_a_live_map_that_spreads_groups_is_refused_by_the_hierarchical_policy() -> None:
    loads, _ = drifting(17)
    live = plan(loads, 16, 2, 5)
    with pytest.raises(PlanInputError, match=r"does not hold 4 whole groups.*`mode` 'full'"):
        Planner(policy="hierarchical", mode="incremental").plan(loads, groups=8, prev=live, **SIZES)
    made = Planner(policy="hierarchical").plan(loads, groups=8, prev=live, **SIZES)
    assert made.mode == "full"


# ---- ranks that are gone ------------------------------------------------------------------------


def test_excluded_ranks_hold_nothing_and_their_experts_move_to_others() -> None:
    loads, pieces = drifting(18)
    live = plan(loads, 16, 2, 5)
    dead = Planner(excluded_ranks=[3, 0], move_budget=4)
    made = dead.plan(loads, prev=live, history=pieces, **SIZES)
    by_rank = made.physical_to_logical.reshape(3, 16, 5)
    assert (by_rank[:, [0, 3]] == -1).all()
    assert (by_rank[:, [1, 2, *range(4, 16)]] >= 0).all()
    assert not (
        np.isin(made.logical_to_physical // 5, [0, 3]) & (made.logical_to_physical >= 0)
    ).any()
    for layer, was in zip(by_rank, live.reshape(3, 16, 5), strict=True):
        assert set(layer.ravel().tolist()) - {-1} == set(range(64))
        lost = set(range(64)) - set(np.delete(was, [0, 3], 0).ravel().tolist())
        arrivals = (
            sum(
                len(set(now) - set(old))
                for now, old in zip(layer.tolist(), was.tolist(), strict=True)
            )
            - 2
        )  # the two excluded ranks "gain" -1
        assert lost and len(lost) <= arrivals <= len(lost) + 4
    assert made.moves > 0
    assert np.isnan(made.ratio_before)
    # from then on the map says itself who is gone
    again = dead.plan(loads, prev=made.physical_to_logical, **SIZES)
    assert again.moves_per_layer.max() <= 4
    assert again.ratio_after <= again.ratio_before


def test_ranks_that_come_back_are_filled_and_nothing_else_moves_beyond_the_budget() -> None:
    loads, _ = drifting(19)
    without = Planner(excluded_ranks=[5]).plan(loads, **SIZES)
    made = Planner(move_budget=3).plan(loads, prev=without, **SIZES)
    check(made.physical_to_logical, Instance(16, 2, 5, loads, None))
    assert made.mode == "incremental"
    assert ((made.moves_per_layer >= 5) & (made.moves_per_layer <= 5 + 3)).all()
    roomy = Planner().plan(loads, prev=without, **SIZES)
    assert roomy.ratio_after < 1.03 < made.ratio_after
    # another rank fails at the same time: its lost experts go to the empty slots
    swapped = Planner(excluded_ranks=[4], move_budget=0).plan(loads, prev=without, **SIZES)
    by_rank = swapped.physical_to_logical.reshape(3, 16, 5)
    assert (by_rank[:, 4] == -1).all() and (by_rank[:, 5] >= 0).all()
    before = without.physical_to_logical.reshape(3, 16, 5)
    others = [r for r in range(16) if r not in (4, 5)]
    lost = [len(set(range(64)) - set(layer[others].ravel().tolist())) for layer in before]
    assert max(lost) <= 5 and (by_rank[:, others] == before[:, others]).all()


def test_a_group_of_nodes_fills_ranks_that_come_back_with_experts_of_their_node() -> None:
    loads, _ = drifting(19)
    sizes = {**SIZES, "groups": 8}
    planner = Planner(policy="hierarchical", excluded_ranks=[5, 9])
    without = planner.plan(loads, **sizes)
    made = Planner(policy="hierarchical", move_budget=2).plan(loads, prev=without, **sizes)
    check(made.physical_to_logical, Instance(16, 2, 5, loads, None))
    for left, right in nodes_of_groups(made.physical_to_logical, 8):
        assert len(left) == len(right) == 4 and not left & right


# ---- splits, silent layers, values --------------------------------------------------------------


def test_quotas_level_ranks_further_than_even_shares() -> None:
    loads, _ = drifting(20)
    even = Planner().plan(loads, **SIZES)
    new_loads = loads * np.random.default_rng(20).lognormal(0, 0.3, loads.shape)
    kept = Planner(move_budget=0).plan(new_loads, prev=even.physical_to_logical, **SIZES)
    quota = Planner(move_budget=0, split="quota").plan(
        new_loads, prev=even.physical_to_logical, **SIZES
    )
    assert quota.ratio_after < kept.ratio_after - 0.02
    assert quota.split is not None and kept.split is None
    for layer, shares in zip(quota.physical_to_logical, quota.split, strict=True):
        assert np.bincount(layer, shares) == pytest.approx(np.ones(64))
    assert quota.digest != kept.digest
    # of scenarios, where there are some
    pieces = new_loads * np.random.default_rng(21).lognormal(0, 0.6, (10, 3, 64))
    live = even.physical_to_logical
    hedged = Planner(move_budget=0, split="quota").plan(
        new_loads, prev=live, history=pieces, **SIZES
    )
    assert hedged.imbalance(pieces.sum(0)).mean() < quota.imbalance(pieces.sum(0)).mean() - 0.02


def test_a_layer_without_tokens_keeps_its_live_map_and_has_no_first_one() -> None:
    loads, pieces = drifting(21)
    live = plan(loads, 16, 2, 5)
    new_loads = drifting(22)[0]
    new_loads[1] = 0
    made = plan(new_loads, 16, 2, 5, prev=live)
    assert (made[1] == live[1]).all()
    assert (made[0] != live[0]).any()
    with pytest.raises(PlanInputError, match=r"layer 1 has any tokens.*1 each"):
        plan(new_loads, 16, 2, 5)
    # hits in older pieces are something to plan on
    silent = pieces.copy()
    silent[-10:, 1] = 0
    plan(new_loads, 16, 2, 5, history=silent)


def test_a_plan_tells_what_it_gains() -> None:
    loads, _ = drifting(23)
    live = plan(loads, 16, 2, 5)
    new_loads = drifting(24)[0]
    made = Planner().plan(new_loads, prev=live, **SIZES)
    before = Planner(move_budget=0).plan(new_loads, prev=live, **SIZES)
    assert made.ratio_before == pytest.approx(before.ratio_after)
    assert made.ratio_after == pytest.approx(made.imbalance(new_loads).mean())
    report = made.report(new_loads)
    for layer in range(3):
        assert f"{made.imbalance(new_loads)[layer]:.3f}" in report
        assert f"{before.imbalance(new_loads)[layer]:.3f}" in report
    assert str(made.moves) in report
    first = Planner().plan(loads, **SIZES)
    assert np.isnan(first.ratio_before) and first.moves == 0
    assert "nan" not in first.report(loads)
    with pytest.raises(PlanInputError, match=r"\[3, 63\].*\[3, 64\]"):
        made.imbalance(loads[:, :63])


def test_arguments_are_left_alone() -> None:
    loads, pieces = drifting(25)
    live = plan(loads, 16, 2, 5)
    copies = loads.copy(), pieces.copy(), live.copy()
    plan(loads, 16, 2, 5, prev=live, history=pieces)
    for array, copy in zip((loads, pieces, live), copies, strict=True):
        assert (array == copy).all()


def test_the_next_interval_of_bursty_traffic_is_served_better_than_by_the_published_greedy() -> (
    None
):
    traffic = Traffic(num_layers=2, num_experts=128, hits_per_step=16 * 60 * 6)
    hits = generate("bursty", 6, 35, traffic).astype(float)
    live, ours, theirs = None, [], []
    for end in range(300, 600, 100):
        windows = [hits[last - 10 : last] for last in (end - 200, end - 100, end)]
        history = np.concatenate(windows)
        live = Planner().plan(
            history[-10:].sum(0), prev=live, history=history, ranks=16, nodes=1, slots_per_rank=9
        )
        assert live.moves_per_layer.max() <= 40
        base = published_greedy(history[-10:].sum(0), 16, 9)
        coming = hits[end : end + 100]
        for found, graded in ((live.physical_to_logical, ours), (base, theirs)):
            graded.append(imbalance(rank_loads(found, coming, 16), 16).mean())
    assert np.mean(ours) - 1 < 0.85 * (np.mean(theirs) - 1)


# ---- the same plan everywhere -------------------------------------------------------------------

GOLDEN = """
import numpy as np
from deepinfer_eplb import Planner
rng = np.random.default_rng(26)
pieces = rng.integers(0, 1000, (20, 2, 48)).astype(float)
sizes = dict(ranks=8, nodes=2, slots_per_rank=7)
first = Planner(split="quota").plan(pieces[-10:].sum(0), history=pieces, **sizes)
later = Planner().plan(pieces[:10].sum(0), prev=first.physical_to_logical, **sizes)
print(first.physical_to_logical[0, :14].tolist(), first.digest, later.digest)
"""


def test_same_inputs_same_plan_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", GOLDEN],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed, **threads},
        ).stdout
        for seed, threads in (("1", {}), ("2", {"NUMBA_CPU_NAME": "generic"}))
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("module", [greedy, search, flat, balance])
def test_compiled_loops_hold_no_interpreter_lock(module: ModuleType) -> None:
    compiled = [each for each in vars(module).values() if isinstance(each, Dispatcher)]
    assert compiled
    assert all(each.targetoptions["nogil"] for each in compiled)


def test_plans_made_by_several_threads_at_once_are_the_same() -> None:
    loads, pieces = drifting(27)
    with ThreadPoolExecutor(4) as threads:
        made = threads.map(
            lambda _: Planner().plan(loads, history=pieces, **SIZES).digest, range(8)
        )
    assert len(set(made)) == 1


# ---- what is refused ----------------------------------------------------------------------------

ONES = np.ones((2, 8))
LIVE = np.tile(np.arange(8, dtype=np.int32), (2, 1))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"slots_per_rank": 1}, r"8 experts do not fit into 4 ranks x 1 slots.*2 or more.*8 ranks"),
        ({"slots_per_rank": 9}, r"9 slots.*more than the 8 experts.*8 or less"),
        ({"slots_per_rank": 0}, r"`slots_per_rank` is 0.*from 1"),
        ({"ranks": -4}, r"`num_ranks` is -4"),
        ({"ranks": 4.0}, r"`num_ranks` is 4.0"),
        ({"nodes": 3}, r"4 ranks cannot be divided among 3 nodes.*divides 4"),
        ({"loads": np.ones(8)}, r"`loads` has shape \[8\]; needed: \[layers, experts\]"),
        ({"loads": np.ones((0, 8))}, r"`loads` has shape \[0, 8\]"),
        ({"loads": ONES * np.nan}, r"`loads`\[0, 0\] is nan.*finite"),
        ({"loads": ONES * np.inf}, r"`loads`\[0, 0\] is inf"),
        ({"loads": np.array([[1] * 7 + [-1]])}, r"`loads`\[0, 7\] is -1.*not negative"),
        ({"loads": ONES.astype(complex)}, r"dtype complex128"),
        ({"loads": ONES.astype(str)}, r"dtype <U"),
        ({"loads": ONES * 0}, r"layer 0 has any tokens"),
        ({"history": np.ones((3, 2, 7))}, r"`history` has shape \[3, 2, 7\].*\[2, 8\]"),
        ({"history": -np.ones((3, 2, 8))}, r"`history`\[0, 0, 0\] is -1.0"),
        ({"prev": LIVE[:1]}, r"`prev` has shape \[1, 8\]; needed: \[2, 8\]"),
        ({"prev": LIVE[:, :7]}, r"`prev` has shape \[2, 7\]; needed: \[2, 8\].*4 ranks x 2"),
        ({"prev": LIVE + 1}, r"`prev`\[0, 7\] is 8; allowed: 0 to 7"),
        ({"prev": LIVE - 1}, r"`prev`\[0, 0\] is -1; allowed: 0 to 7"),
        ({"prev": LIVE * 1.0}, r"`prev` has dtype float64"),
        ({"prev": LIVE // 2 * 2}, r"loses expert 1 of layer 0"),
        ({"prev": LIVE * 0 - 1}, r"`prev`\[0, 6\] is -1"),
        ({"prev": LIVE.astype(np.uint64) + np.uint64(2**63)}, r"`prev`\[0, 0\] is -"),
        ({"prev": [[0, 1], [2]]}, r"`prev` is no array.*one length"),
        ({"loads": ONES * 1e300}, r"`loads`\[0, 0\] is 1e\+300.*1e-30 to 1e\+30"),
        ({"loads": ONES * 5e-324}, r"0 or from 1e-30"),
    ],
)
def test_bad_input_is_refused_with_what_would_work(changed: dict[str, object], words: str) -> None:
    arguments = {"loads": ONES, "ranks": 4, "nodes": 1, "slots_per_rank": 2, **changed}
    with pytest.raises(PlanInputError, match=words):
        Planner().plan(**arguments)


def test_a_live_map_with_an_expert_twice_on_a_rank_is_refused() -> None:
    live = np.array([[0, 0, 1, 2, 3, 4]])
    with pytest.raises(PlanInputError, match="expert 0 of layer 0 twice on rank 0"):
        Planner().plan(np.ones((1, 5)), ranks=3, nodes=1, slots_per_rank=2, prev=live)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "local"}, r"`policy` is 'local'; allowed: 'auto', 'global', 'hierarchical'"),
        ({"mode": "fast"}, r"`mode` is 'fast'"),
        ({"split": "step"}, r"`split` is 'step'; allowed: 'even', 'quota'"),
        ({"move_budget": -1}, r"`move_budget` is -1"),
        ({"move_budget": 2.5}, r"`move_budget` is 2.5"),
        ({"pieces_per_window": 0}, r"`pieces_per_window` is 0"),
        ({"replan_slack": -0.1}, r"`replan_slack` is -0.1"),
        ({"min_gain": -1e-9}, r"`min_gain` is -1e-09"),
        ({"min_gain": float("nan")}, r"`min_gain` is nan"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Planner(**options)


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        ({"excluded_ranks": [4]}, {}, r"Excluded rank 4 is none of the 4 ranks"),
        ({"excluded_ranks": [True]}, {}, r"Excluded rank True"),
        (
            {"policy": "hierarchical"},
            {"groups": 2, "nodes": 2, "ranks": 2, "slots_per_rank": 5},
            r"5 slots on a rank are more than the 4 experts of its node",
        ),
        ({}, {"groups": -5}, r"`groups` is -5"),
        ({}, {"ranks": 10**12}, r"16777216 slots"),
        ({"excluded_ranks": range(4)}, {}, r"All 4 ranks are excluded"),
        ({"excluded_ranks": [1]}, {}, r"8 experts do not fit into 3 ranks x 2.*3 or more"),
        ({"policy": "hierarchical"}, {}, r"`groups` is None"),
        (
            {"policy": "hierarchical"},
            {"groups": 3, "nodes": 2},
            r"`groups` is 3.*give `groups` 2, 4, 8",
        ),
        ({"policy": "hierarchical"}, {"groups": 2, "nodes": 4}, r"`groups` is 2.*4, 8"),
        (
            {"policy": "hierarchical", "excluded_ranks": [1]},
            {"groups": 2, "nodes": 2, "slots_per_rank": 4},
            r"Nodes have \[1, 2\] ranks left",
        ),
        (
            {"policy": "hierarchical"},
            {"groups": 2, "nodes": 2, "slots_per_rank": 5},
            r"On each node: 5 slots.*4 or less",
        ),
        ({"mode": "incremental"}, {}, r"no live map to improve"),
    ],
)
def test_options_that_do_not_fit_the_sizes_are_refused(
    options: dict[str, object], arguments: dict[str, object], words: str
) -> None:
    sizes = {"ranks": 4, "nodes": 1, "slots_per_rank": 2, **arguments}
    with pytest.raises((PlanInputError, SettingError), match=words):
        Planner(**options).plan(ONES, **sizes)
