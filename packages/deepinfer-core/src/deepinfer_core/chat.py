"""What a checkpoint's recipe makes of requests: prompts, settings, grammars; and of replies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from deepinfer_core.errors import RequestError, shown
from deepinfer_core.interfaces import OutputGrammar, PreparedRequest, Recipe, Reply
from deepinfer_core.types import (
    ChatOutput,
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

__all__ = [
    "ChatReader",
    "ChatRequest",
    "Conversations",
    "Follower",
    "bodies_of",
    "judge",
    "switches_of",
]

Message = Mapping[str, object]
Conversations = Sequence[Message] | Sequence[Sequence[Message]]


@dataclass(frozen=True)
class ChatRequest:
    """A conversation, ready to run: prompt, settings, grammar, and what reads the reply."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    reply: Reply
    reply_error: type[Exception]
    overridden: tuple[str, ...] = ()
    grammar: OutputGrammar | None = None


class Follower:
    """Feeds the tokens of a running request to its reply, and says when the reply is over."""

    def __init__(self, chat: ChatRequest, stop_ids: frozenset[int]) -> None:
        """Follow one request; `stop_ids` end it and are no part of the reply."""
        self._chat, self._reply = chat, chat.reply
        self._stop_ids = stop_ids
        self._begun = False

    def __call__(self, token_id: int, logprob: TokenLogprob | None, num_cached: int) -> bool:
        """Take the next token; return whether nothing that follows can be part of the reply."""
        self._begin(num_cached)
        if token_id in self._stop_ids:
            return False
        try:
            self._push(token_id, logprob)
        except self._chat.reply_error:
            # a model's vocabulary may be padded: such an id has no text, alone or as alternative
            with suppress(self._chat.reply_error):
                self._push(token_id, None)
        return self._reply.finished

    def output(self, output: RequestOutput) -> ChatOutput:
        """Return what the caller sees of the request, which has ended."""
        self._begin(output.num_cached_tokens)
        self._reply.finish("length" if output.finish_reason is FinishReason.LENGTH else "stop")
        return ChatOutput(
            output.index,
            output,
            self._reply.response(),
            malformed=tuple(self._reply.malformed),
            overridden=self._chat.overridden,
        )

    def answer(self, output: RequestOutput) -> str | None:
        """Return the text of the answer, None where tools are called instead."""
        reply = self.output(output)
        return None if reply.message.get("tool_calls") else reply.content

    def _begin(self, num_cached: int) -> None:
        if not self._begun:
            self._reply.start(len(self._chat.prompt_token_ids), num_cached)
            self._begun = True

    def _push(self, token_id: int, logprob: TokenLogprob | None) -> None:
        entries = None if logprob is None else ((logprob.logprob, logprob.top),)
        self._reply.push((token_id,), entries)


class ChatReader:
    """Turns bodies of Chat Completions into requests, and constraints into grammars."""

    def __init__(self, recipe: Recipe, model: str, context_limit: int) -> None:
        """Keep what requests are read with.

        Args:
            recipe: of the checkpoint.
            model: its name in responses.
            context_limit: longest prompt plus reply, in tokens.
        """
        self._recipe = recipe
        self._model = model
        self._context_limit = context_limit

    def read(self, body: Mapping[str, object], uid: int) -> ChatRequest:
        """Return the request that a body asks for.

        Raises:
            RequestError: the recipe refuses it, the prompt is too long, or what it asks of the
                reply cannot be enforced.
        """
        _check_body(body)
        try:
            prepared = self._recipe.prepare(body)
            max_tokens = prepared.max_tokens(self._context_limit)
            grammar = prepared.grammar()
        except self._recipe.request_error as error:
            raise _refused(error, getattr(error, "param", None)) from error
        if prepared.images:
            raise RequestError(
                f"The messages have {len(prepared.images)} image(s), but image input is not "
                "served; leave them out.",
                param="messages",
                code="image_input",
            )
        return ChatRequest(
            tuple(prepared.token_ids),
            _params(prepared, max_tokens),
            prepared.reply(f"chatcmpl-{uid}", self._model, int(time.time())),
            self._recipe.reply_error,
            tuple(prepared.overridden),
            grammar,
        )

    def grammar(self, constraint: Mapping[str, object]) -> OutputGrammar:
        """Compile a constraint on a text that is no conversation's.

        Raises:
            RequestError: the recipe does not know it, or cannot enforce it.
        """
        try:
            return self._recipe.grammar(constraint)
        except self._recipe.request_error as error:
            raise _refused(error, "constraint") from error


