"""Counters of verified drafts: how many, how many stood, whether they were as likely as told."""

from __future__ import annotations

import numpy as np

from deepinfer_core.metrics.families import Family, FamilyKind, counter, gauge
from deepinfer_core.plans import StepPlan, StepResult

__all__ = ["SpeculationMetrics"]

NUM_BINS = 15  # of equal width, of predicted chances


class SpeculationMetrics:
    """What became of predictions.

    Survival of a draft is the chance that it and all drafts before it are accepted. Calibration
    errors count steps alone at which all drafts were verified: elsewhere what is unlikely is not
    tried, and records are one-sided.
    """

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._steps = self._full_steps = 0
        self._rows = self._unknown_rows = 0
        self._predicted, self._accepted = 0.0, 0
        # by position of the draft and bin of its survival: how often, sum predicted, how many stood
        self._bins = np.zeros((3, 0, NUM_BINS))

    def observe(
        self,
        plan: StepPlan,
        result: StepResult,
        survival: np.ndarray,
        known: np.ndarray,
        whole: np.ndarray | None = None,
    ) -> None:
        """Take a settled decode step with drafts.

        Args:
            survival: [R, g] float32, as told when they were drafted. known: [R] bool.
            whole: [R] bool, False where the sequence ended before or inside its run; None for none.
        """
        available, verified = plan.rows.num_drafts, result.num_verified
        sound = (result.num_tokens > 0) & (available > 0)
        if whole is not None:
            sound &= whole
        if not sound.any():
            return
        self._steps += 1
        self._full_steps += not plan.trims
        self._rows += int(sound.sum())
        self._unknown_rows += int((sound & ~known).sum())
        sound &= known
        survival, verified = survival[sound], verified[sound]
        accepted = result.num_tokens[sound] - 1
        number = np.arange(survival.shape[1])
        tried = number < verified[:, None]
        self._predicted += float(survival[tried].sum(dtype=np.float64))
        self._accepted += int(accepted.sum())
        if not plan.trims:
            self._count(survival, tried, number < accepted[:, None])

    def _count(self, survival: np.ndarray, tried: np.ndarray, stood: np.ndarray) -> None:
        size = survival.shape[1]
        if size > self._bins.shape[1]:
            self._bins = np.pad(self._bins, ((0, 0), (0, size - self._bins.shape[1]), (0, 0)))
        row, place = tried.nonzero()
        chance = survival[row, place].astype(np.float64)
        bins = np.minimum((chance * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        for sums, values in zip(
            self._bins, (np.ones_like(chance), chance, stood[row, place]), strict=True
        ):
            np.add.at(sums, (place, bins), values)

    def families(self) -> dict[str, Family]:
        """Return all values by name; nothing before a draft was verified."""
        if not self._steps:
            return {}
        count, predicted, stood = self._bins
        seen = count.sum(1)
        error = np.abs(predicted - stood).sum(1) / np.maximum(seen, 1)
        return {
            "verify_steps": Family(
                FamilyKind.COUNTER,
                "Decode steps with drafts: `full` verified all, `trimmed` fewer.",
                ("length",),
                {("full",): self._full_steps, ("trimmed",): self._steps - self._full_steps},
            ),
            "rows_without_survival": counter(
                self._unknown_rows, "Verified sequences whose drafts came without a chance."
            ),
            "predicted_accepted_ratio": gauge(
                self._predicted / max(self._accepted, 1),
                "Drafts predicted to be accepted over those accepted; 1 is calibrated.",
            ),
            "survival_ece": Family(
                FamilyKind.GAUGE,
                "Expected calibration error of the survival of a draft, by its position.",
                ("position",),
                {(str(place),): float(error[place]) for place in np.flatnonzero(seen)},
            ),
        }
