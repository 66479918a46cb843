"""Windows of several texts, for grammars that know how to fill one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["OneByOne"]


class OneByOne:
    """Base of scripted grammars: `fill_window(rows, drafts)` of each; an error harms no other."""

    @staticmethod
    def fill_windows(
        constraints: Sequence[Any], drafts: Sequence[Sequence[int]], rows: np.ndarray
    ) -> Sequence[int | Exception]:
        """See `TokenConstraint.fill_windows`."""
        taken: list[int | Exception] = []
        first = 0
        for constraint, window in zip(constraints, drafts, strict=True):
            end = first + len(window) + 1
            try:
                taken.append(constraint.fill_window(rows[first:end], window))
            except Exception as error:
                taken.append(error)
            first = end
        return taken
