"""Requests of the state-machine test: what may be drawn, a scripted grammar, the expected output.

A prompt is the beginning of one of a few long texts, so that many requests share a prefix and some
have the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.one_by_one import OneByOne
from deepinfer_core.testing.reference import (
    EMPTY_HASH,
    mix,
    mix_rows,
    prompt_logprobs_reference,
    serial_reference,
)
from deepinfer_core.types import FinishReason, Request, SamplingParams, TokenLogprob

__all__ = ["VOCAB", "WISHES", "Known", "ScriptedGrammar", "Wish", "known_request"]

VOCAB = 40  # masks of two words, the second one not full
_IDS = np.arange(VOCAB)

WISHES: Mapping[str, tuple[object, ...]] = {
    "length": (1, 2, 3, 4, 5, 8, 9, 9, 9, 13, 13, 17, 26),
    "family": (0, 0, 0, 1),
    "twist": (0, 0, 0, 0, 1),
    "cap": (1, 2, 4, 8, 16, 25, 25),
    "drafts": (None, None, 0, 1, 2, 7),
    "stops": (0, 0, 0, 1, 1, 9),
    "grammar": (0, 0, 0, 0, 3, 6, 20),
    "fault": (*[""] * 9, "fill", "accept", "refuse"),
    "priority": (0, 0, 0, 1, 2),
    "mode": ("strict", "normal", "encoder", "decoder", "both"),
    "use_cache": (True, True, True, False),
    "lifetime": (*[None] * 7, 100, 800),
    "logprobs": (None, None, 0, 2),
    "prompt_logprobs": (None, None, None, 0, 1),
    "penalty": (False, False, True),
}


@dataclass(frozen=True)
class Wish:
    """What is drawn for a request.

    Args:
        length, family, twist: of the prompt: how long, of which text, what its last id is changed
            by.
        cap: most tokens of output.
        drafts: most drafts a row, or None.
        stops: how many stop ids.
        grammar: tokens until the grammar ends; 0 is none.
        fault: what goes wrong in the grammar, after two tokens: `fill`, `accept`, `refuse` or "".
        mode: `strict`, or `normal` without or with bounded replay.
        lifetime: ns until the deadline, or None.
        penalty: whether sampling needs the tokens so far.
    """

    length: int
    family: int = 0
    twist: int = 0
    cap: int = 5
    drafts: int | None = None
    stops: int = 0
    grammar: int = 0
    fault: str = ""
    priority: int = 0
    mode: str = "normal"
    use_cache: bool = True
    lifetime: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    penalty: bool = False


class ScriptedGrammar(OneByOne):
    """A `TokenConstraint` whose allowed tokens depend on the number of tokens and the last one.

    The scheduler turns what a grammar raises into an error of its request, so breaches of the
    contract are kept in `violations` instead.
    """

    def __init__(self, key: int, length: int, fault: str = "") -> None:
        """Start with nothing accepted.

        Args:
            key: draws which tokens are allowed.
            length: tokens after which only the end is allowed.
            fault: see `Wish`.
        """
        self.accepted: list[int] = []
        self.violations: list[str] = []
        self._key, self._length, self._fault = key, length, fault

    @property
    def done(self) -> bool:
        """Whether only the end is allowed."""
        return len(self.accepted) >= self._length

    def allowed(self, produced: Sequence[int]) -> np.ndarray:
        """Return which ids may follow, [V] bool; all of them behind the end.

        In a third of the places, in runs of three or more, there is no choice.
        """
        count = len(produced)
        if count >= self._length:
            return np.ones(VOCAB, dtype=np.bool_)
        state = mix(mix(self._key, count), produced[-1] if produced else VOCAB)
        drawn = mix_rows(np.array([state], dtype=np.uint64), _IDS) % np.uint64(3)
        found: np.ndarray = drawn > (2 if mix(self._key, count // 3) % 3 == 0 else 0)
        found[state % VOCAB] = True
        return found

    def fill_window(self, rows: np.ndarray, drafts: Sequence[int]) -> int:
        """See `TokenConstraint.fill_window`."""
        if self.done:
            self.violations.append(f"asked for a mask after its end: {self.accepted}")
        if len(rows) != len(drafts) + 1:
            self.violations.append(f"asked for {len(rows)} masks of {len(drafts)} drafts")
        if self._fault == "fill" and len(self.accepted) >= 2:
            raise RuntimeError("no mask")
        produced = list(self.accepted)
        rows[:] = 0
        for row, draft in zip(rows, (*drafts, -1), strict=True):
            if len(produced) >= self._length:
                break
            bits = np.zeros(len(row) * 32, dtype=np.bool_)
            bits[:VOCAB] = self.allowed(produced)
            row[:] = np.packbits(bits, bitorder="little").view(np.int32)
            if draft < 0 or not bits[draft]:
                break
            produced.append(draft)
        return len(produced) - len(self.accepted)

    def accept(self, token_ids: Sequence[int]) -> int:
        """See `TokenConstraint.accept`."""
        if self.done:
            self.violations.append(f"advanced after its end: {self.accepted} by {token_ids}")
        for count, token_id in enumerate(token_ids):
            if self.done:
                return count
            if self._fault and len(self.accepted) >= 2:
                if self._fault == "accept":
                    raise RuntimeError("no state")
                if self._fault == "refuse":
                    return count
            if not self.allowed(self.accepted)[token_id]:
                return count
            self.accepted.append(token_id)
        return len(token_ids)

    def forced(self) -> Sequence[int]:
        """See `TokenConstraint.forced`."""
        if self.done:
            self.violations.append(f"asked what is forced after its end: {self.accepted}")
        produced = list(self.accepted)
        while len(produced) < self._length and (allowed := self.allowed(produced)).sum() == 1:
            produced.append(int(allowed.argmax()))
        return produced[len(self.accepted) :]


@dataclass
class Known:
    """A submitted request: what it must yield, and what was told of it so far."""

    request: Request
    expected: tuple[int, ...]
    reason: FinishReason
    cap: int
    grammar: ScriptedGrammar | None
    fault: str
    output: list[int] = field(default_factory=list)
    scores: Mapping[int, TokenLogprob] = field(default_factory=dict)  # of the prompt, as asked for
    state: int = EMPTY_HASH  # hash of prompt and output
    prompt_positions: list[int] = field(default_factory=list)
    ended: FinishReason | None = None
    code: str | None = None
    cut: bool = False  # ended by its caller
    longest: int = 0  # most settled positions it ever had
    committed: int = 0  # tokens of output that were seen in the books


def known_request(uid: int, wish: Wish, limits: SchedulerLimits, now_ns: int) -> Known:
    """Return a request as wished, with its serial reference."""
    ids = [(wish.family * 11 + i * i) % VOCAB for i in range(wish.length)]
    if ids and wish.twist:
        ids[-1] = (ids[-1] + wish.twist) % VOCAB
    grammar = ScriptedGrammar(uid, wish.grammar, wish.fault) if wish.grammar else None
    skips_rows = wish.mode in ("encoder", "decoder", "both")  # scores need every prompt row
    request = Request(
        uid=uid,
        client_id=f"r{uid}",
        prompt_token_ids=tuple(ids),
        params=SamplingParams(
            max_tokens=wish.cap,
            logprobs=wish.logprobs,
            prompt_logprobs=None if skips_rows else wish.prompt_logprobs,
            presence_penalty=0.5 if wish.penalty else 0.0,
        ),
        seed=uid * 1000,
        stop_ids=frozenset((uid * 3 + i * 4) % VOCAB for i in range(wish.stops)),
        strict=wish.mode == "strict",
        replay_encoder=wish.mode in ("encoder", "both"),
        replay_decoder=wish.mode in ("decoder", "both"),
        use_cache=wish.use_cache,
        priority=wish.priority,
        max_drafts=wish.drafts,
        deadline_ns=None if wish.lifetime is None else now_ns + wish.lifetime,
        constraint=grammar,
    )
    expected: tuple[int, ...] = ()
    reason = FinishReason.LENGTH
    if 0 < len(ids) < limits.max_model_len:
        allowed = None if grammar is None else grammar.allowed
        expected, reason = serial_reference(request, limits.max_model_len, VOCAB, allowed)
        if grammar is not None and len(expected) >= wish.grammar:
            expected, reason = expected[: wish.grammar], FinishReason.STOP
    state = EMPTY_HASH
    for token_id in ids:
        state = mix(state, token_id)
    cap = min(wish.cap, limits.max_model_len - len(ids))
    scores: Mapping[int, TokenLogprob] = {}
    if request.params.prompt_logprobs is not None:
        scores = prompt_logprobs_reference(request, VOCAB)
    fault = wish.fault if grammar else ""
    return Known(request, expected, reason, cap, grammar, fault, scores=scores, state=state)
