"""How replicas of an expert share its tokens, for a map that stands: splits and their bounds.

    split[layer, slot]   the share of its expert's tokens that a slot takes; 1 in sum for an expert

`water_fill` is quick, and close to the best split of a map, which `lp.py` finds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_eplb.compiled import compiled
from deepinfer_eplb.errors import PlanInputError
from deepinfer_eplb.maps import (
    Floats,
    Ints,
    Layout,
    check_loads,
    check_map,
    even_split,
    is_whole,
)

__all__ = [
    "BOUND_SWEEPS",
    "MOST_HITS",
    "check_split",
    "even_split",
    "largest_remainder",
    "lower_bound",
    "water_fill",
]

# Of an expert in a step. Up to here the rounding of shares cannot make parts that were rounded down
# sum to more than the whole: that takes 2^53 / (number of parts).
MOST_HITS = 1 << 40

# Pieces of made-up traffic, EP64 x 7 slots, 384 experts, a map planned one interval earlier: after
# 2, 3, 4, 8 sweeps the slowest/mean is 0.0053, 0.0024, 0.0015, 0.0004 above the best, mean over
# regimes, and from 4 on in no regime by more than 0.005. They take 28 us a layer on one core of
# an AMD EPYC (`water_fill` of benchmarks/planning.py).
SWEEPS = 4
# Ends within 0.0001 of the best, so that it stands for it.
BOUND_SWEEPS = 40


def water_fill(
    physical_to_logical: ArrayLike,
    loads: ArrayLike,
    layout: Layout,
    *,
    sweeps: int = SWEEPS,
    start: ArrayLike | None = None,
) -> Floats:
    """Return a split that levels ranks, by pouring one expert after the other.

    An expert's load is taken off its ranks and poured back like water: into the lightest of them up
    to the next one, then into both, and so on. A sweep does so once with every replicated expert,
    the heaviest first, ties by lower id. No pouring raises the heaviest of the ranks involved.

    Each pouring is the exact minimum, over this expert's shares, of the sum of squares of rank
    loads, which is convex, so many sweeps end at its minimum over all splits. There the heaviest
    rank is as light as it can be, too: an expert with load on one of the heaviest ranks has no
    replica on a lighter rank, or it would have been poured there, so what these ranks compute
    cannot be taken off them.

    Args:
        physical_to_logical: [L, P], a whole map of the layout.
        loads: [L, E] tokens of each expert, or [H, L, E] for a split of each of H pieces.
        layout: ranks and slots.
        sweeps: at most so many, from 0; the last is one that moves less than 1e-12 of the load.
        start: [L, P], the split to begin with, such as the live one; even if None.
    Returns:
        [L, P] float64, or [H, L, P]. Experts without load, and slots of experts with one replica,
        keep what `start` says. The same in every process.
    Raises:
        PlanInputError: map, loads or `start` are not as above.
    """
    values = check_loads(loads, dims=3 if np.ndim(loads) == 3 else 2)
    *_, num_layers, num_experts = values.shape
    slots = check_map(physical_to_logical, num_experts, layout, num_layers)
    if not is_whole(sweeps) or sweeps < 0:
        raise PlanInputError(f"`sweeps` is {sweeps!r}; allowed: whole numbers from 0.")
    first = even_split(slots, num_experts)
    if start is not None:
        first = check_split(start, slots, num_experts, "start")
    split = np.tile(first, (*values.shape[:-2], 1, 1)).reshape(-1, *first.shape)
    pieces = _scaled(values).reshape(-1, *values.shape[-2:])
    # Another order in memory would be compiled once more.
    maps, pieces = np.ascontiguousarray(slots), np.ascontiguousarray(pieces)
    _pour(maps, pieces, layout.num_ranks, sweeps, split)
    return split.reshape(*values.shape[:-1], -1)


@compiled
def _pour(maps: Ints, loads: Floats, num_ranks: int, sweeps: int, split: Floats) -> None:
    """Improve `split` [H, L, P] in place, by sweeps, for a map [L, P] and loads [H, L, E]."""
    num_layers, num_physical = maps.shape
    num_experts = loads.shape[2]
    slots_per_rank = num_physical // num_ranks
    first = np.empty(num_experts + 1, np.int64)
    place = np.empty(num_experts, np.int64)
    slots = np.empty(num_physical, np.int64)
    replicated = np.empty(num_experts, np.int64)
    keys = np.empty(num_experts)
    ranks = np.empty(num_ranks)
    base = np.empty(num_physical)
    sorted_base = np.empty(num_physical)
    for layer in range(num_layers):
        # slots[first[e] : first[e + 1]] hold expert e
        first[:] = 0
        for p in range(num_physical):
            if maps[layer, p] >= 0:
                first[maps[layer, p] + 1] += 1
        for e in range(num_experts):
            first[e + 1] += first[e]
            place[e] = first[e]
        for p in range(num_physical):
            e = maps[layer, p]
            if e >= 0:
                slots[place[e]] = p
                place[e] += 1
        for h in range(loads.shape[0]):
            load = loads[h, layer]
            shares = split[h, layer]
            ranks[:] = 0.0
            total = load.sum()
            for p in range(num_physical):
                if maps[layer, p] >= 0:
                    ranks[p // slots_per_rank] += load[maps[layer, p]] * shares[p]
            count = 0
            for e in range(num_experts):
                if first[e + 1] - first[e] > 1 and load[e] > 0:
                    replicated[count] = e
                    keys[count] = -load[e]
                    count += 1
            order = np.argsort(keys[:count], kind="mergesort")
            for _ in range(sweeps):
                moved = 0.0
                for k in order:
                    e = replicated[k]
                    own = slots[first[e] : first[e + 1]]
                    moved += _pour_one(
                        own, load[e], slots_per_rank, ranks, shares, base, sorted_base
                    )
                if moved <= 1e-12 * total:
                    break


@compiled
def _pour_one(
    own: NDArray[np.int64],
    load: float,
    slots_per_rank: int,
    ranks: Floats,
    shares: Floats,
    base: Floats,
    sorted_base: Floats,
) -> float:
    """Pour one expert, held by slots `own`; return how much of its load changed its place."""
    n = len(own)
    for i in range(n):
        base[i] = ranks[own[i] // slots_per_rank] - load * shares[own[i]]
        j = i
        while j > 0 and sorted_base[j - 1] > base[i]:
            sorted_base[j] = sorted_base[j - 1]
            j -= 1
        sorted_base[j] = base[i]
    below = 0.0
    level = 0.0
    for i in range(n):
        below += sorted_base[i]
        level = (load + below) / (i + 1)
        if i + 1 == n or level <= sorted_base[i + 1]:
            break
    # Rounding of large bases may lose a small load; what is taken is made to sum to it.
    total = 0.0
    for i in range(n):
        total += max(0.0, level - base[i])
    moved = 0.0
    for i in range(n):
        share = max(0.0, level - base[i]) / total if total > 0.0 else 1.0 / n
        rank = own[i] // slots_per_rank
        moved += abs(share - shares[own[i]]) * load
        ranks[rank] += (share - shares[own[i]]) * load
        shares[own[i]] = share
    return moved


def lower_bound(loads: ArrayLike, layout: Layout) -> Floats:
    """Return the slowest rank over the mean, [L], that no map goes below, with any split or even.

    Args:
        loads: [L, E] tokens of each expert.
        layout: ranks and slots.
    Raises:
        PlanInputError: loads are not as above, or do not fit into the layout.
    """
    values = _scaled(check_loads(loads))
    layout.check_experts(values.shape[1])
    ranks = len(layout.active)
    # A rank holds an expert once, so if no rank passes t, an expert of load w has w / t replicas or
    # more, up to one on each rank. The smallest t for which slots suffice is what the greedy finds:
    # it gives a slot to the largest load per replica, and every t below that needs this slot, too.
    counts = np.ones(values.shape, np.int64)
    layers = np.arange(len(values))
    for _ in range(ranks * layout.slots_per_rank - values.shape[1]):
        largest = (values / counts).argmax(1)
        counts[layers, largest] += counts[layers, largest] < ranks
    share = (values / counts).max(1)
    total = values.sum(1)
    return np.where(
        total > 0, np.maximum(1.0, share * ranks / np.where(total > 0, total, 1.0)), 1.0
    )


def largest_remainder(shares: ArrayLike, total: ArrayLike) -> NDArray[np.int64]:
    """Return whole numbers that sum to `total` and are within 1 of its division by shares.

    All are rounded down, and what lacks goes to the largest remainders, ties to the lower index. A
    share of 0 gets 0.

    Args:
        shares: [..., C], not negative; what they sum to does not matter, if it is above 0.
        total: [...] integers, from 0 to `MOST_HITS`.
    Returns:
        [..., C] int64. All 0 where `total` is 0.
    Raises:
        PlanInputError: shapes do not fit, a value is out of range, or there is something to divide
            and all shares are 0.
    """
    parts = np.asarray(shares, np.float64)
    whole = np.asarray(total)
    if parts.ndim < 1 or parts.shape[:-1] != whole.shape or whole.dtype.kind not in "iu":
        raise PlanInputError(
            f"`shares` has shape {list(parts.shape)} and `total` is {list(whole.shape)} "
            f"{whole.dtype}; needed: [..., C], and [...] integers."
        )
    if not (np.isfinite(parts) & (parts >= 0)).all():
        raise PlanInputError("`shares` has values that are negative or not finite; needed: from 0.")
    wrong = (whole < 0) | (whole > MOST_HITS)
    if wrong.any():
        raise PlanInputError(f"`total` has {whole[wrong][0]}; allowed: 0 to {MOST_HITS}.")
    # So that sums neither overflow nor vanish; by powers of two, which is exact.
    parts = np.ldexp(parts, -np.frexp(parts.max(-1, keepdims=True, initial=0.0))[1])
    sums = parts.sum(-1)
    if ((sums == 0) & (whole > 0)).any():
        raise PlanInputError(
            "`shares` are all 0 where `total` is above 0; one must be able to take what there is."
        )
    exact = parts / np.where(sums > 0, sums, 1.0)[..., None] * whole[..., None]
    quotas: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    lacking = whole - quotas.sum(-1)
    order = np.argsort(np.where(parts > 0, quotas - exact, 1.0), -1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(parts.shape[-1]), parts.shape), -1)
    quotas += place < lacking[..., None]
    return quotas


def check_split(split: ArrayLike, slots: Ints, num_experts: int, name: str = "split") -> Floats:
    """Return a split as float64 [L, P] after checking that it is one of a map.

    Args:
        split: what to check.
        slots: [L, P], a whole map.
        num_experts: E.
        name: of the split, for messages.
    Raises:
        PlanInputError: another shape, no numbers, a share outside 0 to 1, an empty slot with a
            share, or shares of an expert that do not sum to 1.
    """
    array = np.asarray(split)
    if array.shape != slots.shape or array.dtype.kind not in "iuf":
        raise PlanInputError(
            f"`{name}` has shape {list(array.shape)} and dtype {array.dtype}; needed: "
            f"{list(slots.shape)}, that of the map, numbers."
        )
    shares = array.astype(np.float64)
    wrong = ~((shares >= 0) & (shares <= 1 + 1e-9)) | ((slots < 0) & (shares != 0))
    if wrong.any():
        layer, slot = (int(i) for i in np.argwhere(wrong)[0])
        allowed = "0 to 1" if slots[layer, slot] >= 0 else "0, since its rank is excluded"
        raise PlanInputError(
            f"`{name}`[{layer}, {slot}] is {shares[layer, slot]}; allowed: {allowed}."
        )
    for layer, row in enumerate(slots):
        sums = np.bincount(row[row >= 0], shares[layer, row >= 0], minlength=num_experts)
        expert = int(np.abs(sums - 1).argmax())
        if abs(sums[expert] - 1) > 1e-6:
            raise PlanInputError(
                f"`{name}` of expert {expert} of layer {layer} sums to {sums[expert]:.6g} over its "
                f"replicas; needed: 1."
            )
    return shares


def _scaled(loads: Floats) -> Floats:
    """Return loads whose largest of each layer is 1, so that sums neither overflow nor vanish."""
    largest = loads.max(-1, keepdims=True)
    return loads / np.where(largest > 0, largest, 1.0)
