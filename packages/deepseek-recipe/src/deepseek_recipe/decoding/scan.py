"""Finds delimiters and stop texts in a text that comes in pieces, in time linear in its length.

An Aho-Corasick automaton: a node is the longest end of the text so far that may still grow into a
pattern. That end is held back; what lies before it is certainly plain.
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache
from typing import NamedTuple

from deepseek_recipe.decoding.signals import Signal

__all__ = ["Pattern", "Patterns", "Scanner", "patterns_of"]


class Pattern(NamedTuple):
    """A text to find and what it means."""

    text: str
    signal: Signal


class Patterns:
    """Patterns, compiled. Of those that end at the same character the one listed first counts."""

    __slots__ = ("fail", "first", "held", "next", "won")

    def __init__(self, patterns: tuple[Pattern, ...]) -> None:
        """Compile patterns, none of them empty."""
        self.next: list[dict[str, int]] = [{}]  # node -> character -> node
        self.held = [""]  # node -> the text that leads to it
        self.won: list[Pattern | None] = [None]  # node -> the pattern that is complete there
        for pattern in patterns:
            node = 0
            for end, char in enumerate(pattern.text, start=1):
                if char not in self.next[node]:
                    self.next[node][char] = len(self.next)
                    self.next.append({})
                    self.held.append(pattern.text[:end])
                    self.won.append(None)
                node = self.next[node][char]
            self.won[node] = self.won[node] or pattern
        self.fail = self._failures(patterns)
        chars = "".join(re.escape(char) for char in self.next[0])
        self.first = re.compile(f"[{chars}]") if chars else None

    def _failures(self, patterns: tuple[Pattern, ...]) -> list[int]:
        rank = {pattern: place for place, pattern in reversed(list(enumerate(patterns)))}
        fail = [0] * len(self.next)
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            shorter = self.won[fail[node]]
            own = self.won[node]
            if shorter is not None and (own is None or rank[shorter] < rank[own]):
                self.won[node] = shorter
            for char, child in self.next[node].items():
                back = fail[node]
                while back and char not in self.next[back]:
                    back = fail[back]
                fail[child] = self.next[back].get(char, 0)
                queue.append(child)
        return fail


@lru_cache(maxsize=256)
def patterns_of(patterns: tuple[Pattern, ...]) -> Patterns:
    """Return the patterns compiled, the same object for the same patterns."""
    return Patterns(patterns)


class Scanner:
    """Reads on with one set of patterns at a time."""

    __slots__ = ("_node", "_patterns")

    def __init__(self, patterns: Patterns) -> None:
        """Begin with nothing held back."""
        self._patterns = patterns
        self._node = 0

    @property
    def held(self) -> str:
        """The end of the text that may become a pattern."""
        return self._patterns.held[self._node]

    def use(self, patterns: Patterns) -> str:
        """Go on with other patterns and nothing held back; return what was held back."""
        held = self.held
        self._patterns = patterns
        self._node = 0
        return held

    def scan(self, text: str, at: int) -> tuple[str, Pattern | None, int]:
        """Read `text[at:]` behind what is held, up to the end of the first complete pattern.

        Returns:
            The text that is certainly plain, the pattern that follows it or None, and the index
            behind it.
        """
        patterns = self._patterns
        first = patterns.first
        node = self._node
        if not node and (first is None or first.search(text, at) is None):
            return (text[at:] if at else text), None, len(text)
        held = patterns.held[node]
        end = len(text)
        index = at
        while index < end:
            if not node:
                found = first.search(text, index) if first is not None else None
                if found is None:
                    index = end
                    break
                index = found.start()
            char = text[index]
            index += 1
            while node and char not in patterns.next[node]:
                node = patterns.fail[node]
            node = patterns.next[node].get(char, 0)
            won = patterns.won[node]
            if won is not None:
                self._node = 0
                return _before(held, text, at, index - len(won.text)), won, index
        self._node = node
        return _before(held, text, at, end - len(patterns.held[node])), None, end


def _before(held: str, text: str, at: int, end: int) -> str:
    # `end` is an index of `text`; below `at` it lies within what was held before `text[at:]`.
    if end < at:
        return held[: len(held) + end - at]
    return held + text[at:end]
