"""What a schema allows, as alternatives of one JSON type each, and their intersection.

A node is a set of literals; a literal is a schema, by its number in the document, asserted or
denied. Shapes speak of their parts by node, so recursive schemas have finitely many of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias, TypeVar

from deepseek_recipe.structured.schema.pattern import Pattern

__all__ = [
    "ANYTHING",
    "UNIVERSE",
    "Array",
    "ArrayFamily",
    "Boolean",
    "Contains",
    "Node",
    "Null",
    "Number",
    "Object",
    "ObjectFamily",
    "Shape",
    "String",
    "meet",
]

T = TypeVar("T")
Node: TypeAlias = frozenset[tuple[int, bool]]
ANYTHING: Node = frozenset()


@dataclass(frozen=True)
class Null:
    """The one null."""


@dataclass(frozen=True)
class Boolean:
    """Some of the truth values."""

    values: frozenset[bool] = frozenset({False, True})


@dataclass(frozen=True)
class Number:
    """An interval, cut by multiples or to a few values."""

    kind: str = "number"  # or integer, or fraction: no integer
    low: float | None = None
    low_open: bool = False
    high: float | None = None
    high_open: bool = False
    multiples: tuple[float, ...] = ()
    values: tuple[float, ...] | None = None

    def holds(self, value: float) -> bool:
        """Whether a value is allowed."""
        whole = value == int(value)
        return (
            (self.kind == "number" or whole == (self.kind == "integer"))
            and (self.low is None or value > self.low or (value == self.low and not self.low_open))
            and (
                self.high is None
                or value < self.high
                or (value == self.high and not self.high_open)
            )
            and all(
                Fraction(str(value)) % Fraction(str(multiple)) == 0 for multiple in self.multiples
            )
        )


@dataclass(frozen=True)
class String:
    """A length, patterns that match and that do not, values allowed and excluded."""

    min_len: int = 0
    max_len: int | None = None
    patterns: tuple[Pattern, ...] = ()
    denied: tuple[Pattern, ...] = ()
    formats: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()
    values: tuple[str, ...] | None = None

    def holds(self, value: str) -> bool:
        """Whether a value is allowed, formats aside."""
        return (
            len(value) >= self.min_len
            and (self.max_len is None or len(value) <= self.max_len)
            and value not in self.excluded
            and all(each.matches(value) for each in self.patterns)
            and not any(each.matches(value) for each in self.denied)
        )


@dataclass(frozen=True)
class ArrayFamily:
    """One schema's items: those of the first places, and the rest."""

    prefix: tuple[Node, ...] = ()
    rest: Node = ANYTHING


@dataclass(frozen=True)
class Contains:
    """How many items are of a node."""

    node: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Array:
    """Items by place, their number, and counted ones."""

    families: tuple[ArrayFamily, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    unique: bool = False
    contains: tuple[Contains, ...] = ()


@dataclass(frozen=True)
class ObjectFamily:
    """One schema's properties: by name, by pattern, and all others."""

    named: tuple[tuple[str, Node], ...] = ()
    patterns: tuple[tuple[Pattern, Node], ...] = ()
    rest: Node = ANYTHING

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """The nodes of `named`."""
        return dict(self.named)


@dataclass(frozen=True)
class Object:
    """Properties by name, those that must be there, their number, and what names may be."""

    families: tuple[ObjectFamily, ...] = ()
    required: tuple[str, ...] = ()
    min_len: int = 0
    max_len: int | None = None
    names: tuple[Node, ...] = ()


Shape: TypeAlias = Null | Boolean | Number | String | Array | Object
UNIVERSE: tuple[Shape, ...] = (Null(), Boolean(), Number(), String(), Array(), Object())


def meet(one: Shape, two: Shape) -> Shape | None:
    """Return what both allow, None for nothing.

    Raises:
        PatternError: whether a value matches a pattern takes too long to say.
    """
    match one, two:
        case Null(), Null():
            return one
        case Boolean(), Boolean():
            values = one.values & two.values
            return Boolean(values) if values else None
        case Number(), Number():
            return _meet_numbers(one, two)
        case String(), String():
            return _meet_strings(one, two)
        case Array(), Array():
            both = replace(
                one,
                families=_joined(one.families, two.families),
                min_items=max(one.min_items, two.min_items),
                max_items=_lower(one.max_items, two.max_items),
                unique=one.unique or two.unique,
                contains=_joined(one.contains, two.contains),
            )
            return None if _crossed(both.min_items, both.max_items) else both
        case Object(), Object():
            result = Object(
                families=_joined(one.families, two.families),
                required=_joined(one.required, two.required),
                min_len=max(one.min_len, two.min_len),
                max_len=_lower(one.max_len, two.max_len),
                names=_joined(one.names, two.names),
            )
            least = max(result.min_len, len(result.required))
            return None if _crossed(least, result.max_len) else result
    return None


def _joined(one: tuple[T, ...], two: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(one + two))


def _lower(one: int | None, two: int | None) -> int | None:
    return min((each for each in (one, two) if each is not None), default=None)


def _crossed(low: int, high: int | None) -> bool:
    return high is not None and low > high


def _meet_numbers(one: Number, two: Number) -> Number | None:
    kinds = {one.kind, two.kind} - {"number"}
    if len(kinds) > 1:
        return None
    lows = [(e.low, e.low_open) for e in (one, two) if e.low is not None]
    highs = [(-e.high, e.high_open) for e in (one, two) if e.high is not None]
    low, low_open = max(lows, default=(None, False))
    high, high_open = max(highs, default=(None, False))
    high = None if high is None else -high
    kind = kinds.pop() if kinds else "number"
    if kind == "integer":
        if low is not None:
            low, low_open = math.floor(low) + 1 if low_open else math.ceil(low), False
        if high is not None:
            high, high_open = math.ceil(high) - 1 if high_open else math.floor(high), False
    both = Number(
        kind, low, low_open, high, high_open,
        _joined(one.multiples, two.multiples),
    )  # fmt: skip
    if (
        low is not None
        and high is not None
        and (low > high or (low == high and (low_open or high_open)))
    ):
        return None
    values = _values(one.values, two.values)
    if values is None:
        return both
    values = tuple(value for value in values if both.holds(value))
    return replace(both, values=values) if values else None


def _meet_strings(one: String, two: String) -> String | None:
    both = String(
        max(one.min_len, two.min_len),
        _lower(one.max_len, two.max_len),
        _joined(one.patterns, two.patterns),
        _joined(one.denied, two.denied),
        _joined(one.formats, two.formats),
        one.excluded | two.excluded,
    )
    if _crossed(both.min_len, both.max_len):
        return None
    values = _values(one.values, two.values)
    if values is None:
        return both
    values = tuple(value for value in values if both.holds(value))
    return replace(both, values=values) if values else None


def _values(one: tuple[T, ...] | None, two: tuple[T, ...] | None) -> tuple[T, ...] | None:
    if one is None or two is None:
        return two if one is None else one
    allowed = set(two)
    return tuple(value for value in one if value in allowed)
