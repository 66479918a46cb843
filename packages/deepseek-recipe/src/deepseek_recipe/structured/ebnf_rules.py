"""Checks on the rules of a grammar, each linear in its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.ebnf_syntax import Rule
from deepseek_recipe.structured.tree import Chars, Choice, Node, Ref, Repeat, Sequence, Whole

__all__ = ["check_rules", "nullable_rules", "order_of_regular", "refs"]

_START_NAMES = ("root", "start")


def check_rules(rules: tuple[Rule, ...]) -> tuple[Mapping[str, Rule], str, tuple[str, ...]]:
    """Return the rules by name, the name of the start rule, and the names it never reaches.

    Raises:
        ConstraintError: a rule is there twice, is used but not there, never ends, or is itself
            without anything more; or there is no start rule.
    """
    by_name: dict[str, Rule] = {}
    for rule in rules:
        if rule.name in by_name:
            raise ConstraintError(
                rule.place,
                f"rule `{rule.name}` is there already, at {by_name[rule.name].place}. "
                "Rename one, or join both with `|`.",
            )
        by_name[rule.name] = rule
    for rule in rules:
        for ref in refs(rule.node):
            if ref.name not in by_name:
                raise ConstraintError(
                    ref.place,
                    f"there is no rule `{ref.name}`. Write it, or put a literal in quotes.",
                )
    start = next((name for name in _START_NAMES if name in by_name), None)
    if start is None:
        raise ConstraintError(
            rules[0].place, "there is no start rule. Call the first rule `root` or `start`."
        )
    _check_ends(by_name)
    _check_empty_loops(by_name)
    reached, waiting = {start}, [start]
    while waiting:
        new = {ref.name for ref in refs(by_name[waiting.pop()].node)} - reached
        reached |= new
        waiting += new
    return by_name, start, tuple(name for name in by_name if name not in reached)


def refs(node: Node) -> Iterator[Ref]:
    """Yield the references in a tree."""
    waiting = [node]
    while waiting:
        match waiting.pop():
            case Ref() as ref:
                yield ref
            case Sequence(parts) | Choice(parts):
                waiting += reversed(parts)
            case Repeat(part):
                waiting.append(part)


def nullable_rules(rules: Mapping[str, Rule]) -> frozenset[str]:
    """Return the names of the rules that derive the empty text."""
    return _true_rules(rules, characters=False)


def order_of_regular(rules: Mapping[str, Rule]) -> tuple[str, ...]:
    """Return the names of the rules that reach no cycle, each after the ones that it uses."""
    uses = {name: {ref.name for ref in refs(rule.node)} for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in uses.items():
        for other in used:
            users[other].append(name)
    missing = {name: len(used) for name, used in uses.items()}
    order = [name for name, count in missing.items() if not count]
    for name in order:  # grows while it is read
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                order.append(user)
    return tuple(order)


@dataclass
class _Fact:
    """Holds once `missing` of what it waits for do; then those that `wait` are told."""

    missing: int
    waits: list[_Fact] = field(default_factory=list)


def _true_rules(rules: Mapping[str, Rule], *, characters: bool) -> frozenset[str]:
    """Return the rules that hold, if a character does or not.

    A sequence holds if all parts do, a choice if one does, a repeat if it may be skipped or its
    part holds. With characters true these are the rules that derive a text, else the empty text.
    """
    facts = {name: _Fact(1) for name in rules}
    known: list[_Fact] = []

    def watch(node: Node, user: _Fact) -> None:
        match node:
            case Chars() | Whole():
                known.extend([user] if characters else [])
            case Ref(name):
                facts[name].waits.append(user)
            case Repeat(part, least):
                if least == 0:
                    known.append(user)
                else:
                    watch(part, user)
            case Sequence(parts) | Choice(parts):
                own = _Fact(len(parts) if isinstance(node, Sequence) else 1, [user])
                if own.missing == 0:
                    known.append(user)
                for part in parts:
                    watch(part, own)

    for name, rule in rules.items():
        watch(rule.node, facts[name])
    while known:
        fact = known.pop()
        fact.missing -= 1
        if fact.missing == 0:
            known += fact.waits
    return frozenset(name for name, fact in facts.items() if fact.missing <= 0)


def _check_ends(rules: Mapping[str, Rule]) -> None:
    endless = rules.keys() - _true_rules(rules, characters=True)
    for name, rule in rules.items():
        if name in endless:
            raise ConstraintError(
                rule.place, f"rule `{name}` never ends. Give it an alternative without itself."
            )


def _check_empty_loops(rules: Mapping[str, Rule]) -> None:
    nullable = nullable_rules(rules)
    graph: dict[str, set[str]] = {}
    for name, rule in rules.items():
        graph[name] = _alone(rule.node, nullable)[1]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = list(reversed(error.args[1]))
        way = " -> ".join(f"`{name}`" for name in cycle[:10])
        raise ConstraintError(
            rules[cycle[0]].place,
            f"rule `{cycle[0]}` is itself without anything more: {way}. Cut that alternative.",
        ) from error


def _alone(node: Node, nullable: frozenset[str]) -> tuple[bool, set[str]]:
    """Tell whether a tree derives the empty text, and which rules can be all that it derives."""
    match node:
        case Chars() | Whole():
            return False, set()
        case Ref(name):
            return name in nullable, {name}
        case Repeat(part, least):
            empty, names = _alone(part, nullable)
            return empty or least == 0, names if empty or least <= 1 else set()
        case Choice(parts):
            found = [_alone(part, nullable) for part in parts]
            return any(empty for empty, _ in found), set().union(*(names for _, names in found))
        case Sequence(parts):
            found = [_alone(part, nullable) for part in parts]
            solid = [names for empty, names in found if not empty]
            if len(solid) > 1:
                return False, set()
            return not solid, solid[0] if solid else set().union(*(names for _, names in found))
