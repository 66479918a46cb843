"""`SamplingParams`: how the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from deepinfer_core.errors import RequestError, shown

__all__ = ["SamplingParams"]

DETERMINISM = ("strict", "normal")
BOUNDED_REPLAY = ("off", "encoder", "decoder", "both")
MAX_LOGPROBS = 64
MAX_INTEGER = 2**31 - 1
# The device computes in float32: much smaller settings are 0 there, or make logits infinite.
MIN_TEMPERATURE = 1e-6
MIN_TOP_P = 1e-6
MIN_REPETITION_PENALTY = 1e-3

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1e-3, 1e9

_DIGITS = re.compile("[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Filters are applied in this order: mask of the constraint, logit bias, repetition penalty,
    frequency and presence penalties, temperature, top-k, top-p, min-p. Log-probabilities are of the
    raw logits.

    Args:
        max_tokens: most tokens to produce; the context length limits it too.
        temperature: 0 is greedy; else at least 1e-6.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; at least
            1e-6.
        min_p: drop tokens less likely than this times the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or
            output; at least 0.001.
        frequency_penalty: subtracted once for each time a token occurs in the output.
        presence_penalty: subtracted once for each token that occurs in the output.
        logit_bias: token id -> value added to its logit.
        seed: key of the noise; None derives one from the engine's seed and the request's number.
        constraint: what the whole text must be, enforced token by token. Exactly one of `json` (a
            schema, parsed or as JSON text), `json_object` (true), `regex`, `choice` (a list of
            texts), `grammar` (EBNF) and `structural_tag`, such as `{"regex": "[0-9]+"}`. The
            package `deepseek-recipe` compiles it; what it cannot enforce, it refuses.
        stop: texts that end the output; the text is cut before the first one.
        stop_token_ids: ids that end the output, besides the model's end-of-sequence ids.
        ignore_eos: go on after the model's end-of-sequence ids.
        logprobs: None for none, 0 for the chosen token's, K for the K most likely as well.
        prompt_logprobs: the same for prompt tokens after the first; computing them needs the exact
            prefill.
        determinism: "strict" or "normal"; None takes the engine's.
        bounded_replay: "encoder": after a prefix hit the windows are rebuilt from its last rows;
            "decoder": late layers skip the prompt before its last window; "both" or "off". None is
            "both" in normal mode, "off" in strict mode or when `prompt_logprobs` is asked for.
        timeout_s: seconds after which the request ends unfinished, with an error; what it produced
            is kept. None is never.

    Raises:
        RequestError: a value is outside its range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    constraint: Mapping[str, object] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    determinism: str | None = None
    bounded_replay: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Check every range, so that a bad value fails where it was written."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", _items("stop", self.stop, "a list of texts"))
        ids = _items("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        _integer("max_tokens", self.max_tokens, 1)
        _integer("top_k", self.top_k, 0)
        _number("temperature", self.temperature, MIN_TEMPERATURE, 100.0, or_zero=True)
        _number("top_p", self.top_p, MIN_TOP_P, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.timeout_s is not None:
            _number("timeout_s", self.timeout_s, MIN_TIMEOUT_S, MAX_TIMEOUT_S)
        if self.constraint is not None:
            _constraint(self.constraint)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise _bad("ignore_eos", self.ignore_eos, "true or false")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise _bad("stop", text, "non-empty texts")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0)
        _one_of("determinism", self.determinism, DETERMINISM)
        _one_of("bounded_replay", self.bounded_replay, BOUNDED_REPLAY)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all settings, in order."""
        return tuple(f.name for f in fields(cls))

    @property
    def uses_penalties(self) -> bool:
        """Whether the sampler has to know which tokens occurred."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


def _items(name: str, value: object, allowed: str) -> tuple[object, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise _bad(name, value, allowed)
    return tuple(value)


def _bad(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"`{name}` is {shown(value)}; allowed: {allowed}.", param=name)


def _integer(name: str, value: object, low: int, high: int = MAX_INTEGER) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _bad(name, value, f"an integer from {low} to {high}")


def _number(name: str, value: object, low: float, high: float, *, or_zero: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (low <= value <= high or (or_zero and value == 0))
    ):
        raise _bad(name, value, f"{'0, or ' if or_zero else ''}a number from {low:g} to {high:g}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise _bad(name, value, " or ".join(repr(word) for word in allowed))


def _constraint(value: object) -> None:
    """Check the form alone: which kinds there are is the recipe's to say."""
    if (
        not isinstance(value, Mapping)
        or not value
        or not all(isinstance(key, str) for key in value)
    ):
        raise _bad("constraint", value, 'a mapping such as {"json": {"type": "object"}}')


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _bad("logit_bias", value, "a mapping of token id to number")
    result: dict[int, float] = {}
    for key, bias in value.items():
        # keys of a JSON object are strings
        token_id = int(key) if isinstance(key, str) and _DIGITS.fullmatch(key) else key
        _integer("logit_bias", token_id, 0)
        _number("logit_bias", bias, -1e9, 1e9)
        result[token_id] = float(bias)
    return result
