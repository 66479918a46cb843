"""Tool markup: how tags begin, and the JSON text of a call's arguments as it grows.

<MARK tool_calls>                                        V4.1 writes ` calls`,
<MARK invoke name="NAME">                                ` invoke`, ` parameter`;
<MARK parameter name="KEY" string="true">TEXT</MARK parameter>    any mix is read
<MARK parameter name="KEY" string="false">JSON</MARK parameter>
</MARK invoke>
</MARK tool_calls>
"""

from __future__ import annotations

import json
import re
from typing import Final

from deepseek_recipe.json_text import load

__all__ = [
    "CLOSING_TAILS",
    "STRING_ATTRIBUTE",
    "Arguments",
    "begins_closing_word",
    "closes_block",
    "is_closing_word",
    "kind_of_tag",
    "quoted",
]

# What ends a parameter's name; a quote inside a name does not.
STRING_ATTRIBUTE: Final = '" string="'

# The text between a mark and the first quote or `>` of its tag.
_NAMED_TAG = re.compile(r'\s*(invoke|parameter)\s+name="')
_BLOCK_TAG = re.compile(r"\s*(?:tool_calls|calls|function_calls)\s*>")
_WORDS: Final = ("parameter", "invoke", "tool_calls", "function_calls", "calls")
# Only these end the block: one that was opened by another word goes on to the end of the output.
_BLOCK_ENDS: Final = ("tool_calls>", " calls>")

# What a closing tag has behind its mark. One that ends like another one comes before that one.
CLOSING_TAILS: Final = tuple(f"{blank}{word}>" for word in _WORDS for blank in (" ", ""))

quoted = json.JSONEncoder(ensure_ascii=False).encode


def kind_of_tag(head: str) -> str:
    """Return what an opening tag's text up to its first quote or `>` begins.

    `invoke`, `parameter` (both up to the quote before the name), `block`, or `bad`.
    """
    named = _NAMED_TAG.fullmatch(head)
    if named is not None:
        return named[1]
    return "block" if _BLOCK_TAG.fullmatch(head) else "bad"


def closes_block(tail: str) -> bool:
    """Return whether a closing tag's text behind the mark, up to its `>`, ends the block."""
    return tail in _BLOCK_ENDS


def is_closing_word(tail: str) -> bool:
    """Return whether a closing tag's text behind the mark is nothing but one of the words."""
    return tail.removesuffix(">").strip() in ("", *_WORDS)


def begins_closing_word(tail: str) -> bool:
    """Return whether a closing tag's text behind the mark may become one of the words."""
    return any(word.startswith(tail.strip()) for word in _WORDS)


class Arguments:
    """The arguments of one call: a JSON object, written piece by piece.

    Every method returns the next piece of its text.
    """

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        """Begin without parameters."""
        self._keys: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether a parameter of that name was begun."""
        return key in self._keys

    def separator(self) -> str:
        """Return what precedes the next name."""
        return ", " if self._keys else "{"

    def begin(self, key: str) -> str:
        """Begin a parameter."""
        text = f"{self.separator()}{quoted(key)}: "
        self._keys.add(key)
        return text

    def value(self, text: str) -> tuple[str, str | None]:
        """Return a whole JSON value as it is, or as a string and why it is none."""
        try:
            # in a list, since one level more must be allowed where the value stands
            values = load(f"[{text}]")
            if isinstance(values, list) and len(values) == 1:
                return text, None
        except (ValueError, RecursionError):
            pass
        return quoted(text), _why_no_json(text)

    def end(self) -> str:
        """End the object."""
        return "}" if self._keys else "{}"


def _why_no_json(text: str) -> str:
    try:
        load(text)
    except (ValueError, RecursionError) as error:
        return str(error)
    return "too many levels"
