"""Grammar rules of objects: named members in the order of the schema, others behind them.

A state is (next name, members that surely differ, members written). The second counts towards
`minProperties`: of unnamed members only the first, as later ones may repeat its name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.schema.expander import Expander
from deepseek_recipe.structured.schema.grammar_text import COLON, SEPARATOR, Rules
from deepseek_recipe.structured.schema.pattern import CHAR, Pattern, quote_literal
from deepseek_recipe.structured.schema.scalars import string_terms
from deepseek_recipe.structured.schema.shapes import ANYTHING, Node, Object, String

__all__ = ["write_object"]

_MAX_STATES = 10_000
_MAX_PATTERNS = 4
_MAX_KEYS = 64
_TOO_MANY_KINDS = (
    f"`patternProperties` and `propertyNames` divide the names into over {_MAX_KEYS} kinds. Use "
    "fewer patterns, or fewer alternatives in `propertyNames`."
)


def write_object(
    rules: Rules, expander: Expander, shape: Object, path: str, value_rule: Callable[[Node], str]
) -> tuple[str, ...] | None:
    """Add the rules of an object; return its symbols, None if there is none.

    Raises:
        ConstraintError: it cannot be enforced.
    """
    names = _names(expander, shape)
    members: list[tuple[str, str, bool]] = []  # key, value rule, required
    for name in names:
        needed = name in shape.required
        node = expander.member(shape, name)
        if expander.allows_name(shape, name) and expander.lives(node):
            key = rules.terminal(f'/"{quote_literal(name)}"/')
            members.append((key, value_rule(node), needed))
        elif needed:
            return None
    extras = _extras(rules, expander, shape, names, path, value_rule)
    extra = None
    if extras:
        extra = rules.new()
        for key, rule in extras:
            rules.add(extra, key, COLON, rule)
    reach = len(members) + (extra is not None)
    if shape.min_len > reach:
        if extra is None:
            return None
        raise ConstraintError(
            path,
            f"`minProperties` {shape.min_len}: only {reach} are sure to differ, as names that are "
            "not listed may repeat. List more names in `properties`.",
        )
    return ("OPEN_OBJECT", _states(rules, members, extra, shape, path))


def _states(
    rules: Rules, members: list[tuple[str, str, bool]], extra: str | None, shape: Object, path: str
) -> str:
    top = 1 if shape.max_len is None else shape.max_len
    known: dict[tuple[int, int, int], str] = {}
    stack: list[tuple[int, int, int]] = []

    def state(at: int, sure: int, written: int) -> str:
        capped = min(written, max(top, 1))
        key = (at, min(sure, shape.min_len), capped)
        if key not in known:
            if len(known) >= _MAX_STATES:
                raise ConstraintError(
                    path,
                    f"to count {len(members)} members takes over {_MAX_STATES} states. List fewer "
                    "`properties`, or use a smaller `minProperties` or `maxProperties`.",
                )
            known[key] = rules.new()
            stack.append(key)
        return known[key]

    start = state(0, 0, 0)
    while stack:
        key = at, sure, written = stack.pop()
        rule = known[key]
        mark = (SEPARATOR,) if written else ()
        room = shape.max_len is None or written < shape.max_len
        if at < len(members):
            name, value, needed = members[at]
            if room:
                after = state(at + 1, sure + 1, written + 1)
                rules.add(rule, *mark, name, COLON, value, after)
            if not needed:
                rules.add(rule, state(at + 1, sure, written))
            continue
        if sure >= shape.min_len and at == len(members):
            rules.add(rule, "CLOSE_OBJECT")
        if extra is not None and room:
            after = state(len(members) + 1, sure + (at == len(members)), written + 1)
            rules.add(rule, *mark, extra, after)
        if at > len(members) and sure >= shape.min_len:
            rules.add(rule, "CLOSE_OBJECT")
    return start


def _names(expander: Expander, shape: Object) -> list[str]:
    names = dict.fromkeys(name for family in shape.families for name, _ in family.named)
    names |= dict.fromkeys(shape.required)
    for node in shape.names:
        texts = [each for each in expander.of_node(node) if isinstance(each, String)]
        names |= dict.fromkeys(name for each in texts for name in each.values or ())
    return list(names)


def _extras(
    rules: Rules,
    expander: Expander,
    shape: Object,
    names: list[str],
    path: str,
    value_rule: Callable[[Node], str],
) -> list[tuple[str, str]]:
    """Return key terminal and value rule of every class of names that are not listed."""
    patterns: dict[Pattern, None] = {}
    for family in shape.families:
        if family.rest != ANYTHING or any(node != ANYTHING for _, node in family.patterns):
            patterns |= dict.fromkeys(pattern for pattern, _ in family.patterns)
    if len(patterns) > _MAX_PATTERNS:
        raise ConstraintError(
            path,
            f"{len(patterns)} patterns of `patternProperties` meet here; allowed: {_MAX_PATTERNS}. "
            "Join those of one schema with `|`, or leave some out.",
        )
    limits = _limits(expander, shape, path)
    listed = [f'~/"(?:{"|".join(map(quote_literal, sorted(names)))})"/'] if names else []
    found: list[tuple[str, str]] = []
    for choice in product((False, True), repeat=len(patterns)):
        matching = {pattern for pattern, chosen in zip(patterns, choice, strict=True) if chosen}
        node: Node = ANYTHING
        for family in shape.families:
            own = [each for pattern, each in family.patterns if pattern in matching]
            node = node.union(*(own or [family.rest]))
        if not expander.lives(node):
            continue
        terms = listed + [
            f'{"" if pattern in matching else "~"}/"{pattern.quoted}"/' for pattern in patterns
        ]
        for limit in limits:
            if len(found) >= _MAX_KEYS:
                raise ConstraintError(path, _TOO_MANY_KINDS)
            both = list(dict.fromkeys([*limit, *terms]))
            terminal = " & ".join(both)
            if (matching or len(both) > 2) and not rules.writable(terminal, path):
                continue
            key = rules.terminal(terminal)
            found.append((key, value_rule(node)))
    return found


def _limits(expander: Expander, shape: Object, path: str) -> list[list[str]]:
    """Return the alternatives of what `propertyNames` leaves, listed names aside."""
    limits: list[list[str]] = [[f'/"{CHAR}*"/']]
    for node in shape.names:
        texts = [
            string_terms(each, path)
            for each in expander.of_node(node)
            if isinstance(each, String) and each.values is None
        ]
        limits = [[*one, *two] for one in limits for two in texts]
        if len(limits) > _MAX_KEYS:
            raise ConstraintError(path, _TOO_MANY_KINDS)
    return limits
