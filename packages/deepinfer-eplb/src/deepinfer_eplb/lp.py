"""The best split of a map, by linear programmes.

`lp_split` is the best one for given loads, `scenario_split` the best one for loads that are not
known but come from several pieces. Both are for hosts with time: `balance.water_fill` is quick.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linprog
from scipy.sparse import csr_array

from deepinfer_eplb.errors import PlanInputError
from deepinfer_eplb.maps import (
    Floats,
    Ints,
    Layout,
    check_loads,
    check_map,
    even_split,
    imbalance,
    num_replicas_of,
    rank_loads,
)

__all__ = ["lp_bound", "lp_split", "scenario_split"]


def lp_split(physical_to_logical: ArrayLike, loads: ArrayLike, layout: Layout) -> Floats:
    """Return a split under which the heaviest rank is as light as the map allows.

    There may be many, and ranks below the heaviest need not be level: `water_fill` from here levels
    them without raising it.

    Args:
        physical_to_logical: [L, P], a whole map of the layout.
        loads: [L, E] tokens of each expert.
        layout: ranks and slots.
    Returns:
        [L, P] float64; even for experts without load.
    Raises:
        PlanInputError: map or loads are not as above.
    Source: a linear programme with one variable for each slot of a replicated expert and one for
        the heaviest rank.
    """
    values = check_loads(loads)
    return scenario_split(physical_to_logical, values[None], np.ones(1), layout)


def scenario_split(
    physical_to_logical: ArrayLike, scenarios: ArrayLike, weights: ArrayLike, layout: Layout
) -> Floats:
    """Return the one split whose heaviest rank is lightest in the weighted mean over scenarios.

    Args:
        physical_to_logical: [L, P], a whole map of the layout.
        scenarios: [H, L, E] tokens of each expert. The heaviest rank of each counts in tokens: a
            scenario with twice the tokens counts twice.
        weights: [H], not negative, with a positive sum.
        layout: ranks and slots.
    Returns:
        [L, P] float64; even for experts without load in any scenario that counts.
    Raises:
        PlanInputError: map, scenarios or weights are not as above.
    """
    values = check_loads(scenarios, "scenarios", dims=3)
    slots = check_map(physical_to_logical, values.shape[2], layout, values.shape[1])
    factors = check_loads(weights, "weights", dims=1)
    if factors.shape != values.shape[:1] or not factors.any():
        raise PlanInputError(
            f"`weights` has shape {list(factors.shape)} and sum {factors.sum()}; needed: "
            f"[{len(values)}], one for each scenario, and a sum above 0."
        )
    used = factors > 0
    split = even_split(slots, values.shape[2])
    for layer in range(values.shape[1]):
        of_layer = values[used, layer]
        if of_layer.any():
            scaled = of_layer / of_layer.max()
            # The solver's tolerances are absolute: ranks are made to be near 1.
            scaled *= len(layout.active) / scaled.sum(1).max()
            _solve(slots[layer], scaled, factors[used] / factors.sum(), layout, split[layer])
    return split


def lp_bound(physical_to_logical: ArrayLike, loads: ArrayLike, layout: Layout) -> Floats:
    """Return the slowest rank over the mean, [L], that no split of this map goes below.

    Args, Raises: as `lp_split`.
    """
    values = check_loads(loads)
    split = lp_split(physical_to_logical, values, layout)
    slots = np.asarray(physical_to_logical)
    return imbalance(rank_loads(slots, values, layout.num_ranks, split), len(layout.active))


def _solve(slots: Ints, scenarios: Floats, weights: Floats, layout: Layout, split: Floats) -> None:
    """Write the best split of a layer, [P], into `split`, which is even so far.

    Variables: the share x of each slot that has a choice, and the heaviest rank t of each scenario.

        minimise    sum_h weight[h] t[h]
        where       fixed[h, r] + sum of load[h, e] x over slots of rank r   <=  t[h]
                    sum of x over slots of expert e                          ==  1
    """
    num_scenarios, num_experts = scenarios.shape
    counts = num_replicas_of(slots[None], num_experts)[0]
    has_choice = (slots >= 0) & (counts[slots] > 1) & (scenarios[:, slots] > 0).any(0)
    chosen = np.flatnonzero(has_choice)
    if not len(chosen):
        return
    others = np.where(has_choice, 0.0, split)[None]
    fixed = rank_loads(slots[None], scenarios[:, None], layout.num_ranks, others)
    experts, of_expert = np.unique(slots[chosen], return_inverse=True)
    num_shares, num_rows = len(chosen), num_scenarios * layout.num_ranks
    num_variables = num_shares + num_scenarios

    scenario, share = (each.ravel() for each in np.indices((num_scenarios, num_shares)))
    rows, heaviest = np.arange(num_rows), num_shares + np.arange(num_rows) // layout.num_ranks
    row = scenario * layout.num_ranks + chosen[share] // layout.slots_per_rank
    values = np.concatenate([scenarios[:, slots[chosen]].ravel(), -np.ones(num_rows)])
    places = (np.concatenate([row, rows]), np.concatenate([share, heaviest]))
    # Any: linprog takes sparse matrices, but its published types know dense ones alone.
    upper: Any = csr_array((values, places), shape=(num_rows, num_variables))
    places = (of_expert, np.arange(num_shares))
    equal: Any = csr_array((np.ones(num_shares), places), shape=(len(experts), num_variables))
    cost = np.concatenate([np.zeros(num_shares), weights])
    found = linprog(cost, upper, -fixed.ravel(), equal, np.ones(len(experts)), method="highs")
    assert found.x is not None, f"the programme of a split has no optimum: {found.message}"
    shares = np.maximum(found.x[:num_shares], 0.0)
    split[chosen] = shares / np.bincount(of_expert, shares)[of_expert]
