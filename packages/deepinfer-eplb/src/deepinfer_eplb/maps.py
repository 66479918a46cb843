"""The map of experts: which logical expert each slot holds, and what follows from it.

    physical_to_logical[layer, rank * slots_per_rank + i] -> logical expert, -1 on an excluded rank

A slot's number is the physical expert's id. A map is whole when every logical expert has a slot and
no rank holds one twice, but for a single rank, where a second copy is the only thing left to hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_eplb.errors import PlanInputError

__all__ = [
    "Layout",
    "Lookups",
    "as_array",
    "check_loads",
    "check_map",
    "even_split",
    "imbalance",
    "is_whole",
    "lookup_of",
    "num_arrivals",
    "num_replicas_of",
    "rank_loads",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Powers and sums of loads stay finite between these.
_LEAST_LOAD, _MOST_LOAD = 1e-30, 1e30
_MOST_SLOTS = 1 << 24


@dataclass(frozen=True)
class Layout:
    """Ranks and their slots.

    Attributes:
        num_ranks: of the expert-parallel group, the excluded ones included.
        num_nodes: machines that the ranks are divided among evenly, in order.
        slots_per_rank: experts that a rank holds of one layer.
        excluded: ranks that hold nothing, sorted: failed ones, or ones being drained.
    Raises:
        PlanInputError: a number is below 1, ranks cannot be divided among nodes, or none is left.
    """

    num_ranks: int
    num_nodes: int
    slots_per_rank: int
    excluded: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("num_ranks", "num_nodes", "slots_per_rank"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise PlanInputError(f"`{name}` is {value!r}; allowed: whole numbers from 1.")
            object.__setattr__(self, name, int(value))
        if self.num_ranks * self.slots_per_rank > _MOST_SLOTS:
            raise PlanInputError(
                f"{self.num_ranks} ranks x {self.slots_per_rank} slots are more than the "
                f"{_MOST_SLOTS} slots of a layer that are supported; give fewer of one."
            )
        if self.num_ranks % self.num_nodes:
            raise PlanInputError(
                f"{self.num_ranks} ranks cannot be divided among {self.num_nodes} nodes evenly; "
                f"give a number of nodes that divides {self.num_ranks}."
            )
        object.__setattr__(self, "excluded", _ranks(self.excluded, self.num_ranks))

    @property
    def num_physical(self) -> int:
        """Slots of all ranks, excluded ones included: the length of a layer's map."""
        return self.num_ranks * self.slots_per_rank

    @property
    def active(self) -> Longs:
        """Ranks that hold experts, ascending."""
        return np.setdiff1d(np.arange(self.num_ranks), np.array(self.excluded, np.int64))

    def check_experts(self, num_experts: int) -> None:
        """Refuse sizes for which there is no plan.

        Raises:
            PlanInputError: with a size that works.
        """
        ranks, slots = len(self.active), self.slots_per_rank
        if ranks * slots < num_experts:
            raise PlanInputError(
                f"{num_experts} experts do not fit into {ranks} ranks x {slots} slots = "
                f"{ranks * slots}; give `slots_per_rank` {-(-num_experts // ranks)} or more, or "
                f"{-(-num_experts // slots)} ranks."
            )
        if ranks > 1 and slots > num_experts:
            raise PlanInputError(
                f"{slots} slots on a rank are more than the {num_experts} experts, so a rank would "
                f"hold one twice; give `slots_per_rank` {num_experts} or less."
            )


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number, of Python or numpy; true and false are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _ranks(excluded: Iterable[int], num_ranks: int) -> tuple[int, ...]:
    given = tuple(excluded)
    for rank in given:
        if not is_whole(rank) or not 0 <= rank < num_ranks:
            raise PlanInputError(
                f"Excluded rank {rank!r} is none of the {num_ranks} ranks; allowed: whole numbers "
                f"from 0 to {num_ranks - 1}."
            )
    ranks = tuple(sorted({int(rank) for rank in given}))
    if len(ranks) == num_ranks:
        raise PlanInputError(f"All {num_ranks} ranks are excluded; leave one at least.")
    return ranks


