"""Strategies: what is planned at the end of an interval, from what is known by then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from deepinfer_eplb.errors import SettingError
from deepinfer_eplb.maps import Floats, Layout
from deepinfer_eplb.plan import Plan, Planner
from deepinfer_eplb.report import in_order

__all__ = ["DEFAULT_STRATEGY", "STRATEGIES", "Moment", "Strategy", "make_strategy"]


@dataclass(frozen=True, eq=False)
class Moment:
    """What is known at the end of an interval.

    Attributes:
        loads: [L, E] float64, hits of the last window.
        history: [H, L, E] float64, pieces of the last windows, oldest first.
        pieces_per_window: of `history`.
        live: the plan in use, None at start.
        layout: ranks and slots.
    """

    loads: Floats
    history: Floats
    pieces_per_window: int
    live: Plan | None
    layout: Layout


Strategy = Callable[[Moment], Plan]


@dataclass(frozen=True)
class _Recipe:
    """A strategy: mode of the planner, whether it sees pieces, whether it plans again at all.

    Without a mode nothing is planned: experts are in order, and have no replicas.
    """

    mode: str | None
    sees_pieces: bool = False
    plans_again: bool = True


STRATEGIES = {
    "none": _Recipe(None, plans_again=False),
    "window-full": _Recipe("full"),
    "window-incremental": _Recipe("auto"),
    "scenario-full": _Recipe("full", sees_pieces=True),
    "scenario-incremental": _Recipe("auto", sees_pieces=True),
    "static": _Recipe("full", plans_again=False),
}
DEFAULT_STRATEGY = "scenario-incremental"  # what `plan(..., prev=..., history=...)` does


def make_strategy(
    name: str, *, split: str = "even", move_budget: int = 40, groups: int | None = None
) -> Strategy:
    """Return a strategy.

    Args:
        name: one of `STRATEGIES`: experts in order without replicas (`none`), the first plan for
            ever (`static`), or a new one each time, from the last window or from scenarios, in full
            or incremental.
        split: see `Planner`; `quota` for a dispatch by quota.
        move_budget: copies in one layer of an incremental plan, at most.
        groups: of experts that the router picks as one, each kept on one node; None: experts may go
            anywhere.
    Raises:
        SettingError: the name is unknown, or another value is not as `Planner` wants it.
    """
    if name not in STRATEGIES:
        allowed = ", ".join(map(repr, STRATEGIES))
        raise SettingError(f"Strategy {name!r} is unknown; allowed: {allowed}.")
    recipe = STRATEGIES[name]
    # Once, so that a value that is not allowed is refused here.
    policy = "global" if groups is None else "hierarchical"
    planner = Planner(
        policy=policy, mode=recipe.mode or "full", split=split, move_budget=move_budget
    )

    def run(moment: Moment) -> Plan:
        if moment.live is not None and not recipe.plans_again:
            return moment.live
        layout = moment.layout
        if recipe.mode is None:
            return _unbalanced(moment)
        ready = replace(
            planner, excluded_ranks=layout.excluded, pieces_per_window=moment.pieces_per_window
        )
        return ready.plan(
            moment.loads,
            ranks=layout.num_ranks,
            nodes=layout.num_nodes,
            slots_per_rank=layout.slots_per_rank,
            prev=None if moment.live is None else moment.live.physical_to_logical,
            history=moment.history if recipe.sees_pieces else None,
            groups=groups,
        )

    return run


def _unbalanced(moment: Moment) -> Plan:
    """Return a plan that does without balancing."""
    num_layers, num_experts = moment.loads.shape
    slots = np.tile(in_order(num_experts, moment.layout), (num_layers, 1))
    return Plan(slots, num_experts, moment.layout, None, None, moment.loads)
