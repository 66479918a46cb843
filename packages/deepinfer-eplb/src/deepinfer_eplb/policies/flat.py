"""The policy `global`: an expert may live on any rank.

The compiled functions hold no interpreter lock, so that a thread can plan beside a step loop. None
of them calls one of another module: numba's cache looks at the file of the outer one alone, so a
change of the inner one would go unnoticed.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from scipy.optimize import linear_sum_assignment

from deepinfer_eplb.forecast import Forecast
from deepinfer_eplb.maps import Longs
from deepinfer_eplb.policies.greedy import place, replicate, restore
from deepinfer_eplb.policies.search import improve

__all__ = ["full", "incremental", "relabel"]

MAX_STEPS = 300  # of a layer; 400 gain 1 % of the excess over perfect, for a third more time


def full(coming: Forecast, num_ranks: int, slots_per_rank: int) -> Longs:
    """Plan layers from nothing, [L, R, S] int64."""
    num_layers, num_experts = coming.demand.shape
    num_slots = num_ranks * slots_per_rank
    most = num_ranks if num_ranks > 1 else slots_per_rank
    assert num_experts <= num_slots <= num_experts * most, "checked by the caller"
    found = np.empty((num_layers, num_ranks, slots_per_rank), np.int64)
    for layer, demand in enumerate(coming.demand):
        counts = replicate(demand, num_slots, most)
        first = place(demand, counts, num_ranks, slots_per_rank)
        found[layer] = improve(first, coming.scenarios[layer], coming.weights, num_slots, MAX_STEPS)
    return found


def incremental(coming: Forecast, live: Longs, budgets: Longs) -> Longs:
    """Improve the live map of layers [L, R, S] with at most so many moves in each, [L].

    Experts that have no slot get one first, outside the budget.
    """
    found = np.array(live, np.int64, order="C")
    for layer, demand in enumerate(coming.demand):
        restore(demand, found[layer])
        found[layer] = improve(
            found[layer], coming.scenarios[layer], coming.weights, budgets[layer], MAX_STEPS
        )
    return found


def relabel(new: Longs, old: Longs) -> Longs:
    """Return the same plan of one layer [R, S] with ranks and slots named as in the old one.

    Ranks are interchangeable: each set of experts goes to the rank that holds most of it already,
    all in all as many as possible, and every expert that stays on its rank keeps its slot.
    """
    num_ranks = len(new)
    num_experts = int(max(new.max(), old.max())) + 1
    holds = np.zeros((2, num_ranks, num_experts + 1), np.float32)  # the last one: -1
    for which, ranks in enumerate((new, old)):
        np.put_along_axis(holds[which], ranks, 1.0, 1)
    shared = holds[0, :, :-1] @ holds[1, :, :-1].T
    _, to = linear_sum_assignment(shared, maximize=True)
    found = np.full_like(new, -1)
    for rank in range(num_ranks):
        _keep_slots(new[rank], old[to[rank]], found[to[rank]])
    return found


@njit(cache=True, nogil=True)
def _keep_slots(experts: Longs, before: Longs, slots: Longs) -> None:
    """Write a rank's experts into its slots [S]: those that were there stay where they were."""
    left = np.ones(len(experts), np.bool_)
    for slot in range(len(slots)):
        for k in range(len(experts)):
            if left[k] and experts[k] == before[slot]:
                slots[slot] = experts[k]
                left[k] = False
                break
    k = 0
    for slot in range(len(slots)):
        if slots[slot] < 0:
            while not left[k]:
                k += 1
            slots[slot] = experts[k]
            k += 1
