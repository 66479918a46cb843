"""What a world of the state-machine test is made of, and a scheduler that tells what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_core.cache.block_pool import Owner
from deepinfer_core.plans import SequenceMetadata, StepKind, StepPlan, StepResult
from deepinfer_core.scheduler import Scheduler, SchedulerLimits, Scrub
from deepinfer_core.scheduler.cost_model import CostModel
from deepinfer_core.scheduler.decision import Ballot
from deepinfer_core.scheduler.settlement import Settlement
from deepinfer_core.testing.planners import Asked, RecordingPlanner
from deepinfer_core.testing.world_requests import VOCAB
from deepinfer_core.types import SequenceUpdate

if TYPE_CHECKING:
    from deepinfer_core.testing.world import World

__all__ = [
    "CONFIGS",
    "TIERS",
    "Allocations",
    "Before",
    "Config",
    "Fresh",
    "InjectedFault",
    "Named",
    "Planned",
    "Published",
    "Settled",
    "Ticket",
    "WatchedScheduler",
]

CONFIGS: Mapping[str, tuple[object, ...]] = {
    "blocks": (4, 5, 6, 7, 8, 10, 12, 16, 24, 32),
    "more": (0, 0, 1, 3),
    "slots": (1, 2, 3, 4, 4, 6),
    "chunk": (1, 3, 7, 32),
    "budget": (4, 9, 32),
    "drafts": (0, 0, 1, 2, 3, 7),
    "block_size": (2, 4),
    "growth": (0, 0, 0, 400),
    "stored": (0, 1, 2, 2),
    "cache": (True, True, True, False),
    "step_budget_ns": (0, 0, 1500, 4000),
    "depth": (0, 1, 2, 2, 3),  # 2 at most in the loop
}
TIERS = (0, 0, 1, 4)


@dataclass(frozen=True)
class Config:
    """What is drawn for a world.

    `more` blocks are in one of the pools, `depth` is the loop's. Random budgets of drafts, whose
    steps have a multiple of `tier` rows; 0 verifies all.
    """

    blocks: int
    more: int = 0
    slots: int = 4
    chunk: int = 7
    budget: int = 32
    drafts: int = 0
    block_size: int = 4
    growth: int = 0
    stored: int = 0
    cache: bool = True
    step_budget_ns: int = 0
    depth: int = 2
    tier: int = 0

    def limits(self) -> SchedulerLimits:
        """Return the scheduler's limits."""
        return SchedulerLimits(
            block_size=self.block_size,
            num_blocks={"compressed": self.blocks + self.more, "index": self.blocks},
            num_slots=self.slots,
            num_stored=self.stored,
            max_model_len=40,
            max_step_tokens=self.budget,
            max_chunk_tokens=self.chunk,
            window=4,
            history_len=3,
            max_drafts=self.drafts,
            prefix_cache=self.cache,
            step_budget_ns=self.step_budget_ns,
            vocab_size=VOCAB,
            growth_permille=self.growth,
        )


@dataclass(frozen=True)
class Named:
    """Blocks of one sequence that a step may touch: pool -> ids in order of positions."""

    owner: Owner
    meta: SequenceMetadata
    blocks: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Before:
    """What a step was planned on: what the rank wanted, blocks to be had, and the cost model."""

    ballot: Ballot
    available: int
    cost_model: CostModel | None


@dataclass(frozen=True)
class Planned:
    """A launched step, and how things stood when it was planned.

    Args:
        asked: how its drafts were budgeted, if they were.
        records: of each row what a budget may know of it; None for nothing.
    """

    plan: StepPlan
    previous: StepPlan | None
    rows: tuple[Named, ...]
    before: Before
    asked: Asked | None
    records: tuple[np.ndarray | None, ...]


@dataclass(frozen=True)
class Settled:
    """A result just before it is applied; settled: [R] L of each row."""

    planned: Planned
    result: StepResult
    settled: np.ndarray


@dataclass(frozen=True)
class Published:
    """A published block as it was first seen; content: tokens and positions, pool by pool."""

    key: bytes
    blocks: tuple[int, ...]
    content: tuple[tuple[int, ...], ...]


@dataclass
class Ticket:
    """A transfer: whose, until when, and which blocks it touches."""

    owner: Owner
    lease_end_ns: int
    blocks: Mapping[str, tuple[int, ...]]


class WatchedScheduler(Scheduler):
    """A scheduler that tells a world what it does."""

    def __init__(
        self, world: World, cost_model: CostModel | None, planner: RecordingPlanner | None
    ) -> None:
        """Start with nothing to do."""
        super().__init__(world.limits, cost_model, world.revoke, planner)
        self._world, self._asked = world, [] if planner is None else planner.asked

    def plan(self, kind: StepKind | None = None) -> StepPlan | None:
        """See `Scheduler.plan`."""
        model = None if self._cost is None else self._cost.model
        self._asked.clear()
        before = Before(self.ballot(), self._roster.prefixes.num_available, model)
        plan = super().plan(kind)
        if plan is not None:
            self._world.planned(plan, before, self._asked[-1] if self._asked else None)
        return plan

    def settle(self, plan: StepPlan, result: StepResult) -> Settlement:
        """See `Scheduler.settle`."""
        self._world.settling(plan, result)
        settlement = super().settle(plan, result)
        self._world.settled(plan)
        return settlement

    def fail(self, plan: StepPlan, error: str) -> tuple[SequenceUpdate, ...]:
        """See `Scheduler.fail`."""
        self._world.failing(plan)
        return super().fail(plan, error)

    def scrub(self) -> Scrub:
        """See `Scheduler.scrub`; without what the world has taken out of use."""
        scrub = super().scrub()
        blocks = {
            pool: tuple(set(ids) - set(self._world.squeezed.get(pool, ())))
            for pool, ids in scrub.blocks.items()
        }
        return Scrub(blocks, scrub.slots)

    def scrubbed(self, scrub: Scrub) -> None:
        """See `Scheduler.scrubbed`."""
        self._world.fresh.scrubs.append(scrub)
        super().scrubbed(scrub)


@dataclass
class Fresh:
    """What happened since the invariants were checked last."""

    planned: list[Planned] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)
    scrubs: list[Scrub] = field(default_factory=list)


class InjectedFault(RuntimeError):
    """An error that no code expects."""


class Allocations:
    """Stands before all pools of a scheduler and lets an allocation fail when told to."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Let everything pass."""
        self._error: Exception | None = None
        self._pool = self._left = 0
        pools: list[Any] = [*scheduler._roster.pools.pools.values(), scheduler._roster.slots]
        for number, pool in enumerate(pools):
            pool.allocate_each = partial(self._allocate, number, pool.allocate_each)

    def fail(self, pool: int, nth: int, error: Exception) -> None:
        """Let the nth allocation from now on of a pool raise an error; the slots come last."""
        self._pool, self._left, self._error = pool, nth, error

    def calm(self) -> None:
        """Let everything pass."""
        self._error = None

    def _allocate(self, number: int, real: Any, *args: Any) -> np.ndarray:
        if self._error is not None and number == self._pool:
            self._left -= 1
            if not self._left:
                error, self._error = self._error, None
                raise error
        found: np.ndarray = real(*args)
        return found
