"""A request body to its typed model: one door for bytes, text and Python values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar, cast

from pydantic import ValidationError

from deepseek_recipe.errors import BodyError, shown
from deepseek_recipe.json_text import load
from deepseek_recipe.protocols.fields import Body

__all__ = ["parse_body"]

BodyT = TypeVar("BodyT", bound=Body)


def parse_body(model: type[BodyT], body: bytes | str | Mapping[str, object]) -> BodyT:
    """Return the request that a body holds.

    Args:
        body: JSON text, or the same as a Python mapping.

    Raises:
        BodyError: it is not JSON, or a field is missing or has a wrong type; the message names it.
    """
    try:
        value = load(body if isinstance(body, (bytes, str)) else _text_of(body))
    except (ValueError, RecursionError) as error:
        raise BodyError(f"invalid JSON request: {error}") from error
    if not isinstance(value, dict):
        raise BodyError(
            f"invalid request body: expected a JSON object, got {shown(value)}. "
            "Send the request's fields in one object."
        )
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise BodyError(f"invalid request body: {_first(error, value)}") from error


def _text_of(body: Mapping[str, object]) -> bytes:
    # Through text, so that what is no JSON (sets, NaN, cycles, lone surrogates) ends here.
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, default=_as_dict).encode()
    except TypeError as error:
        raise ValueError(f"not a JSON value: {error}") from error


def _as_dict(value: object) -> dict[object, object]:
    if isinstance(value, Mapping):  # of another kind than dict
        return dict(value)
    raise TypeError(f"{shown(value)} of type {type(value).__name__}")


def _first(error: ValidationError, body: dict[str, object]) -> str:
    details = error.errors(include_url=False, include_context=False)
    first = details[0]
    is_missing = first["type"] == "missing"
    path, value = "", cast(object, body)
    for left, part in zip(range(len(first["loc"]) - 1, -1, -1), first["loc"], strict=True):
        if isinstance(value, list) and isinstance(part, int):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (is_missing and not left)):
            path, value = f"{path}.{part}" if path else str(part), value.get(part)
        # else it names a branch of a union, no place in the request
    more = f" ({len(details) - 1} more)" if len(details) > 1 else ""
    got = "" if is_missing else f", got {shown(first['input'])}"
    return f"`{path or 'body'}`: {first['msg']}{got}{more}"
