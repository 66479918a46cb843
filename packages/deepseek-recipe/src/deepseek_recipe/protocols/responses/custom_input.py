"""`CustomInput`: the one text of a custom tool's call, taken out of the call's JSON arguments."""

from __future__ import annotations

import json
import re

from deepseek_recipe.decoding.marks import without_surrogates

__all__ = ["CustomInput"]

_HEAD = '{"input": "'
# Complete characters of a JSON string. A surrogate pair is one of them. A first half alone is one
# when no second half can follow any more: a call that is cut off may have any text for its value.
_CHARACTERS = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[0-9a-fA-F]{4}(?=[^\\]|\\(?:[^u]|u(?:[^dD]|[dD][^c-fC-F]))))*"
)


class CustomInput:
    """Turns pieces of a call's arguments into pieces of the text that the tool gets.

    That is the value of `input` where it comes first and is a string, which is how a custom tool is
    shown to the model. Other arguments are the text as they are. Nothing comes out before the shape
    is certain, so a call that is cut off earlier has no text.
    """

    __slots__ = ("_behind", "_held", "_state")

    def __init__(self) -> None:
        """Start before the first piece."""
        self._held = ""
        self._state = "head"  # then `text`, then `ended`; or `other`
        self._behind: list[str] = []

    def feed(self, arguments: str) -> str:
        """Take in a piece of the arguments and return what it adds to the text, often nothing."""
        state = self._state
        if state == "text" and not self._held and '"' not in arguments and "\\" not in arguments:
            return arguments
        if state == "ended":
            self._behind.append(arguments)
            return ""
        if state == "other":
            return arguments
        held = self._held + arguments
        if state == "head":
            if len(held) < len(_HEAD) and _HEAD.startswith(held):
                self._held = held
                return ""
            if not held.startswith(_HEAD):
                self._state = "other"
                return held
            self._state = "text"
            held = held[len(_HEAD) :]
        end = self._end_of_text(held)
        self._held = held[end:] if self._state == "text" else ""
        return without_surrogates(json.loads(f'"{held[:end]}"', strict=False))

    def left_out(self) -> str:
        """Return what of the arguments so far is neither in the text nor JSON around it."""
        if self._state == "text":
            return self._held  # an escape that is cut off, or none
        behind = "".join(self._behind)
        return "" if behind == "}" else behind

    def _end_of_text(self, held: str) -> int:
        match = _CHARACTERS.match(held)
        assert match is not None, "the pattern matches the empty text"
        if held.startswith('"', match.end()):
            self._state = "ended"
            self._behind.append(held[match.end() + 1 :])
        return match.end()
