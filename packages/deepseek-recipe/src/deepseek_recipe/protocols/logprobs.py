"""Log-probabilities in the shape that the Chat and Responses protocols share."""

from __future__ import annotations

from collections.abc import Iterable
from json import JSONEncoder
from math import isfinite
from typing import TYPE_CHECKING

from deepseek_recipe.decoding.events import TokenLogprob

if TYPE_CHECKING:
    from deepseek_recipe.encoding.tokenizer import PromptTokenizer

__all__ = ["LogprobTexts"]

# Stands for "as good as impossible": JSON has no infinity, and clients know this number.
_LOWEST = "-9999.0"

_dumps = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class LogprobTexts:
    """Writes log-probabilities as JSON: for each token its text, bytes and alternatives.

    The text of a token that ends within a character is its bytes, as `\\xf0\\x9f`. What is written
    of a token besides the number is kept, since replies have most of their tokens often.
    """

    __slots__ = ("_known", "_tokenizer")

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        """Take the tokenizer that spells the tokens."""
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, str]] = {}  # what precedes and follows the number

    def entries(self, logprobs: Iterable[TokenLogprob]) -> str:
        """Return the entries of tokens, with commas between them."""
        out = []
        for each in logprobs:
            own = self._entry(each.token_id, each.logprob)
            top = [f"{self._entry(token_id, logprob)}}}" for token_id, logprob in each.top]
            out.append(f'{own},"top_logprobs":[{",".join(top)}]}}')
        return ",".join(out)

    def _entry(self, token_id: int, logprob: float) -> str:
        """Return an object that is still open."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._around(token_id)
        number = repr(logprob) if isfinite(logprob) else _LOWEST
        return f"{known[0]}{number}{known[1]}"

    def _around(self, token_id: int) -> tuple[str, str]:
        data = self._tokenizer.token_bytes(token_id)
        text = self._tokenizer.token_text(token_id)
        if text is None:
            text = "".join(f"\\x{byte:02x}" for byte in data)
        return f'{{"token":{_dumps(text)},"logprob":', f',"bytes":{_dumps(list(data))}'
