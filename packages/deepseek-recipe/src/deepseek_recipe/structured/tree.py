"""The tree that the regex and the EBNF front end both build: characters, sequence, choice, repeat.

Build with `sequence`, `choice` and `repeat`: they keep empty parts out of sequences and choices, so
that only `EMPTY`, one value, stands for the empty text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepseek_recipe.structured.charset import CharSet

__all__ = ["EMPTY", "Chars", "Choice", "Node", "Ref", "Repeat", "Sequence", "Whole"]
__all__ += ["bounds", "choice", "literal", "repeat", "rust", "sequence"]


@dataclass(frozen=True)
class Chars:
    """One character out of a set that is not empty."""

    chars: CharSet
    depth: int = 1


@dataclass(frozen=True)
class Ref:
    """A rule by name; `place` is where it is used, as `line:column`."""

    name: str
    place: str
    depth: int = 1


@dataclass(frozen=True)
class Sequence:
    """Parts one after the other; none is the empty text."""

    parts: tuple[Node, ...]
    depth: int


@dataclass(frozen=True)
class Choice:
    """One of several parts, none of which is the empty text itself."""

    parts: tuple[Node, ...]
    depth: int


@dataclass(frozen=True)
class Repeat:
    """A part `least` to `most` times; None is without end."""

    part: Node
    least: int
    most: int | None
    depth: int


@dataclass(frozen=True)
class Whole:
    """A part without references that the mask engine reads as one terminal."""

    part: Node
    depth: int = 1


Node = Chars | Ref | Sequence | Choice | Repeat | Whole

EMPTY = Sequence((), 0)


def sequence(parts: Iterable[Node]) -> Node:
    """Return the parts one after the other."""
    kept = tuple(part for part in parts if part is not EMPTY)
    if len(kept) == 1:
        return kept[0]
    return Sequence(kept, 1 + max(part.depth for part in kept)) if kept else EMPTY


def choice(parts: Iterable[Node]) -> Node:
    """Return one of the parts; where one is empty, an optional choice of the others."""
    every = tuple(parts)
    kept = tuple(part for part in every if part is not EMPTY)
    if not kept:
        return EMPTY
    one = kept[0] if len(kept) == 1 else Choice(kept, 1 + max(part.depth for part in kept))
    return one if len(kept) == len(every) else repeat(one, 0, 1)


def repeat(part: Node, least: int, most: int | None) -> Node:
    """Return the part `least` to `most` times."""
    if part is EMPTY or most == 0:
        return EMPTY
    if least == most == 1:
        return part
    return Repeat(part, least, most, 1 + part.depth)


def literal(text: str) -> Node:
    """Return the characters of a text, one after the other."""
    return sequence(Chars(CharSet.char(char)) for char in text)


def rust(node: Node) -> str:
    """Return a tree without references as a Rust regex; the empty text is `()`."""
    match node:
        case Chars(chars):
            return chars.rust()
        case Sequence(parts):
            return "".join(rust(part) for part in parts) or "()"
        case Choice(parts):
            return f"({'|'.join(rust(part) for part in parts)})"
        case Repeat(part, least, most):
            inner = rust(part)
            inner = inner if isinstance(part, Chars) else f"({inner})"
            return inner + bounds(least, most)
        case Whole(part):
            return rust(part)
        case Ref(name):
            raise AssertionError(f"rule {name!r} in a regex")


def bounds(least: int, most: int | None) -> str:
    """Return how often, as it stands behind a part: `?`, `*`, `+` or `{m,n}`."""
    short = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((least, most))
    return short or f"{{{least},{'' if most is None else most}}}"
