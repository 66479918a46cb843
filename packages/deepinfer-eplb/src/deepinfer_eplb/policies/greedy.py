"""A first plan of one layer: how many replicas, then heaviest first into the lightest rank."""

from __future__ import annotations

import numpy as np

from deepinfer_eplb.compiled import compiled
from deepinfer_eplb.maps import Bools, Floats, Longs

__all__ = ["place", "replicate", "restore"]


@compiled
def replicate(load: Floats, num_slots: int, most: int) -> Longs:
    """Return how many replicas each expert gets, [E] int64, summing to `num_slots`.

    Every spare slot goes to the expert with the largest load per replica, which minimises the
    largest one. Ties go to the lower expert, so all ranks agree.

    Args:
        load: [E] float64.
        num_slots: of all ranks, at least E and at most E * most.
        most: replicas that one expert may have: the number of ranks, since a rank needs no second.
    """
    counts = np.ones(len(load), np.int64)
    for _ in range(num_slots - len(load)):
        best = -1
        heaviest = -1.0
        for expert in range(len(load)):
            if counts[expert] < most and load[expert] / counts[expert] > heaviest:
                heaviest = load[expert] / counts[expert]
                best = expert
        counts[best] += 1
    return counts


@compiled
def place(load: Floats, counts: Longs, num_ranks: int, slots_per_rank: int) -> Longs:
    """Return a map [R, S] int64 that holds each expert `counts` times, never twice on a rank.

    With one rank, which may hold an expert twice, experts come in order of their load.

    Args:
        load: [E] float64.
        counts: [E] int64, at most R each where R > 1, summing to R * S.
        num_ranks, slots_per_rank: R and S.
    """
    share = load / counts
    ranks = np.full((num_ranks, slots_per_rank), -1, np.int64)
    used = np.zeros(num_ranks, np.int64)
    total = np.zeros(num_ranks)
    holds = np.zeros((len(load), num_ranks), np.bool_)
    for expert in np.argsort(-share, kind="mergesort"):
        for _ in range(counts[expert]):
            best = -1
            for rank in range(num_ranks):
                free = used[rank] < slots_per_rank and (num_ranks == 1 or not holds[expert, rank])
                if free and (best < 0 or total[rank] < total[best]):
                    best = rank
            if best < 0:
                best = _make_room(expert, share, ranks, used, total, holds)
            ranks[best, used[best]] = expert
            used[best] += 1
            total[best] += share[expert]
            holds[expert, best] = True
    return ranks


@compiled
def _make_room(
    expert: int, share: Floats, ranks: Longs, used: Longs, total: Floats, holds: Bools
) -> int:
    """Free a slot on a rank that lacks the expert; return the rank.

    Where only ranks that hold the expert have room, another one must give an expert to one of
    those. There always is such a pair: a full rank without the expert holds S others, and a rank
    with room holds at most S - 2 others, so it lacks at least two of them.
    """
    num_ranks, slots_per_rank = ranks.shape
    room = -1
    for rank in range(num_ranks):
        if used[rank] < slots_per_rank and (room < 0 or total[rank] < total[room]):
            room = rank
    giver = -1
    given = -1
    closest = np.inf
    for rank in range(num_ranks):
        if holds[expert, rank]:
            continue
        for slot in range(slots_per_rank):
            other = ranks[rank, slot]
            # the total of the giver changes least by an expert of the same share
            gap = abs(share[other] - share[expert])
            if not holds[other, room] and gap < closest:
                closest = gap
                giver = rank
                given = slot
    other = ranks[giver, given]
    ranks[room, used[room]] = other
    used[room] += 1
    total[room] += share[other]
    holds[other, room] = True
    used[giver] -= 1
    ranks[giver, given] = ranks[giver, used[giver]]
    total[giver] -= share[other]
    holds[other, giver] = False
    return giver


@compiled
def restore(load: Floats, ranks: Longs) -> None:
    """Fill empty slots and give every expert without a slot one, in place, [R, S] int64.

    For ranks that were added, and experts that were lost with the ranks that held them. The lost
    ones come first, the heaviest before others: each into an empty slot, or else in place of the
    replica whose going burdens the replicas that stay least. Slots that are left empty get
    replicas of what is heaviest per replica and not on that rank yet.

    Args:
        load: [E] float64.
        ranks: [R, S], with at least E slots; -1 is empty.
    """
    num_ranks, slots_per_rank = ranks.shape
    counts = np.zeros(len(load), np.int64)
    for expert in ranks.ravel():
        if expert >= 0:
            counts[expert] += 1
    for expert in np.argsort(-load, kind="mergesort"):
        if counts[expert] > 0:
            continue
        least = np.inf
        at_rank, at_slot = -1, -1
        for rank in range(num_ranks):
            for slot in range(slots_per_rank):
                burden = _burden(load, counts, ranks[rank, slot])
                if burden < least:
                    least = burden
                    at_rank, at_slot = rank, slot
        if ranks[at_rank, at_slot] >= 0:
            counts[ranks[at_rank, at_slot]] -= 1
        counts[expert] += 1
        ranks[at_rank, at_slot] = expert
    for rank in range(num_ranks):
        for slot in range(slots_per_rank):
            if ranks[rank, slot] < 0:
                added = _heaviest_absent(load, counts, ranks[rank])
                counts[added] += 1
                ranks[rank, slot] = added


@compiled
def _burden(load: Floats, counts: Longs, expert: int) -> float:
    """Return what the going of a replica adds to each of those that stay; -1 for an empty slot."""
    if expert < 0:
        return -1.0
    count = counts[expert]
    # with one replica there is none that could stay
    return np.inf if count < 2 else load[expert] / (count * (count - 1.0))


@compiled
def _heaviest_absent(load: Floats, counts: Longs, held: Longs) -> int:
    """Return the expert with the largest load per replica that a rank does not hold."""
    best = -1
    for expert in range(len(load)):
        absent = True
        for each in held:
            if each == expert:
                absent = False
        if absent and (best < 0 or load[expert] / counts[expert] > load[best] / counts[best]):
            best = expert
    return best
