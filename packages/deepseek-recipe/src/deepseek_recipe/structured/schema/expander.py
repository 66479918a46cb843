"""Schemas to shapes: every keyword asserted or denied, and what all of them leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.structured.schema.asserted import asserted, value_schema
from deepseek_recipe.structured.schema.denied import denied
from deepseek_recipe.structured.schema.document import Document, Site, escape_pointer
from deepseek_recipe.structured.schema.keywords import KEYWORDS
from deepseek_recipe.structured.schema.pattern import Pattern, PatternError, read_pattern
from deepseek_recipe.structured.schema.scalars import no_format_of_names
from deepseek_recipe.structured.schema.shapes import (
    ANYTHING,
    UNIVERSE,
    Array,
    Node,
    Object,
    Shape,
    String,
    meet,
)

__all__ = ["Expander", "item_at"]

_MAX_SHAPES = 512
_MAX_MEETS = 100_000
_MAX_SITES = 20_000
_MAX_DEPTH = 150
_MAX_FAMILIES = 64
_MAX_PATTERN_CHARS = 10_000
"""Of all patterns together."""
_TOO_MANY = (
    f"too much meets here; allowed: {_MAX_SHAPES} alternatives, {_MAX_FAMILIES} schemas of one "
    f"object or array, {_MAX_MEETS} comparisons. Use fewer `anyOf`, `oneOf`, `if` and `not` "
    "side by side."
)
_SIMPLER = "Use a simpler one."


class Expander:
    """Shapes of the schemas of one document, and what had to be said about it."""

    def __init__(self, document: Document) -> None:
        """Start with nothing expanded."""
        self.document = document
        self.warnings: dict[str, None] = {}
        self._shapes: dict[tuple[int, bool], tuple[Shape, ...] | None] = {}
        self._nodes: dict[Node, tuple[Shape, ...]] = {}
        self._asked: set[Node] = set()
        self._path = ""
        self._patterns: dict[str, Pattern] = {}
        self._pattern_chars = 0
        self._meets = 0
        self._depth = 0

    def warn(self, text: str) -> None:
        """Note what is not enforced, once."""
        self.warnings[text] = None

    def pattern(self, site: Site, keyword: str, text: str) -> Pattern:
        """Return the pattern that stands at a keyword.

        Raises:
            ConstraintError: it is none, or not supported.
        """
        place = f"{site.pointer}/{keyword}"
        if text not in self._patterns:
            self._pattern_chars += len(text)
            if self._pattern_chars > _MAX_PATTERN_CHARS:
                raise ConstraintError(
                    place,
                    f"up to here the patterns have {self._pattern_chars} characters together; "
                    f"allowed: {_MAX_PATTERN_CHARS}. Make them shorter, or leave some out.",
                )
            try:
                self._patterns[text] = read_pattern(text)
            except PatternError as error:
                raise ConstraintError(place, f"pattern {shown(text)}: {error}") from error
        return self._patterns[text]

    def node(self, number: int, holds: bool = True) -> Node:
        """Return the node of one schema, asserted or denied."""
        schema = self.document[number].schema
        if holds and (schema is True or schema == {}):
            return ANYTHING
        return frozenset({(number, holds)})

    def opposite(self, node: Node) -> Node:
        """Return the complement of a node of one schema."""
        if len(node) != 1:
            raise ConstraintError(
                self._path,
                "the opposite of several schemas that meet cannot be enforced. Write them as one.",
            )
        ((number, holds),) = node
        return self.node(number, not holds)

    def place(self, node: Node) -> str:
        """Return the pointer of a node's first schema."""
        return self.document[min(node)[0]].pointer if node else ""

    def of_node(self, node: Node) -> tuple[Shape, ...]:
        """Return what all schemas of a node leave."""
        if node not in self._nodes:
            self._nodes[node] = self.meet_all(self.shapes(*literal) for literal in sorted(node))
        return self._nodes[node]

    def shapes(self, number: int, holds: bool = True) -> tuple[Shape, ...]:
        """Return what a schema allows, or forbids.

        Raises:
            ConstraintError: it cannot be enforced, or is too much work.
        """
        key = (number, holds)
        site = self.document[number]
        if key in self._shapes:
            found = self._shapes[key]
            if found is None:
                raise ConstraintError(
                    site.pointer,
                    "the schema applies itself to the same value, so that it says nothing. Let the "
                    "reference stand below `properties` or `items`.",
                )
            return found
        self._shapes[key] = None
        self._path, before = site.pointer, self._path
        self._depth += 1
        if self._depth > _MAX_DEPTH or len(self.document) > _MAX_SITES:
            raise ConstraintError(
                site.pointer,
                f"{len(self.document)} schemas, {self._depth} inside one another; allowed: "
                f"{_MAX_SITES} and {_MAX_DEPTH}. Make the schema smaller.",
            )
        found = self._expand(site, holds)
        self._depth -= 1
        self._path = before
        self._shapes[key] = found
        return found

    def _expand(self, site: Site, holds: bool) -> tuple[Shape, ...]:
        schema = site.schema
        if isinstance(schema, bool):
            return UNIVERSE if schema == holds else ()
        assert isinstance(schema, dict)
        result: Sequence[Shape] = UNIVERSE if holds else ()
        for keyword in schema:
            if keyword.startswith("x-"):
                self.warn(f"{site.pointer}/{escape_pointer(keyword)} is an annotation")
                continue
            if keyword not in KEYWORDS:
                raise ConstraintError(
                    f"{site.pointer}/{escape_pointer(keyword)}",
                    f"unknown keyword {shown(keyword)}. Remove it, or start its name with `x-`.",
                )
            if KEYWORDS[keyword][0] != "enforced":
                continue
            if not holds:
                result = [*result, *denied(self, site, keyword)]
            elif (found := asserted(self, site, keyword)) is not None:
                result = self.meet(result, found)
        return tuple(dict.fromkeys(result))

    def meet_all(self, parts: Iterable[Sequence[Shape]]) -> tuple[Shape, ...]:
        """Return what several lists of alternatives have in common."""
        result: Sequence[Shape] = UNIVERSE
        for part in parts:
            result = self.meet(result, part)
        return tuple(result)

    def meet(self, one: Sequence[Shape], two: Sequence[Shape]) -> tuple[Shape, ...]:
        """Return what two lists of alternatives have in common."""
        self._meets += len(one) * len(two)
        if self._meets > _MAX_MEETS:
            raise ConstraintError(self._path, _TOO_MANY)
        try:
            found = dict.fromkeys(
                both
                for a in one
                for b in two
                if type(a) is type(b) and (both := meet(a, b)) is not None
            )
        except PatternError as error:
            raise ConstraintError(self._path, f"a pattern {error}. {_SIMPLER}") from error
        if len(found) > _MAX_SHAPES or any(
            len(each.families) > _MAX_FAMILIES
            for each in found
            if isinstance(each, (Array, Object))
        ):
            raise ConstraintError(self._path, _TOO_MANY)
        return tuple(found)

    def living(self, shapes: Iterable[Shape]) -> bool:
        """Return whether any alternative has a value, as far as is seen; True may be wrong."""
        return any(self._alive(each) for each in shapes)

    def lives(self, node: Node) -> bool:
        """Return whether a node has a value, as far as is seen; True may be wrong."""
        if node in self._asked:
            return True
        self._asked.add(node)
        try:
            return self.living(self.of_node(node))
        finally:
            self._asked.discard(node)

    def _alive(self, shape: Shape) -> bool:
        if len(self._asked) > 8:
            return True
        if isinstance(shape, Object):
            return all(self.lives(self.member(shape, name)) for name in shape.required) and all(
                self.allows_name(shape, name) for name in shape.required
            )
        if isinstance(shape, Array):
            return all(self.lives(item_at(shape, at)) for at in range(min(shape.min_items, 16)))
        return True

    def member(self, shape: Object, name: str) -> Node:
        """Return the node of a member's value, what names may be aside."""
        nodes: Node = ANYTHING
        for family in shape.families:
            found = [family.by_name[name]] if name in family.by_name else []
            found += [node for pattern, node in family.patterns if self._matches(pattern, name)]
            nodes = nodes.union(*(found or [family.rest]))
        return nodes

    def _matches(self, pattern: Pattern, name: str) -> bool:
        try:
            return pattern.matches(name)
        except PatternError as error:
            raise ConstraintError(self._path, f"a pattern {error}. {_SIMPLER}") from error

    def allows_name(self, shape: Object, name: str) -> bool:
        """Return whether a member may have a name."""
        for node in shape.names:
            texts = [each for each in self.of_node(node) if isinstance(each, String)]
            if formats := [text for each in texts for text in each.formats]:
                raise ConstraintError(self.place(node), no_format_of_names(formats))
            try:
                if not any(
                    each.holds(name) and (each.values is None or name in each.values)
                    for each in texts
                ):
                    return False
            except PatternError as error:
                raise ConstraintError(self.place(node), f"a pattern {error}. {_SIMPLER}") from error
        return True

    def denied_value(self, site: Site, value: JsonValue) -> tuple[Shape, ...]:
        """Return everything but one array or object."""
        return self.shapes(self.document.made(site, value_schema(value)), False)


def item_at(shape: Array, at: int) -> Node:
    """Return the node of an array's item at a place."""
    nodes: Node = ANYTHING
    for family in shape.families:
        nodes |= family.prefix[at] if at < len(family.prefix) else family.rest
    return nodes
