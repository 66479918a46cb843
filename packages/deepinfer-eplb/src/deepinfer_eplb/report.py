"""Reports for a terminal: what a plan gains and costs, how a map does, what it holds.

Figures are slowest rank over mean of the loads that are given, 1 is perfect. Where these are the
sum of a window, single steps are worse; the two must not be compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from deepinfer_eplb.balance import lower_bound, water_fill
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
    "map_report",
    "moves_between",
    "plan_report",
    "score_report",
]

_BOUND_SWEEPS = 40  # of water-filling, see `simulate/replay.py`
_MOST_NAMED = 5  # experts named in a row


def plan_report(plan: Plan, load: ArrayLike, expert_bytes: int | None = None) -> str:
    """Return a table: what a plan gains in each layer under a load, and what it costs.

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
    known = before_of(plan)
    before = None if known is None else _imbalance(known, loads, plan.layout, None)
    added = _added(plan)
    moves = plan.moves_per_layer
    most = plan.num_replicas.max(1)
    header = ["layer", "slowest/mean before", "after", "replicas added", "most replicas", "moves"]
    rows = [header]
    for layer in range(len(after)):
        cells = [str(layer), "-" if before is None else f"{before[layer]:.3f}"]
        cells += [f"{after[layer]:.3f}", *(str(each[layer]) for each in (added, most, moves))]
        rows.append(cells)
    old = "-" if before is None else f"{before.mean():.3f}"
    totals = (str(added.sum()), str(most.max()), str(moves.sum()))
    rows.append(["all", old, f"{after.mean():.3f}", *totals])
    old = "-" if before is None else f"{before.max():.3f}"
    rows.append(["worst", old, f"{after.max():.3f}", "", "", ""])
    if expert_bytes is not None:
        sizes = [size(int(each) * expert_bytes) for each in (*moves, moves.sum())]
        for row, cell in zip(rows, ["to move", *sizes, ""], strict=True):
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
    best = water_fill(slots, values, layout, sweeps=_BOUND_SWEEPS)
    columns = {
        "slowest/mean": _imbalance(slots, values, layout, stored.split),
        "best split": _imbalance(slots, values, layout, best),
        "no map below": lower_bound(values, layout),
    }
    if history is not None:
        pieces = check_loads(history, "history", 3)
        for piece in pieces[:1]:
            check_fits(stored, piece)
        columns["of pieces"] = _imbalance(slots, pieces, layout, stored.split).mean(0)
    rows = [["layer", *columns]]
    for layer in range(len(values)):
        rows.append([str(layer), *(f"{each[layer]:.3f}" for each in columns.values())])
    rows.append(["mean", *(f"{each.mean():.3f}" for each in columns.values())])
    rows.append(["worst", *(f"{each.max():.3f}" for each in columns.values())])
    return aligned(rows)


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
    header = ["layer", "replicated experts", "most replicas", "of experts"]
    rows = [header]
    for layer, of_layer in enumerate(counts):
        most = int(of_layer.max())
        named = _named(np.flatnonzero(of_layer == most)) if most > 1 else "-"
        rows.append([str(layer), str((of_layer > 1).sum()), str(most), named])
    if loads is not None:
        values = check_fits(stored, loads)
        active = active_loads(stored.physical_to_logical, values, layout, stored.split)
        ratios = imbalance(active, len(layout.active))
        header += ["slowest/mean", "slowest rank", "quickest rank"]
        for layer, row in enumerate(rows[1:]):
            slowest, quickest = (layout.active[f(active[layer])] for f in (np.argmax, np.argmin))
            row += [f"{ratios[layer]:.3f}", str(slowest), str(quickest)]
    if previous is not None:
        header.append("moves")
        for row, moves in zip(rows[1:], moves_between(previous, stored), strict=True):
            row.append(str(moves))
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
