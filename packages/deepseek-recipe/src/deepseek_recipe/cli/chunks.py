"""Chunks of a model's output as JSON, in the form of the golden files.

{"kind": "ready", "prompt_tokens": 12, "cache_hit": 4, "fingerprint": "fp"}
{"kind": "text", "text": "Hello", "n": 1}
{"kind": "tokens", "ids": [19923], "logprobs": [[-0.5, [[19923, -0.5]]]]}
{"kind": "finish", "reason": "stop"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.decoding.events import (
    BackendFinish,
    Chunk,
    Ready,
    TextChunk,
    TokenChunk,
    TokenLogprob,
)
from deepseek_recipe.errors import BodyError, shown

__all__ = ["expand", "mapping", "read_chunks", "read_finish", "read_ids"]

_MAX_REPEATED = 2**26  # characters


def read_chunks(value: JsonValue, name: str = "model_output_chunks") -> list[Chunk]:
    """Return the chunks of a JSON list.

    Raises:
        BodyError: it is no such list; the message names the place.
    """
    return [_chunk(item, f"{name}[{index}]") for index, item in enumerate(_list(value, name))]


def expand(value: JsonValue) -> JsonValue:
    """Return a JSON value with each `{"$repeat": [text, n]}` replaced by `n` times the text.

    Raises:
        BodyError: such an object is not of that form, or asks for more than 64 Mi characters.
    """
    if isinstance(value, list):
        return [expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {"$repeat"}:
        return {key: expand(item) for key, item in value.items()}
    match value["$repeat"]:
        case [_, bool()]:
            pass
        case [str(text), int(count)] if 0 <= count * max(1, len(text)) <= _MAX_REPEATED:
            return text * count
    raise BodyError(
        f"`$repeat` is {shown(value['$repeat'])}; allowed: [text, n] that makes up to "
        f"{_MAX_REPEATED} characters."
    )


def read_ids(value: JsonValue, name: str) -> list[int]:
    """Return the token ids of a JSON list, or raise `BodyError` that names it."""
    return [_count(each, name) for each in _list(value, name)]


def read_finish(value: JsonValue, name: str) -> BackendFinish:
    """Return the end of a reply for a reason, or raise `BodyError` that names it."""
    if value in ("stop", "length", "content_filter"):
        return BackendFinish(value)
    raise _bad(name, value, "'stop', 'length' or 'content_filter'")


# kind of a chunk -> what it may have besides
_KEYS = {
    "ready": ("prompt_tokens", "cache_hit", "fingerprint"),
    "text": ("text", "n"),
    "tokens": ("ids", "logprobs"),
    "finish": ("reason",),
}


def _chunk(item: JsonValue, name: str) -> Chunk:
    if not isinstance(item, dict):
        raise _bad(name, item, "an object with `kind`")
    kind = item.get("kind")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise _bad(f"{name}.kind", kind, "'ready', 'text', 'tokens' or 'finish'")
    for key in item:
        if key != "kind" and key not in _KEYS[kind]:
            allowed = " and ".join(f"`{each}`" for each in _KEYS[kind])
            raise BodyError(
                f"`{name}.{key}` is unknown; a chunk of the kind {kind!r} has {allowed}."
            )
    if kind == "ready":
        return Ready(
            _count(item.get("prompt_tokens", 0), f"{name}.prompt_tokens"),
            _count(item.get("cache_hit", 0), f"{name}.cache_hit"),
            _text(item.get("fingerprint", ""), f"{name}.fingerprint"),
        )
    if kind == "text":
        return TextChunk(
            _text(item.get("text"), f"{name}.text"), _count(item.get("n"), f"{name}.n")
        )
    if kind == "tokens":
        ids = read_ids(item.get("ids"), f"{name}.ids")
        return TokenChunk(ids, _logprobs(item.get("logprobs"), ids, f"{name}.logprobs"))
    return read_finish(item.get("reason"), f"{name}.reason")


def _logprobs(value: JsonValue, ids: list[int], name: str) -> tuple[TokenLogprob, ...] | None:
    if value is None:
        return None
    entries = []
    for place, entry in enumerate(_list(value, name)):
        # a list of another length than the ids is the decoder's to refuse
        token_id = ids[place] if place < len(ids) else 0
        match entry:
            case [own, list(top)] if _is_number(own):
                pairs = tuple(_pair(pair, f"{name}[{place}]") for pair in top)
                entries.append(TokenLogprob(token_id, float(own), pairs))
            case _:
                raise _bad(f"{name}[{place}]", entry, "[logprob, [[id, logprob], ...]]")
    return tuple(entries)


def _pair(value: JsonValue, name: str) -> tuple[int, float]:
    match value:
        case [token_id, logprob] if _is_number(logprob):
            return _count(token_id, name), float(logprob)
    raise _bad(name, value, "alternatives as [id, logprob]")


def _is_number(value: JsonValue) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list(value: JsonValue, name: str) -> list[JsonValue]:
    if not isinstance(value, list):
        raise _bad(name, value, "a list")
    return value


def _text(value: JsonValue, name: str) -> str:
    if not isinstance(value, str):
        raise _bad(name, value, "a text")
    return value


def _count(value: JsonValue, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _bad(name, value, "integers from 0")
    return value


def _bad(name: str, value: JsonValue, allowed: str) -> BodyError:
    return BodyError(f"`{name}` is {shown(value)}; allowed: {allowed}.")


def mapping(value: JsonValue, name: str) -> Mapping[str, JsonValue]:
    """Return a JSON object, or raise `BodyError` that names it."""
    if not isinstance(value, dict):
        raise _bad(name, value, "a JSON object")
    return value
