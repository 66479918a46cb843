"""The requests that differential runs serve: every kind of sampling, end and grammar among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_core.testing.one_by_one import OneByOne
from deepinfer_core.types import Request, SamplingParams

__all__ = ["Layout", "ModuloGrammar", "Spec", "layout_for", "trace"]

_MODULUS = 3  # of the grammar: one id in so many is refused
TIGHT = 6  # quarters of the longest sequence
_VOCAB = 300  # prompts have ids from 5 to here


class ModuloGrammar(OneByOne):
    """Refuses the ids `t` with `(t + 5 * n + last) % 3 == 0` after n tokens of which one was last.

    Of every six tokens it leaves no choice for the last three.

    Args:
        vocab_size: V.
        length: tokens after which it allows no more; None is never.
    """

    def __init__(self, vocab_size: int, length: int | None = None) -> None:
        """Start before the first token."""
        self._vocab_size, self._length = vocab_size, length
        self._taken: list[int] = []

    @property
    def done(self) -> bool:
        """See `TokenConstraint.done`."""
        return len(self._taken) == self._length

    def fill_window(self, rows: np.ndarray, drafts: Sequence[int]) -> int:
        """See `TokenConstraint.fill_window`."""
        taken = self._taken.copy()
        rows[:] = 0
        for row, draft in zip(rows, (*drafts, None), strict=True):
            if len(taken) == self._length:
                break
            bits = np.zeros(32 * len(row), dtype=np.bool_)
            bits[: self._vocab_size] = self._allowed(taken)
            row[:] = np.packbits(bits, bitorder="little").view(np.int32)
            if draft is None or not bits[draft]:
                break
            taken.append(draft)
        return len(taken) - len(self._taken)

    def accept(self, token_ids: Sequence[int]) -> int:
        """See `TokenConstraint.accept`."""
        for count, token_id in enumerate(token_ids):
            if self.done or not self._allowed(self._taken)[token_id]:
                return count
            self._taken.append(token_id)
        return len(token_ids)

    def forced(self) -> Sequence[int]:
        """See `TokenConstraint.forced`."""
        taken = self._taken.copy()
        while len(taken) != self._length and (found := self._only(taken)) is not None:
            taken.append(found)
        return taken[len(self._taken) :]

    def _allowed(self, taken: Sequence[int]) -> np.ndarray:
        ids, only = np.arange(self._vocab_size), self._only(taken)
        found: np.ndarray = ids == only
        return (ids + _shift(taken)) % _MODULUS != 0 if only is None else found

    def _only(self, taken: Sequence[int]) -> int | None:
        """Return the one token that may follow, where there is no choice."""
        return (7 * _shift(taken) + 5) % self._vocab_size if len(taken) % 6 > 2 else None


def _shift(taken: Sequence[int]) -> int:
    return 5 * len(taken) + (taken[-1] if taken else 0)


@dataclass(frozen=True)
class Layout:
    """Lengths that make blocks of a size matter.

    Attributes:
        pad: tokens in front of every prompt but the shortest, so that some outputs cross the end of
            a block.
        max_model_len: the context; one request ends by it.
        tight: blocks of a pool for about two sequences, so that they preempt one another.
        least: blocks of a pool for the longest one alone.
    """

    pad: int
    max_model_len: int
    tight: int
    least: int


def layout_for(block_size: int) -> Layout:
    """Return the layout for blocks of that many tokens."""
    pad = block_size - 20 if block_size > 16 else 0
    max_model_len = 32 + pad
    least = -(-max_model_len // block_size) + 1
    return Layout(pad, max_model_len, -(-max_model_len * TIGHT // (4 * block_size)) + 1, least)


@dataclass(frozen=True)
class Spec:
    """A request before it has a number.

    Attributes:
        settings: fields of `SamplingParams`.
        fields: further fields of `Request`.
        grammar_len: length of its grammar; 0 for one without end, None for no grammar.
        abort_after: tokens after which its client gives up, 0 for some while before the first;
            None is never.
    """

    name: str
    prompt: tuple[int, ...]
    settings: Mapping[str, Any]
    fields: Mapping[str, Any]
    grammar_len: int | None = None
    abort_after: int | None = None

    def request(self, uid: int, vocab_size: int) -> Request:
        """Return a request of it with a fresh grammar, strict, and with a seed of its name."""
        constraint = None
        if self.grammar_len is not None:
            constraint = ModuloGrammar(vocab_size, self.grammar_len or None)
        return Request(
            uid=uid,
            client_id=f"{self.name}-{uid}",
            prompt_token_ids=self.prompt,
            params=SamplingParams(**self.settings),
            seed=sum(self.name.encode()),
            strict=True,
            constraint=constraint,
            **self.fields,
        )


def trace(layout: Layout, *, grammars: bool, aborts: bool) -> list[Spec]:
    """Return the requests, in the order of their arrival.

    Args:
        layout: lengths.
        grammars: with those that follow one, whose steps sample late.
        aborts: with neighbours whose clients give up; a whole run of one is its reference.
    """

    def prompt(number: int, length: int) -> tuple[int, ...]:
        count = length + layout.pad
        return tuple((17 * number + 31 * i * i + 7 * i) % _VOCAB + 5 for i in range(count))

    def spec(name: str, ids: tuple[int, ...], **settings: Any) -> Spec:
        fields = {key: settings.pop(key) for key in _FIELDS & settings.keys()}
        more = {key: settings.pop(key) for key in _SPEC & settings.keys()}
        return Spec(name, ids, {"temperature": 0.0, "max_tokens": 6, **settings}, fields, **more)

    first = prompt(0, 17)
    longer = first + prompt(1, 8 - layout.pad)  # resumes behind the first, where both are cached
    found = [
        spec("greedy", first, logprobs=2, max_tokens=9),
        spec("top_p", longer, temperature=1.0, top_p=0.95, logprobs=0),
        spec("other seed", first, temperature=1.0, top_k=40, min_p=0.001, max_drafts=2),
        spec("context", prompt(2, 23), **_PENALTIES, logprobs=1, max_tokens=99),
        spec("one stop", prompt(3, 9), **_FEW, stop_ids=frozenset({70}), max_tokens=9),
        spec("many stops", prompt(4, 15), **_FEW, stop_ids=_MANY, logprobs=0, priority=1),
        spec("repeats", (9,), temperature=1.0, logit_bias=_TWO, logprobs=0, max_tokens=12),
        spec("one token", prompt(5, 10), max_tokens=1, logprobs=3, prompt_logprobs=1),
    ]
    if grammars:
        found[2:2] = [
            spec("grammar", prompt(6, 8), temperature=0.8, logprobs=1, grammar_len=0),
            spec("grammar that ends", prompt(7, 5), grammar_len=6, max_tokens=30),
        ]
    if aborts:
        found[1:1] = [
            spec("gone before", prompt(8, 20), abort_after=0, max_tokens=8),
            spec("gone late", prompt(9, 9), max_tokens=20, abort_after=3, logprobs=0),
        ]
    return found


_FIELDS = frozenset({"stop_ids", "max_drafts", "priority"})
_SPEC = frozenset({"grammar_len", "abort_after"})
_PENALTIES: dict[str, Any] = {
    "temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4,
    "presence_penalty": 0.2, "logit_bias": {9: 2.0},
}  # fmt: skip
_FEW: dict[str, Any] = {"temperature": 1.5, "logit_bias": {token: 60.0 for token in range(66, 72)}}
_MANY = frozenset({67, *range(100, 120)})  # more than fit into a column
_TWO = {60: 60.0, 61: 57.5}  # n-grams find something to draft
