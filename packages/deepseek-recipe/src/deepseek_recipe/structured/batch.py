"""Masks of many texts at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.matcher import Mask, Matcher, check_rows

__all__ = ["fill_batch"]


def fill_batch(matchers: Sequence[Matcher], rows: Mask) -> dict[int, ConstraintError]:
    """Write the masks of several matchers at once, in native threads.

    Args:
        matchers: all of one vocabulary, none of them twice.
        rows: [len(matchers), words] int32, contiguous; every word is written.

    Returns:
        Place -> what is wrong, for each matcher whose grammar became too complex; its row is 0.

    Raises:
        ConstraintError: the rows do not fit, or the matchers do not go together.
    """
    if not matchers:
        return {}
    vocabulary = matchers[0].vocabulary
    if any(matcher.vocabulary is not vocabulary for matcher in matchers):
        raise ConstraintError("", "the matchers of a batch are of several vocabularies.")
    if len(set(map(id, matchers))) < len(matchers):
        raise ConstraintError("", "a matcher is in the batch twice. Use `fork`.")
    check_rows(rows, len(matchers), vocabulary.num_words)
    num_words = vocabulary.num_words
    # The engine writes rows of its own length.
    exact = rows.shape[-1] == num_words
    target = rows if exact else np.zeros((len(matchers), num_words), np.int32)
    jobs = [
        (matcher.engine, place)
        for place, matcher in enumerate(matchers)
        if not matcher.fill_known(target[place])
    ]
    vocabulary.executor.unsafe_compute_mask_ptr(
        jobs, target.ctypes.data, 4 * num_words, len(matchers)
    )
    failures = {}
    for _, place in jobs:
        matchers[place].masked()
        if (error := matchers[place].failure()) is not None:
            target[place] = 0
            failures[place] = error
    if not exact:
        rows[:, :num_words] = target
        rows[:, num_words:] = 0
    return failures
