"""`ReplyGrammar`: a whole reply, free at its front: in reasoning, and in an answer before calls.

    phase                     ends with               allowed
    reasoning                 </think> (id)           all but the end and the mark of calls
    answer, calls may follow  the mark of calls (id)  all; the mark only behind `<`
    constrained               the grammar's end       what the grammar allows

Only the last phase asks the mask engine. A draft window may cross any of these borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.batch import fill_windows
from deepseek_recipe.structured.grammar import Grammar
from deepseek_recipe.structured.matcher import Matcher
from deepseek_recipe.structured.rows import Mask, check_rows, checked_rollback, whole_numbers
from deepseek_recipe.structured.vocabulary import TokenVocabulary

__all__ = ["Free", "ReplyGrammar", "ReplyMatcher"]


@dataclass(frozen=True)
class Free:
    """A phase in which the text is free.

    Attributes:
        until: id of the token that ends the phase.
        behind: what the token before that one must end with, bytes; empty for anything.
        forbidden: ids that are not allowed in it.
    """

    until: int
    behind: bytes = b""
    forbidden: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ReplyGrammar:
    """A reply: free phases, then a grammar. May be used from several threads.

    Attributes:
        free: phases in front, in order.
        grammar: of what follows them.
        vocabulary: whose tokens these are.
    """

    free: tuple[Free, ...]
    grammar: Grammar
    vocabulary: TokenVocabulary

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the constraint does not constrain the text (annotations)."""
        return self.grammar.warnings

    def matcher(self) -> ReplyMatcher:
        """Return a matcher at the beginning of a reply."""
        return ReplyMatcher(self)

    def fault_of(self, text: str) -> str | None:
        """Return why the finished text of the constrained phase is wrong; see `Grammar`."""
        return self.grammar.fault_of(text)

    @cached_property
    def masks(self) -> tuple[tuple[Mask, Mask], ...]:
        """Masks of each free phase: where it cannot end, and where it can; [words] int32 each."""
        return tuple(
            (
                _all_but(self.vocabulary, phase.forbidden | {phase.until}),
                _all_but(self.vocabulary, phase.forbidden),
            )
            for phase in self.free
        )


