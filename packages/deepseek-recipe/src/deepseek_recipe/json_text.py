"""JSON text to values and back, with the bounds that a server needs."""

from __future__ import annotations

import json
import re
from typing import Literal, NoReturn, TypeAlias

from pydantic_core import from_json

from deepseek_recipe.conversation import JsonValue

__all__ = ["FloatStyle", "dump_compact", "dump_prompt", "load"]

FloatStyle: TypeAlias = Literal["shortest", "python"]

_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
# What may be a number that the fast parser reads otherwise: -0, an integer of 64 bits or more, a
# float that may be beyond the largest double. Within strings these are harmless: just slower.
_ODD_NUMBER = re.compile(rb"-0(?![.eE0-9])|[0-9]{19}|[0-9][eE]\+?[0-9]{3}")
# What Python writes for a float below 1e-4; the only ones that differ between the styles.
_SMALL_FLOAT = re.compile(r"e-[0-9]")


def load(text: str | bytes) -> JsonValue:
    """Parse one JSON value; of equal keys in an object the last value counts, at the first's place.

    Integers are exact from -2**63 to 2**64 - 1 and floats beyond; `-0` is the float -0.0.

    Raises:
        ValueError: it is not JSON, has something behind the value, a lone surrogate, a number
            beyond the range of doubles, or more than 201 levels.
    """
    data = text.encode() if isinstance(text, str) else text
    value = from_json(data, allow_inf_nan=False)
    if _ODD_NUMBER.search(data):
        return json.loads(data.decode(), parse_int=_integer, parse_float=_float)
    return value


def dump_prompt(value: JsonValue, float_style: FloatStyle) -> str:
    """Return a value as it stands in prompts: blanks after `,` and `:`, non-ASCII as it is.

    Args:
        value: as `load` returns it.
        float_style: `python` for repr, `shortest` for fixed notation with exponents -5 to 15.

    Raises:
        ValueError: a float is infinite or no number, or a container holds itself.
    """
    text = _SPACED.encode(value)
    if float_style == "shortest" and _SMALL_FLOAT.search(text):
        return _written(value, ", ", ": ")
    return text


def dump_compact(value: JsonValue) -> str:
    """Return a value without blanks, non-ASCII as it is, floats in the style `shortest`.

    Raises:
        ValueError: a float is infinite or no number, or a container holds itself.
    """
    text = _COMPACT.encode(value)
    return _written(value, ",", ":") if _SMALL_FLOAT.search(text) else text


def _refuse(value: object) -> NoReturn:
    raise ValueError(f"not a JSON value: {type(value).__name__}")


_SPACED = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_refuse)
_COMPACT = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, default=_refuse, separators=(",", ":")
)


def _integer(digits: str) -> int | float:
    if digits == "-0":
        return -0.0
    value = int(digits)
    return value if _MIN_INT <= value <= _MAX_INT else _float(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("number out of range")
    return value


def _written(value: JsonValue, comma: str, colon: str) -> str:
    # The encoder of the standard library has no hook for floats.
    if isinstance(value, dict):
        items = (
            f"{_COMPACT.encode(key)}{colon}{_written(item, comma, colon)}"
            for key, item in value.items()
        )
        return "{" + comma.join(items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + comma.join(_written(item, comma, colon) for item in value) + "]"
    if isinstance(value, float):
        return _shortest(value)
    return _COMPACT.encode(value)


def _shortest(value: float) -> str:
    mantissa, _, exponent = repr(value).partition("e-")
    if not exponent:
        return mantissa
    if exponent != "05":
        return f"{mantissa}e-{exponent.lstrip('0')}"
    sign = "-" if value < 0 else ""
    return f"{sign}0.0000{mantissa.lstrip('-').replace('.', '')}"
