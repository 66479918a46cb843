"""What drafters said of each sequence, kept beside the scheduler's own records.

A budget may know of a sequence what the steps before its last launched one told: the drafts of the
last one are about to be verified.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_core.cache.block_pool import Owner
from deepinfer_core.plans import RowStatus, StepPlan, StepResult

__all__ = ["Records"]

_KEPT = 6  # of a sequence: more than steps are unsettled at a time


@dataclass
class _Record:
    """What a launched step says of the drafts it makes of a sequence; None until it is settled."""

    step_seq: int
    survival: np.ndarray | None = None


class Records:
    """Records of sequences by owner: another generation starts without any."""

    def __init__(self) -> None:
        """Know nothing."""
        self._of: dict[int, tuple[Owner, list[_Record]]] = {}  # by uid

    def earlier(self, owner: Owner) -> np.ndarray | None:
        """Return the newest survival [g] that a step before the last launched one has told."""
        told = [record.survival for record in self._kept(owner)[:-1]]
        return next((each for each in reversed(told) if each is not None), None)

    def launched(self, plan: StepPlan) -> None:
        """Note who drafts in a step."""
        for owner in _drafting(plan):
            if owner is None:
                continue
            kept = self._kept(owner)
            self._of[owner.uid] = owner, [*kept[-_KEPT:], _Record(plan.output.step_seq)]

    def settled(self, plan: StepPlan, result: StepResult) -> None:
        """Note what a step has told."""
        if result.survival is None:
            return
        for row, owner in enumerate(_drafting(plan)):
            if owner is None or result.status[row] != RowStatus.OK:
                continue
            for record in self._kept(owner):
                if record.step_seq == result.step_seq:
                    record.survival = result.survival[row].copy()

    def _kept(self, owner: Owner) -> list[_Record]:
        who, records = self._of.get(owner.uid, (owner, []))
        return records if who == owner else []


def _drafting(plan: StepPlan) -> list[Owner | None]:
    """Return whose drafts a step makes, None for rows that sample nothing."""
    rows = plan.rows
    pairs = zip(rows.uid.tolist(), rows.generation.tolist(), rows.samples.tolist(), strict=True)
    return [Owner(uid, generation) if samples else None for uid, generation, samples in pairs]
