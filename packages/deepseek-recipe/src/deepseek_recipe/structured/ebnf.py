"""Grammars: rules in three spellings to one grammar text for the mask engine, exactly.

A grammar means the set of texts its rules derive, character by character: no longest match, no
ignored blanks, no priority. The mask engine reads terminals greedily, so that a terminal here is
one character, unless greed cannot matter: a grammar without recursion is one pattern, and within
recursion `ebnf_terminals` finds the parts that are safe to read as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.ebnf_nesting import groups_deep, rules_deep
from deepseek_recipe.structured.ebnf_rules import check_rules, order_of_regular
from deepseek_recipe.structured.ebnf_syntax import Rule, parse_rules
from deepseek_recipe.structured.ebnf_terminals import whole_terminals
from deepseek_recipe.structured.lowered import Lowered
from deepseek_recipe.structured.regex import weight
from deepseek_recipe.structured.tree import (
    Chars,
    Choice,
    Node,
    Ref,
    Repeat,
    Sequence,
    Whole,
    bounds,
    choice,
    repeat,
    rust,
    sequence,
)

__all__ = ["lower_ebnf"]

_MAX_PATTERN = 20_000  # characters of one pattern, repetitions written out
# What the mask engine takes: groups in a rule, and with 2 MiB of stack groups and rules at once.
_MAX_PATTERN_DEPTH = 100
_MAX_GROUPS_DEEP = 25
_MAX_RULES_DEEP = 500
_MAX_WEIGHT = 10_000  # characters and references of the rules, repetitions written out


def lower_ebnf(text: str) -> Lowered:
    """Return the grammar of the texts that rule `root` (or `start`) derives.

    Raises:
        ConstraintError: the text is no grammar, is too large, or has a rule that makes no sense;
            names line and column.
    """
    rules, start, unused = check_rules(parse_rules(text))
    warnings = tuple(f"{rules[name].place}: rule `{name}` is never used." for name in unused)
    rules = {name: rule for name, rule in rules.items() if name not in unused}
    patterns = _patterns(rules)
    if start in patterns:
        return Lowered(f"start: /{rust(patterns[start])}/\n", warnings)
    size = sum(weight(rule.node) for rule in rules.values())
    if size > _MAX_WEIGHT:
        raise ConstraintError(
            rules[start].place,
            f"with its repetitions written out the grammar has {size} characters and references; "
            f"allowed: {_MAX_WEIGHT}. Use smaller counts.",
        )
    trees = whole_terminals({name: rule.node for name, rule in rules.items()}, patterns)
    for name, node in trees.items():
        if groups_deep(node) > _MAX_GROUPS_DEEP:
            raise ConstraintError(
                rules[name].place,
                f"rule `{name}` nests groups {groups_deep(node)} deep around a rule; allowed: "
                f"{_MAX_GROUPS_DEEP}. Give an inner group a rule of its own.",
            )
    deep = rules_deep(trees)
    if deep > _MAX_RULES_DEEP:
        raise ConstraintError(
            rules[start].place,
            f"rules and groups are nested up to {deep} deep; allowed: {_MAX_RULES_DEEP}. Let "
            "fewer rules use one another.",
        )
    return Lowered(_print(trees, start), warnings)


def _patterns(rules: Mapping[str, Rule]) -> dict[str, Node]:
    """Return the rules that are regular and not too large as trees without references."""
    patterns: dict[str, Node] = {}
    sizes: dict[str, int] = {}
    for name in order_of_regular(rules):
        node = rules[name].node
        size = _size(node, sizes)
        if size is not None and size <= _MAX_PATTERN:
            inlined = _inline(node, patterns)
            if inlined.depth <= _MAX_PATTERN_DEPTH:
                patterns[name], sizes[name] = inlined, size
    return patterns


def _size(node: Node, sizes: Mapping[str, int]) -> int | None:
    """Return the weight of a tree with its references written out, or None if one is unknown."""
    match node:
        case Chars():
            return 1
        case Whole(part):
            return weight(part)
        case Ref(name):
            return sizes.get(name)
        case Repeat(part, least, most):
            size = _size(part, sizes)
            return None if size is None else size * max(1, least if most is None else most)
        case Sequence(parts) | Choice(parts):
            found = [_size(part, sizes) for part in parts]
            return None if None in found else sum(size for size in found if size is not None)


def _inline(node: Node, patterns: Mapping[str, Node]) -> Node:
    """Return a tree with its references replaced."""
    match node:
        case Chars() | Whole():
            return node
        case Ref(name):
            return patterns[name]
        case Repeat(part, least, most):
            return repeat(_inline(part, patterns), least, most)
        case Sequence(parts):
            return sequence(_inline(part, patterns) for part in parts)
        case Choice(parts):
            return choice(_inline(part, patterns) for part in parts)


def _print(rules: Mapping[str, Node], start: str) -> str:
    """Return rules as grammar text."""
    names = {name: f"r{number}" for number, name in enumerate(rules)}
    terminals: dict[str, str] = {}

    def shown(node: Node) -> str:
        match node:
            case Chars(chars):
                return terminals.setdefault(chars.rust(), f"T{len(terminals)}")
            case Whole(part):
                return terminals.setdefault(rust(part), f"T{len(terminals)}")
            case Ref(name):
                return names[name]
            case Repeat(part, least, most):
                return f"({shown(part)}){bounds(least, most)}"
            case Sequence(parts):
                return " ".join(shown(part) for part in parts)
            case Choice(parts):
                return f"({' | '.join(shown(part) for part in parts)})"

    lines = [f"start: {names[start]}"]
    lines += [f"{names[name]}: {shown(node)}" for name, node in rules.items()]
    lines += [f"{terminal}: /{pattern}/" for pattern, terminal in terminals.items()]
    return "\n".join(lines) + "\n"
