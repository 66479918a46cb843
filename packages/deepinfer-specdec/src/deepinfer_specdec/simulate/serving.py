"""What a step costs, and what a group of ranks gets done under a policy.

A rank has R requests. A step of B rows (R and the drafts that are verified) takes

    fixed + row_share * tiles(B) / tiles(full) + step_share * steps(B)

in units of a full-length step at the operating point: rows are computed in tiles, and every
`tiles_per_step` tiles the time jumps. All ranks of a group end a step together, with the slowest;
"alone" is the same rank when it waits for nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from deepinfer_specdec.cost import CostTable
from deepinfer_specdec.errors import SettingError
from deepinfer_specdec.simulate.acceptance import RECORD_AGE, Trace
from deepinfer_specdec.simulate.measured import MeasuredPoint
from deepinfer_specdec.simulate.policies import Choice, Policy

__all__ = ["OperatingPoint", "Outcome", "simulate"]


@dataclass(frozen=True)
class OperatingPoint:
    """The time of a step as a function of its rows.

    Attributes:
        requests: of a rank at the point where the shares were measured.
        num_drafts: of a block, g.
        row_share: share of a full-length step's time there that is proportional to tiles.
        tile: rows that are computed together.
        tiles_per_step, step_share: every so many tiles the time jumps by this share.
        draft_share: share of the time that drafting takes; a step without drafts lacks it.
    """

    requests: int = 60
    num_drafts: int = 5
    row_share: float = 0.39
    tile: int = 32
    tiles_per_step: int = 4
    step_share: float = 0.02
    draft_share: float = 0.06

    def __post_init__(self) -> None:
        """Refuse shares that leave nothing, or less, for the fixed part.

        Raises:
            SettingError: a count is not positive, a share is negative, or they pass 1 together.
        """
        for name in ("requests", "num_drafts", "tile", "tiles_per_step"):
            if getattr(self, name) < 1:
                raise SettingError(f"`{name}` is {getattr(self, name)!r}; it must be at least 1.")
        for name in ("row_share", "step_share", "draft_share"):
            share = getattr(self, name)
            if not (math.isfinite(share) and share >= 0):
                raise SettingError(f"`{name}` is {share!r}; it must be 0 or a share below 1.")
        if self._fixed <= 0:
            raise SettingError(
                "`row_share`, `draft_share` and the jumps of `step_share` take up all of a "
                "full-length step; together they must stay below 1. Choose smaller shares."
            )

    @property
    def _fixed(self) -> float:
        """Share that depends neither on rows nor on drafting."""
        full = self._tiles(self.requests * (1 + self.num_drafts))
        return 1 - self.row_share - self.draft_share - self.step_share * self._jumps(full)

    def _tiles(self, rows: int) -> int:
        return -(-rows // self.tile)

    def _jumps(self, tiles: int) -> int:
        return max(tiles - 1, 0) // self.tiles_per_step

    def seconds(self, rows: int, *, drafting: bool = True) -> float:
        """Return the time of a step, a full-length step of the operating point being 1.

        Args:
            rows: of the step, all that are computed.
            drafting: whether the step makes drafts.
        """
        tiles = self._tiles(rows)
        full = self._tiles(self.requests * (1 + self.num_drafts))
        seconds = self._fixed + self.row_share * tiles / full + self.step_share * self._jumps(tiles)
        return seconds + self.draft_share if drafting else seconds

    def check_load(self, requests: int) -> None:
        """Any load can be simulated."""

    def describe(self) -> str:
        """Return one sentence about the times."""
        return (
            f"Steps: {self.row_share:.0%} of a full-length step of {self.requests} requests in "
            f"tiles of {self.tile} rows, {self.step_share:.0%} more every {self.tiles_per_step} "
            f"tiles; drafting {self.draft_share:.0%}."
        )

    def costs(self, max_rows: int) -> CostTable:
        """Return the table that a profile of this device would give.

        Args:
            max_rows: largest step; every whole number of tiles up to it is a captured size.
        """
        # A table has at least two sizes.
        sizes = tuple(self.tile * (i + 1) for i in range(max(self._tiles(max_rows), 2)))
        return CostTable(
            rows=sizes, seconds=tuple(self.seconds(rows) for rows in sizes), graph_rows=sizes
        )


@dataclass(frozen=True)
class Outcome:
    """What a policy did with a trace.

    Attributes:
        verified: mean drafts verified for a request in a step.
        accepted_len: mean tokens committed for a request in a step, the one after the drafts
            included.
        alone: tokens per unit of time of a mean rank that waits for nobody.
        group: the same of a rank of the group, all ending each step together.
        rows: mean rows of a rank's step, padding included.
        padding: mean share of these rows that is padding.
        full: share of the steps of a rank that verify all drafts.
    """

    verified: float
    accepted_len: float
    alone: float
    group: float
    rows: float
    padding: float
    full: float


def simulate(trace: Trace, policy: Policy, point: OperatingPoint | MeasuredPoint) -> Outcome:
    """Run a policy over a trace.

    Args:
        trace: at least three steps.
        policy: chooses before each step from records two steps old, and within it from what is
            current; told the time of every step after it.
        point: what steps cost.

    Raises:
        SettingError: the trace is too short.
    """
    steps, count, drafts = trace.survival.shape
    if steps <= RECORD_AGE:
        raise SettingError(f"The trace has {steps} steps; it must have more than {RECORD_AGE}.")
    starts, ranks = trace.first_row[:-1], trace.num_ranks
    requests = np.diff(trace.first_row)
    tokens, own_time = np.zeros(ranks), np.zeros(ranks)
    group_time = verified = rows = padding = full = 0.0
    # Before that nothing has a record, which says nothing about a policy.
    for step in range(RECORD_AGE, steps):
        choice = policy.choose(trace, step)
        used = _sums(choice.lengths, starts, requests) + requests
        _check(choice, used, drafts)
        seconds = np.array([point.seconds(int(n), drafting=policy.drafts) for n in choice.rows])
        policy.observe(choice.rows, seconds)
        done = np.minimum(choice.lengths, trace.passed[step])
        tokens += _sums(done, starts, requests) + requests
        own_time += seconds
        group_time += float(seconds.max())
        verified += float(choice.lengths.sum())
        rows += float(choice.rows.mean())
        padding += float((choice.rows - used).sum() / choice.rows.sum())
        full += float((used == requests * (1 + drafts)).mean())
    ran = steps - RECORD_AGE
    return Outcome(
        verified=verified / (ran * count),
        accepted_len=float(tokens.sum()) / (ran * count),
        alone=float((tokens / own_time).mean()),
        group=float(tokens.sum()) / ranks / group_time,
        rows=rows / ran,
        padding=padding / ran,
        full=full / ran,
    )


def _sums(values: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sum of each rank's rows; a rank may have none."""
    running = np.concatenate([[0], values.cumsum()])
    sums: np.ndarray = running[starts + counts] - running[starts]
    return sums


def _check(choice: Choice, used: np.ndarray, drafts: int) -> None:
    """Stop at a choice that no device could run: our fault, not the caller's."""
    assert (choice.lengths >= 0).all() and (choice.lengths <= drafts).all(), "length out of range"
    assert (choice.rows >= used).all(), f"steps of {choice.rows} rows cannot hold {used}"