def judge(grammar: OutputGrammar, text: str) -> str | None:
    """Return why a finished text does not satisfy its constraint, None also where nobody can tell.

    The check is a net below the masks: one that fails itself is nobody's fault.
    """
    try:
        return grammar.fault_of(text)
    except Exception:
        return None


def bodies_of(
    conversations: Conversations, fields: Mapping[str, object]
) -> list[Mapping[str, object]]:
    """Return one request body for each conversation.

    Args:
        conversations: one list of messages, or a list of these; where a mapping has `messages`, it
            is a body itself, whose fields win over `fields`.
        fields: of all bodies; None leaves a field out.

    Raises:
        RequestError: it is neither.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if "messages" in given:
        raise RequestError(
            "`messages` is given beside the conversations; give one of them.", param="messages"
        )
    if isinstance(conversations, str | bytes | Mapping) or not isinstance(conversations, Sequence):
        raise _no_conversation(conversations)
    if conversations and isinstance(conversations[0], Mapping) and "role" in conversations[0]:
        return [{**given, "messages": list(conversations)}]
    bodies: list[Mapping[str, object]] = []
    for item in conversations:
        if isinstance(item, Mapping):
            bodies.append(_merged(given, item))
        elif isinstance(item, Sequence) and not isinstance(item, str | bytes):
            bodies.append({**given, "messages": list(item)})
        else:
            raise _no_conversation(item)
    return bodies


def switches_of(tools: object, thinking: object) -> dict[str, object]:
    """Return the arguments of `LLM.chat` as fields of a body, None where they say nothing.

    Raises:
        RequestError: one is of another form.
    """
    if isinstance(thinking, bool):
        thinking = {"type": "enabled" if thinking else "disabled"}
    elif thinking is not None and not isinstance(thinking, Mapping):
        raise RequestError(
            f'`thinking` is {shown(thinking)}; allowed: True, False or {{"type": ...}}.',
            param="thinking",
        )
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence | None):
        raise RequestError(
            f"`tools` is {shown(tools)}; allowed: a list of tools as in Chat Completions.",
            param="tools",
        )
    return {"tools": None if tools is None else list(tools), "thinking": thinking}


def _merged(given: Mapping[str, object], body: Mapping[str, object]) -> dict[str, object]:
    """Return a body with the fields it lacks; null is a lack."""
    own = {name: value for name, value in body.items() if value is not None}
    rest = dict(given)
    for names in (("max_tokens", "max_completion_tokens"), ("logprobs", "top_logprobs")):
        if any(name in own for name in names):  # they speak of one thing
            for name in names:
                rest.pop(name, None)
    return {**rest, **own}


def _check_body(body: Mapping[str, object]) -> None:
    """Refuse what a whole reply cannot honour, whatever the recipe says of it."""
    if body.get("stream") or body.get("stream_options"):
        raise RequestError(
            "`stream` is set, but replies come as a whole here; leave it out.", param="stream"
        )


def _refused(error: Exception, param: str | None) -> RequestError:
    """Return what the recipe refuses as an error of ours."""
    code = str(getattr(error, "code", "invalid_request"))
    return RequestError(str(error), param=param, code=code)


def _no_conversation(value: object) -> RequestError:
    return RequestError(
        f"A conversation is {shown(value)}; allowed: a list of messages such as "
        '{"role": "user", "content": "Hello"}, or a list of such lists.',
        param="messages",
    )


def _params(prepared: PreparedRequest, max_tokens: int) -> SamplingParams:
    settings = prepared.settings
    # stop texts are the reply's: they count in the answer only, not in reasoning or tool calls
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
        logprobs=(settings.top_logprobs or 0) if settings.logprobs else None,
    )
