"""Grammar symbols of strings and numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Any

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.schema.grammar_text import Rules
from deepseek_recipe.structured.schema.pattern import CHAR, quote_literal
from deepseek_recipe.structured.schema.shapes import Number, String

__all__ = ["number_symbols", "string_symbol", "string_terms"]

_FRACTION = r"/-?(?:0|[1-9][0-9]*)\.[0-9]*[1-9][0-9]*/"
_MAX_PARTS = 16


# The engine keeps a state for each remainder: 20,000 take 0.1 s and 15 MB.
_MOST_REMAINDERS = 20_000


def _check_multiples(multiples: Sequence[float], path: str) -> None:
    """Refuse `multipleOf` whose remainders the mask engine cannot hold.

    Raises:
        ConstraintError: there are more than `_MOST_REMAINDERS`.
    """
    exact = [Fraction(str(each)) for each in multiples]
    scale = lcm(*(each.denominator for each in exact))
    common = lcm(*(int(each * scale) for each in exact))
    if common > _MOST_REMAINDERS:
        raise ConstraintError(
            path,
            f"`multipleOf` {', '.join(map(str, multiples))}: their common multiple is {common} "
            f"units of the last digit; allowed: {_MOST_REMAINDERS}. Use a smaller one.",
        )


def number_symbols(rules: Rules, shape: Number, path: str) -> list[str]:
    """Return the alternatives of a number.

    Raises:
        ConstraintError: what is left cannot be enforced.
    """
    if shape.values is not None:
        return [rules.terminal(f'"{json.dumps(value)}"') for value in shape.values]
    if shape.kind == "fraction":
        if shape.low is None and shape.high is None and not shape.multiples:
            return [rules.terminal(_FRACTION)]
        raise ConstraintError(path, "a number with limits that is no integer cannot be enforced")
    schema: dict[str, Any] = {"type": shape.kind}
    if shape.low is not None:
        schema["exclusiveMinimum" if shape.low_open else "minimum"] = shape.low
    if shape.high is not None:
        schema["exclusiveMaximum" if shape.high_open else "maximum"] = shape.high
    _check_multiples(shape.multiples, path)
    if len(shape.multiples) == 1:
        schema["multipleOf"] = shape.multiples[0]
    elif shape.multiples:
        schema["allOf"] = [{"multipleOf": each} for each in shape.multiples]
    symbol = rules.json(schema)
    limits = shape.low is not None or shape.high is not None
    # the engine has limits of its own on digits; bounds alone are never empty here
    unsure = shape.multiples or (limits and shape.kind != "integer")
    if unsure and not rules.writable(symbol, path):
        return []
    return [symbol]


def string_symbol(rules: Rules, shape: String, path: str) -> str | None:
    """Return the symbol of a string, None if there is none.

    Raises:
        ConstraintError: what is left cannot be enforced.
    """
    if shape.formats:
        if (
            len(shape.formats) > 1
            or shape.patterns
            or shape.denied
            or shape.excluded
            or shape.values is not None
            or shape.min_len
            or shape.max_len is not None
        ):
            raise ConstraintError(
                path, f"`format` {shape.formats[0]!r} beside other limits of the text"
            )
        return rules.json({"type": "string", "format": shape.formats[0]})
    if shape.values is not None:
        return rules.json({"enum": list(shape.values)})
    if not shape.patterns and not shape.denied and not shape.excluded:
        schema: dict[str, Any] = {"type": "string"}
        if shape.min_len:
            schema["minLength"] = shape.min_len
        if shape.max_len is not None:
            schema["maxLength"] = shape.max_len
        return rules.json(schema)
    terms = string_terms(shape, path)
    terminal = " & ".join(terms)
    bounded = len(terms) > 2 or shape.min_len or shape.max_len is not None
    if bounded and not rules.writable(terminal, path):
        return None
    return rules.terminal(terminal)


def string_terms(shape: String, path: str) -> list[str]:
    """Return regexes and complements, whose intersection is the JSON text of a string."""
    if len(shape.patterns) + len(shape.denied) > _MAX_PARTS:
        raise ConstraintError(path, f"more than {_MAX_PARTS} patterns meet here")
    if shape.formats:
        raise ConstraintError(path, "a `format` of names cannot be enforced")
    if shape.values is not None:
        return [f'/"(?:{"|".join(map(quote_literal, shape.values))})"/']
    top = "" if shape.max_len is None else shape.max_len
    length = "*" if not shape.min_len and top == "" else f"{{{shape.min_len},{top}}}"
    terms = [f'/"{CHAR}{length}"/']
    terms += [f'/"{each.quoted}"/' for each in shape.patterns]
    terms += [f'~/"{each.quoted}"/' for each in shape.denied]
    if shape.excluded:
        terms.append(f'~/"(?:{"|".join(map(quote_literal, sorted(shape.excluded)))})"/')
    return terms
