"""The policy `global`: an expert may live on any rank.

Compiled functions hold no interpreter lock, so that a thread can plan beside a step loop.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from deepinfer_eplb.compiled import compiled
from deepinfer_eplb.forecast import Forecast
from deepinfer_eplb.maps import Longs
from deepinfer_eplb.policies.greedy import place, replicate, restore
from deepinfer_eplb.policies.search import improve

__all__ = ["full", "incremental", "relabel", "shared"]

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
        found[layer] = improve(
            first, coming.scenarios[layer], coming.weights[layer], num_slots, 0.0, MAX_STEPS
        )
    return found


def incremental(coming: Forecast, live: Longs, budgets: Longs, min_gain: float) -> Longs:
    """Improve the live map of layers [L, R, S] with at most so many moves in each, [L].

    Empty slots, which hold -1, are filled first, and experts without a slot get one: outside the
    budget.
    """
    found = np.array(live, np.int64, order="C")
    for layer, demand in enumerate(coming.demand):
        restore(demand, found[layer])
        found[layer] = improve(
            found[layer],
            coming.scenarios[layer],
            coming.weights[layer],
            budgets[layer],
            min_gain,
            MAX_STEPS,
        )
    return found


def relabel(new: Longs, old: Longs) -> Longs:
    """Return the same plan of one layer [R, S] with ranks and slots named as in the old one.

    Ranks are interchangeable: each set of experts goes to the rank that holds most of it already,
    all in all as many as possible, and every expert that stays on its rank keeps its slot.
    """
    _, to = linear_sum_assignment(shared(new, old), maximize=True)
    found = np.full_like(new, -1)
    for rank in range(len(new)):
        _keep_slots(new[rank], old[to[rank]], found[to[rank]])
    return found


@compiled
def shared(new: Longs, old: Longs) -> Longs:
    """Return how many experts each row of one map holds that each row of the other does, [R, R].

    Counted here and not by a matrix product, for which numpy may wake threads on all cores.

    Args:
        new, old: [R, S]; -1 in an empty slot of `old`.
    """
    num_experts = max(new.max(), old.max()) + 1
    holds = np.zeros((num_experts, len(new)), np.bool_)
    for rank in range(len(new)):
        for expert in new[rank]:
            holds[expert, rank] = True
    found = np.zeros((len(new), len(old)), np.int64)
    seen = np.full(num_experts, -1, np.int64)
    for rank in range(len(old)):
        for expert in old[rank]:
            if expert >= 0 and seen[expert] != rank:
                seen[expert] = rank
                for each in range(len(new)):
                    found[each, rank] += holds[expert, each]
    return found


@compiled
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
