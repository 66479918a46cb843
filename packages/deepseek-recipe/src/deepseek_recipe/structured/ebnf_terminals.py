"""Which parts of recursive rules the mask engine may read as one terminal, the meaning the same.

The engine reads the longest match of a terminal. That is the only match, and nothing competes, if
  1. no character that goes on behind a finished word of the part may also follow the part, and
  2. no other terminal of the grammar starts with a character that the part starts with.
A part that fails is split into its own parts, down to single characters, which are always safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from deepseek_recipe.structured.automaton import Alphabet, ends_and_continues
from deepseek_recipe.structured.regex import weight
from deepseek_recipe.structured.tree import (
    Chars,
    Choice,
    Node,
    Ref,
    Repeat,
    Sequence,
    Whole,
    choice,
    repeat,
    rust,
    sequence,
)

__all__ = ["whole_terminals"]

# Beyond these nothing is joined: correct, only slower to fill masks for.
_MAX_PART = 300  # characters of one terminal, repetitions written out
_MAX_ALL = 10_000  # the same, of all places
_MAX_ALPHABET = 256
_MAX_LEAVES = 3_000  # places in the rules
_MAX_PASSES = 30
_MAX_ROUNDS = 20
_MAX_STEPS = 200_000  # of all automata: about 0.1 s


def whole_terminals(rules: Mapping[str, Node], patterns: Mapping[str, Node]) -> dict[str, Node]:
    """Return the rules with the parts that are safe to read as one terminal marked `Whole`.

    Args:
        rules: trees by name.
        patterns: those of them without recursion, references written out; left out of the answer
            where no rule needs them.
    """
    marked = {name: _mark(node, patterns) for name, node in rules.items() if name not in patterns}
    wholes = [part for node in marked.values() for part in _leaves(node) if isinstance(part, Whole)]
    if sum(weight(part) for part in wholes) > _MAX_ALL:
        return dict(rules)
    alphabet = Alphabet(leaf.chars for node in marked.values() for leaf in _characters(node))
    if len(alphabet) > _MAX_ALPHABET:
        return dict(rules)
    return _Splitter(marked, alphabet).run() or dict(rules)


def _mark(node: Node, patterns: Mapping[str, Node]) -> Node:
    """Return a tree with its largest parts without recursion as `Whole`."""
    match node:
        case Chars() | Whole():
            return Whole(node)
        case Ref(name):
            return Whole(patterns[name]) if name in patterns else node
        case Repeat(part, least, most):
            inner = _mark(part, patterns)
            if isinstance(inner, Whole):
                return Whole(repeat(inner.part, least, most))
            return repeat(inner, least, most)
        case Choice(parts):
            found = [_mark(part, patterns) for part in parts]
            wholes = [part.part for part in found if isinstance(part, Whole)]
            others = [part for part in found if not isinstance(part, Whole)]
            joined = [Whole(choice(wholes))] if wholes else []
            return choice([*joined, *others]) if others else joined[0]
        case Sequence(parts):
            if not parts:
                return Whole(node)
            runs: list[Node] = []
            for is_whole, run in groupby(
                (_mark(part, patterns) for part in parts), lambda part: isinstance(part, Whole)
            ):
                if is_whole:
                    runs.append(
                        Whole(sequence(part.part for part in run if isinstance(part, Whole)))
                    )
                else:
                    runs += run
            return sequence(runs)


def _leaves(node: Node) -> Iterator[Chars | Ref | Whole]:
    match node:
        case Chars() | Ref() | Whole():
            yield node
        case Repeat(part):
            yield from _leaves(part)
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from _leaves(part)


def _characters(node: Node) -> Iterator[Chars]:
    for leaf in _leaves(node):
        if isinstance(leaf, Whole):
            yield from _characters(leaf.part)
        elif isinstance(leaf, Chars):
            yield leaf


class _Splitter:
    """Splits marked parts until the rest is safe."""

    def __init__(self, rules: dict[str, Node], alphabet: Alphabet) -> None:
        self.rules = rules
        self.alphabet = alphabet
        self.steps = 0
        self.known: dict[str, int | None] = {}
        self.heads = {name: (False, 0) for name in rules}  # may be empty; first characters
        self.behind = dict.fromkeys(rules, 0)  # characters that follow
        self.refused: set[str] = set()
        self.seen: dict[int, tuple[Node, tuple[bool, int]]] = {}  # heads that are final, by id
        self.final = False

    def fix_heads(self) -> bool:
        """Find how each rule starts; False if that takes too long."""
        for _ in range(_MAX_PASSES):
            before = dict(self.heads)
            for name, node in self.rules.items():
                self.heads[name] = self.head(node)
            if self.heads == before:
                self.final = True
                return True
        return False

    def fix_behind(self) -> bool:
        """Find what follows each rule; False if that takes too long."""
        for _ in range(_MAX_PASSES):
            before = dict(self.behind)
            for name, node in self.rules.items():
                for leaf, follow in self.places(node, self.behind[name]):
                    if isinstance(leaf, Ref):
                        self.behind[leaf.name] |= follow
            if self.behind == before:
                return True
        return False

    def head(self, node: Node) -> tuple[bool, int]:
        """Tell whether a tree may be empty, and its first characters."""
        if isinstance(node, Chars):
            return False, self.alphabet.bits(node.chars)
        if id(node) not in self.seen:
            found = self.find_head(node)
            if not self.final and not isinstance(node, Whole):
                return found
            self.seen[id(node)] = (node, found)
        return self.seen[id(node)][1]

    def find_head(self, node: Node) -> tuple[bool, int]:
        """Return the same from the parts."""
        match node:
            case Chars():
                return False, self.alphabet.bits(node.chars)
            case Whole(part):
                return self.head(part)
            case Ref(name):
                return self.heads[name]
            case Repeat(part, least):
                empty, first = self.head(part)
                return empty or least == 0, first
            case Choice(parts):
                empty, first = False, 0
                for part in parts:
                    empty_part, first_part = self.head(part)
                    empty, first = empty or empty_part, first | first_part
                return empty, first
            case Sequence(parts):
                first = 0
                for part in parts:
                    empty, first_part = self.head(part)
                    first |= first_part
                    if not empty:
                        return False, first
                return True, first

    def places(self, node: Node, follow: int) -> Iterator[tuple[Chars | Ref | Whole, int]]:
        """Yield the leaves of a tree, each with the characters that may follow it."""
        match node:
            case Chars() | Ref() | Whole():
                yield node, follow
            case Repeat(part, _, most):
                again = 0 if most == 1 else self.head(part)[1]
                yield from self.places(part, follow | again)
            case Choice(parts):
                for part in parts:
                    yield from self.places(part, follow)
            case Sequence(parts):
                for part in reversed(parts):
                    yield from self.places(part, follow)
                    empty, first = self.head(part)
                    follow = first | (follow if empty else 0)

    def run(self) -> dict[str, Node] | None:
        """Return the rules with what is safe still marked; None if it takes too long to tell."""
        if not (self.fix_heads() and self.fix_behind()):
            return None
        for _ in range(_MAX_ROUNDS):
            self.refused = self.unsafe()
            if not self.refused:
                return self.rules
            self.rules = {name: self.split(node) for name, node in self.rules.items()}
            if sum(1 for node in self.rules.values() for _ in _leaves(node)) > _MAX_LEAVES:
                return None
        return None

    def unsafe(self) -> set[str]:
        """Return the marked parts that break a condition, as patterns.

        Of those that start with the same character the lightest stays, for the others are often it
        with something more.
        """
        starts: dict[str, int] = {}
        many: dict[str, int] = {}
        found: set[str] = set()
        for name, node in self.rules.items():
            for leaf, follow in self.places(node, self.behind[name]):
                if isinstance(leaf, Ref):
                    continue
                text = rust(leaf)
                empty, starts[text] = self.head(leaf)
                if isinstance(leaf, Whole):
                    many[text] = weight(leaf)
                    on = None if empty else self.continues(text, leaf)
                    if on is None or on & follow:
                        found.add(text)
        taken = 0
        for text in sorted(starts, key=lambda text: (many.get(text, 0), text)):
            if starts[text] & taken and text in many:
                found.add(text)
            taken |= starts[text]
        return found

    def continues(self, text: str, leaf: Whole) -> int | None:
        """Return what goes on behind a word of a part; None if that is too much to find out."""
        if text not in self.known:
            self.known[text] = None
            left = _MAX_STEPS - self.steps
            if weight(leaf) <= _MAX_PART and left > 0:
                found = ends_and_continues(leaf.part, self.alphabet, left)
                self.known[text] = found[0] if found else None
                self.steps += found[1] if found else left
        return self.known[text]

    def split(self, node: Node) -> Node:
        """Return a tree with each refused part split once."""
        match node:
            case Chars() | Ref():
                return node
            case Repeat(part, least, most):
                return repeat(self.split(part), least, most)
            case Choice(parts):
                return choice(self.split(part) for part in parts)
            case Sequence(parts):
                return sequence(self.split(part) for part in parts)
            case Whole(part):
                return _split(part) if rust(part) in self.refused else node


def _split(part: Node) -> Node:
    match part:
        case Repeat(inner, 0, most) if most != 1:
            return repeat(Whole(repeat(inner, 1, most)), 0, 1)
        case Repeat(inner, least, most):
            return repeat(_whole(inner), least, most)
        case Choice(parts):
            return choice(_whole(inner) for inner in parts)
        case Sequence(parts):
            return sequence(_whole(inner) for inner in parts)
        case _:
            return part


def _whole(node: Node) -> Node:
    return node if isinstance(node, Chars) else Whole(node)
