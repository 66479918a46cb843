"""Chat: conversations to prompts and settings, replies to messages, by a checkpoint's recipe."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from deepinfer_core.errors import RequestError, shown
from deepinfer_core.interfaces import PreparedRequest, Recipe, Reply
from deepinfer_core.types import (
    ChatOutput,
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

__all__ = ["ChatReader", "ChatRequest", "Conversations", "Follower", "bodies_of"]

Message = Mapping[str, object]
Conversations = Sequence[Message] | Sequence[Sequence[Message]]


@dataclass(frozen=True)
class ChatRequest:
    """A conversation, ready to run: the prompt, its settings, and what reads the reply."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    reply: Reply
    reply_error: type[Exception]
    overridden: tuple[str, ...] = ()

    def start(self, num_cached: int) -> None:
        """Begin the reply; so many tokens of the prompt were found in the cache."""
        self.reply.start(len(self.prompt_token_ids), num_cached)

    def output(self, output: RequestOutput) -> ChatOutput:
        """Return what the caller sees of a request that has ended."""
        if not output.token_ids:
            self.start(output.num_cached_tokens)
        reason = "length" if output.finish_reason is FinishReason.LENGTH else "stop"
        self.reply.finish(reason)
        return ChatOutput(
            output.index,
            output,
            self.reply.response(),
            malformed=tuple(self.reply.malformed),
            overridden=self.overridden,
        )


class Follower:
    """Feeds the tokens of a running request to its reply, and says when the reply is over."""

    def __init__(self, chat: ChatRequest, stop_ids: frozenset[int]) -> None:
        """Follow one request; `stop_ids` end it and are no part of the reply."""
        self._chat: ChatRequest | None = chat  # until the reply has begun
        self._reply = chat.reply
        self._reply_error = chat.reply_error
        self._stop_ids = stop_ids

    def __call__(self, token_id: int, logprob: TokenLogprob | None, num_cached: int) -> bool:
        """Take the next token; return whether nothing that follows can be part of the reply."""
        if self._chat is not None:
            self._chat.start(num_cached)
            self._chat = None
        if token_id in self._stop_ids:
            return False
        try:
            self._push(token_id, logprob)
        except self._reply_error:
            # a model's vocabulary may be padded: such an id has no text, alone or as alternative
            with suppress(self._reply_error):
                self._push(token_id, None)
        return self._reply.finished

    def _push(self, token_id: int, logprob: TokenLogprob | None) -> None:
        entries = None if logprob is None else ((logprob.logprob, logprob.top),)
        self._reply.push((token_id,), entries)


class ChatReader:
    """Turns bodies of the Chat Completions protocol into requests."""

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
            RequestError: the recipe refuses it, the prompt is too long, or it asks for structured
                output, which is not enforced here.
        """
        _check_body(body)
        try:
            prepared = self._recipe.prepare(body)
            max_tokens = prepared.max_tokens(self._context_limit)
        except self._recipe.request_error as error:
            code = str(getattr(error, "code", "invalid_request"))
            raise RequestError(
                str(error), param=getattr(error, "param", None), code=code
            ) from error
        if prepared.images:
            raise RequestError(
                f"The messages have {len(prepared.images)} image(s), but image input is not "
                "served; leave them out.",
                param="messages",
                code="image_input",
            )
        _check_constraint(prepared.constraint)
        return ChatRequest(
            tuple(prepared.token_ids),
            _params(prepared, max_tokens),
            prepared.reply(f"chatcmpl-{uid}", self._model, int(time.time())),
            self._recipe.reply_error,
            tuple(prepared.overridden),
        )


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
    """Refuse what a whole reply without a grammar cannot honour, whatever the recipe says of it."""
    if body.get("stream") or body.get("stream_options"):
        raise RequestError(
            "`stream` is set, but replies come as a whole here; leave it out.", param="stream"
        )
    form = body.get("response_format")
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind not in (None, "text"):
        raise RequestError(
            f"`response_format` is {shown(kind)}, which this version cannot enforce; leave it out, "
            'or use {"type": "text"}.',
            param="response_format",
            code="unsupported_response_format",
        )


def _no_conversation(value: object) -> RequestError:
    return RequestError(
        f"A conversation is {shown(value)}; allowed: a list of messages such as "
        '{"role": "user", "content": "Hello"}, or a list of such lists.',
        param="messages",
    )


def _check_constraint(constraint: Mapping[str, str] | None) -> None:
    """Refuse strict tools. Others need no grammar: the prompt asks for calls."""
    if constraint is None or not constraint["kind"].startswith("tool_call"):
        return
    for tool in json.loads(constraint["schema"]):
        function = tool["function"]
        if function.get("strict"):
            raise RequestError(
                f"The tool {shown(function['name'])} is `strict`, but this version cannot enforce "
                "that arguments match its schema; leave `strict` out.",
                param="tools",
                code="unsupported_strict",
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
