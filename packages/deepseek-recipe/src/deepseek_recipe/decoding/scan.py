"""Finds delimiters and stop texts in a text that comes in pieces, in time linear in its length.

An Aho-Corasick automaton: a node is the longest end of the text so far that may still grow into a
pattern. That end is held back; what lies before it is certainly plain.
"""

from __future__ import annotations

import re
from array import array
from typing import NamedTuple

from deepseek_recipe.decoding.signals import Signal

__all__ = ["Pattern", "Patterns", "Scanner"]


class Pattern(NamedTuple):
    """A text to find and what it means."""

    text: str
    signal: Signal


class Patterns:
    """Patterns, compiled. Of those that end at the same character the one listed first counts.

    A node is one depth of one pattern, its owner; patterns with a common begin share nodes. A node
    is made when a text first leads to it, and holds no text of its own. So the patterns of a client
    cost what a reply makes of them: for each character a node of each pattern at most, and never
    more than their own length.

    Attributes:
        begins: the nodes that node 0 leads to.
        first: finds what a pattern may begin with, None without patterns.
        depth, fail, won: of each node, how far from node 0 it is, the node to go on with where the
            text does, and the place among the patterns of the one that is complete there, or -1.
    """

    __slots__ = (
        "_branches",
        "_child",
        "_group",
        "_groups",
        "_owner",
        "_texts",
        "begins",
        "depth",
        "fail",
        "first",
        "patterns",
        "won",
    )

    def __init__(self, patterns: tuple[Pattern, ...]) -> None:
        """Compile patterns, none of them empty."""
        self.patterns = patterns
        self._texts = [pattern.text for pattern in patterns]
        self._groups = [list(range(len(patterns)))]  # patterns that begin alike
        self._group = array("i", [0])  # node -> place of those that begin like it
        self._owner = array("i", [0])  # node -> the first of them
        self.depth = array("i", [0])
        self.fail = array("i", [0])
        self.won = array("i", [-1])
        self._child = array("i", [0])  # by the owner's next character; 0 for none so far
        self.begins: dict[str, int] = {}
        self._branches = {0: self.begins}  # by the other characters
        for text in self._texts:
            if text[0] not in self.begins:
                self._add(0, text[0])
        chars = "".join(map(re.escape, self.begins))
        self.first = re.compile(f"[{chars}]") if chars else None

    def next(self, node: int, char: str) -> int:
        """Return the node that a character leads to, 0 for none."""
        if not node:
            return self.begins.get(char, 0)
        at = self.depth[node]
        text = self._texts[self._owner[node]]
        if at < len(text) and text[at] == char:
            return self._child[node] or self._add(node, char)
        if len(self._groups[self._group[node]]) == 1:
            return 0
        branches = self._branches.get(node)
        found = 0 if branches is None else branches.get(char, 0)
        return found or self._add(node, char)

    def held(self, node: int, end: int) -> str:
        """Return the first characters of the text that leads to a node."""
        return self._texts[self._owner[node]][:end] if node else ""

    def _add(self, parent: int, char: str) -> int:
        """Make the node that a character leads to; 0 when no pattern goes on so."""
        at, texts = self.depth[parent], self._texts
        before = self._groups[self._group[parent]]
        group = [each for each in before if len(texts[each]) > at and texts[each][at] == char]
        if not group:
            return 0
        back = self.fail[parent]
        if parent:
            while back and not self.next(back, char):
                back = self.fail[back]
            back = self.next(back, char)
        complete = [each for each in group if len(texts[each]) == at + 1]
        if self.won[back] >= 0:
            complete.append(self.won[back])
        node = len(self.fail)
        if len(group) == len(before):
            self._group.append(self._group[parent])
        else:
            self._group.append(len(self._groups))
            self._groups.append(group)
        self._owner.append(group[0])
        self.depth.append(at + 1)
        self.fail.append(back)
        self.won.append(min(complete, default=-1))
        self._child.append(0)
        if parent and group[0] == self._owner[parent]:
            self._child[parent] = node
        else:
            self._branches.setdefault(parent, {})[char] = node
        return node


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
        patterns, node = self._patterns, self._node
        return patterns.held(node, patterns.depth[node])

    def use(self, patterns: Patterns) -> str:
        """Go on with other patterns and nothing held back; return what was held back."""
        held = self.held if self._node else ""
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
        node = before = self._node
        if not node and (first is None or first.search(text, at) is None):
            return (text[at:] if at else text), None, len(text)
        end = len(text)
        index = at
        while index < end:
            if not node:
                found = first.search(text, index) if first is not None else None
                if found is None:
                    index = end
                    break
                index = found.start()
                node = patterns.begins[text[index]]
            else:
                char = text[index]
                after = patterns.next(node, char)
                while node and not after:
                    node = patterns.fail[node]
                    after = patterns.next(node, char)
                node = after
            index += 1
            place = patterns.won[node]
            if place >= 0:
                self._node = 0
                won = patterns.patterns[place]
                return self._plain(before, text, at, index - len(won.text)), won, index
        self._node = node
        return self._plain(before, text, at, end - patterns.depth[node]), None, end

    def follow(self, text: str, at: int) -> tuple[Pattern | None, bool, int]:
        """Read `text[at:]` behind what is held as long as that may become a pattern as a whole.

        For patterns that are parts of one another at their ends only, the longer one listed first.

        Returns:
            The pattern that it became, whether it may still become one (it is held then), and the
            index behind what was read.
        """
        patterns, node = self._patterns, self._node
        for index in range(at, len(text)):
            after = patterns.next(node, text[index])
            if not after:
                self._node = node
                return None, False, index
            node = after
            place = patterns.won[node]
            if place >= 0:
                self._node = 0
                return patterns.patterns[place], False, index + 1
        self._node = node
        return None, True, len(text)

    def _plain(self, before: int, text: str, at: int, end: int) -> str:
        # what was held at the node `before` and the text behind it, up to the index `end` of the
        # text; below `at` that lies within what was held
        patterns = self._patterns
        if not before:
            return text[at:end]
        length = patterns.depth[before] + end - at
        held = patterns.held(before, min(length, patterns.depth[before]))
        return held + text[at:end] if end > at else held
