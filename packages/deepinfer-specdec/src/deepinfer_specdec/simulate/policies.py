"""Policies of a simulation: the planners of this package, one a rank or one for all.

    off                 no drafts
    fixed-N             N drafts of each block, always
    threshold-X         as many drafts as had a survival of at least X, each rank alone
    group-threshold-X   the same in a group whose ranks all fill a step of the fullest one's size
    algorithm-1         the published rule, which looks at the current step and stops early
    algorithm-1-smooth  the same with the stairs of the cost curve replaced by straight lines
    delayed             a budget from records two steps old, each rank alone
    own-k               the same budgets in a group, which waits for its slowest rank
    group-k             one budget for the group

Nothing of a planner is rebuilt here: what a rank decides for itself, and what ranks agree on, is
asked from the classes and functions that an engine uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from deepinfer_specdec.algorithm1 import early_stop_lengths
from deepinfer_specdec.budget import Budget, DelayedPlanner, FixedPlanner, ThresholdPlanner
from deepinfer_specdec.cost import CostTable
from deepinfer_specdec.errors import SettingError
from deepinfer_specdec.group import agree, gains, share
from deepinfer_specdec.lengths import best_lengths
from deepinfer_specdec.simulate.acceptance import Trace

__all__ = [
    "POLICY_NAMES",
    "Choice",
    "EachRank",
    "EarlyStop",
    "Policy",
    "check_policy",
    "make_policy",
]

POLICY_NAMES = (
    "off",
    "fixed-N",
    "threshold-X",
    "group-threshold-X",
    "algorithm-1",
    "algorithm-1-smooth",
    "delayed",
    "own-k",
    "group-k",
)


@dataclass(frozen=True)
class Choice:
    """What a step verifies.

    Attributes:
        lengths: [N] int64, drafts of each request of all ranks.
        rows: [ranks] int64, rows of each rank's step, padding included.
    """

    lengths: np.ndarray
    rows: np.ndarray


class Policy(Protocol):
    """Chooses what each rank verifies."""

    @property
    def drafts(self) -> bool:
        """Whether drafts are made at all."""

    def choose(self, trace: Trace, step: int) -> Choice:
        """Choose for one step of all ranks."""

    def observe(self, rows: np.ndarray, seconds: np.ndarray) -> None:
        """Take note of the rows and times of the step, [ranks] each."""


class Planner(Protocol):
    """What every planner of `deepinfer_specdec.budget` does; see there."""

    def budget(self, survival: np.ndarray, known: np.ndarray, available: np.ndarray) -> Budget:
        """Return the budget from records two steps old."""

    def lengths(self, survival: torch.Tensor, available: torch.Tensor, total: int) -> torch.Tensor:
        """Return drafts to verify for each request."""

    def observe(self, rows: int, seconds: float) -> None:
        """Take note of a measured step."""


class EachRank:
    """Ranks with a planner each; all that one may know of another is how full it is."""

    def __init__(
        self,
        planners: Sequence[Planner],
        costs: CostTable,
        max_drafts: int,
        *,
        to_fullest: bool = False,
    ) -> None:
        """Take the planners.

        Args:
            planners: one a rank.
            costs: of the device; its captured sizes round a step up.
            max_drafts: of a block that may be verified; 0 makes none.
            to_fullest: whether all ranks run a step of the largest size that any of them asks for,
                which they would wait for anyway, and fill it.
        """
        self._planners = planners
        self._costs = costs
        self._max_drafts = max_drafts
        self._to_fullest = to_fullest

    @property
    def drafts(self) -> bool:
        """Whether drafts are made at all."""
        return self._max_drafts > 0

    def choose(self, trace: Trace, step: int) -> Choice:
        """Ask each rank's planner for a budget from its own records, then for lengths."""
        survival, known = trace.records(step)
        owns = _ranks(trace)
        availables = [_available(own, self._max_drafts) for own in owns]
        budgets = [
            planner.budget(survival[own], known[own], available)
            for planner, own, available in zip(self._planners, owns, availables, strict=True)
        ]
        if self._to_fullest:
            fullest = max(budget.rows for budget in budgets)
            budgets = [share(fullest, len(available), available) for available in availables]
        lengths = np.zeros(len(known), np.int64)
        for planner, own, available, budget in zip(
            self._planners, owns, availables, budgets, strict=True
        ):
            lengths[own] = _lengths(planner.lengths, trace, step, own, available, budget)
        return Choice(lengths, np.array([budget.rows for budget in budgets]))

    def observe(self, rows: np.ndarray, seconds: np.ndarray) -> None:
        """Tell each planner its own step."""
        for planner, n, time in zip(self._planners, rows, seconds, strict=True):
            planner.observe(int(n), float(time))


