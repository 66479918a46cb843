"""Grammar rules of arrays: by place, counted, or with every value once."""

from __future__ import annotations

from collections.abc import Callable

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.schema.expander import Expander, item_at
from deepseek_recipe.structured.schema.grammar_text import SEPARATOR, Rules
from deepseek_recipe.structured.schema.shapes import Array, Node
from deepseek_recipe.structured.schema.unique import (
    MAX_UNIQUE,
    unique_symbol,
    value_terminals,
)

__all__ = ["write_array"]

_MAX_STATES = 5000
_MAX_COUNTED = 8
"""Different values of items that are also counted or bound to a place: a rule for each set."""


def write_array(
    rules: Rules, expander: Expander, shape: Array, path: str, value_rule: Callable[[Node], str]
) -> tuple[str, ...] | None:
    """Add the rules of an array; return its symbols, None if there is none.

    Raises:
        ConstraintError: it cannot be enforced.
    """
    size = max((len(family.prefix) for family in shape.families), default=0)
    top = shape.max_items
    for at in range(size + 1):
        if (top is None or at < top) and not expander.lives(item_at(shape, at)):
            top = at
            break
    if top is not None and top < shape.min_items:
        return None
    unique = shape.unique and (top is None or top > 1)
    if unique and not shape.contains and not size:
        terminals = value_terminals(expander, item_at(shape, 0), path)
        _check_unique(len(terminals), MAX_UNIQUE, path)
        symbol = unique_symbol(terminals, shape.min_items, top)
        return None if symbol is None else ("OPEN_ARRAY", symbol)
    if shape.contains or unique:
        rule = _counted(rules, expander, shape, size, top, unique, path, value_rule)
    else:
        rule = _plain(rules, shape, size, top, value_rule)
    return ("OPEN_ARRAY", rule)


def _plain(
    rules: Rules, shape: Array, size: int, top: int | None, value_rule: Callable[[Node], str]
) -> str:
    start = rule = rules.new()
    for at in range(size if top is None else min(size, top)):
        if at >= shape.min_items:
            rules.add(rule, "CLOSE_ARRAY")
        after = rules.new()
        mark = (SEPARATOR,) if at else ()
        rules.add(rule, *mark, value_rule(item_at(shape, at)), after)
        rule = after
    if top is not None and top <= size:
        rules.add(rule, "CLOSE_ARRAY")
        return start
    item = value_rule(item_at(shape, size))
    low, high = max(0, shape.min_items - size), None if top is None else top - size
    if not size:
        if not low:
            rules.add(rule, "CLOSE_ARRAY")
        low, high = max(low - 1, 0), None if high is None else high - 1
    tail: tuple[str, ...] = () if size else (item,)
    if high != 0:
        more = rules.new()
        rules.add(more, SEPARATOR, item)
        tail += (f"{more}{{{low},{'' if high is None else high}}}",)
    rules.add(rule, *tail, "CLOSE_ARRAY")
    return start


def _counted(
    rules: Rules,
    expander: Expander,
    shape: Array,
    size: int,
    top: int | None,
    unique: bool,
    path: str,
    value_rule: Callable[[Node], str],
) -> str:
    """Write the states (items written, of each counted node, values used)."""
    if unique:
        places = [value_terminals(expander, item_at(shape, at), path) for at in range(size + 1)]
        _check_unique(len(set[str]().union(*places)), _MAX_COUNTED, path)
    limit = max(shape.min_items, size, top or 0, 1)
    caps = [max(each.low, -1 if each.high is None else each.high) for each in shape.contains]
    known: dict[tuple[int, tuple[int, ...], frozenset[str]], str] = {}
    stack: list[tuple[int, tuple[int, ...], frozenset[str]]] = []

    def state(written: int, counts: tuple[int, ...], used: frozenset[str]) -> str:
        key = (min(written, limit), counts, used)
        if key not in known:
            if len(known) >= _MAX_STATES:
                raise ConstraintError(
                    path,
                    f"`contains`, `uniqueItems` and the numbers of items take over {_MAX_STATES} "
                    "states. Use smaller numbers, or fewer `contains`.",
                )
            known[key] = rules.new()
            stack.append(key)
        return known[key]

    start = state(0, (0,) * len(caps), frozenset())
    while stack:
        key = written, counts, used = stack.pop()
        rule = known[key]
        if written >= shape.min_items and all(
            count >= each.low for count, each in zip(counts, shape.contains, strict=True)
        ):
            rules.add(rule, "CLOSE_ARRAY")
        if top is not None and written >= top:
            continue
        mark = (SEPARATOR,) if written else ()
        node = item_at(shape, written)
        for each, after in _choices(expander, shape, node, counts, caps):
            if not expander.lives(each):
                continue
            if not unique:
                rules.add(rule, *mark, value_rule(each), state(written + 1, after, used))
                continue
            for text in value_terminals(expander, each, path):
                if text not in used:
                    follow = state(written + 1, after, used | {text})
                    rules.add(rule, *mark, rules.terminal(text), follow)
    return start


def _check_unique(num_values: int, most: int, path: str) -> None:
    if num_values > most:
        beside = "" if most == MAX_UNIQUE else " beside `prefixItems` or `contains`"
        raise ConstraintError(
            path,
            f"`uniqueItems` of items of {num_values} values; allowed{beside}: {most}. Allow fewer "
            "values, or leave `uniqueItems` out.",
        )


def _choices(
    expander: Expander, shape: Array, node: Node, counts: tuple[int, ...], caps: list[int]
) -> list[tuple[Node, tuple[int, ...]]]:
    """Return what the next item may be, with the counts behind it."""
    found: list[tuple[Node, tuple[int, ...]]] = [(node, ())]
    for each, count, cap in zip(shape.contains, counts, caps, strict=True):
        longer = []
        for item, after in found:
            if each.high is None or count < each.high:
                longer.append((item | each.node, (*after, min(count + 1, cap))))
            if each.high is None:
                longer.append((item, (*after, count)))
            elif each.node:
                longer.append((item | expander.opposite(each.node), (*after, count)))
        found = longer
    return found
