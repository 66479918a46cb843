"""Reports for a terminal: what a plan gains and costs, how a map does, what it holds.

Figures are slowest rank over mean of the loads that are given, 1 is perfect. Where these are the
sum of a window, single steps are worse; the two must not be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_eplb.balance import BOUND_SWEEPS, lower_bound, water_fill
from deepinfer_eplb.errors import PlanInputError
from deepinfer_eplb.maps import (
    Floats,
    Ints,
    Layout,
    Longs,
    check_loads,
    imbalance,
    num_arrivals,
    num_replicas_of,
    rank_loads,
)
from deepinfer_eplb.tables import aligned, size, words_of

if TYPE_CHECKING:
    from deepinfer_eplb.files import StoredMap
    from deepinfer_eplb.plan import Plan

__all__ = [
    "active_loads",
    "before_of",
    "check_fits",
    "in_order",
    "in_order_imbalance",
    "map_report",
    "moves_between",
    "plan_report",
    "score_report",
]

Rows: TypeAlias = list[list[str]]

_MOST_NAMED = 5  # experts named in a row


def plan_report(plan: Plan, load: ArrayLike, expert_bytes: int | None = None) -> str:
    """Return a table: what a plan gains in each layer under a load, and what it costs.

    It is compared with the live map; where there is none, or one that has slots of ranks that are
    excluded now, with `in_order`.

    Args:
        plan: the plan.
        load: [L, E] tokens of each expert.
        expert_bytes: bytes of one expert of one layer, all its tensors, for what moves; the column
            is left out if None.
    Raises:
        PlanInputError: the load does not fit the plan.
    """
    after = plan.imbalance(load)
    loads = check_loads(load, "load")
    live = before_of(plan)
    if live is None:
        name, before = "in order", in_order_imbalance(loads, plan.layout)
    else:
        name, before = "before", _imbalance(live, loads, plan.layout, None)
    added, most, moves = _added(plan), plan.num_replicas.max(1), plan.moves_per_layer
    rows = [
        ["layer", f"slowest/mean {name}", "after", "replicas added", "most replicas", "moves"],
        *_ratio_rows((before, after), (added, most, moves)),
        ["all", "", "", str(added.sum()), str(most.max()), str(moves.sum())],
    ]
    if expert_bytes is not None:
        sizes = [size(int(each) * expert_bytes) for each in moves]
        cells = ["to move", *sizes, "", "", size(int(moves.sum()) * expert_bytes)]
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    return aligned(rows)


def score_report(stored: StoredMap, loads: ArrayLike, history: ArrayLike | None = None) -> str:
    """Return a table: how a map does under loads, and how near that is to what can be had.

    Args:
        stored: the map; by its split where it has one, else evenly.
        loads: [L, E] tokens of each expert.
        history: [H, L, E], pieces of the loads; None where there are none. Each is rated for itself
            and the mean is shown: the shorter the time, the worse the figures.
    Raises:
        PlanInputError: loads do not fit the map.
    """
    layout, slots = stored.layout, stored.physical_to_logical
    values = check_fits(stored, loads)
    best = water_fill(slots, values, layout, sweeps=BOUND_SWEEPS)
    columns = {
        "slowest/mean": _imbalance(slots, values, layout, stored.split),
        "in order": in_order_imbalance(values, layout),
        "best split": _imbalance(slots, values, layout, best),
        "no map below": lower_bound(values, layout),
    }
    if history is not None:
        pieces = check_loads(history, "history", 3)
        for piece in pieces[:1]:
            check_fits(stored, piece)
        columns["of pieces"] = _imbalance(slots, pieces, layout, stored.split).mean(0)
    return aligned([["layer", *columns], *_ratio_rows(tuple(columns.values()))])


def map_report(
    stored: StoredMap, loads: ArrayLike | None = None, previous: StoredMap | None = None
) -> str:
    """Return what a map holds.

    Args:
        stored: the map.
        loads: [L, E] tokens of each expert; adds how the ranks of each layer are loaded.
        previous: a map of the same sizes; adds the moves from it to `stored`.
    Raises:
        PlanInputError: loads or maps do not fit together.
    """
    layout, counts = stored.layout, stored.num_replicas
    replicated, most = (counts > 1).sum(1), counts.max(1)
    rows = [["layer", "replicated experts", "most replicas", "of experts"]]
    for layer, of_layer in enumerate(counts):
        named = _named(np.flatnonzero(of_layer == most[layer])) if most[layer] > 1 else "-"
        rows.append([str(layer), str(replicated[layer]), str(most[layer]), named])
    totals = ["all", str(replicated.sum()), str(most.max()), ""]
    if loads is not None:
        values = check_fits(stored, loads)
        active = active_loads(stored.physical_to_logical, values, layout, stored.split)
        ratios = imbalance(active, len(layout.active))
        rows[0] += ["slowest/mean", "slowest rank", "quickest rank"]
        for layer, row in enumerate(rows[1:]):
            slowest, quickest = (layout.active[f(active[layer])] for f in (np.argmax, np.argmin))
            row += [f"{ratios[layer]:.3f}", str(slowest), str(quickest)]
        for name, value in (("mean", ratios.mean()), ("worst", ratios.max())):
            rows.append([name, "", "", "", f"{value:.3f}", "", ""])
        totals += [""] * 3
    rows.append(totals)
    if previous is not None:
        moves = moves_between(previous, stored)
        blank = [""] * (len(rows) - len(moves) - 2)
        cells = ["moves", *map(str, moves), *blank, str(moves.sum())]
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    return _summary(stored) + "\n\n" + aligned(rows)


def moves_between(previous: StoredMap, stored: StoredMap) -> Longs:
    """Return how many experts ranks hold and did not hold in the previous map: [L].

    Raises:
        PlanInputError: the maps are not of the same sizes.
    """
    sizes = [
        (*each.physical_to_logical.shape, each.num_experts, each.layout.num_ranks)
        for each in (previous, stored)
    ]
    if sizes[0] != sizes[1]:
        words = ("layers", "slots", "experts", "ranks")
        old, new = (", ".join(map("{} {}".format, each, words)) for each in sizes)
        raise PlanInputError(f"The maps cannot be compared: {old}, and {new}. Give two of a model.")
    maps = (stored.physical_to_logical, previous.physical_to_logical)
    return num_arrivals(*maps, stored.layout.num_ranks)


def check_fits(stored: StoredMap, loads: ArrayLike) -> Floats:
    """Return loads [L, E] after checking that they are of the map's layers and experts.

    Raises:
        PlanInputError: they are not.
    """
    values = check_loads(loads)
    shape = (len(stored.physical_to_logical), stored.num_experts)
    if values.shape != shape:
        raise PlanInputError(
            f"`loads` has shape {list(values.shape)}, but the map is for {list(shape)}: layers, "
            "experts. Give loads of the same model."
        )
    return values


def in_order(num_experts: int, layout: Layout) -> Ints:
    """Return the map of a layer without balancing: [P] int32.

    Experts in order, as many on each rank that is not excluded, or one more on the first ones; no
    replicas, and -1 in the slots that are left.

    Args:
        num_experts: E.
        layout: ranks and slots.
    Raises:
        PlanInputError: so many experts do not fit.
    """
    layout.check_experts(num_experts)
    slots = np.full((layout.num_ranks, layout.slots_per_rank), -1, np.int32)
    parts = np.array_split(np.arange(num_experts), len(layout.active))
    for rank, experts in zip(layout.active, parts, strict=True):
        slots[rank, : len(experts)] = experts
    return slots.ravel()


def in_order_imbalance(loads: ArrayLike, layout: Layout) -> Floats:
    """Return slowest rank over mean with experts in order and no replicas: [L] float64.

    What it is without balancing; see `in_order`.

    Args:
        loads: [L, E] tokens of each expert.
        layout: ranks and slots.
    Raises:
        PlanInputError: loads are not as above, or do not fit into the layout.
    """
    values = check_loads(loads)
    slots = in_order(values.shape[1], layout)
    return _imbalance(np.tile(slots, (len(values), 1)), values, layout, None)


def active_loads(slots: Ints, loads: Floats, layout: Layout, split: Floats | None) -> Floats:
    """Return what each rank that is not excluded computes, [L, ranks], of loads [L, E].

    Args:
        slots: a map [L, P].
        loads: [L, E].
        layout: of the map.
        split: [L, P], even if None.
    """
    found: Floats = rank_loads(slots, loads, layout.num_ranks, split)[:, layout.active]
    return found


def before_of(plan: Plan) -> Ints | None:
    """Return the live map of a plan, or None where it cannot be rated: it has excluded ranks."""
    previous = plan.previous
    if previous is None or (previous[plan.physical_to_logical < 0] >= 0).any():
        return None
    return previous


def _imbalance(slots: Ints, loads: Floats, layout: Layout, split: Floats | None) -> Floats:
    return imbalance(rank_loads(slots, loads, layout.num_ranks, split), len(layout.active))


def _ratio_rows(ratios: Sequence[Floats], counts: Sequence[NDArray[np.integer]] = ()) -> Rows:
    """Return a row for each layer, and `mean` and `worst` of the ratios."""
    rows = []
    for layer in range(len(ratios[0])):
        cells = [f"{each[layer]:.3f}" for each in ratios]
        rows.append([str(layer), *cells, *(str(each[layer]) for each in counts)])
    blank = [""] * len(counts)
    rows.append(["mean", *(f"{each.mean():.3f}" for each in ratios), *blank])
    rows.append(["worst", *(f"{each.max():.3f}" for each in ratios), *blank])
    return rows


def _added(plan: Plan) -> Longs:
    """Return replicas that experts have more of than before, or than one each: [L]."""
    before: Ints = np.ones_like(plan.num_replicas)
    if plan.previous is not None:
        before = num_replicas_of(plan.previous, plan.num_experts)
    added: Longs = np.maximum(plan.num_replicas - before, 0).sum(1, dtype=np.int64)
    return added


def _named(experts: Longs) -> str:
    text = " ".join(map(str, experts[:_MOST_NAMED]))
    return text + f" +{len(experts) - _MOST_NAMED}" * (len(experts) > _MOST_NAMED)


def _summary(stored: StoredMap) -> str:
    layout = stored.layout
    spare = len(layout.active) * layout.slots_per_rank - stored.num_experts
    lines = [
        f"{len(stored.physical_to_logical)} layers of {stored.num_experts} experts, "
        f"{words_of(layout)}, {spare} of them spare; dispatch "
        f"{'even' if stored.split is None else 'by quota'}."
    ]
    if layout.excluded:
        lines.append(f"Excluded ranks: {', '.join(map(str, layout.excluded))}.")
    if stored.ratio_after is not None:
        old = "" if stored.ratio_before is None else f"{stored.ratio_before:.3f} before and "
        moves = "" if stored.moves is None else f", for {stored.moves} moves"
        lines.append(
            f"When it was planned, slowest/mean of the window was {old}{stored.ratio_after:.3f} "
            f"after{moves}."
        )
    return "\n".join(lines)
