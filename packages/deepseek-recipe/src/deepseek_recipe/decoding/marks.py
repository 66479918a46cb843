"""Two private characters that stand for the marks which have meaning by their token id.

A mark's token becomes one character that no text can hold, so that all rules of the machine are
plain rules about text, and the same spelling made of ordinary tokens is never taken for the mark.
"""

from __future__ import annotations

import re
from typing import Final

from deepseek_recipe.encoding.profile import Profile

__all__ = ["DSML", "THINK_END", "Spelling", "without_surrogates"]

# Lone surrogates: decoding bytes never yields them, and `without_surrogates` keeps them out of
# texts that come as text.
THINK_END: Final = "\udc00"
DSML: Final = "\udc01"

_SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """Return a text with each lone surrogate, which is no character, replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


class Spelling:
    """How the marks are written in a checkpoint's texts."""

    __slots__ = ("dsml", "think_end")

    def __init__(self, profile: Profile) -> None:
        """Take the spellings of a profile."""
        self.think_end = profile.tokens.think_end
        self.dsml = profile.tokens.dsml

    def of(self, text: str) -> str:
        """Return a text with private characters replaced by what they stand for."""
        return text.replace(THINK_END, self.think_end).replace(DSML, self.dsml)
