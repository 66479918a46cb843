"""Mask rows and token ids as callers give them, checked."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np
from numpy.typing import NDArray

from deepseek_recipe.errors import ConstraintError, shown

__all__ = ["Mask", "check_rows", "checked_rollback", "whole_numbers"]

Mask = NDArray[np.int32]


def check_rows(rows: Mask, num_rows: int | None, num_words: int) -> None:
    """Refuse masks that do not fit: [num_rows, num_words or more], without `num_rows` one row.

    Raises:
        ConstraintError: shape, type or layout is another.
    """
    front = () if num_rows is None else (num_rows,)
    if (
        rows.dtype != np.int32
        or rows.shape[:-1] != front
        or rows.ndim != len(front) + 1
        or rows.shape[-1] < num_words
        or not rows.flags.c_contiguous
        or not rows.flags.writeable
    ):
        raise ConstraintError(
            "",
            f"the mask is {rows.dtype} {list(rows.shape)}; allowed: int32 "
            f"{[*front, num_words]} or wider, contiguous and writeable.",
        )


def whole_numbers(values: Sequence[int]) -> list[int]:
    """Return whole numbers, of any type that has them, as Python's.

    Raises:
        ConstraintError: one is something else.
    """
    try:
        if not any(isinstance(value, bool) for value in values):
            return [index(value) for value in values]
    except TypeError:
        pass
    raise ConstraintError("", f"{shown(values)} holds something else than whole numbers.")


def checked_rollback(count: int, length: int) -> int:
    """Return how many tokens are to be taken back.

    Raises:
        ConstraintError: it is no number from 0 to `length`, all that were accepted.
    """
    [count] = whole_numbers([count])
    if not 0 <= count <= length:
        raise ConstraintError(
            "", f"roll-back of {shown(count)} tokens; allowed: 0 to {length}, all so far."
        )
    return count
