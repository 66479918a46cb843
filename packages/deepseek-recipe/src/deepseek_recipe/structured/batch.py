"""Masks of many texts at once, in native threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.rows import Mask, check_rows, whole_numbers

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from deepseek_recipe.structured.vocabulary import TokenVocabulary

__all__ = ["fill_batch", "fill_windows"]


class Windowed(Protocol):
    """What `Matcher` and `ReplyMatcher` have, which say what it means."""

    @property
    def vocabulary(self) -> TokenVocabulary:
        """Whose tokens these are."""

    @property
    def engine(self) -> LLMatcher:
        """The mask engine's part of the state; asked for only where `fill_known` is False."""

    def fill_known(self, row: Mask) -> bool:
        """Write the mask if that does not need the engine; return whether it was written."""

    def masked(self) -> None:
        """Take note that the engine has made the mask of this place."""

    def failure(self) -> ConstraintError | None:
        """Return what has gone wrong for good, if something has."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance; return how many were allowed."""

    def fork(self) -> Self:
        """Return an independent copy."""


def fill_batch(matchers: Sequence[Windowed], rows: Mask) -> dict[int, ConstraintError]:
    """Write the masks of several matchers.

    Args:
        matchers: all of one vocabulary, none of them twice.
        rows: [len(matchers), words] int32, contiguous; every word is written.

    Returns:
        Place -> what is wrong, for each matcher whose grammar became too complex; its row is 0.

    Raises:
        ConstraintError: the rows do not fit, or the matchers do not go together.
    """
    found = fill_windows(matchers, [()] * len(matchers), rows)
    return {place: each for place, each in enumerate(found) if isinstance(each, ConstraintError)}


def fill_windows(
    matchers: Sequence[Windowed], drafts: Sequence[Sequence[int]], rows: Mask
) -> list[int | ConstraintError]:
    """Write the masks of several windows, as `Matcher.fill_window` does of one.

    Args:
        matchers: all of one vocabulary, none of them twice; they stay where they are.
        drafts: proposed tokens of each.
        rows: [sum of len(drafts) + 1, words] int32, contiguous: the windows one after the other.

    Returns:
        For each how many drafts are allowed, or what is wrong where its grammar became too complex;
        its rows are 0 then.

    Raises:
        ConstraintError: the rows do not fit, or the matchers do not go together.
    """
    if not matchers:
        return []
    vocabulary = matchers[0].vocabulary
    if any(matcher.vocabulary is not vocabulary for matcher in matchers):
        raise ConstraintError("", "the matchers of a batch are of several vocabularies.")
    if len(set(map(id, matchers))) < len(matchers):
        raise ConstraintError("", "a matcher is in the batch twice. Use `fork`.")
    if len(drafts) != len(matchers):
        raise ConstraintError("", f"{len(drafts)} lists of drafts for {len(matchers)} matchers.")
    windows = [whole_numbers(each) if each else [] for each in drafts]
    check_rows(rows, len(windows) + sum(map(len, windows)), vocabulary.num_words)
    num_words = vocabulary.num_words
    # The engine writes rows of its own length.
    exact = rows.shape[-1] == num_words
    target = rows if exact else np.zeros((len(rows), num_words), np.int32)
    taken: list[int | ConstraintError] = [0] * len(matchers)
    firsts = np.cumsum([0, *(len(each) + 1 for each in windows[:-1])]).tolist()
    places = list(enumerate(firsts))  # of matchers that have a mask to come: number, row
    ahead = [
        each.fork() if each_window else each
        for each, each_window in zip(matchers, windows, strict=True)
    ]
    while places:
        jobs, asked = [], []
        for number, row in places:
            if not ahead[number].fill_known(target[row]):
                jobs.append((ahead[number].engine, row))
                asked.append(number)
        if jobs:
            vocabulary.executor.unsafe_compute_mask_ptr(
                jobs, target.ctypes.data, 4 * num_words, len(target)
            )
        for number in asked:
            ahead[number].masked()
            if (error := ahead[number].failure()) is not None:
                taken[number] = error
        places = [
            (number, row + 1)
            for number, row in places
            if windows[number] and _step(ahead[number], windows[number], taken, number)
        ]
    for first, window, count in zip(firsts, windows, taken, strict=True):
        if isinstance(count, ConstraintError):
            target[first : first + len(window) + 1] = 0
        elif window:
            target[first + count + 1 : first + len(window) + 1] = 0
    if not exact:
        rows[:, :num_words] = target
        rows[:, num_words:] = 0
    return taken


def _step(
    matcher: Windowed,
    window: Sequence[int],
    taken: list[int | ConstraintError],
    number: int,
) -> bool:
    """Accept the next draft of a window; return whether there is one and it was allowed."""
    count = taken[number]
    if isinstance(count, ConstraintError) or count == len(window):
        return False
    try:
        allowed = matcher.accept([window[count]]) == 1
    except ConstraintError as error:
        taken[number] = error
        return False
    if allowed:
        taken[number] = count + 1
    return allowed