class Agreed:
    """Ranks that vote: each says what it expects, all take the same size of step and fill it."""

    def __init__(self, costs: CostTable, max_drafts: int, full_every: int = 100) -> None:
        """Take the table that all ranks share.

        Args:
            costs: of the device.
            max_drafts: of a block.
            full_every: every so many steps, by their number, all ranks verify everything; 0 never.
        """
        self._costs = costs
        self._tiers = np.array(costs.graph_rows)
        self._max_drafts = max_drafts
        self._full_every = full_every

    @property
    def drafts(self) -> bool:
        """Drafts are always made."""
        return True

    def choose(self, trace: Trace, step: int) -> Choice:
        """Gather each rank's gains, agree, and let each rank fill the step."""
        survival, known = trace.records(step)
        owns = _ranks(trace)
        availables = [_available(own, self._max_drafts) for own in owns]
        requests = np.diff(trace.first_row)
        drafts = requests * self._max_drafts
        if self._full_every and step % self._full_every == 0:
            rows = self._costs.tier(int((requests + drafts).max()))
        else:
            told = [
                gains(survival[own], known[own], available, self._tiers)
                for own, available in zip(owns, availables, strict=True)
            ]
            rows = agree(np.stack(told), requests, drafts, self._tiers, self._costs)
        lengths = np.zeros(len(known), np.int64)
        for own, available in zip(owns, availables, strict=True):
            budget = share(rows, len(available), available)
            lengths[own] = _lengths(best_lengths, trace, step, own, available, budget)
        return Choice(lengths, np.full(trace.num_ranks, rows))

    def observe(self, rows: np.ndarray, seconds: np.ndarray) -> None:
        """Learn nothing: a table that ranks correct on their own is one they no longer share."""


class EarlyStop:
    """The published rule on each rank: it looks at the current step, and waits for it.

    Whatever it admits, a step is padded to a captured size with rows that do nothing.
    """

    def __init__(self, believed: CostTable, costs: CostTable, max_drafts: int) -> None:
        """Take the curve that the rule is told, and the table of the device."""
        self._believed = believed
        self._costs = costs
        self._max_drafts = max_drafts

    @property
    def drafts(self) -> bool:
        """Drafts are always made."""
        return True

    def choose(self, trace: Trace, step: int) -> Choice:
        """Walk each rank's drafts from the best on until speed no longer rises."""
        lengths = np.zeros(trace.survival.shape[1], np.int64)
        rows = np.zeros(trace.num_ranks, np.int64)
        for rank, own in enumerate(_ranks(trace)):
            available = _available(own, self._max_drafts)
            lengths[own] = early_stop_lengths(trace.survival[step, own], available, self._believed)
            rows[rank] = self._costs.tier(len(available) + int(lengths[own].sum()))
        return Choice(lengths, rows)

    def observe(self, rows: np.ndarray, seconds: np.ndarray) -> None:
        """Learn nothing: the rule as published has a fixed curve."""


def check_policy(name: str, num_drafts: int) -> None:
    """Check the name of a policy.

    Raises:
        SettingError: it is unknown, or its number is out of range.
    """
    _parse(name, num_drafts)


def make_policy(name: str, costs: CostTable, ranks: int, num_drafts: int) -> Policy:
    """Return a policy with fresh planners.

    Args:
        name: see the top of the module.
        costs: of the device.
        ranks: of the group.
        num_drafts: of a block.

    Raises:
        SettingError: the name is unknown, or its number is out of range.
    """
    kind, number = _parse(name, num_drafts)
    if kind == "group-k":
        return Agreed(costs, num_drafts)
    if kind == "algorithm-1":
        return EarlyStop(costs, costs, num_drafts)
    if kind == "algorithm-1-smooth":
        return EarlyStop(replace(costs, graph_rows=()), costs, num_drafts)
    planners: list[Planner]
    if kind in ("threshold", "group-threshold"):
        planners = [ThresholdPlanner(number, costs) for _ in range(ranks)]
    elif kind in ("delayed", "own-k"):
        planners = [DelayedPlanner(costs) for _ in range(ranks)]
    else:
        planners = [FixedPlanner(costs) for _ in range(ranks)]
    max_drafts = int(number) if kind in ("off", "fixed") else num_drafts
    return EachRank(planners, costs, max_drafts, to_fullest=kind == "group-threshold")


def _parse(name: str, num_drafts: int) -> tuple[str, float]:
    """Return the kind of a policy and its number, 0 where it has none."""
    if name in POLICY_NAMES and not name.endswith(("-N", "-X")):
        return name, 0.0
    kind, _, text = name.rpartition("-")
    if kind == "fixed":
        if not text.isdecimal() or not 1 <= int(text) <= num_drafts:
            raise _refused(name, f"fixed-1 .. fixed-{num_drafts}")
        return kind, float(text)
    if kind in ("threshold", "group-threshold"):
        try:
            threshold = float(text)
        except ValueError:
            threshold = -1.0
        if not 0 <= threshold <= 1:
            raise _refused(name, f"{kind}-0 .. {kind}-1")
        return kind, threshold
    raise _refused(name, ", ".join(POLICY_NAMES))


def _refused(name: str, allowed: str) -> SettingError:
    return SettingError(f"The policy {name!r} is unknown; allowed: {allowed}. Choose another one.")


def _lengths(
    choose: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    trace: Trace,
    step: int,
    own: slice,
    available: np.ndarray,
    budget: Budget,
) -> np.ndarray:
    """Fill a budget from what is current."""
    if budget.is_full:
        return available
    current = torch.from_numpy(trace.survival[step, own])
    lengths: np.ndarray = choose(current, torch.from_numpy(available), budget.total).numpy()
    return lengths


def _ranks(trace: Trace) -> list[slice]:
    first = trace.first_row.tolist()
    return [slice(start, stop) for start, stop in pairwise(first)]


def _available(own: slice, max_drafts: int) -> np.ndarray:
    return np.full(own.stop - own.start, max_drafts, np.int64)
