"""Improves a map of one layer step by step: swaps of two slots, and changes of replicas.

What is minimised, over scenarios h of weight w[h] and ranks r with load x[h, r], is

    cost = sum_h w[h] * sum_r x[h, r] ** 8

a smooth stand-in for the weighted mean of the heaviest rank: with loads near 1 the heaviest ranks
make up nearly all of it. Unlike the maximum itself it also counts the second heaviest, which may be
the heaviest of the next interval; and what a step gains needs the two ranks it touches alone.

A step takes the most expensive rank and looks at

    swap     an expert of it against an expert of any other rank: two slots are written
    replica  the expert of it that this relieves most gets one replica more, on another rank, in
             place of a replica that can be spared: one slot is written

and does what gains most, or with a budget of moves what gains most per move. Where nothing helps
that rank the next expensive one is tried, `_TRIES` ranks in all.

Swaps are screened in float32, S * R * S of them for each scenario, and the best is judged again in
float64. All loops over candidates are element by element, so no order of additions depends on the
width of the machine's vectors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer_eplb.compiled import compiled
from deepinfer_eplb.maps import Bools, Floats, Longs

__all__ = ["improve"]

_TRIES = 4
_SCREENED = 16  # slots of the rank that are offered for swaps; more experts are sampled by load
# Replicas that are offered to go. With 12 a plan right after a shift is worse (1.045, not 1.037),
# with 64 it is a little better (1.033) and takes a quarter more time.
_SPARED = 40
_LEAST_GAIN = 1e-6  # of the whole cost; float32 screening is good for about 1e-7 of two ranks


class _State(NamedTuple):
    """One layer while it is being improved."""

    scenarios: Floats  # [H, E]
    weights: Floats  # [H]
    mean: Floats  # [E], over scenarios
    held: Bools  # [E, R], which rank held what at the start
    ranks: Longs  # [R, S], the map
    counts: Longs  # [E], replicas
    holds: Bools  # [E, R], which rank holds what
    slot_loads: Floats  # [H, R * S]
    loads: Floats  # [H, R]
    costs: Floats  # [R], what each rank adds to the cost


@compiled
def improve(
    start: Longs,
    scenarios: Floats,
    weights: Floats,
    budget: int,
    min_gain: float,
    max_steps: int,
) -> Longs:
    """Return a better map [R, S] int64, or the same one.

    The weighted mean of the heaviest rank is never above that of `start`.

    Args:
        start: [R, S] int64, whole, no expert twice on a rank.
        scenarios: [H, E] float64, loads of experts, scaled so that ranks have about 1 on average.
        weights: [H] float64, summing to 1.
        budget: how many experts ranks may hold in the end which they did not hold in `start`.
        min_gain: share of the cost that a step must take off, per move where the budget is below
            R * S.
        max_steps: at most.
    """
    num_ranks = len(start)
    if num_ranks == 1:
        return start
    state = _begin(start, scenarios, weights)
    promised = _heaviest(state)
    bounded = budget < start.size
    tried = np.zeros(num_ranks, np.bool_)
    steps = 0
    moves = 0
    while steps < max_steps and tried.sum() < min(_TRIES, num_ranks):
        heavy = -1
        for rank in range(num_ranks):
            if not tried[rank] and (heavy < 0 or state.costs[rank] > state.costs[heavy]):
                heavy = rank
        tried[heavy] = True
        least = max(min_gain, _LEAST_GAIN) * state.costs.sum()
        left = budget - moves
        slot, other, rate = _best_swap(state, heavy, left, bounded, least)
        if slot >= 0 and _gain_of_swap(state, slot, other) <= least:
            slot, rate = -1, least  # float32 saw a gain that is none
        expert, spared, better = _best_replica(state, heavy, left, bounded, rate)
        if expert >= 0 and better > rate:
            moves += _replace(state, spared, expert)
        elif slot >= 0:
            moves += _swap(state, slot, other)
        else:
            continue
        steps += 1
        tried[:] = False
    return state.ranks if _heaviest(state) <= promised else start


@compiled
def _begin(start: Longs, scenarios: Floats, weights: Floats) -> _State:
    num_ranks, slots_per_rank = start.shape
    num_experts = scenarios.shape[1]
    counts = np.zeros(num_experts, np.int64)
    holds = np.zeros((num_experts, num_ranks), np.bool_)
    for rank in range(num_ranks):
        for expert in start[rank]:
            counts[expert] += 1
            holds[expert, rank] = True
    mean = np.zeros(num_experts)
    for h in range(len(weights)):
        mean += weights[h] * scenarios[h]
    state = _State(
        scenarios,
        weights,
        mean,
        holds.copy(),
        start.copy(),
        counts,
        holds,
        np.zeros((len(weights), num_ranks * slots_per_rank)),
        np.zeros((len(weights), num_ranks)),
        np.zeros(num_ranks),
    )
    for rank in range(num_ranks):
        _sum_up(state, rank)
    return state


@compiled
def _power(load: float) -> float:
    square = load * load
    fourth = square * square
    return fourth * fourth


@compiled
def _sum_up(state: _State, rank: int) -> None:
    """Write what a rank and its slots compute and cost: anew, so that no rounding adds up."""
    slots_per_rank = state.ranks.shape[1]
    state.costs[rank] = 0.0
    for h in range(len(state.weights)):
        load = 0.0
        for k in range(slots_per_rank):
            expert = state.ranks[rank, k]
            share = state.scenarios[h, expert] / state.counts[expert]
            state.slot_loads[h, rank * slots_per_rank + k] = share
            load += share
        state.loads[h, rank] = load
        state.costs[rank] += state.weights[h] * _power(load)


@compiled
def _heaviest(state: _State) -> float:
    """Return the weighted mean over scenarios of the heaviest rank."""
    mean = 0.0
    for h in range(len(state.weights)):
        mean += state.weights[h] * state.loads[h].max()
    return mean


@compiled
def _arrival(state: _State, expert: int, rank: int) -> int:
    """Return 1 where holding the expert takes a copy, 0 where the rank held it at the start."""
    return 0 if state.held[expert, rank] else 1


@compiled
def _rate(gain: float, moves: int, bounded: bool) -> float:
    """Return what a step is worth: its gain; where moves are scarce, per move."""
    # a step without a new move is worth more than any other of its gain, but not infinitely
    return gain / max(moves, 0.5) if bounded else gain


@compiled
def _moves_of_swap(state: _State, slot: int, other: int) -> int:
    slots_per_rank = state.ranks.shape[1]
    rank, far = slot // slots_per_rank, other // slots_per_rank
    ours = state.ranks[rank, slot % slots_per_rank]
    theirs = state.ranks[far, other % slots_per_rank]
    arrivals = _arrival(state, ours, far) + _arrival(state, theirs, rank)
    return arrivals - _arrival(state, ours, rank) - _arrival(state, theirs, far)


@compiled
def _swap(state: _State, slot: int, other: int) -> int:
    """Swap the experts of two slots; return the moves that takes."""
    moves = _moves_of_swap(state, slot, other)
    slots_per_rank = state.ranks.shape[1]
    rank, far = slot // slots_per_rank, other // slots_per_rank
    ours = state.ranks[rank, slot % slots_per_rank]
    theirs = state.ranks[far, other % slots_per_rank]
    state.ranks[rank, slot % slots_per_rank] = theirs
    state.ranks[far, other % slots_per_rank] = ours
    state.holds[ours, rank] = state.holds[theirs, far] = False
    state.holds[ours, far] = state.holds[theirs, rank] = True
    _sum_up(state, rank)
    _sum_up(state, far)
    return moves


@compiled
def _replace(state: _State, slot: int, expert: int) -> int:
    """Put an expert into a slot in place of what it holds; return the moves that takes."""
    rank, k = slot // state.ranks.shape[1], slot % state.ranks.shape[1]
    gone = state.ranks[rank, k]
    state.ranks[rank, k] = expert
    state.holds[gone, rank] = False
    state.holds[expert, rank] = True
    state.counts[gone] -= 1
    state.counts[expert] += 1
    for each in range(len(state.ranks)):
        if state.holds[gone, each] or state.holds[expert, each]:
            _sum_up(state, each)
    return _arrival(state, expert, rank) - _arrival(state, gone, rank)


@compiled
def _offered(state: _State, heavy: int) -> Longs:
    """Return the slots of a rank that are offered for swaps: all, or some of every load."""
    slots_per_rank = state.ranks.shape[1]
    first = heavy * slots_per_rank
    if slots_per_rank <= _SCREENED:
        return np.arange(first, first + slots_per_rank)
    # by the load of the last scenario, the youngest
    recent = state.slot_loads[-1, first : first + slots_per_rank]
    order = np.argsort(recent, kind="mergesort")
    picked: Longs = first + order[np.arange(_SCREENED) * (slots_per_rank - 1) // (_SCREENED - 1)]
    return picked


@compiled
def _best_swap(
    state: _State, heavy: int, left: int, bounded: bool, least: float
) -> tuple[int, int, float]:
    """Return slot of the heavy rank, slot of another rank and rate of the best swap, or -1."""
    num_ranks, slots_per_rank = state.ranks.shape
    offered = _offered(state, heavy)
    after = _costs_after_swaps(heavy, offered, state.slot_loads, state.loads, state.weights)
    best, best_other, best_rate = -1, -1, least
    # a gain that is not worth the best rate whatever it moves
    enough = least / _rate(1.0, 0, bounded)
    for k, slot in enumerate(offered):
        ours = state.ranks[heavy, slot % slots_per_rank]
        for rank in range(num_ranks):
            if rank == heavy or state.holds[ours, rank]:
                continue
            both = state.costs[heavy] + state.costs[rank]
            for other in range(rank * slots_per_rank, (rank + 1) * slots_per_rank):
                gain = both - after[k, other]
                if gain <= enough:  # before anything is looked up
                    continue
                if state.holds[state.ranks[rank, other % slots_per_rank], heavy]:
                    continue
                moves = _moves_of_swap(state, slot, other)
                if moves <= left and _rate(gain, moves, bounded) > best_rate:
                    best, best_other, best_rate = slot, other, _rate(gain, moves, bounded)
                    enough = best_rate / _rate(1.0, 0, bounded)
    return best, best_other, best_rate


@compiled
def _costs_after_swaps(
    heavy: int, offered: Longs, slot_loads: Floats, loads: Floats, weights: Floats
) -> NDArray[np.float32]:
    """Return what both ranks cost after each swap, [offered, R * S] float32."""
    num_slots = slot_loads.shape[1]
    slots_per_rank = num_slots // loads.shape[1]
    after = np.zeros((len(offered), num_slots), np.float32)
    theirs = np.zeros(num_slots, np.float32)
    their_rank = np.zeros(num_slots, np.float32)
    for h in range(len(weights)):
        weight = np.float32(weights[h])
        our_rank = np.float32(loads[h, heavy])
        for slot in range(num_slots):
            theirs[slot] = slot_loads[h, slot]
        for rank in range(loads.shape[1]):
            their_rank[rank * slots_per_rank : (rank + 1) * slots_per_rank] = loads[h, rank]
        for k in range(len(offered)):
            ours = theirs[offered[k]]
            row = after[k]
            for slot in range(num_slots):
                change = theirs[slot] - ours
                row[slot] += weight * (
                    _power(our_rank + change) + _power(their_rank[slot] - change)
                )
    return after


@compiled
def _gain_of_swap(state: _State, slot: int, other: int) -> float:
    slots_per_rank = state.ranks.shape[1]
    rank, far = slot // slots_per_rank, other // slots_per_rank
    gain = float(state.costs[rank] + state.costs[far])
    for h in range(len(state.weights)):
        change = state.slot_loads[h, other] - state.slot_loads[h, slot]
        after = _power(state.loads[h, rank] + change) + _power(state.loads[h, far] - change)
        gain -= state.weights[h] * after
    return gain


@compiled
def _best_replica(
    state: _State, heavy: int, left: int, bounded: bool, least: float
) -> tuple[int, int, float]:
    """Return expert, slot of the replica that goes for it, and rate of the best change, or -1."""
    slots_per_rank = state.ranks.shape[1]
    best_slot, best_rate = -1, least
    expert = _most_relieved(state, heavy)
    if expert < 0:
        return -1, -1, least
    for slot in _replicas_to_spare(state):
        if slot < 0:
            break
        rank = slot // slots_per_rank
        gone = state.ranks[rank, slot % slots_per_rank]
        if gone == expert or state.holds[expert, rank]:
            continue
        moves = _arrival(state, expert, rank) - _arrival(state, gone, rank)
        if moves > left:
            continue
        rate = _rate(_gain_of_replica(state, expert, gone, rank), moves, bounded)
        if rate > best_rate:
            best_slot, best_rate = slot, rate
    return (expert, best_slot, best_rate) if best_slot >= 0 else (-1, -1, least)


@compiled
def _replicas_to_spare(state: _State) -> Longs:
    """Return slots whose going burdens the expert's other replicas least, [_SPARED], -1 behind."""
    slots = np.full(_SPARED, -1, np.int64)
    burdens = np.full(_SPARED, np.inf)
    slots_per_rank = state.ranks.shape[1]
    for slot in range(state.ranks.size):
        expert = state.ranks[slot // slots_per_rank, slot % slots_per_rank]
        count = state.counts[expert]
        if count < 2:
            continue
        burden = state.mean[expert] / (count * (count - 1.0))
        k = _SPARED - 1
        if burden < burdens[k]:
            while k > 0 and burdens[k - 1] > burden:
                burdens[k], slots[k] = burdens[k - 1], slots[k - 1]
                k -= 1
            burdens[k], slots[k] = burden, slot
    return slots


@compiled
def _most_relieved(state: _State, rank: int) -> int:
    """Return the expert of a rank that one replica more relieves most; -1 if none can have one."""
    best = -1
    most = 0.0
    for expert in state.ranks[rank]:
        count = state.counts[expert]
        relief = state.mean[expert] / (count * (count + 1.0))
        if count < len(state.ranks) and relief > most:
            most = relief
            best = expert
    return best


@compiled
def _gain_of_replica(state: _State, expert: int, gone: int, rank: int) -> float:
    """Return what is gained when a rank gets the expert in place of another one's replica."""
    count, others = state.counts[expert], state.counts[gone]
    less = 1.0 / (count + 1.0) - 1.0 / count
    more = 1.0 / (others - 1.0) - 1.0 / others
    gain = 0.0
    for each in range(len(state.ranks)):
        if not (state.holds[expert, each] or state.holds[gone, each]):
            continue
        of_expert = less if state.holds[expert, each] else 0.0
        of_gone = more if state.holds[gone, each] else 0.0
        if each == rank:
            of_expert, of_gone = 1.0 / (count + 1.0), -1.0 / others
        gain += state.costs[each]
        for h in range(len(state.weights)):
            change = of_expert * state.scenarios[h, expert] + of_gone * state.scenarios[h, gone]
            gain -= state.weights[h] * _power(state.loads[h, each] + change)
    return gain
