"""Characters of a pattern: as they stand, escaped, or in a class."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.structured.charset import DIGITS, SPACES, WORD, CharSet
from deepseek_recipe.structured.tree import Chars, Node

__all__ = ["Cursor", "read_class", "read_escape", "read_plain"]

_CLASSES = {"d": DIGITS, "w": WORD, "s": SPACES}
_CLASSES |= {name.upper(): chars.negate() for name, chars in _CLASSES.items()}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_HEX = {"x": 2, "u": 4, "U": 8}
_SET_OPERATORS = ("&&", "--", "~~", "||")


@dataclass
class Cursor:
    """A pattern and the place of the next character.

    Attributes:
        pattern: the text that is read.
        line, column: where it starts in the whole, from 1.
        at: index of the next character in `pattern`.
    """

    pattern: str
    line: int = 1
    column: int = 1
    at: int = 0

    def refuse(self, at: int, message: str) -> NoReturn:
        """Raise the error for a place."""
        num_newlines = self.pattern.count("\n", 0, at)
        column = at - self.pattern.rfind("\n", 0, at) if num_newlines else self.column + at
        raise ConstraintError(f"{self.line + num_newlines}:{column}", message)

    def ahead(self, *texts: str) -> str | None:
        """Return the first of the texts that stands here."""
        return next((text for text in texts if self.pattern.startswith(text, self.at)), None)


def read_plain(cursor: Cursor, char: str, place: int) -> CharSet:
    """Return the set of a character as it stands."""
    chars = CharSet.char(char)
    if not chars.ranges:
        cursor.refuse(place, f"{shown(char)} is a lone surrogate, which no text has. Cut it.")
    return chars


def read_class(cursor: Cursor, place: int) -> Node:
    """Read a character class behind its `[`."""
    negated = bool(cursor.ahead("^"))
    cursor.at += negated
    if cursor.ahead("]"):
        cursor.refuse(place, "an empty class; escape a `]` that belongs to it.")
    ranges: list[tuple[int, int]] = []
    while not cursor.ahead("]"):
        if cursor.at >= len(cursor.pattern):
            cursor.refuse(place, "the class is not closed. Write `\\[` for the character.")
        ranges += _class_item(cursor)
    cursor.at += 1
    chars = CharSet.of(ranges)
    chars = chars.negate() if negated else chars
    if not chars.ranges:
        cursor.refuse(place, "the class has no character, so that nothing matches. Name one.")
    return Chars(chars)


def _class_item(cursor: Cursor) -> tuple[tuple[int, int], ...]:
    """Read one character, class escape or range of a character class."""
    place = cursor.at
    first = _class_char(cursor)
    if not cursor.ahead("-") or cursor.pattern[cursor.at + 1 : cursor.at + 2] in ("", "]"):
        return first.ranges
    cursor.at += 1
    last = _class_char(cursor)
    low, high = first.ranges[0][0], last.ranges[-1][1]
    if len(_one(first)) != 1 or len(_one(last)) != 1:
        cursor.refuse(place, "a range between classes. Escape the `-` that belongs to the class.")
    if low > high:
        cursor.refuse(
            place,
            f"the range {shown(cursor.pattern[place : cursor.at])} is in the wrong order. "
            "Write the lower end first.",
        )
    return ((low, high),)


def _one(chars: CharSet) -> str:
    """Return the only character of a set, or nothing."""
    (low, high), *others = chars.ranges
    return chr(low) if low == high and not others else ""


def _class_char(cursor: Cursor) -> CharSet:
    """Read one character or escape of a character class."""
    place = cursor.at
    if operator := cursor.ahead(*_SET_OPERATORS):
        cursor.refuse(
            place,
            f"`{operator}` in a class is an operator elsewhere. Escape the second character.",
        )
    if posix := cursor.ahead("[:", "[.", "[="):
        cursor.refuse(
            place,
            f"`{posix}` in a class starts a POSIX name, which is not supported. Spell out "
            "the ranges.",
        )
    cursor.at += 1
    char = cursor.pattern[place]
    if char == "\\":
        return read_escape(cursor, place, in_class=True)
    return read_plain(cursor, char, place)


def read_escape(cursor: Cursor, place: int, *, in_class: bool) -> CharSet:
    """Read an escape behind its backslash."""
    if cursor.at >= len(cursor.pattern):
        cursor.refuse(place, "a backslash ends the pattern. Write `\\\\` for the character.")
    char = cursor.pattern[cursor.at]
    cursor.at += 1
    if char in _CLASSES:
        return _CLASSES[char]
    if char in _CONTROLS:
        return CharSet.char(_CONTROLS[char])
    if char in _HEX:
        return _code_point(cursor, place, char)
    if char == "b" and in_class:
        return CharSet.char("\b")
    if char == "0" and cursor.pattern[cursor.at : cursor.at + 1] not in tuple("01234567"):
        return CharSet.char("\0")
    if char.isdigit() or char in "kg":
        what = "an octal escape" if char == "0" or in_class else "a back-reference"
        cursor.refuse(
            place, f"`\\{char}` is {what}, which is not supported. Write out what it stands for."
        )
    if char in "bB":
        cursor.refuse(
            place,
            f"the word boundary `\\{char}` is not supported. Name the characters that may "
            "stand there.",
        )
    if char in "pP":
        cursor.refuse(place, f"the property `\\{char}` is not supported. Spell out the ranges.")
    if char.isascii() and char.isalnum():
        cursor.refuse(place, f"the escape `\\{char}` is not supported. Write the character itself.")
    return read_plain(cursor, char, place)


def _code_point(cursor: Cursor, place: int, kind: str) -> CharSet:
    """Read the digits of `\\xHH`, `\\uHHHH`, `\\UHHHHHHHH` or, in braces, up to six."""
    if kind != "U" and cursor.ahead("{"):
        digits = re.compile(r"\{([0-9A-Fa-f]{1,6})\}").match(cursor.pattern, cursor.at)
    else:
        digits = re.compile(f"([0-9A-Fa-f]{{{_HEX[kind]}}})").match(cursor.pattern, cursor.at)
    if digits is None:
        cursor.refuse(place, f"`\\{kind}` needs {_HEX[kind]} hexadecimal digits.")
    cursor.at = digits.end()
    code = int(digits[1], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        cursor.refuse(
            place, f"`\\{kind}{digits[0]}` is no character. Use a code up to 10FFFF, no surrogate."
        )
    return CharSet.char(chr(code))
