"""The model of the fakes, run for one request alone: what any schedule of it must reproduce.

The state of a sequence is the hash of its tokens. Hashes are numbers below 2^64; the functions on
arrays give the same values as those on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from deepinfer_core.types import FinishReason, Request, TokenLogprob

__all__ = [
    "EMPTY_HASH",
    "allowed_token",
    "chain_rows",
    "logprob_of",
    "mix",
    "mix_rows",
    "next_token",
    "next_token_rows",
    "prompt_logprobs_reference",
    "serial_reference",
]

EMPTY_HASH = 1
_MASK = 2**64 - 1
_ADD, _FACTOR, _SHIFT = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 29
_SEVEN = np.full(1, 7, dtype=np.uint64)
_LOGPROB_STEPS = 1024  # a power of two: every value is exact in float32
# A numpy call costs about as much as this many of `mix`: two cores, numpy 2.
_CALLS_PER_VECTOR_STEP = 12


def mix(state: int, value: int) -> int:
    """Return the hash of a prefix with one more token."""
    state = (state ^ (value + _ADD)) * _FACTOR & _MASK
    return state ^ (state >> _SHIFT)


def mix_rows(states: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return `mix` of each pair of items; states uint64, values uint64 or int64, broadcast."""
    mixed: np.ndarray = states ^ (values.astype(np.uint64) + np.uint64(_ADD))
    mixed *= np.uint64(_FACTOR)
    mixed ^= mixed >> np.uint64(_SHIFT)
    return mixed


def _prefix_hash(token_ids: Sequence[int]) -> int:
    state = EMPTY_HASH
    for token_id in token_ids:
        state = mix(state, token_id)
    return state


def chain_rows(states: np.ndarray, token_ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the hash after each token of several sequences.

    Args:
        states: [R] uint64, hash before the first token of each sequence.
        token_ids: [sum(lengths)] int64, their tokens end to end.
        lengths: [R] int64, how many tokens each has, at least 1.
    """
    hashes = np.empty(len(token_ids), dtype=np.uint64)
    firsts = np.cumsum(lengths) - lengths
    longest = int(lengths.max(initial=0))
    if len(token_ids) < longest * _CALLS_PER_VECTOR_STEP:  # a few long chunks
        for state, first, length in zip(
            states.tolist(), firsts.tolist(), lengths.tolist(), strict=True
        ):
            ids = token_ids[first : first + length].tolist()
            hashes[first : first + length] = list(accumulate(ids, mix, initial=state))[1:]
        return hashes
    for place in range(longest):
        left = np.flatnonzero(lengths > place)
        states = mix_rows(states[left] if place else states, token_ids[firsts[left] + place])
        hashes[firsts[left] + place] = states
        firsts, lengths = firsts[left], lengths[left]
    return hashes


def next_token(state: int, seed: int, vocab_size: int) -> int:
    """Return the token after the prefix with hash `state`."""
    return mix(mix(state, seed), 7) % vocab_size


def next_token_rows(states: np.ndarray, seeds: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return `next_token` of each item, int64; states and seeds are uint64 of one shape."""
    mixed = mix_rows(mix_rows(states, seeds), _SEVEN)
    return (mixed % np.uint64(vocab_size)).astype(np.int64)


def allowed_token(token_id: int, allowed: np.ndarray) -> int | None:
    """Return what is sampled under a mask where `token_id` is sampled without one.

    Ids follow one another in a circle; the first allowed one from `token_id` on is taken.

    Args:
        token_id: what `next_token` returns.
        allowed: [V] bool.

    Returns:
        The token, or None when nothing is allowed.
    """
    order = np.flatnonzero(np.roll(allowed, -token_id))
    return (token_id + int(order[0])) % len(allowed) if len(order) else None


def serial_reference(
    request: Request,
    max_model_len: int,
    vocab_size: int,
    allowed: Callable[[Sequence[int]], np.ndarray] | None = None,
) -> tuple[tuple[int, ...], FinishReason]:
    """Return the tokens a request yields when nothing else exists, and why it ends.

    Args:
        request: the request; its constraint is not looked at.
        max_model_len: most tokens of prompt and output together.
        vocab_size: tokens are below this.
        allowed: the tokens produced so far -> [V] bool, which ids may follow; None for all.
    """
    state = _prefix_hash(request.prompt_token_ids)
    produced: list[int] = []
    while True:
        token_id: int | None = next_token(state, request.seed, vocab_size)
        if allowed is not None:
            assert token_id is not None
            token_id = allowed_token(token_id, allowed(produced))
        assert token_id is not None, f"nothing is allowed after {len(produced)} tokens"
        produced.append(token_id)
        state = mix(state, token_id)
        if token_id in request.stop_ids:
            return tuple(produced), FinishReason.STOP
        if (
            len(produced) == request.params.max_tokens
            or len(request.prompt_token_ids) + len(produced) == max_model_len
        ):
            return tuple(produced), FinishReason.LENGTH


def logprob_of(state: int, token_id: int, num_top: int = 0, vocab_size: int = 0) -> TokenLogprob:
    """Return a made-up log-probability of a token after a prefix, and those of the best tokens.

    Ties go to the lower id. `vocab_size` is needed when `num_top` is not 0.
    """
    top = sorted((-_logprob(state, other), other) for other in range(vocab_size if num_top else 0))
    best = tuple((other, -negated) for negated, other in top[:num_top])
    return TokenLogprob(token_id, _logprob(state, token_id), best)


def _logprob(state: int, token_id: int) -> float:
    return -(mix(state, token_id) % _LOGPROB_STEPS) / _LOGPROB_STEPS


def prompt_logprobs_reference(request: Request, vocab_size: int = 0) -> Mapping[int, TokenLogprob]:
    """Return position -> log-probability of the prompt token there.

    `vocab_size` is needed when the request asks for the best tokens too.
    """
    ids, num_top = request.prompt_token_ids, request.params.prompt_logprobs or 0
    return {
        p: logprob_of(_prefix_hash(ids[:p]), ids[p], num_top, vocab_size)
        for p in range(1, len(ids))
    }
