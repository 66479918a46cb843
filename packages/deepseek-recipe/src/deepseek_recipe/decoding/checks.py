"""What a reply decoder is given: checked as a whole, before any of it is taken in.

Each function returns the value as the rest of this package has it, and raises `ReplyError` that
names the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from operator import index
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from deepseek_recipe.decoding.events import Ready, TokenLogprob
from deepseek_recipe.errors import ReplyError, shown

__all__ = [
    "Reason",
    "checked_count",
    "checked_ids",
    "checked_logprobs",
    "checked_ready",
    "checked_reason",
    "checked_text",
]

Reason: TypeAlias = Literal["stop", "length", "content_filter"]

_REASONS: Final[Mapping[str, Reason]] = MappingProxyType(
    {"stop": "stop", "length": "length", "content_filter": "content_filter"}
)


def checked_reason(value: object) -> Reason:
    """Return why a backend ended a reply."""
    reason = _REASONS.get(value) if isinstance(value, str) else None
    if reason is None:
        raise _bad("finish reason", value, ", ".join(map(repr, _REASONS)))
    return reason


def checked_text(value: object) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise _bad("text", value, "a str")
    return value


def checked_count(value: object, name: str) -> int:
    """Return a number of tokens."""
    count = _integer(value)
    if count is None or count < 0:
        raise _bad(name, value, "an integer from 0")
    return count


def checked_ready(ready: Ready) -> Ready:
    """Return the begin of a reply."""
    prompt_tokens = checked_count(ready.prompt_tokens, "number of prompt tokens")
    cached_tokens = checked_count(ready.cached_tokens, "number of cached tokens")
    if cached_tokens > prompt_tokens:
        allowed = f"0 to {shown(prompt_tokens)}, the length of the prompt"
        raise _bad("number of cached tokens", cached_tokens, allowed)
    if not isinstance(ready.fingerprint, str):
        raise _bad("fingerprint", ready.fingerprint, "a str")
    return Ready(prompt_tokens, cached_tokens, ready.fingerprint)


def checked_ids(value: object) -> Sequence[int]:
    """Return token ids, which may still be outside the vocabulary."""
    if not isinstance(value, (list, tuple)):
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping, Set)):
            raise _bad("list of token ids", value, "a list or tuple of integers")
        value = list(value)
    for each in value:
        if type(each) is not int:
            return [_token_id(each) for each in value]
    return value


def checked_logprobs(value: object, num_ids: int) -> Sequence[TokenLogprob]:
    """Return the log-probabilities of some ids, whose own ids may be outside the vocabulary."""
    if not isinstance(value, (list, tuple)):
        raise _bad("list of log-probabilities", value, "a list or tuple of TokenLogprob, or None")
    if len(value) != num_ids:
        raise ReplyError(
            f"invalid log probabilities: {len(value)} log probabilities for {num_ids} token IDs"
        )
    return [_logprob(each) for each in value]


def _logprob(value: object) -> TokenLogprob:
    if not isinstance(value, TokenLogprob):
        raise _bad("log-probability", value, "a TokenLogprob")
    top: object = value.top
    if not isinstance(top, (list, tuple)):
        raise _bad("list of alternatives", top, "a tuple of (token id, log-probability)")
    is_exact = type(value.token_id) is int and type(value.logprob) is float
    for pair in top:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise _bad("alternative", pair, "(token id, log-probability)")
        is_exact = is_exact and type(pair[0]) is int and type(pair[1]) is float
    if is_exact:
        return value
    pairs = tuple((_token_id(token_id), _number(logprob)) for token_id, logprob in top)
    return TokenLogprob(_token_id(value.token_id), _number(value.logprob), pairs)


def _token_id(value: object) -> int:
    token_id = _integer(value)
    if token_id is None:
        raise _bad("token id", value, "an integer")
    return token_id


def _integer(value: object) -> int | None:
    """Return an integer of any library as one of Python's; a truth value is none."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _number(value: object) -> float:
    if not isinstance(value, (str, bytes, bytearray, bool)):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            pass
    raise _bad("log-probability", value, "a number")


def _bad(name: str, value: object, allowed: str) -> ReplyError:
    return ReplyError(f"The {name} is {shown(value)}; allowed: {allowed}.")
