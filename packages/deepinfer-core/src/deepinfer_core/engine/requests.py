"""Prompts and settings of a caller, checked and turned into `Request`s."""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Callable, Mapping, Sequence

from deepinfer_core.config import EngineConfig, did_you_mean
from deepinfer_core.errors import RequestError, shown
from deepinfer_core.interfaces import OutputGrammar
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.scheduler.budget import SchedulerLimits, check_prompt
from deepinfer_core.types import Request, SamplingParams

__all__ = ["Prompt", "Prompts", "RequestReader", "as_list", "params_of_each"]

Prompt = str | Sequence[int] | Mapping[str, object]
Prompts = Prompt | Sequence[Prompt]

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "client_id")


class RequestReader:
    """Turns one prompt and its settings into a `Request`, or says what is wrong with them."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        *,
        limits: SchedulerLimits,
        encode: Callable[[str], list[int]],
        no_strict: str | None = None,
    ) -> None:
        """Keep what requests are checked against.

        Args:
            config: the engine's options.
            model_config: the model's vocabulary and control tokens.
            limits: what a prompt must fit into.
            encode: makes ids of a text.
            no_strict: name of the kernel backend if it lacks `determinism="strict"`.
        """
        self._config = config
        self._model = model_config
        self._limits = limits
        self._encode = encode
        self._no_strict = no_strict

    def read(
        self, item: Prompt, params: SamplingParams, uid: int, grammar: OutputGrammar | None = None
    ) -> Request:
        """Return the request.

        Args:
            item: a text, token ids, or a mapping with one of the two.
            params: checked settings.
            uid: the request's number; the seed of a request that has none depends on it.
            grammar: what the output must follow.

        Raises:
            RequestError: the prompt is empty, too long or not a prompt, an id is out of range, or
                settings contradict one another.
        """
        client_id, ids = _read_item(item, f"request-{uid}")
        prompt = self._checked_prompt(self._encode(ids) if isinstance(ids, str) else ids)
        for token_id in params.stop_token_ids:
            self.check_id("stop_token_ids", token_id)
        for token_id in params.logit_bias:
            self.check_id("logit_bias", token_id)
        strict = (params.determinism or self._config.determinism) == "strict"
        if strict and self._no_strict is not None:
            raise RequestError(
                f"`determinism` is 'strict', which backend `{self._no_strict}` lacks; use "
                "'normal', or the backend `cpu`.",
                param="determinism",
            )
        rejects = self._config.acceptance == "rejection" and self._limits.max_drafts > 0
        if strict and rejects and params.temperature > 0:
            raise RequestError(
                f"`determinism` is 'strict' and `temperature` is {params.temperature:g}, but the "
                "engine's `acceptance` is 'rejection', under which texts depend on what was "
                "drafted. Use 'normal', temperature 0, or `acceptance` 'target_noise'.",
                param="determinism",
            )
        ends = () if params.ignore_eos else self._model.eos_token_ids
        return Request(
            uid=uid,
            client_id=client_id,
            prompt_token_ids=prompt,
            params=params,
            seed=_seed(self._config.seed, uid) if params.seed is None else params.seed,
            stop_ids=frozenset(params.stop_token_ids).union(ends),
            strict=strict,
            replay_encoder=_replays(params, strict, "encoder"),
            replay_decoder=_replays(params, strict, "decoder"),
            deadline_ns=_deadline_ns(params.timeout_s),
            constraint=None if grammar is None else grammar.matcher(),
        )

    def skips_rows(self, request: Request) -> bool:
        """Say whether late layers really skip rows: not if the prompt fits into one window."""
        return request.replay_decoder and len(request.prompt_token_ids) > self._model.sliding_window

    def check_id(self, name: str, value: object) -> int:
        """Return a token id, or raise `RequestError` that names the field it stands in."""
        token_id = -1
        if hasattr(value, "__index__") and not isinstance(value, bool):
            token_id = operator.index(value)
        if not 0 <= token_id < self._model.vocab_size:
            raise RequestError(
                f"`{name}` has {shown(value)}; token ids are integers from 0 to "
                f"{self._model.vocab_size - 1}.",
                param=name,
                code="token_id_out_of_range",
            )
        return token_id

    def _checked_prompt(self, ids: Sequence[int]) -> tuple[int, ...]:
        check_prompt(len(ids), self._limits)
        prompt = tuple(self.check_id("prompt_token_ids", token_id) for token_id in ids)
        image_id = self._model.image_token_id
        if image_id is not None and image_id in prompt:
            raise RequestError(
                f"`prompt_token_ids` has the image id {image_id} at place "
                f"{prompt.index(image_id)}, but image input is not served; leave it out.",
                param="prompt_token_ids",
                code="image_input",
            )
        return prompt


def as_list(prompts: Prompts) -> list[Prompt]:
    """Return the prompts one by one, whether one or several were given."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"`prompts` is of type {type(prompts).__name__}; allowed: a text, a list of token ids, "
            "a mapping, or a list of these.",
            param="prompts",
        )
    if len(prompts) and hasattr(prompts[0], "__index__"):
        return [prompts]  # type: ignore[list-item]  # the ids of one prompt
    return list(prompts)  # type: ignore[arg-type]


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    """Return the settings of each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    several = isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params)
    if not several:
        raise RequestError(
            f"`params` is {params!r}; allowed: `SamplingParams`, one for all prompts or a list of "
            "one for each.",
            param="params",
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"`params` has {len(params)} entries for {num_prompts} prompts; give one for all, or "
            "one for each.",
            param="params",
        )
    return params


def _read_item(item: Prompt, client_id: str) -> tuple[str, str | Sequence[int]]:
    """Return the label of a prompt, and its text or ids."""
    if not isinstance(item, Mapping):
        if not isinstance(item, Sequence) or isinstance(item, bytes):
            raise _wrong_type("prompt", item, "a text or a list of token ids")
        return client_id, item
    for key in item:
        if key not in _PROMPT_KEYS:
            raise RequestError(
                f"A prompt has the unknown key `{key}`. {did_you_mean(str(key), _PROMPT_KEYS)}",
                param=str(key),
                code="unknown_field",
            )
    if ("prompt" in item) == ("prompt_token_ids" in item):
        raise RequestError(
            f"A prompt has {'both `prompt` and' if 'prompt' in item else 'neither `prompt` nor'} "
            "`prompt_token_ids`; give one of them.",
            param="prompt",
        )
    label = item.get("client_id", client_id)
    if not isinstance(label, str):
        raise _wrong_type("client_id", label, "a text")
    if "prompt" in item:
        text = item["prompt"]
        if not isinstance(text, str):
            raise _wrong_type("prompt", text, "a text")
        return label, text
    ids = item["prompt_token_ids"]
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise _wrong_type("prompt_token_ids", ids, "a list of token ids")
    return label, ids


def _wrong_type(name: str, value: object, allowed: str) -> RequestError:
    kind = type(value).__name__
    return RequestError(f"`{name}` is of type {kind}; it must be {allowed}.", param=name)


def _replays(params: SamplingParams, strict: bool, side: str) -> bool:
    """Whether a request may use replay on a side, `encoder` or `decoder`."""
    if not strict and params.prompt_logprobs is None:
        return params.bounded_replay in (None, "both", side)
    if params.bounded_replay in ("both", side):
        exact = "`determinism` 'strict'" if strict else "`prompt_logprobs`"
        raise RequestError(
            f"`bounded_replay` is {params.bounded_replay!r}, but {exact} needs the exact prefill; "
            "use 'off'.",
            param="bounded_replay",
        )
    return False


def _deadline_ns(timeout_s: float | None) -> int | None:
    """Return the instant on the loop's clock at which a request of now has to end."""
    return None if timeout_s is None else time.perf_counter_ns() + round(timeout_s * 1e9)


def _seed(engine_seed: int, uid: int) -> int:
    """Return 64 bits that depend on both, the same ones on every machine."""
    words = engine_seed.to_bytes(8, "little") + uid.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "little")
