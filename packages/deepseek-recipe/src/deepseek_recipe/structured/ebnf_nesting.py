"""How deep the mask engine recurses into rules, which decides whether its stack is enough."""

from __future__ import annotations

from collections.abc import Mapping

from deepseek_recipe.structured.ebnf_rules import refs
from deepseek_recipe.structured.tree import Chars, Choice, Node, Ref, Repeat, Sequence, Whole

__all__ = ["groups_deep", "rules_deep"]


def groups_deep(node: Node) -> int:
    """Return how deep groups are nested in a tree as it is printed."""
    match node:
        case Chars() | Ref() | Whole():
            return 0
        case Sequence(parts):
            return max((groups_deep(part) for part in parts), default=0)
        case Choice(parts):
            return 1 + max(groups_deep(part) for part in parts)
        case Repeat(part):
            return 1 + groups_deep(part)


def rules_deep(rules: Mapping[str, Node]) -> int:
    """Return a bound on the groups and rules that are open at once when rules are walked.

    A walk may go through all rules that reach one another, but only once through each.
    """
    uses = {name: sorted({ref.name for ref in refs(node)}) for name, node in rules.items()}
    deepest: dict[str, int] = {}  # of the rules whose set is complete
    for component in _components(uses):
        own = sum(1 + groups_deep(rules[name]) for name in component)
        below = max(
            (deepest.get(other, 0) for name in component for other in uses[name]), default=0
        )
        deepest.update(dict.fromkeys(component, own + below))
    return max(deepest.values())


def _components(uses: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the sets of rules that reach one another, each after the sets that it uses."""
    finished = _finish_order(uses)
    users: dict[str, list[str]] = {name: [] for name in uses}
    for name, others in uses.items():
        for other in others:
            users[other].append(name)
    found: list[list[str]] = []
    seen: set[str] = set()
    for name in reversed(finished):
        if name in seen:
            continue
        component, waiting = [], [name]
        seen.add(name)
        while waiting:
            component.append(waiting.pop())
            new = [user for user in users[component[-1]] if user not in seen]
            seen.update(new)
            waiting += new
        found.append(component)
    return found[::-1]


def _finish_order(uses: Mapping[str, list[str]]) -> list[str]:
    """Return the rules in the order in which a walk in depth leaves them."""
    finished: list[str] = []
    seen: set[str] = set()
    for name in uses:
        stack = [] if name in seen else [(name, iter(uses[name]))]
        seen.add(name)
        while stack:
            at, others = stack[-1]
            other = next((other for other in others if other not in seen), None)
            if other is None:
                finished.append(at)
                stack.pop()
            else:
                seen.add(other)
                stack.append((other, iter(uses[other])))
    return finished
