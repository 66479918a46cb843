"""Shapes to grammar rules, one rule a node."""

from __future__ import annotations

import json
from collections.abc import Callable

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
    String,
)

__all__ = ["write_grammar"]

_MAX_NODES = 5000


def write_grammar(expander: Expander) -> str:
    """Return the grammar of the document's root.

    Raises:
        ConstraintError: it allows nothing, or cannot be enforced.
    """
    rules = Rules()
    names: dict[Node, str] = {}
    waiting: list[Node] = []

    def value_rule(node: Node) -> str:
        if node not in names:
            if len(names) >= _MAX_NODES:
                raise ConstraintError(expander.place(node), "the schema has too many parts")
            names[node] = rules.new()
            waiting.append(node)
        return names[node]

    start = value_rule(expander.node(expander.document.root()))
    while waiting:
        node = waiting.pop()
        _write(rules, expander, node, names[node], value_rule)
    text = rules.text(start)
    if text is None:
        raise ConstraintError(
            _blamed(expander), "no finite value is valid here: the schema contradicts itself"
        )
    return text


def _blamed(expander: Expander) -> str:
    """Return the pointer of the innermost part that leaves nothing, as far as is seen."""
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
    return expander.place(node)


def _write(
    rules: Rules, expander: Expander, node: Node, rule: str, value_rule: Callable[[Node], str]
) -> None:
    path = expander.place(node)
    if node == ANYTHING:
        rules.add(rule, rules.json({}))
        return
    for shape in expander.of_node(node):
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
                symbols = write_array(rules, expander, shape, path, value_rule)
                if symbols is not None:
                    rules.add(rule, *symbols)
            case Object():
                symbols = write_object(rules, expander, shape, path, value_rule)
                if symbols is not None:
                    rules.add(rule, *symbols)
