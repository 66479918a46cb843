"""Plans where experts live: `plan()` for a map, `Planner` for a `Plan` that explains itself."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_eplb.balance import water_fill
from deepinfer_eplb.errors import PlanInputError, SettingError
from deepinfer_eplb.forecast import Forecast, forecast
from deepinfer_eplb.maps import (
    Floats,
    Ints,
    Layout,
    Longs,
    Lookups,
    as_array,
    check_loads,
    check_map,
    imbalance,
    is_whole,
    num_arrivals,
    rank_loads,
)
from deepinfer_eplb.policies import flat, hierarchical
from deepinfer_eplb.report import before_of, plan_report

__all__ = ["Plan", "Planner", "plan", "warm_up"]

_POLICIES = ("auto", "global", "hierarchical")
_MODES = ("auto", "full", "incremental")
_SPLITS = ("even", "quota")


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Lookups):
    """Where experts live, and what that gains. A value: nothing is moved by making one.

    Attributes:
        physical_to_logical: [L, R * S] int32, the expert in each slot; -1 on excluded ranks.
        num_experts: E, logical ones.
        layout: ranks, nodes, slots, excluded ranks.
        split: [L, R * S] float64, the share of its expert's tokens that each slot takes, summing to
            1 for an expert; None where all replicas take the same.
        previous: the map that was live, [L, R * S] int32, or None.
        loads: [L, E] float64, of the last window.
        mode: `full`, planned from nothing, or `incremental`, the live map improved.
    """

    physical_to_logical: Ints
    num_experts: int
    layout: Layout
    split: Floats | None
    previous: Ints | None
    loads: Floats
    mode: str = "full"

    def __repr__(self) -> str:
        """Say what it is, without the maps."""
        return (
            f"Plan({self.mode}: {len(self.physical_to_logical)} layers x {self.num_experts} experts"
            f" on {self.layout.num_ranks} ranks x {self.layout.slots_per_rank} slots, slowest/mean "
            f"{self.ratio_before:.3f} -> {self.ratio_after:.3f}, {self.moves} moves)"
        )

    @cached_property
    def moves_per_layer(self) -> Longs:
        """[L]: experts that ranks hold and did not hold in `previous`; 0 without one."""
        if self.previous is None:
            return np.zeros(len(self.physical_to_logical), np.int64)
        return num_arrivals(self.physical_to_logical, self.previous, self.layout.num_ranks)

    @property
    def moves(self) -> int:
        """Copies between ranks on the way from `previous`, of all layers."""
        return int(self.moves_per_layer.sum())

    @cached_property
    def ratio_before(self) -> float:
        """Slowest rank over mean of `loads` under `previous`, mean over layers.

        NaN without a previous map, or where it has slots of ranks that are excluded now.
        """
        previous = before_of(self)
        if previous is None:
            return float("nan")
        return float(self._imbalance(previous, self.loads, None).mean())

    @cached_property
    def ratio_after(self) -> float:
        """Slowest rank over mean of `loads` under this plan, mean over layers."""
        return float(self.imbalance(self.loads).mean())

    @cached_property
    def digest(self) -> str:
        """A hash of the plan, for ranks that each make it and compare."""
        content = hashlib.sha256(repr((self.physical_to_logical.shape, self.layout)).encode())
        content.update(np.ascontiguousarray(self.physical_to_logical, np.int32).tobytes())
        if self.split is not None:
            content.update(np.ascontiguousarray(self.split, np.float64).tobytes())
        return content.hexdigest()

    def imbalance(self, load: ArrayLike) -> Floats:
        """Return the slowest rank's load over the mean, per layer: [L] float64, 1.0 is perfect.

        Args:
            load: [L, E] tokens of each expert.
        Raises:
            PlanInputError: it does not fit the plan.
        """
        loads = check_loads(load, "load")
        shape = (len(self.physical_to_logical), self.num_experts)
        if loads.shape != shape:
            raise PlanInputError(
                f"`load` has shape {list(loads.shape)}, but the plan is for {list(shape)}: layers, "
                "experts. Give loads of the same model."
            )
        return self._imbalance(self.physical_to_logical, loads, self.split)

    def report(self, load: ArrayLike, expert_bytes: int | None = None) -> str:
        """Return a table for a terminal: what each layer gains under a load, and what it costs.

        Args:
            load: [L, E] tokens of each expert.
            expert_bytes: bytes of one expert of one layer, all its tensors; adds what moves.
        Raises:
            PlanInputError: the load does not fit the plan.
        """
        return plan_report(self, load, expert_bytes)

    def _imbalance(self, physical_to_logical: Ints, loads: Floats, split: Floats | None) -> Floats:
        ranks = rank_loads(physical_to_logical, loads, self.layout.num_ranks, split)
        return imbalance(ranks, len(self.layout.active))


@dataclass(frozen=True)
class Planner:
    """Plans where experts live. Pure: same options and arguments, same plan, in every process.

    Attributes:
        policy: `global`: experts may go anywhere; `hierarchical`: groups of experts stay on one
            node; `auto`: the latter where groups are given and divide as it needs.
        mode: `full`: a plan from nothing, its ranks named so that little moves; `incremental`: the
            live map is improved; `auto`: incremental where there is a live map.
        move_budget: copies between ranks in one layer of an incremental plan, at most. Not counted
            are those that must be: experts that were lost with excluded ranks, and what fills ranks
            that are excluded no more.
        min_gain: what a move of an incremental plan must take off the cost that is minimised (see
            `policies.search`), as a share of it. With the default nothing moves while traffic stays
            as it is; with 0 the budget is always used up, for gains of about 0.0003 in the ratio.
        replan_slack: where the incremental plan's slowest/mean of the loads is above that of a full
            one by more, the layer is planned in full, whatever that moves; None: never.
        split: `even`: all replicas of an expert take the same share; `quota`: shares that level the
            ranks, for a dispatch by quota.
        excluded_ranks: they hold nothing: failed ones, or ones being drained.
        pieces_per_window: of `history`.
    Raises:
        SettingError: an option is not one of those allowed.
    """

    policy: str = "auto"
    mode: str = "auto"
    move_budget: int = 40
    min_gain: float = 1e-5
    replan_slack: float | None = None
    split: str = "even"
    excluded_ranks: Iterable[int] = ()
    pieces_per_window: int = 10

    def __post_init__(self) -> None:
        """Check the options."""
        allowed = {"policy": _POLICIES, "mode": _MODES, "split": _SPLITS}
        for name, words in allowed.items():
            if getattr(self, name) not in words:
                raise SettingError(
                    f"`{name}` is {getattr(self, name)!r}; allowed: {', '.join(map(repr, words))}."
                )
        for name, least in (("move_budget", 0), ("pieces_per_window", 1)):
            value = getattr(self, name)
            if not is_whole(value) or value < least:
                raise SettingError(f"`{name}` is {value!r}; allowed: whole numbers from {least}.")
        gain, slack = self.min_gain, self.replan_slack
        if not _is_number(gain) or not 0 <= gain < 1:
            raise SettingError(f"`min_gain` is {gain!r}; allowed: numbers from 0, below 1.")
        if slack is not None and not (_is_number(slack) and slack >= 0):
            raise SettingError(f"`replan_slack` is {slack!r}; allowed: None, or numbers from 0.")
        try:
            object.__setattr__(self, "excluded_ranks", tuple(self.excluded_ranks))
        except TypeError:
            raise SettingError(
                f"`excluded_ranks` is {self.excluded_ranks!r}; allowed: several ranks, such as [3]."
            ) from None

    def plan(
        self,
        loads: ArrayLike,
        *,
        ranks: int,
        nodes: int,
        slots_per_rank: int,
        prev: Plan | ArrayLike | None = None,
        history: ArrayLike | None = None,
        groups: int | None = None,
    ) -> Plan:
        """Return a plan for the next interval.

        Args:
            loads: [L, E] tokens of each expert in the last window.
            ranks, nodes, slots_per_rank: where they may go; slots count spare ones too.
            prev: [L, ranks * slots_per_rank], the live map, or the plan that it came from; -1 on
                ranks excluded when it was made.
            history: [H, L, E], pieces of the last window, and of windows before it where they were
                kept, oldest first. Planned on instead of `loads`, as scenarios (see `forecast`);
                time grows with H, and a piece weighs 0.93 of the next younger one.
            groups: of experts that the router picks as one; for the policy `hierarchical`.
        Raises:
            PlanInputError: loads, maps or sizes do not fit together, or no plan exists; with
                numbers that work.
        """
        given = check_loads(loads)
        num_layers, num_experts = given.shape
        layout = Layout(ranks, nodes, slots_per_rank, tuple(self.excluded_ranks))
        layout.check_experts(num_experts)
        pieces = None if history is None else check_loads(history, "history", 3)
        if pieces is not None and pieces.shape[1:] != given.shape:
            raise PlanInputError(
                f"`history` has shape {list(pieces.shape)}, but `loads` {list(given.shape)}: "
                "layers and experts must be the same."
            )
        known = self._by_groups(num_experts, groups, layout)
        previous = None if prev is None else _previous(prev, num_experts, layout, num_layers)
        maps = None if previous is None else _active(previous, layout)
        improves = self._improves(maps, layout, known, num_experts)
        silent = given.sum(1) == 0
        if pieces is not None:
            silent &= pieces.sum((0, 2)) == 0
        if silent.any() and not improves:
            raise PlanInputError(
                f"No expert of layer {int(np.argmax(silent))} has any tokens, so there is nothing "
                "to plan on. Give a layer that was not used equal loads, such as 1 each."
            )
        # Only the map of a live layer can be silent, and it stays as it is.
        coming = forecast(
            np.where(silent[:, None], 1.0, given),
            pieces,
            self.pieces_per_window,
            len(layout.active),
        )
        most = min(self.move_budget, layout.num_physical)
        budgets = np.where(silent, 0, most)
        if improves and maps is not None:
            found = _improved(coming, maps, layout, known, budgets, self.min_gain)
            if self.replan_slack is not None:
                whole = _full(coming, layout, known, maps)
                excess = _ratios(found, given) - _ratios(whole, given)
                found[excess > self.replan_slack] = whole[excess > self.replan_slack]
        else:
            found = _full(coming, layout, known, maps)
        physical_to_logical = _with_excluded(found, layout)
        split = None
        if self.split == "quota":
            expected = np.einsum("lh,lhe->le", coming.weights, coming.scenarios)
            split = water_fill(physical_to_logical, expected, layout)
        mode = "incremental" if improves else "full"
        return Plan(physical_to_logical, num_experts, layout, split, previous, given, mode)

    def _improves(
        self, maps: Longs | None, layout: Layout, groups: int | None, num_experts: int
    ) -> bool:
        """Return whether the live map [L, R, S] is improved, and not planned from nothing."""
        if self.mode == "full":
            return False
        if maps is None:
            if self.mode == "incremental":
                raise SettingError(
                    "`mode` is 'incremental', but `prev` is None: there is no live map to improve. "
                    "Give one, or use 'auto', which then plans in full."
                )
            return False
        if groups is None or hierarchical.keeps_groups(maps, layout.num_nodes, groups, num_experts):
            return True
        if self.mode == "incremental":
            raise PlanInputError(
                f"The live map does not hold {groups // layout.num_nodes} whole groups on each "
                "node, as the policy 'hierarchical' needs. Plan once with `mode` 'full'."
            )
        return False

    def _by_groups(self, num_experts: int, groups: int | None, layout: Layout) -> int | None:
        """Return the number of groups where they decide, else None."""
        if groups is not None and (not is_whole(groups) or groups < 1):
            raise PlanInputError(f"`groups` is {groups!r}; allowed: None, or whole numbers from 1.")
        if self.policy == "global" or (self.policy == "auto" and groups is None):
            return None
        try:
            return hierarchical.check(num_experts, groups, layout)
        except PlanInputError:
            if self.policy == "auto":
                return None
            raise


def plan(
    loads: ArrayLike,
    ranks: int,
    nodes: int,
    slots_per_rank: int,
    prev: Plan | ArrayLike | None = None,
    history: ArrayLike | None = None,
) -> Ints:
    """Return a map [L, ranks * slots_per_rank] int32 for the next interval.

    With `prev` it improves that map by at most 40 moves in a layer, with `history` it plans on
    scenarios; arguments and errors are those of `Planner.plan`.
    """
    made = Planner().plan(
        loads, ranks=ranks, nodes=nodes, slots_per_rank=slots_per_rank, prev=prev, history=history
    )
    return made.physical_to_logical


def warm_up() -> float:
    """Compile what plans need, or load it from numba's cache; return the seconds that took.

    The first plan of a process does the same. Call it at start where that one must not be late.
    """
    start = time.perf_counter()
    loads = np.arange(1.0, 9.0).reshape(1, 8)
    planner = Planner(split="quota")
    first = planner.plan(loads, ranks=2, nodes=1, slots_per_rank=5)
    live = first.physical_to_logical
    planner.plan(loads, ranks=2, nodes=1, slots_per_rank=5, prev=live, history=loads[None])
    Planner(mode="full").plan(loads, ranks=2, nodes=1, slots_per_rank=5, prev=live)
    return time.perf_counter() - start


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _previous(prev: Plan | ArrayLike, num_experts: int, layout: Layout, num_layers: int) -> Ints:
    """Return the live map, checked; ranks that are excluded now may still have experts in it."""
    array = as_array(prev.physical_to_logical if isinstance(prev, Plan) else prev, "prev")
    empty: NDArray[np.intp] = np.empty(0, np.intp)
    if array.ndim == 2 and array.shape[1] == layout.num_physical:
        by_rank = array.reshape(len(array), layout.num_ranks, -1)
        empty = np.flatnonzero((by_rank == -1).all((0, 2)))
        empty = empty[: layout.num_ranks - 1]
    then = Layout(layout.num_ranks, layout.num_nodes, layout.slots_per_rank, tuple(empty.tolist()))
    return check_map(array, num_experts, then, num_layers, "prev")


def _active(physical_to_logical: Ints, layout: Layout) -> Longs:
    """Return the map of ranks that are not excluded, [L, R, S]."""
    by_rank = physical_to_logical.reshape(len(physical_to_logical), layout.num_ranks, -1)
    return np.ascontiguousarray(by_rank[:, layout.active], np.int64)


def _with_excluded(maps: Longs, layout: Layout) -> Ints:
    """Return the map of all ranks, [L, P] int32, excluded ones with -1."""
    found = np.full((len(maps), layout.num_ranks, layout.slots_per_rank), -1, np.int32)
    found[:, layout.active] = maps
    return found.reshape(len(maps), -1)


def _improved(
    coming: Forecast,
    maps: Longs,
    layout: Layout,
    groups: int | None,
    budgets: Longs,
    min_gain: float,
) -> Longs:
    if groups is None:
        return flat.incremental(coming, maps, budgets, min_gain)
    return hierarchical.incremental(coming, maps, layout.num_nodes, groups, budgets, min_gain)


def _full(coming: Forecast, layout: Layout, groups: int | None, maps: Longs | None) -> Longs:
    """Plan from nothing, with ranks named so that little moves from the live maps [L, R, S]."""
    num_ranks, slots, nodes = len(layout.active), layout.slots_per_rank, layout.num_nodes
    if groups is None:
        found = flat.full(coming, num_ranks, slots)
        if maps is None:
            return found
        return np.stack([flat.relabel(*pair) for pair in zip(found, maps, strict=True)])
    found = hierarchical.full(coming, nodes, groups, num_ranks, slots)
    if maps is None:
        return found
    return np.stack([hierarchical.relabel(*pair, nodes) for pair in zip(found, maps, strict=True)])


def _ratios(maps: Longs, loads: Floats) -> Floats:
    """Return slowest rank over mean of maps [L, R, S], [L]."""
    ranks = rank_loads(maps.reshape(len(maps), -1), loads, maps.shape[1])
    return imbalance(ranks, maps.shape[1])
