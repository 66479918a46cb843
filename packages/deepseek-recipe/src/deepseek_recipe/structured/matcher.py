"""`Matcher`: where one text stands in its grammar; masks, advance and roll-back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.batch import fill_windows
from deepseek_recipe.structured.rows import Mask, check_rows, checked_rollback, whole_numbers
from deepseek_recipe.structured.vocabulary import TokenVocabulary

__all__ = ["Matcher"]

# Bytes without a choice that are still a constraint and not an attack: finding the tokens of this
# many takes 40 ms.
_MAX_FORCED_BYTES = 32_768


class Matcher:
    """The state of one text under a grammar.

    Not for several threads at once; forks are independent of one another. A token's mask bit is set
    exactly when `accept` takes it. Where the grammar forces a text, that is the one token with
    which the tokenizer itself would begin that text.

    Attributes:
        engine: the mask engine's part of the state, for `fill_batch`.
        vocabulary: whose tokens these are.
    """

    fill_windows = staticmethod(fill_windows)

    def __init__(self, origin: LLMatcher, vocabulary: TokenVocabulary) -> None:
        """Begin a text; `Grammar.matcher` makes these.

        Args:
            origin: the engine's state at the beginning, which is copied and left alone.
            vocabulary: whose tokens these are.
        """
        self.engine = origin.deep_copy()
        self.vocabulary = vocabulary
        self._origin = origin
        self._ids: list[int] = []  # accepted tokens, the end left out
        self._ended = False  # the end was accepted; the engine does not know it
        # Runs of tokens without a choice, and the length at which each begins. Finding one takes
        # time by the length of the forced text, so it is done once. All are kept: after a roll-back
        # into a run its rest must be what it was, and from the middle of a text the tokenizer may
        # see other tokens.
        self._runs: list[tuple[int, list[int]]] = []
        self._free_at = -1  # a length at which there is known to be a choice
        self._masked_at = -1  # a length at which the engine has made the mask
        self._refusal: ConstraintError | None = None

    @property
    def num_accepted(self) -> int:
        """Accepted tokens that were not rolled back."""
        return len(self._ids) + self._ended

    @property
    def ended(self) -> bool:
        """Whether an end-of-sequence id was accepted."""
        return self._ended

    @property
    def can_end(self) -> bool:
        """Whether an end-of-sequence id is allowed now."""
        return not self._ended and self.engine.is_accepting()

    @property
    def done(self) -> bool:
        """Whether the grammar allows nothing but the end, or has ended."""
        if self._ended or self.engine.is_stopped():
            self._check()
            return True
        if self._masked_at == self.num_accepted or not self.engine.is_accepting():
            return False
        # The engine may find out only with the mask that nothing can follow.
        row = np.empty(self.vocabulary.num_words, np.int32)
        self._fill(row, row.ctypes.data)
        return self.engine.is_stopped()

    def fill(self, mask_row: Mask) -> None:
        """Write the allowed tokens as a bit mask; none are allowed behind the end.

        Args:
            mask_row: int32, contiguous, `num_words` of the vocabulary or more (a model may have
                more logits than its tokenizer has tokens); every word is written. Bit `i % 32` of
                word `i // 32` is token `i`.

        Raises:
            ConstraintError: the row does not fit, or the grammar became too complex.
        """
        check_rows(mask_row, None, self.vocabulary.num_words)
        self._fill(mask_row, mask_row.ctypes.data)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over the allowed tokens at the front; return how many they are.

        A refused token leaves the state unchanged, and so does one behind the end.

        Raises:
            ConstraintError: an id is no whole number, and nothing was taken; or the grammar became
                too complex.
        """
        ids = whole_numbers(token_ids)
        for place, token_id in enumerate(ids):
            if not self._accept(token_id):
                return place
        return len(ids)

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens; an accepted end counts as one.

        Reads what is left again, which takes some microseconds a token. To look ahead and come
        back, `fork` is the better way.

        Raises:
            ConstraintError: fewer were accepted.
        """
        count = checked_rollback(count, self.num_accepted)
        if count == 0:
            return
        # Not by the engine's own roll-back: it keeps rows of its parser that a mask has made, and
        # takes them for those of another text of the same length. Nor does it count the bytes of
        # tokens right that a grammar names by their ids.
        del self._ids[len(self._ids) + self._ended - count :]
        self._ended = False
        self._free_at = self._masked_at = -1
        while self._runs and self._runs[-1][0] > self.num_accepted:
            self._runs.pop()
        self.engine = self._origin.deep_copy()
        taken = self.engine.try_consume_tokens(self._ids)
        self._check()
        assert taken == len(self._ids), "the engine refuses what it accepted before"

    def fork(self) -> Matcher:
        """Return an independent copy."""
        copy = Matcher.__new__(Matcher)
        copy.engine = self.engine.deep_copy()
        copy.vocabulary, copy._origin = self.vocabulary, self._origin
        copy._ids, copy._ended, copy._runs = self._ids.copy(), self._ended, self._runs.copy()
        copy._free_at, copy._masked_at = self._free_at, self._masked_at
        copy._refusal = self._refusal
        return copy

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as far as there is no choice.

        The end is not among them: `done` says that it is all that is left.

        Raises:
            ConstraintError: the grammar became too complex.
        """
        if self._ended:
            return []
        self._look_ahead()
        return self._known()

    def fill_window(self, rows: Mask, drafts: Sequence[int]) -> int:
        """Write the masks before each draft and behind the last one; the state stays as it is.

        Args:
            rows: [len(drafts) + 1, words] int32, contiguous. Behind the first refused draft all
                words are 0: nothing is allowed there, so that no row can be accepted beyond it.
            drafts: proposed tokens.

        Returns:
            How many drafts the grammar allows, from the front.

        Raises:
            ConstraintError: the rows do not fit, or the grammar became too complex.
        """
        check_rows(rows, len(drafts) + 1, self.vocabulary.num_words)
        ids = whole_numbers(drafts)
        taken = 0
        address, width = rows.ctypes.data, rows.strides[0]
        ahead = self.fork() if ids else self
        ahead._fill(rows[0], address)
        for draft in ids:
            if not ahead._accept(draft):
                break
            taken += 1
            ahead._fill(rows[taken], address + taken * width)
        rows[taken + 1 :] = 0
        return taken

    def _accept(self, token_id: int) -> bool:
        if self._ended or not 0 <= token_id < self.vocabulary.size:
            return False
        engine = self.engine
        if token_id in self.vocabulary.eos_ids:
            if not engine.is_accepting():
                return False
            self._ended = True
            return True
        # The mask allows only this one of the tokens that spell a forced text.
        self._look_ahead()
        if (forced := self._next()) is not None and token_id != forced:
            return False
        if not engine.try_consume_tokens([token_id]):
            self._check()
            return False
        self._ids.append(token_id)
        return True

    def fill_known(self, row: Mask) -> bool:
        """Write the mask if that does not need the engine; return whether it was written."""
        token_id = self._next()
        if token_id is None and not self._ended:
            return False
        row[:] = 0
        if token_id is not None:
            row.view(np.uint32)[token_id // 32] = 1 << token_id % 32
        return True

    def _fill(self, row: Mask, address: int) -> None:
        if self.fill_known(row):
            return
        num_words = self.vocabulary.num_words
        if len(row) > num_words:
            row[num_words:] = 0
        self.engine.unsafe_compute_mask_ptr(address, 4 * num_words)
        self._masked_at = self.num_accepted
        self._check()

    def masked(self) -> None:
        """Take note that the engine has made the mask of this place."""
        self._masked_at = self.num_accepted

    def _known(self) -> list[int]:
        """Return the tokens that are known to be without a choice."""
        if not self._runs:
            return []
        start, run = self._runs[-1]
        return run[self.num_accepted - start :]

    def _next(self) -> int | None:
        """Return the next token, if it is known to be the only choice."""
        if not self._runs:
            return None
        start, run = self._runs[-1]
        place = self.num_accepted - start
        return run[place] if place < len(run) else None

    def _look_ahead(self) -> None:
        """Find out whether there is a choice now."""
        if self._free_at == self.num_accepted or self._next() is not None:
            return
        self._check()
        run = self.engine.compute_ff_tokens()
        self._check()
        if run and (size := len(self.engine.compute_ff_bytes())) > _MAX_FORCED_BYTES:
            self._refusal = ConstraintError(
                "",
                f"after {self.num_accepted} tokens the constraint leaves no choice for {size} "
                f"bytes; allowed: {_MAX_FORCED_BYTES}. Shorten its constants.",
            )
            self._check()
        if run:
            self._runs.append((self.num_accepted, run))
        else:
            self._free_at = self.num_accepted

    def _check(self) -> None:
        if (error := self.failure()) is not None:
            raise error

    def failure(self) -> ConstraintError | None:
        """Return what has gone wrong for good, if something has."""
        if self._refusal is not None or not self.engine.is_error():
            return self._refusal
        cause = self.engine.get_error().split("\n", 1)[0]
        return ConstraintError(
            "",
            f"after {self.num_accepted} tokens the constraint cannot be followed further: {cause}.",
        )
