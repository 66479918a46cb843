"""Ranges of request fields, the same in all protocols. Each check passes None.

Fractions are compared as float32, which is what they become: 2.00000001 is 2, and 1e-60 is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepseek_recipe.errors import ConversionError
from deepseek_recipe.settings import to_float32

__all__ = [
    "MAX_STOPS",
    "check_max_tokens",
    "check_penalty",
    "check_seed",
    "check_stop",
    "check_temperature",
    "check_top_logprobs",
    "check_top_p",
]

MAX_STOPS = 16


def check_temperature(value: float | None) -> None:
    """Raise ConversionError unless `value` is in [0, 2]."""
    if value is not None and not 0 <= _single(value) <= 2:
        raise _out_of_range("temperature", "[0, 2]")


def check_top_p(value: float | None) -> None:
    """Raise ConversionError unless `value` is in (0, 1]."""
    if value is not None and not 0 < _single(value) <= 1:
        raise _out_of_range("top_p", "(0, 1.0]")


def check_max_tokens(value: int | None, bound: int) -> None:
    """Raise ConversionError unless `value` is in [1, bound]; `bound` is in tokens."""
    if value is not None and not 1 <= value <= bound:
        raise _out_of_range("max_tokens", f"[1, {bound}]")


def check_seed(value: int | None) -> None:
    """Raise ConversionError unless `value` is in [0, 2^63)."""
    if value is not None and not 0 <= value < 1 << 63:
        raise _out_of_range("seed", "[0, 2^63)")


def check_top_logprobs(value: int | None) -> None:
    """Raise ConversionError unless `value` is in [0, 20]."""
    if value is not None and not 0 <= value <= 20:
        raise _out_of_range("top_logprobs", "[0, 20].")


def check_penalty(name: str, value: float | None) -> None:
    """Raise ConversionError unless `value` of the penalty `name` is in [-2, 2]."""
    if value is not None and not -2 <= _single(value) <= 2:
        raise _out_of_range(name, "[-2, 2]")


def check_stop(stops: Sequence[str], *, bare: bool = False) -> None:
    """Raise ConversionError on more than 16 stop texts, or an empty one.

    Args:
        bare: the request has one text in place of a list, so that messages give no index.
    """
    if len(stops) > MAX_STOPS:
        raise ConversionError(f"Stop string array too long: {len(stops)}")
    for index, stop in enumerate(stops):
        if not stop:
            place = "stop" if bare else f"stop[{index}]"
            raise ConversionError(
                f"Invalid '{place}': empty string. Expected a string with minimum length 1, but "
                "got an empty string instead."
            )


def _single(value: float) -> float:
    # what float32 cannot hold is out of every range here, so it may stay as it is
    return to_float32(value) if abs(value) < 1e30 else value


def _out_of_range(name: str, allowed: str) -> ConversionError:
    return ConversionError(f"Invalid {name} value, the valid range of {name} is {allowed}")
