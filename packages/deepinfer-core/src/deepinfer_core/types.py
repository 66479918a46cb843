"""Values that cross module borders: requests, sampling settings, step plans and results.

Integers only, no torch.

A step is three values: `StepPlan` (what the scheduler decided, frozen), the ticket that
`Worker.launch` returns, and `StepResult` (the host's copy of what the sampler produced).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from deepinfer_core.params import SamplingParams

__all__ = [
    "Admission",
    "BlockDelta",
    "ChatOutput",
    "FinishReason",
    "Phase",
    "PromptLogprob",
    "Request",
    "RequestOutput",
    "RowStatus",
    "SamplingParams",
    "SchedulerOutput",
    "SequenceMetadata",
    "SequenceUpdate",
    "StepKind",
    "StepPlan",
    "StepResult",
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
        replay_decoder: skip late layers for prompt rows outside the last window.
        priority: larger runs first.
    """

    uid: int
    client_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    strict: bool = False
    replay_decoder: bool = False
    priority: int = 0


class StepKind(StrEnum):
    """What a step computes. An empty step of either kind has no rows."""

    PREFILL = "prefill"
    DECODE = "decode"


class Phase(StrEnum):
    """What a sequence does in a step."""

    CHUNK = "chunk"  # part of the prompt, nothing sampled
    FINAL_CHUNK = "final_chunk"  # the prompt's end: its last row is sampled
    VERIFY = "verify"  # the last sampled token and its drafts; no draft is plain decoding


class RowStatus(int, Enum):
    """What the sampler says of one sequence's rows."""

    OK = 0
    NON_FINITE = 1  # no finite logit in a row; the token is a pad id
    BAD_SOURCE = 2  # the carry did not belong to this sequence


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """New entries of one block table.

    `table[pool][slot, first : first + len(block_ids)] = block_ids`.
    """

    pool: str
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """What the device must know about a sequence that enters a slot (first step of a generation).

    Args:
        params: sampling settings, constant while the sequence lives.
        seed: key of the noise.
        history: token ids just before the first computed position, oldest first; Engram looks back
            at them.
        prompt_len: number of prompt tokens.
        token_ids: prompt and tokens produced so far; filled only when penalties need them.
    """

    params: SamplingParams
    seed: int
    history: tuple[int, ...]
    prompt_len: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceMetadata:
    """One sequence's part of a step.

    Rows are laid end to end in plan order; row i of the sequence sits at position `start + i`.

    Args:
        uid, generation: which sequence; the generation grows with every preemption.
        slot: its place in all per-sequence device state.
        phase: chunk, final chunk or verify.
        start: position of the first row; an upper bound when the row's source is the carry.
        num_rows: tokens fed in this step.
        token_ids: the rows' tokens, or () when the carry of the previous step supplies them.
        kv_len: positions written once the step ran, upper bound (U: one past the highest position
            that a launched step may have written).
        blocks: block-table entries that are new since the last step of this sequence.
        num_drafts: drafts among the rows (verify only).
        num_replay: leading rows that only rebuild window state and write no block. For
            encoder-side replay, which requests meet with the prefix index; 0 until then.
        window_start: first position that windows may see; 0 but for encoder-side replay.
        tail_start: rows below this position skip the layers after the last KV source.
        remaining: tokens it may still produce, this step's included.
        admission: set on the first step of a generation.
        logprobs: None for none, else how many alternatives beside the chosen token.
        prompt_logprobs: the same for prompt rows of this step.
        prompt_targets: the prompt tokens after this step's first rows, when `prompt_logprobs` is
            set.
    """

    uid: int
    generation: int
    slot: int
    phase: Phase
    start: int
    num_rows: int
    token_ids: tuple[int, ...]
    kv_len: int
    blocks: tuple[BlockDelta, ...] = ()
    num_drafts: int = 0
    num_replay: int = 0
    window_start: int = 0
    tail_start: int = 0
    remaining: int = 1
    admission: Admission | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_targets: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether this step yields tokens of the sequence."""
        return self.phase is not Phase.CHUNK


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What a step is, apart from its rows.

    Args:
        step_seq: strictly increasing number.
        kind: prefill or decode.
        remap: for each sequence its row in the previous unsettled step, or -1 when the host
            supplies its source.
        num_rows: rows of all sequences together.
        strict: use kernels whose rows do not depend on other rows.
        preempted: uids taken off the device by this plan.
        expert_map_epoch: which placement of experts the step runs with.
    """

    step_seq: int
    kind: StepKind
    remap: tuple[int, ...]
    num_rows: int
    strict: bool
    preempted: tuple[int, ...] = ()
    expert_map_epoch: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step as the scheduler decided it: frozen, printable, testable without a device."""

    output: SchedulerOutput
    sequences: tuple[SequenceMetadata, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
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


@dataclass(frozen=True, slots=True)
class StepResult:
    """The host's copy of a step's sampler output.

    Every field has one item for each sequence of the plan.

    Args:
        step_seq: the plan's number.
        token_ids: accepted drafts and the token after them; () where nothing was sampled.
        status: `RowStatus` of each sequence.
        logprobs: one item for each produced token; () where not asked for.
        prompt_logprobs: those of the prompt rows in this step.
        start: position each sequence really started at; between the settled length and the upper
            bound that was planned.
    """

    step_seq: int
    token_ids: tuple[tuple[int, ...], ...]
    status: tuple[RowStatus, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    prompt_logprobs: tuple[tuple[PromptLogprob, ...], ...]
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What settling a step means for one request.

    Args:
        uid: which request.
        token_ids: new tokens in order, already cut at the first stop or cap.
        logprobs: one for each new token, or ().
        prompt_logprobs: newly known ones.
        finish_reason: set when the request ended with this step.
        error: a sentence for the user when `finish_reason` is ERROR.
        error_code: what it was, then: `cache_exhausted`, `non_finite` (values of the model),
            `bad_source` (a fault of the engine) or `device_fault`.
        num_preemptions: how often it was taken off the device so far.
    """

    uid: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None
    num_preemptions: int = 0


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
        determinism: the mode the request ran in.
        bounded_replay: which replay was really used: "off" or "decoder".
        num_preemptions: how often it was taken off the device and recomputed.
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
    determinism: str = "normal"
    bounded_replay: str = "off"
    num_preemptions: int = 0

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
