"""Patterns: the syntax that Python, ECMAScript and Rust agree on, for the whole text, exactly.

`\\d`, `\\w`, `\\s` are ASCII, `.` is all but a newline, case counts. `^` and `$` are accepted where
they say nothing (the whole text must match anyway). A lazy quantifier matches the same texts as a
greedy one. Look-around and back-references, which no finite automaton decides, what depends on a
mode, and what the dialects read differently is refused with its place.
"""

from __future__ import annotations

import re

from deepseek_recipe.errors import shown
from deepseek_recipe.structured.charset import NOT_NEWLINE
from deepseek_recipe.structured.lowered import Lowered
from deepseek_recipe.structured.regex_chars import Cursor, read_class, read_escape, read_plain
from deepseek_recipe.structured.tree import (
    EMPTY,
    Chars,
    Choice,
    Node,
    Ref,
    Repeat,
    Sequence,
    Whole,
    choice,
    repeat,
    rust,
    sequence,
)

__all__ = ["lower_regex", "parse_regex", "weight"]

_MAX_CHARS = 32_768  # parsed in well under 0.2 s
_MAX_DEPTH = 100  # of groups, and of the tree: the mask engine takes this
_MAX_COUNT = 10_000
# Characters with every repetition written out; far beyond it the mask engine gives up half-way.
_MAX_WEIGHT = 20_000

_START_ANCHORS = ("^", "\\A")
_END_ANCHORS = ("$", "\\Z", "\\z")
_COUNT = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_GROUP_NAME = re.compile(r"P?<[A-Za-z_][A-Za-z0-9_]*>")
_REFUSED_GROUPS = {
    "=": "look-ahead",
    "!": "negative look-ahead",
    "<=": "look-behind",
    "<!": "negative look-behind",
    ">": "an atomic group",
    "(": "a conditional group",
    "#": "a comment",
    "|": "a branch reset",
    "P=": "a back-reference",
    "P>": "a recursive call",
    "&": "a recursive call",
    "R": "a recursive call",
}
_GROUPS = "Say what the text is, with groups `(...)`, `(?:...)` and `(?P<name>...)` only."


def lower_regex(pattern: str) -> Lowered:
    """Return the grammar of the texts that match a pattern as a whole.

    Raises:
        ConstraintError: the pattern is malformed, too large, or not a regular expression.
    """
    return Lowered(f"start: /{rust(parse_regex(pattern))}/\n")


def parse_regex(pattern: str, line: int = 1, column: int = 1) -> Node:
    """Return a pattern as a tree without references.

    Args:
        pattern: the pattern.
        line, column: where it starts in a larger text, for the places in errors.

    Raises:
        ConstraintError: as in `lower_regex`.
    """
    cursor = Cursor(pattern, line, column)
    if len(pattern) > _MAX_CHARS:
        cursor.refuse(
            0, f"the pattern has {len(pattern)} characters; allowed: {_MAX_CHARS}. Make it shorter."
        )
    parser = _Parser(cursor)
    node = parser.choice(at_start=True, depth=0)
    if cursor.at < len(pattern):
        cursor.refuse(cursor.at, "`)` closes no group. Write `\\)` for the character.")
    if node.depth > _MAX_DEPTH:
        cursor.refuse(
            0, f"groups are nested too deep: {node.depth} levels; allowed: {_MAX_DEPTH}. Use fewer."
        )
    size = weight(node)
    if size > _MAX_WEIGHT:
        cursor.refuse(
            0,
            f"with its repetitions written out the pattern has {size} characters; "
            f"allowed: {_MAX_WEIGHT}. Use smaller counts.",
        )
    return node


def weight(node: Node) -> int:
    """Return how many characters a tree without references has, each repetition written out."""
    match node:
        case Sequence(parts) | Choice(parts):
            return sum(weight(part) for part in parts)
        case Repeat(part, least, most):
            return weight(part) * max(1, least if most is None else most)
        case Whole(part):
            return weight(part)
        case Chars() | Ref():
            return 1


