"""The ways in which differential runs serve their trace, and which of them to take."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

__all__ = ["VALUES", "Values", "Variant", "all_variants", "covering"]

Values = Mapping[str, tuple[Any, ...]]

VALUES: Values = {
    "depth": (0, 1, 2),
    "gamma": tuple(range(8)),
    "drafter": ("none", "mixed", "right", "wrong", "ngram"),
    "lengths": ("all", "some"),
    "chunk": ("block", "odd", "half", "whole"),
    "block_size": (2, 4, 16, 64, 256),
    "pool": ("loose", "tight", "least"),
    "cache": ("off", "cold", "warm"),
    "company": ("alone", "batch", "abort"),
    "grammars": (False, True),
    "numerics": ("ideal", "release"),
}

_TRIES = 200  # random completions of a pair before it is called impossible
_RIVALS = 40  # random completions of a pair of which the best is taken


@dataclass(frozen=True)
class Variant:
    """A way to serve the trace. The defaults are the reference.

    Attributes:
        depth: steps that may be unsettled.
        gamma: drafts verified with a row.
        drafter: who drafts: a script that is right in 7 of 10 cases, always or never, or n-grams.
        lengths: whether all drafts are verified, or as many as random budgets allow: the likeliest
            ones by what a script says of them; n-grams say nothing.
        chunk: tokens of a prefill step: a block, an odd number, half of the context, or everything.
        block_size: tokens of a block.
        pool: room for everybody, for about two, which then preempt one another, or for just one.
        cache: prefix cache off; empty at the start; or filled by the same trace before.
        company: requests one after another, all at once, or with neighbours that are aborted.
        grammars: whether requests with grammars are among them; always, where each runs alone.
        numerics: mode of the backend.
    """

    depth: int = 0
    gamma: int = 0
    drafter: str = "none"
    lengths: str = "all"
    chunk: str = "whole"
    block_size: int = 4
    pool: str = "loose"
    cache: str = "off"
    company: str = "alone"
    grammars: bool = True
    numerics: str = "ideal"

    @property
    def possible(self) -> bool:
        """Whether the values go together."""
        if (self.gamma == 0) != (self.drafter == "none"):
            return False
        if self.gamma == 0 and self.lengths == "some":
            return False
        return self.company != "alone" or (self.pool == "loose" and self.grammars)

    def __str__(self) -> str:
        """Return its values, in order."""
        return " ".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))


def all_variants(values: Values = VALUES) -> Iterator[Variant]:
    """Return the cross product of values, without what is not possible."""
    for chosen in product(*values.values()):
        variant = Variant(**dict(zip(values, chosen, strict=True)))
        if variant.possible:
            yield variant


def covering(values: Values = VALUES) -> list[Variant]:
    """Return few variants in which every possible pair of values occurs; always the same ones.

    Greedy: each takes a pair that is missing and, of random completions, the one with most others.
    """
    rng = random.Random(0)
    missing = set()
    for one, other in combinations(values, 2):
        for pair in product(values[one], values[other]):
            wanted = dict(zip((one, other), pair, strict=True))
            if _completed(wanted, values, rng) is not None:
                missing.add(tuple(wanted.items()))
    chosen = []
    while missing:
        wanted = dict(min(missing, key=str))
        rivals = [_completed(wanted, values, rng) for _ in range(_RIVALS)]
        found = [variant for variant in rivals if variant is not None]
        if not found:
            continue  # unlucky draws of a pair that was completed before
        best = max(found, key=lambda variant: len(missing & _pairs(variant, values)))
        chosen.append(best)
        missing -= _pairs(best, values)
    return chosen


def _completed(wanted: Mapping[str, Any], values: Values, rng: random.Random) -> Variant | None:
    """Return a random possible variant with the wanted values, or None if none was found."""
    for _ in range(_TRIES):
        drawn = {name: rng.choice(allowed) for name, allowed in values.items()}
        variant = Variant(**{**drawn, **wanted})
        if variant.possible:
            return variant
    return None


def _pairs(variant: Variant, values: Values) -> set[tuple[tuple[str, Any], ...]]:
    return set(combinations([(name, getattr(variant, name)) for name in values], 2))
