"""Which drafts a fake device verifies where a plan leaves the choice to it, and what it goes by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from deepinfer_core.plans import StepPlan, StepRows
from deepinfer_core.testing.fake_memory import ragged
from deepinfer_core.testing.reference import mix_rows

__all__ = ["Confidence", "best_lengths", "made_up_confidence", "survival_of", "trimmed"]

# uid [R, 1] and position [R, g] of drafts, int64 -> chances [R, g] that each passes if those before
# it do
Confidence = Callable[[np.ndarray, np.ndarray], np.ndarray]

_SALT = np.full(1, 0xC0FF, dtype=np.uint64)
_NUM_ROWS, _NUM_DRAFTS = StepRows.FIELDS.index("num_rows"), StepRows.FIELDS.index("num_drafts")


def made_up_confidence(uid: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return 0, 1/4, 1/2, 3/4 or 1 for each draft, by its request and place: ties are common."""
    drawn = mix_rows(mix_rows(_SALT, uid), position) % np.uint64(5)
    return drawn.astype(np.float32) / np.float32(4)


def survival_of(confidence: np.ndarray) -> np.ndarray:
    """Return the products of chances [R, g] from the first draft on, float32; NaN counts as 0."""
    found = np.nan_to_num(confidence.astype(np.float32), nan=0.0)
    for number in range(1, found.shape[1]):
        found[:, number] *= found[:, number - 1]
    return found


def best_lengths(survival: np.ndarray, available: np.ndarray, total: int) -> np.ndarray:
    """Return how many drafts of each sequence are among the best ones: [R] int64.

    Ties go to the smaller draft number, then to the sequence that comes first.

    Args:
        survival: [R, g] float32, non-increasing in a row.
        available: [R] int64, drafts that may be chosen.
        total: how many are; at most those that are available.
    """
    row, number = ragged(available)
    order = np.lexsort((row, number, -survival[row, number]))
    return np.bincount(row[order[:total]], minlength=len(available))


def trimmed(plan: StepPlan, lengths: np.ndarray) -> StepPlan:
    """Return the step that runs when so many drafts [R] of each sequence are verified."""
    row, place = ragged(plan.rows.num_rows)
    data = plan.rows.data.copy()
    data[_NUM_ROWS], data[_NUM_DRAFTS] = 1 + lengths, lengths
    return replace(plan, rows=StepRows(data), token_ids=plan.token_ids[place <= lengths[row]])
