"""Token ids to text: bytes of several tokens may be needed for one character."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from deepseek_recipe.decoding.events import TokenLogprob
from deepseek_recipe.decoding.marks import DSML, THINK_END, Spelling
from deepseek_recipe.errors import ReplyError, TokenizerError, shown

if TYPE_CHECKING:
    from deepseek_recipe.encoding.tokenizer import PromptTokenizer

__all__ = ["TokenText"]

_Decoder = getincrementaldecoder("utf-8")
# Bytes that are not UTF-8 are shown as U+FFFD, as many as the Unicode standard advises.
_REPLACE: Final = "replace"


class TokenText:
    """Turns ids into text; the marks' ids become their private characters.

    A special token that is no mark becomes its spelling.
    """

    __slots__ = ("_decoder", "_known", "_plain", "_tokenizer", "pending")

    def __init__(self, tokenizer: PromptTokenizer, spelling: Spelling) -> None:
        """Look up the marks' ids.

        Raises:
            TokenizerError: the tokenizer lacks one of the marks.
        """
        self._tokenizer = tokenizer
        self._decoder = _Decoder(_REPLACE)
        self._known = {
            tokenizer.special_id(spelling.think_end): THINK_END,
            tokenizer.special_id(spelling.dsml): DSML,
        }
        self._plain: dict[int, str] = {}  # those of `_known` that are no special tokens
        self.pending = False  # bytes of an incomplete character are held

    def complete(self, token_id: int) -> str | None:
        """Return the text of a token that is complete on its own, None for any other.

        Raises:
            ReplyError: the id is outside the vocabulary.
        """
        text = self._known.get(token_id)
        if text is not None:
            return text
        text = self._lookup(token_id)
        if text is not None:
            self._known[token_id] = text
            if token_id not in self._tokenizer.special_tokens:
                self._plain[token_id] = text
        return text

    def plain(self, token_ids: object) -> str | None:
        """Return the text of tokens, None unless all are ordinary ones that were read before.

        Nearly all tokens of a reply are, and there is nothing more to check or to find out.
        """
        if type(token_ids) is not list and type(token_ids) is not tuple:
            return None
        known = self._plain
        text = ""
        for token_id in token_ids:
            if type(token_id) is not int or token_id not in known:
                return None
            text += known[token_id]
        return text

    def pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return `complete` of each.

        Raises:
            ReplyError: an id is outside the vocabulary.
        """
        known = self._known
        return [known.get(token_id) or self.complete(token_id) for token_id in token_ids]

    def check(self, logprobs: Iterable[TokenLogprob]) -> None:
        """Refuse log-probabilities of tokens that do not exist.

        Raises:
            ReplyError: an id is outside the vocabulary.
        """
        known = self._known
        for each in logprobs:
            if each.token_id not in known:
                self.complete(each.token_id)
            for token_id, _ in each.top:
                if token_id not in known:
                    self.complete(token_id)

    def partial(self, token_id: int) -> str:
        """Return the text that is complete with a token that is not so on its own."""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return U+FFFD for the bytes of a character that stays incomplete, "" without any."""
        self.pending = False
        return self._decoder.decode(b"", True)

    def _lookup(self, token_id: int) -> str | None:
        try:
            return self._tokenizer.token_text(token_id)
        except TokenizerError as error:
            raise ReplyError(
                f"token id {shown(token_id)} is outside the vocabulary of "
                f"{self._tokenizer.vocab_size} tokens"
            ) from error
