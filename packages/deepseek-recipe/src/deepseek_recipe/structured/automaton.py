"""What may follow a word of a pattern: its positions, and the states they make together.

Characters are numbered by an `Alphabet`, so that a set of characters is the bits of one integer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepseek_recipe.structured.charset import CharSet
from deepseek_recipe.structured.tree import Chars, Choice, Node, Ref, Repeat, Sequence, Whole

__all__ = ["Alphabet", "ends_and_continues"]


class Alphabet:
    """Classes of characters that no set of a grammar tells apart, as bits."""

    def __init__(self, sets: Iterable[CharSet]) -> None:
        """Cut the characters at each border of each set."""
        self._sets = set(sets)
        borders = {border for chars in self._sets for border in _borders(chars)}
        self._index = {border: number for number, border in enumerate(sorted(borders))}
        self._bits = {chars: self._count(chars) for chars in self._sets}

    def __len__(self) -> int:
        """Return the number of classes."""
        return len(self._index)

    def bits(self, chars: CharSet) -> int:
        """Return one of the sets as bits."""
        return self._bits[chars]

    def _count(self, chars: CharSet) -> int:
        ranges = ((self._index[low], self._index[high + 1]) for low, high in chars.ranges)
        return sum((1 << end) - (1 << start) for start, end in ranges)


def _borders(chars: CharSet) -> Iterable[int]:
    for low, high in chars.ranges:
        yield low
        yield high + 1


@dataclass(frozen=True)
class _Part:
    """A part of a pattern: whether it may be empty, its first and its last positions as bits."""

    empty: bool
    first: int
    last: int


class _Positions:
    """The characters of a pattern, repetitions written out, and which can follow which."""

    def __init__(self, alphabet: Alphabet) -> None:
        self.alphabet = alphabet
        self.bits: list[int] = []
        self.follow: list[int] = []

    def read(self, node: Node) -> _Part:
        """Number the positions of a tree."""
        match node:
            case Chars(chars):
                self.bits.append(self.alphabet.bits(chars))
                self.follow.append(0)
                own = 1 << (len(self.bits) - 1)
                return _Part(False, own, own)
            case Whole(part):
                return self.read(part)
            case Sequence(parts):
                whole = _Part(True, 0, 0)
                for part in parts:
                    whole = self.join(whole, self.read(part))
                return whole
            case Choice(parts):
                found = [self.read(part) for part in parts]
                return _Part(
                    any(part.empty for part in found),
                    _union(part.first for part in found),
                    _union(part.last for part in found),
                )
            case Repeat(part, least, most):
                whole = _Part(True, 0, 0)
                for number in range(max(1, least) if most is None else most):
                    copy = self.read(part)
                    if most is None and number == max(1, least) - 1:
                        self.connect(copy.last, copy.first)
                    skipped = copy.empty or number >= least
                    whole = self.join(whole, _Part(skipped, copy.first, copy.last))
                return whole
            case Ref(name):
                raise AssertionError(f"rule {name!r} in a pattern")

    def join(self, left: _Part, right: _Part) -> _Part:
        """Return two parts one after the other."""
        self.connect(left.last, right.first)
        return _Part(
            left.empty and right.empty,
            left.first | (right.first if left.empty else 0),
            right.last | (left.last if right.empty else 0),
        )

    def connect(self, last: int, first: int) -> None:
        """Let the first positions follow the last ones."""
        for position in _members(last):
            self.follow[position] |= first


def ends_and_continues(node: Node, alphabet: Alphabet, budget: int) -> tuple[int, int] | None:
    """Return the characters that go on behind a finished word of a pattern, and the steps taken.

    Args:
        node: a tree without references that does not derive the empty text.
        alphabet: has all its characters.
        budget: steps allowed; None is returned if it takes more.
    """
    positions = _Positions(alphabet)
    whole = positions.read(node)
    steps, behind = 0, 0
    seen, waiting = {whole.first << 1}, [(whole.first, False)]
    while waiting:
        options, finished = waiting.pop()
        members = list(_members(options))
        chars = _union(positions.bits[position] for position in members)
        behind |= chars if finished else 0
        for char in _members(chars):
            steps += 1 + len(members)
            if steps > budget:
                return None
            here = [position for position in members if positions.bits[position] >> char & 1]
            following = _union(positions.follow[position] for position in here)
            ended = any(whole.last >> position & 1 for position in here)
            key = following << 1 | ended
            if key not in seen:
                seen.add(key)
                waiting.append((following, ended))
    return behind, steps


def _members(bits: int) -> Iterable[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _union(sets: Iterable[int]) -> int:
    whole = 0
    for bits in sets:
        whole |= bits
    return whole