def check_loads(loads: ArrayLike, name: str = "loads", dims: int = 2) -> Floats:
    """Return loads as float64, [L, E], or with pieces in front [H, L, E].

    Raises:
        PlanInputError: another number of dimensions, no numbers, NaN, infinite or negative values,
            or no layers or experts.
    """
    shape = {1: "[experts]", 2: "[layers, experts]", 3: "[pieces, layers, experts]"}[dims]
    array = as_array(loads, name)
    if array.ndim != dims or array.size == 0:
        raise PlanInputError(f"`{name}` has shape {list(array.shape)}; needed: {shape}, not empty.")
    if array.dtype.kind not in "iuf":
        raise PlanInputError(f"`{name}` has dtype {array.dtype}; needed: integers or floats.")
    values = array.astype(np.float64)
    wrong = ~((values == 0) | ((values >= _LEAST_LOAD) & (values <= _MOST_LOAD)))
    if wrong.any():
        place = [int(i) for i in np.argwhere(wrong)[0]]
        raise PlanInputError(
            f"`{name}`{place} is {array[tuple(place)]}; loads are counts of tokens: finite and "
            f"not negative, 0 or from {_LEAST_LOAD:g} to {_MOST_LOAD:g}."
        )
    return values


def as_array(value: ArrayLike, name: str) -> NDArray[Any]:
    """Return a value as an array.

    Raises:
        PlanInputError: it is none, as lists of different lengths.
    """
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise PlanInputError(f"`{name}` is no array: {error}. Give rows of one length.") from error


def check_map(
    physical_to_logical: ArrayLike,
    num_experts: int,
    layout: Layout,
    num_layers: int | None = None,
    name: str = "physical_to_logical",
) -> Ints:
    """Return a map as int32 [L, P] after checking that it is whole.

    Raises:
        PlanInputError: wrong shape or dtype, an expert out of range, without a slot, or twice on a
            rank, or an excluded rank's slot in use.
    """
    array = as_array(physical_to_logical, name)
    want = ["layers" if num_layers is None else num_layers, layout.num_physical]
    layers_fit = array.ndim == 2 and num_layers in (None, len(array))
    if not layers_fit or array.shape[1] != layout.num_physical or not len(array):
        raise PlanInputError(
            f"`{name}` has shape {list(array.shape)}; needed: {want} "
            f"({layout.num_ranks} ranks x {layout.slots_per_rank} slots)."
        )
    if array.dtype.kind not in "iu":
        raise PlanInputError(f"`{name}` has dtype {array.dtype}; needed: integers.")
    array = array.astype(np.int64)  # an unsigned one beyond it becomes negative
    used = np.zeros(layout.num_ranks, bool)
    used[layout.active] = True
    used = np.repeat(used, layout.slots_per_rank)
    wrong = np.where(used, (array < 0) | (array >= num_experts), array != -1)
    if wrong.any():
        layer, slot = (int(i) for i in np.argwhere(wrong)[0])
        allowed = f"0 to {num_experts - 1}" if used[slot] else "-1, since its rank is excluded"
        raise PlanInputError(
            f"`{name}`[{layer}, {slot}] is {array[layer, slot]}; allowed: {allowed}."
        )
    counts = num_replicas_of(array, num_experts)
    if (counts == 0).any():
        layer, expert = (int(i) for i in np.argwhere(counts == 0)[0])
        raise PlanInputError(
            f"`{name}` loses expert {expert} of layer {layer}: no slot holds it. Give it one."
        )
    if len(layout.active) > 1:
        _check_twice(array, layout, name)
    return array.astype(np.int32)


def _check_twice(array: NDArray[np.integer], layout: Layout, name: str) -> None:
    """Refuse a map in which a rank holds an expert twice."""
    by_rank = array.reshape(len(array), layout.num_ranks, -1)[:, layout.active]
    held = np.sort(by_rank, -1)
    same = held[..., 1:] == held[..., :-1]
    if same.any():
        layer, k, i = (int(each) for each in np.argwhere(same)[0])
        raise PlanInputError(
            f"`{name}` has expert {held[layer, k, i]} of layer {layer} twice on rank "
            f"{layout.active[k]}: one of the two slots is wasted. Put another expert there."
        )


