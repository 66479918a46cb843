"""What a front end makes of a constraint."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Lowered", "quoted"]

# What is not itself in a pattern of the engine, or looks like the end of one or of a line.
_SPECIAL = re.compile(r"[^A-Za-z0-9_ \u00a1-\u1fff\u3000-\ud7ff]")


@dataclass(frozen=True)
class Lowered:
    """Grammar text for the mask engine; its start rule is `start`."""

    grammar: str
    warnings: tuple[str, ...] = ()
    """What does not constrain the text although the constraint names it (annotations)."""


def quoted(text: str) -> str:
    """Return a text as a pattern of the mask engine that matches it alone."""
    return _SPECIAL.sub(lambda char: f"\\x{{{ord(char.group()):x}}}", text)
