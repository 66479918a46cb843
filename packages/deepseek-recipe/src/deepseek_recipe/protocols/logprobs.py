"""Log-probabilities in the shape that the Chat and Responses protocols share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepseek_recipe.decoding.events import TokenLogprob

if TYPE_CHECKING:
    from deepseek_recipe.encoding.tokenizer import PromptTokenizer

__all__ = ["logprob_entries"]

# Stands for "as good as impossible": JSON has no infinity, and clients know this number.
_LOWEST = -9999.0


def logprob_entries(
    logprobs: Iterable[TokenLogprob], tokenizer: PromptTokenizer
) -> list[dict[str, object]]:
    """Return one entry for each token: its text, log-probability, bytes and alternatives.

    The text of a token that ends within a character is its bytes, as `\\xf0\\x9f`.
    """
    return [
        {
            **_entry(each.token_id, each.logprob, tokenizer),
            "top_logprobs": [_entry(*alternative, tokenizer) for alternative in each.top],
        }
        for each in logprobs
    ]


def _entry(token_id: int, logprob: float, tokenizer: PromptTokenizer) -> dict[str, object]:
    data = tokenizer.token_bytes(token_id)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "".join(f"\\x{byte:02x}" for byte in data)
    return {
        "token": text,
        "logprob": logprob if math.isfinite(logprob) else _LOWEST,
        "bytes": list(data),
    }