def num_replicas_of(physical_to_logical: NDArray[np.integer], num_experts: int) -> Ints:
    """Return how many slots hold each expert, [L, E] int32, of a map [L, P]."""
    layers = len(physical_to_logical)
    row = np.arange(layers)[:, None] * (num_experts + 1) + physical_to_logical + 1
    counts = np.bincount(row.ravel(), minlength=layers * (num_experts + 1))
    return counts.reshape(layers, num_experts + 1)[:, 1:].astype(np.int32)


def lookup_of(physical_to_logical: NDArray[np.integer], num_experts: int) -> Ints:
    """Return the slots of each expert, ascending, padded with -1: [L, E, C] int32.

    C is the largest number of replicas in any layer.
    """
    counts = num_replicas_of(physical_to_logical, num_experts)
    found = np.full((*counts.shape, int(counts.max())), -1, np.int32)
    for layer, slots in enumerate(physical_to_logical):
        order = np.argsort(slots, kind="stable")
        order = order[np.searchsorted(slots[order], 0) :]  # without the slots that hold nothing
        first = np.cumsum(counts[layer]) - counts[layer]
        experts = slots[order]
        found[layer, experts, np.arange(len(order)) - first[experts]] = order
    return found


class Lookups:
    """What follows from a map that a value holds."""

    physical_to_logical: Ints
    num_experts: int

    @cached_property
    def logical_to_physical(self) -> Ints:
        """[L, E, C] int32, the slots of each expert, ascending, padded with -1."""
        return lookup_of(self.physical_to_logical, self.num_experts)

    @cached_property
    def num_replicas(self) -> Ints:
        """[L, E] int32, how many slots hold each expert."""
        return num_replicas_of(self.physical_to_logical, self.num_experts)


def even_split(physical_to_logical: NDArray[np.integer], num_experts: int) -> Floats:
    """Return the split in which all replicas of an expert take the same, [L, P], of a map [L, P].

    Slots that hold nothing (-1) take 0.
    """
    counts = num_replicas_of(physical_to_logical, num_experts)
    shares = 1.0 / np.take_along_axis(counts, np.maximum(physical_to_logical, 0), 1)
    held: Floats = np.where(physical_to_logical >= 0, shares, 0.0)
    return held


def rank_loads(
    physical_to_logical: NDArray[np.integer],
    loads: Floats,
    num_ranks: int,
    split: Floats | None = None,
) -> Floats:
    """Return what each rank computes, [..., L, R] float64, excluded ranks with 0.

    Args:
        physical_to_logical: [L, P].
        loads: [..., L, E].
        num_ranks: R.
        split: [L, P], the share of its expert's tokens that a slot takes; even shares if None.
    """
    layers, physical = physical_to_logical.shape
    if split is None:
        held = even_split(physical_to_logical, loads.shape[-1])
    else:
        held = np.where(physical_to_logical >= 0, split, 0.0)
    index = np.broadcast_to(np.maximum(physical_to_logical, 0), (*loads.shape[:-1], physical))
    taken: Floats = np.take_along_axis(loads, index, -1) * held
    ranks: Floats = taken.reshape(*loads.shape[:-2], layers, num_ranks, -1).sum(-1)
    return ranks


def imbalance(ranks: Floats, num_active: int) -> Floats:
    """Return the slowest rank's load over the mean, [...], of rank loads [..., R]; 1 is perfect.

    Where nothing was computed it is 1.
    """
    total = ranks.sum(-1)
    mean = np.where(total > 0, total, 1.0) / num_active
    ratio: Floats = np.where(total > 0, ranks.max(-1) / mean, 1.0)
    return ratio


def num_arrivals(new: NDArray[np.integer], old: NDArray[np.integer], num_ranks: int) -> Longs:
    """Return how many experts ranks hold that they did not hold before, of each layer: [L].

    These are the copies that have to travel between ranks; a second slot of a rank is filled from
    its first.

    Args:
        new, old: maps [L, P] of the same size; slots of excluded ranks hold -1.
        num_ranks: R.
    """
    num_experts = int(max(new.max(), old.max())) + 1
    held = np.zeros((2, len(new), num_ranks, num_experts + 1), bool)  # the last one: -1
    for which, each in enumerate((new, old)):
        np.put_along_axis(held[which], each.reshape(len(new), num_ranks, -1), True, 2)
    arrivals: Longs = (held[0] & ~held[1])[..., :-1].sum((1, 2))
    return arrivals