class _Parser:
    """Recursive descent; `end` is the place of a `$` in this branch."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.end: int | None = None
        self.num_anchors = 0

    def choice(self, *, at_start: bool, depth: int) -> Node:
        """Read up to a `)` or the end."""
        if depth > _MAX_DEPTH:
            self.cursor.refuse(
                self.cursor.at, f"groups are nested over {_MAX_DEPTH} deep. Use fewer."
            )
        branches: list[Node] = []
        ends: list[int | None] = []
        while True:
            self.end = None
            branches.append(self.branch(at_start=at_start, depth=depth))
            ends.append(self.end)
            if not self.cursor.ahead("|"):
                break
            self.cursor.at += 1
        self.end = next((end for end in ends if end is not None), None)
        return choice(branches)

    def branch(self, *, at_start: bool, depth: int) -> Node:
        """Read up to a `|`, a `)` or the end."""
        parts: list[Node] = []
        while self.cursor.at < len(self.cursor.pattern) and not self.cursor.ahead("|", ")"):
            place, end, num_anchors = self.cursor.at, self.end, self.num_anchors
            self.end = None
            at_item_start = at_start and not parts
            node = self.quantified(self.item(at_start=at_item_start, depth=depth), num_anchors)
            if node is not EMPTY:
                parts.append(node)
                if end is not None:
                    self.cursor.refuse(
                        end,
                        f"the end anchor is before the item at character {place + 1}; it is "
                        "allowed at the end only. Write `\\$` for the character.",
                    )
            self.end = self.end if self.end is not None else end
        return sequence(parts)

    def item(self, *, at_start: bool, depth: int) -> Node:
        """Read one character, class, group or anchor."""
        place = self.cursor.at
        if anchor := self.cursor.ahead(*_START_ANCHORS):
            if not at_start:
                self.cursor.refuse(
                    place, f"the anchor `{anchor}` is allowed at the start only. Cut it."
                )
            self.cursor.at += len(anchor)
            self.num_anchors += 1
            return EMPTY
        if anchor := self.cursor.ahead(*_END_ANCHORS):
            self.cursor.at += len(anchor)
            self.end = place
            self.num_anchors += 1
            return EMPTY
        self.cursor.at += 1
        match self.cursor.pattern[place]:
            case "(":
                return self.group(at_start=at_start, depth=depth)
            case "[":
                return read_class(self.cursor, place)
            case ".":
                return Chars(NOT_NEWLINE)
            case "\\":
                return Chars(read_escape(self.cursor, place, in_class=False))
            case "*" | "+" | "?":
                self.cursor.refuse(
                    place, f"`{self.cursor.pattern[place]}` repeats nothing. Escape it or cut it."
                )
            case "{" if _COUNT.match(self.cursor.pattern, place):
                self.cursor.refuse(
                    place, "the count repeats nothing. Write `\\{` for the character."
                )
            case char:
                return Chars(read_plain(self.cursor, char, place))

    def group(self, *, at_start: bool, depth: int) -> Node:
        """Read a group behind its `(`."""
        place = self.cursor.at - 1
        if self.cursor.ahead("?"):
            self.cursor.at += 1
            if name := _GROUP_NAME.match(self.cursor.pattern, self.cursor.at):
                self.cursor.at = name.end()
            elif self.cursor.ahead(":"):
                self.cursor.at += 1
            elif refused := self.cursor.ahead(*_REFUSED_GROUPS):
                self.cursor.refuse(place, f"{_REFUSED_GROUPS[refused]} is not supported. {_GROUPS}")
            else:
                self.cursor.refuse(
                    place, f"inline flags and unknown groups are not supported. {_GROUPS}"
                )
        elif self.cursor.ahead("*"):
            self.cursor.refuse(place, f"a verb `(*...)` is not supported. {_GROUPS}")
        node = self.choice(at_start=at_start, depth=depth + 1)
        if not self.cursor.ahead(")"):
            self.cursor.refuse(place, "the group is not closed. Write `\\(` for the character.")
        self.cursor.at += 1
        return node

    def quantified(self, node: Node, num_anchors: int) -> Node:
        """Apply the quantifier that follows, if any."""
        place = self.cursor.at
        if count := _COUNT.match(self.cursor.pattern, self.cursor.at):
            least, most = self.count(count)
            self.cursor.at = count.end()
        elif mark := self.cursor.ahead("*", "+", "?"):
            least = int(mark == "+")
            most = 1 if mark == "?" else None
            self.cursor.at += 1
        else:
            return node
        if num_anchors != self.num_anchors:
            self.cursor.refuse(
                place, "an anchor is repeated; it is allowed at either end only. Cut it."
            )
        if self.cursor.ahead("+"):
            self.cursor.refuse(place, "a possessive quantifier is not supported. Cut the last `+`.")
        self.cursor.at += bool(self.cursor.ahead("?"))
        if self.cursor.ahead("*", "+", "?") or _COUNT.match(self.cursor.pattern, self.cursor.at):
            self.cursor.refuse(
                self.cursor.at, "a quantifier follows a quantifier. Put the first in a group."
            )
        return repeat(node, least, most)

    def count(self, count: re.Match[str]) -> tuple[int, int | None]:
        """Return the bounds of `{m}`, `{m,}` or `{m,n}`."""
        low, comma, high = count.groups()
        if not low:
            self.cursor.refuse(
                count.start(), f"`{count[0]}` means different things elsewhere. Write `{{0,n}}`."
            )
        if max(len(low), len(high)) > 9 or max(int(low), int(high or 0)) > _MAX_COUNT:
            self.cursor.refuse(
                count.start(),
                f"the count {shown(count[0])} is too large; allowed: {_MAX_COUNT}. Use less.",
            )
        least, most = int(low), int(high) if high else None if comma else int(low)
        if most is not None and least > most:
            self.cursor.refuse(
                count.start(),
                f"the bounds of `{count[0]}` are in the wrong order. Write the lower first.",
            )
        return least, most
