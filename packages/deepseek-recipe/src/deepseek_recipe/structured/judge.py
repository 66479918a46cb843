"""A second opinion of finished texts, by another library than the one that made the masks.

It is a net: what it catches is a fault of ours, which is counted and told, not a fault of the text.
"""

from __future__ import annotations

import json
from decimal import Decimal
from functools import lru_cache
from typing import Any

from deepseek_recipe.structured.schema.document import escape_pointer
from deepseek_recipe.structured.spec import Spec

__all__ = ["fault_of"]

_MAX_DIGITS = 400  # of a number that is worth an integer
_MAX_CHARS = 1_000_000  # the library takes some seconds for more


def fault_of(spec: Spec, text: str) -> str | None:
    """Return why a finished text does not satisfy a constraint; None if it does.

    None as well where that cannot be told: of patterns and grammars, and of texts that are too
    long, or that the library fails on.

    Args:
        spec: was compiled, so that it is sound.
        text: the whole of it.
    """
    if spec.kind == "choice":
        texts = json.loads(spec.content)
        return None if text in texts else f"the text is none of the {len(texts)} choices"
    if spec.kind not in ("json_schema", "json_object") or len(text) > _MAX_CHARS:
        return None
    try:
        value = json.loads(text, parse_float=_number)
    except ValueError as wrong:
        return f"the text is not JSON: {wrong}"
    except RecursionError:
        return None
    if spec.kind == "json_object":
        return None if isinstance(value, dict) else "the text is JSON, but no object"
    try:
        error = next(_validator(spec.content).iter_errors(value), None)
    except Exception:  # of recursion, say: nobody's text is worse for it
        return None
    if error is None:
        return None
    place = "".join("/" + escape_pointer(str(each)) for each in error.absolute_path)
    return f"at `{place}`: {error.message[:400]}"


@lru_cache(maxsize=64)
def _validator(content: str) -> Any:
    import jsonschema
    from referencing import Registry

    # References were found to be local when the constraint was compiled: nothing is fetched.
    schema = json.loads(content, parse_float=_number)
    return jsonschema.Draft202012Validator(schema, registry=Registry())


def _number(text: str) -> Decimal | int:
    """Return a number as written: 0.3 is a multiple of 0.1, and 1.0 an integer."""
    value = Decimal(text)
    if value.adjusted() < _MAX_DIGITS and value == value.to_integral_value():
        return int(value)
    return value
