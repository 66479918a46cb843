"""Stand-ins for what chooses among drafts: budgets by chance, or as a test wants them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from deepinfer_core.interfaces import Acceptor, VerifyBudget, VerifyPlanner
from deepinfer_core.testing.fake_trim import best_lengths

__all__ = [
    "Asked",
    "Budget",
    "ChosenPlanner",
    "PlainCalibration",
    "RandomPlanner",
    "RecordingPlanner",
    "ScriptedVerifier",
]


@dataclass(frozen=True)
class Budget:
    """See `VerifyBudget`."""

    total: int
    rows: int


class ChosenPlanner:
    """Verifies as many drafts as a test says; it picks them on the host, which waits for it.

    Args:
        choose: how many of all drafts that are available, none below 0 and all above them.
        tier: rows of a step are rounded up to a multiple of it, and filled with drafts.
    """

    def __init__(self, choose: Callable[[int], int], tier: int = 1) -> None:
        """Take what decides."""
        self._choose, self._tier = choose, tier

    def budget(self, survival: np.ndarray, known: np.ndarray, available: np.ndarray) -> Budget:
        """See `VerifyPlanner.budget`; records are not looked at."""
        most = int(available.sum())
        wanted = min(max(self._choose(most), 0), most)
        rows = -(-(len(available) + wanted) // self._tier) * self._tier
        return Budget(min(rows - len(available), most), rows)

    def lengths(self, survival: Tensor, available: Tensor, total: int) -> Tensor:
        """See `VerifyPlanner.lengths`."""
        found = best_lengths(survival.cpu().numpy(), available.cpu().numpy(), total)
        return available.new_tensor(found.tolist()).int()

    def observe(self, rows: int, seconds: float) -> None:
        """See `VerifyPlanner.observe`; times are not looked at."""


class RandomPlanner(ChosenPlanner):
    """Draws budgets from none to all drafts, each of these two in one step of five."""

    def __init__(self, seed: int, tier: int = 1) -> None:
        """Take the seed of the draws, and a tier as of `ChosenPlanner`."""
        draw = random.Random(seed)
        super().__init__(
            lambda most: draw.choice((0, most, *(draw.randint(0, most) for _ in range(3)))), tier
        )


@dataclass(frozen=True)
class Asked:
    """A question for a budget and the answer; arrays as of `VerifyPlanner.budget`, copied."""

    survival: np.ndarray
    known: np.ndarray
    available: np.ndarray
    budget: VerifyBudget


@dataclass
class RecordingPlanner:
    """Hands everything on to another planner and keeps what it was told.

    Attributes:
        asked: questions for budgets, in order. observed: (rows, seconds) of measured steps.
    """

    planner: VerifyPlanner
    asked: list[Asked] = field(default_factory=list)
    observed: list[tuple[int, float]] = field(default_factory=list)

    def budget(
        self, survival: np.ndarray, known: np.ndarray, available: np.ndarray
    ) -> VerifyBudget:
        """See `VerifyPlanner.budget`."""
        found = self.planner.budget(survival, known, available)
        self.asked.append(Asked(survival.copy(), known.copy(), available.copy(), found))
        return found

    def lengths(self, survival: Tensor, available: Tensor, total: int) -> Tensor:
        """See `VerifyPlanner.lengths`."""
        return self.planner.lengths(survival, available, total)

    def observe(self, rows: int, seconds: float) -> None:
        """See `VerifyPlanner.observe`."""
        self.observed.append((rows, seconds))
        self.planner.observe(rows, seconds)


class PlainCalibration:
    """Takes confidences as they are."""

    def apply(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """See `Calibration.apply`."""
        return logits.sigmoid()


@dataclass
class ScriptedVerifier:
    """A verifier of one planner, for drafts that are accepted by the target's own token."""

    planner: VerifyPlanner
    calibration: PlainCalibration = field(default_factory=PlainCalibration)
    error: type[Exception] = ValueError
    has_costs: bool = False

    @staticmethod
    def write_costs(
        path: str,
        samples: Mapping[int, Sequence[float]],
        *,
        fingerprint: Mapping[str, str | int],
    ) -> None:
        """Refuse: nothing is measured for it."""
        raise AssertionError("a scripted verifier has no costs")

    @property
    def acceptor(self) -> Acceptor:
        """Refuse: nobody asks for one but rejection sampling, which this does not do."""
        raise AssertionError("a scripted verifier has no acceptor")
