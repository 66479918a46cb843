"""Shapes to grammar rules, one rule a node."""

from __future__ import annotations

import json
from collections.abc import Iterable

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.schema.arrays import write_array
from deepseek_recipe.structured.schema.expander import Expander, item_at
from deepseek_recipe.structured.schema.grammar_text import Rules
from deepseek_recipe.structured.schema.objects import write_object
from deepseek_recipe.structured.schema.scalars import number_symbols, string_symbol
from deepseek_recipe.structured.schema.shapes import (
    ANYTHING,
    Array,
    Boolean,
    Node,
    Null,
    Number,
    Object,
    Shape,
    String,
)

__all__ = ["Writer", "contradiction", "write_grammar"]

_MAX_NODES = 5000


class Writer:
    """Writes rules of one document's nodes; several writers may share the rules.

    Attributes:
        expander: says what the nodes allow.
    """

    def __init__(self, rules: Rules, expander: Expander) -> None:
        """Start with no node written."""
        self.expander = expander
        self._rules = rules
        self._names: dict[Node, str] = {}
        self._waiting: list[Node] = []

    def rule(self, node: Node) -> str:
        """Return the rule of a node; `finish` writes it."""
        if node not in self._names:
            if len(self._names) >= _MAX_NODES:
                raise ConstraintError(
                    self.expander.place(node),
                    f"the schema has over {_MAX_NODES} parts. Make it smaller.",
                )
            self._names[node] = self._rules.new()
            self._waiting.append(node)
        return self._names[node]

    def finish(self) -> None:
        """Write the rules that were asked for, and those that they need.

        Raises:
            ConstraintError: one cannot be enforced.
        """
        while self._waiting:
            node = self._waiting.pop()
            rule = self._names[node]
            if node == ANYTHING:
                self._rules.add(rule, self._rules.json({}))
            else:
                self.write(rule, self.expander.of_node(node), self.expander.place(node))

    def write(self, rule: str, shapes: Iterable[Shape], path: str) -> None:
        """Give a rule one alternative for each shape that has a value.

        Raises:
            ConstraintError: one cannot be enforced.
        """
        rules, expander = self._rules, self.expander
        for shape in shapes:
            symbols: tuple[str, ...] | None
            match shape:
                case Null():
                    rules.add(rule, '"null"')
                case Boolean():
                    for value in sorted(shape.values):
                        rules.add(rule, f'"{json.dumps(value)}"')
                case Number():
                    for symbol in number_symbols(rules, shape, path):
                        rules.add(rule, symbol)
                case String():
                    text = string_symbol(rules, shape, path)
                    if text is not None:
                        rules.add(rule, text)
                case Array():
                    symbols = write_array(rules, expander, shape, path, self.rule)
                    if symbols is not None:
                        rules.add(rule, *symbols)
                case Object():
                    symbols = write_object(rules, expander, shape, path, self.rule)
                    if symbols is not None:
                        rules.add(rule, *symbols)


def write_grammar(expander: Expander) -> str:
    """Return the grammar of the document's root.

    Raises:
        ConstraintError: it allows nothing, or cannot be enforced.
    """
    rules = Rules()
    writer = Writer(rules, expander)
    start = writer.rule(expander.node(expander.document.root()))
    writer.finish()
    text = rules.text(start)
    if text is None:
        raise contradiction(expander)
    return text


def contradiction(expander: Expander) -> ConstraintError:
    """Return the error of a document that allows nothing.

    Its pointer is that of the innermost part that leaves nothing, as far as is seen.
    """
    node = expander.node(expander.document.root())
    seen: set[Node] = set()
    while node not in seen:
        seen.add(node)
        for shape in expander.of_node(node):
            parts: list[Node] = []
            if isinstance(shape, Object):
                parts = [expander.member(shape, name) for name in shape.required]
            elif isinstance(shape, Array):
                parts = [item_at(shape, at) for at in range(min(shape.min_items, 16))]
            node = next((each for each in parts if not expander.lives(each)), node)
    return ConstraintError(
        expander.place(node), "no finite value is valid here: the schema contradicts itself"
    )
