"""Sets of characters as sorted ranges of code points, and how a Rust regex writes them.

Surrogates (U+D800 to U+DFFF) are in no set: text in UTF-8 has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ANY", "DIGITS", "NOT_NEWLINE", "SPACES", "WORD", "CharSet"]

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True)
class CharSet:
    """A set of characters.

    Attributes:
        ranges: inclusive ranges of code points, sorted, apart by at least one missing character.
    """

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> CharSet:
        """Return the union of inclusive ranges, which may overlap; surrogates are left out."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted(ranges):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        return cls(tuple(part for whole in merged for part in _without_surrogates(*whole)))

    @classmethod
    def char(cls, char: str) -> CharSet:
        """Return the set of one character."""
        return cls.of([(ord(char), ord(char))])

    def union(self, other: CharSet) -> CharSet:
        """Return what is in either set."""
        return CharSet.of(self.ranges + other.ranges)

    def negate(self) -> CharSet:
        """Return every other character."""
        gaps, start = [], 0
        for low, high in self.ranges:
            if low > start:
                gaps.append((start, low - 1))
            start = high + 1
        if start <= _LAST:
            gaps.append((start, _LAST))
        return CharSet.of(gaps)

    def intersects(self, other: CharSet) -> bool:
        """Tell whether a character is in both sets."""
        mine, theirs = self.ranges, other.ranges
        at, beside = 0, 0
        while at < len(mine) and beside < len(theirs):
            if mine[at][1] < theirs[beside][0]:
                at += 1
            elif theirs[beside][1] < mine[at][0]:
                beside += 1
            else:
                return True
        return False

    def contains(self, char: str) -> bool:
        """Tell whether a character is in the set."""
        return any(low <= ord(char) <= high for low, high in self.ranges)

    def rust(self) -> str:
        """Return the set as a Rust regex; a set of one character is that character."""
        if len(self.ranges) == 1 and self.ranges[0][0] == self.ranges[0][1]:
            return _written(self.ranges[0][0])
        parts = (
            _written(low) if low == high else f"{_written(low)}-{_written(high)}"
            for low, high in self.ranges
        )
        return f"[{''.join(parts)}]"


def _without_surrogates(low: int, high: int) -> Iterable[tuple[int, int]]:
    first, last = _SURROGATES
    if high < first or low > last:
        yield (low, high)
        return
    if low < first:
        yield (low, first - 1)
    if high > last:
        yield (last + 1, high)


def _written(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"


DIGITS = CharSet.of([(0x30, 0x39)])
WORD = CharSet.of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACES = CharSet.of([(0x09, 0x0D), (0x20, 0x20)])
NOT_NEWLINE = CharSet.char("\n").negate()
ANY = CharSet.of([(0, _LAST)])
