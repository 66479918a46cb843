"""The texts that end plain text, by their meaning."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["Signal"]


class Signal(Enum):
    """What can follow plain text. Where two end at the same character, the first one here counts.

    `OPEN` and `CLOSE` are `<` or `</` with the tool mark behind it, `MARK` is that mark alone and
    `LONE` any mark alone. `TAIL` is what a closing tag has behind its mark.
    """

    STOP = auto()
    FENCE_END = auto()
    FENCE = auto()
    BRACE = auto()
    OPEN = auto()
    CLOSE = auto()
    MARK = auto()
    THINK_END = auto()
    LONE = auto()
    STRING_ATTRIBUTE = auto()
    QUOTE = auto()
    TAG_END = auto()
    TAIL = auto()
