"""Values that cross module borders: requests, what becomes known of them, and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from deepinfer_core.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer_core.interfaces import TokenConstraint

__all__ = [
    "ChatOutput",
    "FinishReason",
    "PromptLogprob",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "SequenceUpdate",
    "TokenLogprob",
]


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop id, the end of sequence, or a stop string
    LENGTH = "length"  # `max_tokens` or the context limit
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the scheduler sees it: token ids and settled settings.

    Args:
        uid: never reused; the engine's own name of the request.
        client_id: the caller's label; unique among live requests.
        prompt_token_ids: at least one id.
        params: as given by the caller.
        seed: key of the noise, resolved.
        stop_ids: ids that end the output, end-of-sequence ids included unless ignored.
        strict: recompute exactly and use kernels whose rows do not depend on other rows.
        replay_encoder: after a prefix hit, rebuild the windows from the last rows of the hit alone.
        replay_decoder: skip late layers for prompt rows outside the last window.
        use_cache: look the prompt up in the prefix index, and publish what is computed.
        priority: larger runs first.
        max_drafts: most drafts verified with one of its rows; None is the engine's limit.
        deadline_ns: instant, on the scheduler's clock, at which it ends unfinished; None is never.
        constraint: a grammar that its output must follow, fresh, or None.
    """

    uid: int
    client_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    strict: bool = False
    replay_encoder: bool = False
    replay_decoder: bool = False
    use_cache: bool = True
    priority: int = 0
    max_drafts: int | None = None
    deadline_ns: int | None = None
    constraint: TokenConstraint | None = None


class TokenLogprob(NamedTuple):
    """Log-probability of a token and of the most likely ones, best first.

    Natural, of the raw logits.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Log-probability of the prompt token at `position`."""

    position: int
    value: TokenLogprob


class SequenceUpdate(NamedTuple):
    """What settling a step means for one request.

    Args:
        uid: which request.
        token_ids: new tokens in order, already cut at the first stop or cap.
        logprobs: one for each new token, or ().
        prompt_logprobs: newly known ones.
        finish_reason: set when the request ended with this step.
        error: a sentence for the user when `finish_reason` is ERROR.
        error_code: what it was, then: `cache_exhausted`, `deadline_exceeded`, `non_finite` (values
            of the model), `constraint` (a grammar failed), `bad_source` (a fault of the engine) or
            `device_fault`.
        num_preemptions: how often it was taken off the device so far.
        num_cached_tokens: tokens of the prompt that were found in the prefix index.
        replayed: rows were replayed after such a hit, maybe after a preemption.
    """

    uid: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything known of a request so far; ids, text and logprobs always cover the same tokens.

    Args:
        index: place of the request in the caller's list.
        client_id: the caller's label.
        prompt_token_ids: ids of the prompt.
        token_ids: ids produced so far, a stop id included.
        text: text of `token_ids`, special tokens left out, cut before a stop string.
        delta: what this output adds to the text of the one before it (streaming).
        finish_reason: None while it runs.
        logprobs: one for each token, or None when not asked for.
        prompt_logprobs: one for each prompt token but the first, or None.
        error: a sentence when `finish_reason` is ERROR; what was produced before it is kept.
        error_param: the request field at fault, or None.
        error_code: a short machine-readable word: that of the `RequestError`, or of the
            `SequenceUpdate` when it failed while it ran.
        constraint_fault: why the finished text does not satisfy the request's constraint; None
            where it does, where there is none, and where the text was cut.
        constraint_warnings: of a finished request: what its constraint names that is not enforced,
            since it only describes.
        determinism: the mode the request ran in.
        bounded_replay: which replay was really used: "off", "encoder", "decoder" or "both".
        num_preemptions: how often it was taken off the device and recomputed.
        num_cached_tokens: tokens of the prompt that were not computed because an earlier request
            had them.
    """

    index: int
    client_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    delta: str
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    error_param: str | None = None
    error_code: str | None = None
    constraint_fault: str | None = None
    constraint_warnings: tuple[str, ...] = ()
    determinism: str = "normal"
    bounded_replay: str = "off"
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether no more output follows."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The reply to one conversation.

    Args:
        index: place of the conversation in the caller's list.
        output: the request as such: ids, raw text, errors.
        response: the whole response as Chat Completions states it; None if the request was refused.
        malformed: text of the model that fits nowhere in the message, such as broken tool markup.
        overridden: fields of the request that the checkpoint's own settings replaced.
    """

    index: int
    output: RequestOutput
    response: Mapping[str, object] | None
    malformed: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()

    @property
    def message(self) -> Mapping[str, object]:
        """The assistant's message: `content`, and maybe `reasoning_content` and `tool_calls`."""
        choice = self._choice()
        message = choice.get("message", {})
        assert isinstance(message, Mapping)
        return message

    @property
    def content(self) -> str:
        """The answer; empty if there is none."""
        return str(self.message.get("content") or "")

    @property
    def finish_reason(self) -> str:
        """`stop`, `length`, `tool_calls`, `abort` or `error`."""
        if self.output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return self.output.finish_reason.value
        return str(self._choice().get("finish_reason"))

    @property
    def error(self) -> str | None:
        """A sentence when `finish_reason` is `error`."""
        return self.output.error

    def _choice(self) -> Mapping[str, object]:
        choices = [] if self.response is None else self.response["choices"]
        assert isinstance(choices, list)
        return choices[0] if choices else {}