class ReplyMatcher:
    """The state of one reply. Not for several threads at once.

    A token's mask bit is set exactly when `accept` takes it.
    """

    fill_windows = staticmethod(fill_windows)

    def __init__(self, grammar: ReplyGrammar) -> None:
        """Start a reply; `ReplyGrammar.matcher` makes these."""
        self._grammar = grammar
        self._borders: list[int] = []  # tokens up to the end of each phase behind us
        self._free: list[int] = []  # tokens of free phases
        self._ended = False  # the last of them ended the reply
        self._inner: Matcher | None = None
        if not grammar.free:
            self._inner = grammar.grammar.matcher()

    @property
    def vocabulary(self) -> TokenVocabulary:
        """Whose tokens these are."""
        return self._grammar.vocabulary

    @property
    def engine(self) -> LLMatcher:
        """The mask engine's part of the state, in the last phase."""
        assert self._inner is not None, "free text does not need the engine"
        return self._inner.engine

    @property
    def num_accepted(self) -> int:
        """Accepted tokens that were not rolled back."""
        return len(self._free) + (0 if self._inner is None else self._inner.num_accepted)

    @property
    def ended(self) -> bool:
        """Whether an end-of-sequence id was accepted."""
        return self._ended if self._inner is None else self._inner.ended

    @property
    def done(self) -> bool:
        """Whether the grammar allows nothing but the end, or has ended."""
        return self._ended if self._inner is None else self._inner.done

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as far as there is no choice."""
        return [] if self._inner is None else self._inner.forced()

    def fill(self, mask_row: Mask) -> None:
        """Write the allowed tokens, as `Matcher.fill`."""
        if self._inner is not None:
            self._inner.fill(mask_row)
            return
        check_rows(mask_row, None, self.vocabulary.num_words)
        self._fill_free(mask_row)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over the allowed tokens at the front; return how many they are.

        Raises:
            ConstraintError: as `Matcher.accept`.
        """
        ids = whole_numbers(token_ids)
        for place, token_id in enumerate(ids):
            if self._inner is not None:
                return place + self._inner.accept(ids[place:])
            if not self._accept_free(token_id):
                return place
        return len(ids)

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens; an accepted end counts as one.

        Raises:
            ConstraintError: fewer were accepted.
        """
        count = checked_rollback(count, self.num_accepted)
        inside = 0 if self._inner is None else min(count, self._inner.num_accepted)
        count -= inside
        if self._inner is not None and not count:
            self._inner.rollback(inside)
        if count:
            del self._free[-count:]
            self._ended = False
            while self._borders and self._borders[-1] > len(self._free):
                self._borders.pop()
                self._inner = None

    def fork(self) -> ReplyMatcher:
        """Return an independent copy."""
        copy = ReplyMatcher(self._grammar)
        copy._borders, copy._free = self._borders.copy(), self._free.copy()
        copy._ended = self._ended
        copy._inner = None if self._inner is None else self._inner.fork()
        return copy

    def fill_window(self, rows: Mask, drafts: Sequence[int]) -> int:
        """Write the masks before each draft and behind the last one, as `Matcher.fill_window`."""
        if self._inner is not None:
            return self._inner.fill_window(rows, drafts)
        check_rows(rows, len(drafts) + 1, self.vocabulary.num_words)
        ids = whole_numbers(drafts)
        taken = 0
        while self._inner is None:
            self._fill_free(rows[taken])
            if taken == len(ids) or not self._accept_free(ids[taken]):
                rows[taken + 1 :] = 0
                break
            taken += 1
        allowed = taken
        if self._inner is not None:
            allowed += self._inner.fill_window(rows[taken:], ids[taken:])
        self.rollback(taken)
        return allowed

    def fill_known(self, row: Mask) -> bool:
        """Write the mask if that does not need the engine; return whether it was written."""
        if self._inner is not None:
            return self._inner.fill_known(row)
        self._fill_free(row)
        return True

    def masked(self) -> None:
        """Take note that the engine has made the mask of this place."""
        if self._inner is not None:
            self._inner.masked()

    def failure(self) -> ConstraintError | None:
        """Return what has gone wrong for good, if something has."""
        return None if self._inner is None else self._inner.failure()

    def _fill_free(self, row: Mask) -> None:
        row[:] = 0
        if not self._ended:
            shut, open_ = self._grammar.masks[len(self._borders)]
            row[: len(shut)] = open_ if self._can_pass() else shut

    def _can_pass(self) -> bool:
        """Return whether the token that ends this phase may come now."""
        behind = self._grammar.free[len(self._borders)].behind
        if not behind:
            return True
        start = self._borders[-1] if self._borders else 0
        return len(self._free) > start and self.vocabulary.token_bytes(self._free[-1]).endswith(
            behind
        )

    def _accept_free(self, token_id: int) -> bool:
        phase = self._grammar.free[len(self._borders)]
        if (
            self._ended
            or not 0 <= token_id < self.vocabulary.size
            or token_id in phase.forbidden
            or (token_id == phase.until and not self._can_pass())
        ):
            return False
        self._free.append(token_id)
        if token_id == phase.until:
            self._borders.append(len(self._free))
            if len(self._borders) == len(self._grammar.free):
                self._inner = self._grammar.grammar.matcher()
        elif token_id in self.vocabulary.eos_ids:
            self._ended = True
        return True


def _all_but(vocabulary: TokenVocabulary, forbidden: frozenset[int]) -> Mask:
    bits = np.zeros(32 * vocabulary.num_words, np.bool_)
    bits[: vocabulary.size] = True
    bits[list(forbidden)] = False
    return np.packbits(bits, bitorder="little").view(np.int32)
