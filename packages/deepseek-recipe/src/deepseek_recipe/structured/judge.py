"""A second opinion of finished texts, by another library than the one that made the masks.

It is a net: what it catches is a fault of ours, which is counted and told, not a fault of the text.
So it never fails, nor does it take long: what cannot be told soon is not told.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

from deepseek_recipe.structured.schema.document import escape_pointer
from deepseek_recipe.structured.schema.pattern import read_pattern
from deepseek_recipe.structured.spec import Spec

__all__ = ["fault_of"]

_MAX_CHARS = 100_000
_MAX_DIGITS = 400  # of a number that is worth an integer
_MAX_SECONDS = 0.2


class _Untold(Exception):
    """It would take too long to say, or the library cannot."""


def fault_of(spec: Spec, text: str) -> str | None:
    """Return why a finished text does not satisfy a constraint; None if it does.

    None as well where that cannot be told: of patterns and grammars, of schemas with
    `patternProperties`, and of texts or numbers that are long.

    Args:
        spec: was compiled, so that it is sound.
        text: the whole of it.
    """
    try:
        return _fault_of(spec, text)
    except Exception:  # of recursion, say: nobody's text is worse for it
        return None


def _fault_of(spec: Spec, text: str) -> str | None:
    if spec.kind == "choice":
        texts = json.loads(spec.content)
        return None if text in texts else f"the text is none of the {len(texts)} choices"
    if spec.kind not in ("json_schema", "json_object") or len(text) > _MAX_CHARS:
        return None
    try:
        value = json.loads(text, parse_float=_number, parse_int=_number)
    except json.JSONDecodeError as wrong:
        return f"the text is not JSON: {wrong}"
    if spec.kind == "json_object":
        return None if isinstance(value, dict) else "the text is JSON, but no object"
    if '"patternProperties"' in spec.content:  # read by another regex library than ours
        return None
    validator = _validator(spec.content)
    _deadline.at = time.monotonic() + _MAX_SECONDS
    error = next(validator.iter_errors(value), None)
    if error is None:
        return None
    place = "".join("/" + escape_pointer(str(each)) for each in error.absolute_path)
    return f"at `{place}`: {error.message[:400]}"


class _Deadline(threading.local):
    at = 0.0

    def check(self) -> None:
        if time.monotonic() > self.at:
            raise _Untold


_deadline = _Deadline()


@lru_cache(maxsize=64)
def _validator(content: str) -> Any:
    import jsonschema
    from referencing import Registry

    extend: Any = jsonschema.validators.extend
    draft = jsonschema.Draft202012Validator
    follow = draft.VALIDATORS["$ref"]

    def reference(validator: Any, target: str, value: Any, schema: Any) -> Any:
        _deadline.check()
        return follow(validator, target, value, schema)

    kind = extend(draft, {"$ref": reference, "pattern": _pattern})
    # References were found to be local when the constraint was compiled: nothing is fetched.
    schema = json.loads(content, parse_float=_number, parse_int=_number)
    return kind(schema, registry=Registry())


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Judge a pattern as the draft means it; the library would take Python's classes."""
    import jsonschema

    _deadline.check()
    if isinstance(value, str) and not read_pattern(pattern).matches(value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _number(text: str) -> Decimal | int:
    """Return a number as written: 0.3 is a multiple of 0.1, and 1.0 an integer."""
    value = Decimal(text)
    if value.adjusted() >= _MAX_DIGITS:
        raise _Untold
    return int(value) if value == value.to_integral_value() else value
