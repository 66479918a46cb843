"""The model of `FakeWorker`, run for one request alone: what any schedule of it must reproduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepinfer_core.types import FinishReason, Request, TokenLogprob

__all__ = ["logprob_of", "mix", "next_token", "prompt_logprobs_reference", "serial_reference"]

_MASK = 2**64 - 1


def mix(state: int, value: int) -> int:
    """Return the hash of a prefix with one more token."""
    state = (state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ (state >> 29)


def _prefix_hash(token_ids: Sequence[int]) -> int:
    state = 1
    for token_id in token_ids:
        state = mix(state, token_id)
    return state


def next_token(state: int, seed: int, vocab_size: int) -> int:
    """Return the token after the prefix with hash `state`."""
    return mix(mix(state, seed), 7) % vocab_size


def serial_reference(
    request: Request, max_model_len: int, vocab_size: int
) -> tuple[tuple[int, ...], FinishReason]:
    """Return the tokens a request yields when nothing else exists, and why it ends."""
    state = _prefix_hash(request.prompt_token_ids)
    produced: list[int] = []
    while True:
        produced.append(next_token(state, request.seed, vocab_size))
        state = mix(state, produced[-1])
        if produced[-1] in request.stop_ids:
            return tuple(produced), FinishReason.STOP
        if (
            len(produced) == request.params.max_tokens
            or len(request.prompt_token_ids) + len(produced) == max_model_len
        ):
            return tuple(produced), FinishReason.LENGTH


def logprob_of(state: int, token_id: int) -> TokenLogprob:
    """Return a made-up log-probability of a token after a prefix."""
    return TokenLogprob(token_id, -(mix(state, token_id) % 1000) / 1000)


def prompt_logprobs_reference(request: Request) -> Mapping[int, TokenLogprob]:
    """Return position -> log-probability of the prompt token there."""
    ids = request.prompt_token_ids
    return {p: logprob_of(_prefix_hash(ids[:p]), ids[p]) for p in range(1, len(ids))}
