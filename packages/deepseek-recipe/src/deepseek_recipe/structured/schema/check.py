"""Whether a value is a schema of draft 2020-12, in bounded time."""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import Any

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.protocols.schema_plain import is_plain
from deepseek_recipe.structured.schema.document import escape_pointer

__all__ = ["check_schema"]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_MAX_VALUES = 20_000
_MAX_CHARS = 250_000
_MAX_RARE_VALUES = 2000
"""Of schemas that go to the jsonschema library, which takes some 100 us for each."""
_MAX_DEPTH = 64


def check_schema(schema: JsonValue) -> None:
    """Refuse what is no schema, or too large to look at.

    Raises:
        ConstraintError: with the JSON pointer of the first fault.
    """
    values = _measure(schema)
    if isinstance(schema, dict) and "$schema" in schema:
        draft = schema["$schema"]
        if not isinstance(draft, str) or draft.rstrip("#") != _DRAFT:
            raise ConstraintError(
                "/$schema",
                f"the draft is {shown(draft)}; allowed: {_DRAFT!r}. Write the schema in its "
                "keywords, or leave `$schema` out.",
            )
    if is_plain(schema):
        return
    if values > _MAX_RARE_VALUES:
        raise ConstraintError(
            "",
            f"the schema has errors or rare keywords, and {values} values; allowed: "
            f"{_MAX_RARE_VALUES}. Make it smaller, or check it with the jsonschema library first.",
        )
    error = next(_validator().iter_errors(schema), None)
    if error is not None:
        pointer = "".join("/" + escape_pointer(str(each)) for each in error.absolute_path)
        raise ConstraintError(
            pointer,
            f"no JSON Schema: {error.message[:400]}. Mend it by the rules of draft 2020-12.",
        )


def _measure(root: JsonValue) -> int:
    stack: list[tuple[JsonValue, str, int]] = [(root, "", 0)]
    values = chars = 0
    while stack:
        value, pointer, depth = stack.pop()
        values += 1
        chars += len(value) if isinstance(value, str) else 0
        if values > _MAX_VALUES or chars > _MAX_CHARS:
            raise ConstraintError(
                "",
                f"the schema is too large; allowed: {_MAX_VALUES} values and {_MAX_CHARS} "
                "characters. Make it smaller.",
            )
        if depth > _MAX_DEPTH:
            raise ConstraintError(
                pointer[:200],
                f"level {depth} of the schema; allowed: {_MAX_DEPTH}. Put inner schemas under "
                "`$defs`.",
            )
        if isinstance(value, dict):
            chars += sum(map(len, value))
            for key, each in value.items():
                _check_text(key, pointer)
                stack.append((each, f"{pointer}/{escape_pointer(key[:50])}", depth + 1))
        elif isinstance(value, list):
            stack += [(each, f"{pointer}/{at}", depth + 1) for at, each in enumerate(value)]
        elif isinstance(value, str):
            _check_text(value, pointer)
        elif not isinstance(value, (bool, int, float, type(None))) or (
            isinstance(value, float) and not isfinite(value)
        ):
            raise ConstraintError(
                pointer,
                f"{shown(value)} is no JSON value. Use null, booleans, finite numbers, strings, "
                "lists and objects.",
            )
    return values


def _check_text(text: str, pointer: str) -> None:
    if not text.isascii() and any(0xD800 <= ord(char) < 0xE000 for char in text):
        raise ConstraintError(pointer, f"{shown(text)} has a lone surrogate. Send valid Unicode.")


@lru_cache(maxsize=1)
def _validator() -> Any:
    import jsonschema
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    draft = jsonschema.Draft202012Validator
    return draft(draft.META_SCHEMA, registry=REGISTRY)
