"""Grammar symbols of strings and numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from math import inf, lcm
from typing import Any

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.schema.formats import FORMAT_PATTERNS
from deepseek_recipe.structured.schema.grammar_text import Rules
from deepseek_recipe.structured.schema.pattern import CHAR, quote_literal
from deepseek_recipe.structured.schema.shapes import Number, String

__all__ = ["number_symbols", "string_symbol", "string_terms", "value_terminal"]

_INTEGER = r"/-?(?:0|[1-9][0-9]*)(?:\.0)?/"
_ZERO_FRACTION = r"/\.0/"
_FRACTION = r"\.[0-9]*[1-9][0-9]*"
_MAYBE_EMPTY = re.compile(r"\[\^[^\]]*(?:\[|\\x00)")
"""A class that excludes whole sets, such as `[^\\d\\D]`, as patterns write it."""
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
            f"units of the last digit; allowed: {_MOST_REMAINDERS}. Use one with fewer digits.",
        )


def number_symbols(rules: Rules, shape: Number, path: str) -> list[str]:
    """Return the alternatives of a number.

    Raises:
        ConstraintError: what is left cannot be enforced.
    """
    if shape.values is not None:
        return [rules.terminal(value_terminal(value)) for value in shape.values]
    limits = shape.low is not None or shape.high is not None
    if shape.kind == "integer" and not limits and not shape.multiples:
        return [rules.terminal(_INTEGER)]
    if shape.kind == "fraction":
        return _fraction_symbols(rules, shape, path)
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
    # the engine has limits of its own on digits; bounds alone are never empty here
    unsure = shape.multiples or (limits and shape.kind != "integer")
    if unsure and not rules.writable(symbol, path):
        return []
    # the fraction is a lexeme of its own: behind the digits nothing else starts with a point
    return [f"{symbol} {rules.terminal(_ZERO_FRACTION)}?" if shape.kind == "integer" else symbol]


def _fraction_symbols(rules: Rules, shape: Number, path: str) -> list[str]:
    """Return the alternatives of a number that is no integer: an integer part and more behind it.

    Raises:
        ConstraintError: it has multiples, or limits that are no integers.
    """
    if shape.low is None and shape.high is None and not shape.multiples:
        return [rules.terminal(f"/-?(?:0|[1-9][0-9]*){_FRACTION}/")]
    if shape.multiples or any(each is not None and each % 1 for each in (shape.low, shape.high)):
        raise ConstraintError(
            path,
            "a number that is no integer is left here, with `multipleOf` or with limits that are "
            "no integers; allowed: limits that are. Say `integer` or `number` where a `not` or "
            "`oneOf` leaves it.",
        )
    low = -inf if shape.low is None else shape.low
    high = inf if shape.high is None else shape.high
    found = [rules.terminal(f"/0{_FRACTION}/")] if low <= 0 < high else []
    found += [rules.terminal(f"/-0{_FRACTION}/")] if low < 0 <= high else []
    # the integer in front of the point is nearer to zero than the number
    for least, most in ((low + 1, min(high, -1.0)), (max(low, 1.0), high - 1)):
        if least <= most:
            limits = {"minimum": least, "maximum": most}
            part = {name: int(each) for name, each in limits.items() if abs(each) != inf}
            symbol = rules.json({"type": "integer", **part})
            found.append(f"{symbol} {rules.terminal(f'/{_FRACTION}/')}")
    return found


def value_terminal(value: bool | float | str | None) -> str:
    """Return the text of the terminal of one scalar; an integer may end in `.0`."""
    if isinstance(value, str):
        return f'/"{quote_literal(value)}"/'
    text = json.dumps(value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return rf"/{text}(?:\.0)?/" if is_integer else f'"{text}"'


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
                path,
                f"`format` {shape.formats[0]!r} beside other limits of the text cannot be "
                "enforced; it is allowed alone. Use one of them, or a `pattern` for all.",
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
    terminal = " & ".join(string_terms(shape, path))
    has_size = bool(shape.min_len) or shape.max_len is not None
    # one pattern, or all but some values, has a text unless a class is empty; more may have none
    alone = not shape.denied and len(shape.patterns) + bool(shape.excluded) == 1 and not has_size
    sure = alone and not any(_MAYBE_EMPTY.search(each.plain) for each in shape.patterns)
    if not sure and not rules.writable(terminal, path):
        return None
    return rules.terminal(terminal)


def no_format_of_names(formats: Sequence[str]) -> str:
    """Return the message about a format that names of members should have."""
    return (
        f"`format` {formats[0]!r} of names cannot be enforced; allowed: "
        f"{', '.join(FORMAT_PATTERNS)}. Use a `pattern`."
    )


def string_terms(shape: String, path: str) -> list[str]:
    """Return regexes and complements, whose intersection is the JSON text of a string."""
    num_patterns = len(shape.patterns) + len(shape.denied)
    if num_patterns > _MAX_PARTS:
        raise ConstraintError(
            path,
            f"{num_patterns} patterns meet here; allowed: {_MAX_PARTS}. Join some with `|`, or "
            "leave some out.",
        )
    if shape.formats:
        raise ConstraintError(path, no_format_of_names(shape.formats))
    if shape.values is not None:
        return [f'/"(?:{"|".join(map(quote_literal, shape.values))})"/']
    top = "" if shape.max_len is None else shape.max_len
    length = "*" if not shape.min_len and top == "" else f"{{{shape.min_len},{top}}}"
    # a pattern speaks of characters, so that it says this too
    terms = [] if shape.patterns and length == "*" else [f'/"{CHAR}{length}"/']
    terms += [f'/"{each.quoted}"/' for each in shape.patterns]
    terms += [f'~/"{each.quoted}"/' for each in shape.denied]
    if shape.excluded:
        terms.append(f'~/"(?:{"|".join(map(quote_literal, sorted(shape.excluded)))})"/')
    return terms
