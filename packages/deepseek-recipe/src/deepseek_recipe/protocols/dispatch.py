"""The three protocols by name: parse a body, convert it, read the reply to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from deepseek_recipe.decoding.machine import ReplyMachine
from deepseek_recipe.decoding.stream import ReplyStream, ReplyWriter
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.errors import OptionError, shown
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols import call_ids
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.chat.convert import convert_chat
from deepseek_recipe.protocols.chat.models import ChatRequest
from deepseek_recipe.protocols.chat.reply import ChatWriter
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.messages.convert import convert_messages
from deepseek_recipe.protocols.messages.models import MessagesRequest
from deepseek_recipe.protocols.messages.reply import MessagesWriter
from deepseek_recipe.protocols.responses.convert import convert_responses
from deepseek_recipe.protocols.responses.models import ResponsesRequest
from deepseek_recipe.protocols.responses.reply import ResponsesWriter

__all__ = ["PROTOCOLS", "Request", "convert", "parse", "reply_stream"]

Protocol: TypeAlias = Literal["chat", "responses", "messages"]
Request: TypeAlias = ChatRequest | ResponsesRequest | MessagesRequest

PROTOCOLS: tuple[Protocol, ...] = ("chat", "responses", "messages")
_DEFAULTS = ConversionOptions()


def parse(protocol: str, body: bytes | str | Mapping[str, object]) -> Request:
    """Return the typed request that a body holds.

    Args:
        protocol: `chat`, `responses` or `messages`.
        body: JSON text, or the same as a Python mapping.

    Raises:
        BodyError: it is not JSON, or a field is missing or has a wrong type.
        OptionError: there is no such protocol.
    """
    if protocol == "chat":
        return parse_body(ChatRequest, body)
    if protocol == "responses":
        return parse_body(ResponsesRequest, body)
    if protocol == "messages":
        return parse_body(MessagesRequest, body)
    allowed = " or ".join(map(repr, PROTOCOLS))
    raise OptionError(f"The protocol is {shown(protocol)}; allowed: {allowed}.")


def convert(request: Request, options: ConversionOptions = _DEFAULTS) -> ConvertedRequest:
    """Return what a request asks for: a conversation, settings, and how to read the reply.

    Raises:
        ConversionError: it asks for something that is not allowed or not supported.
        OptionError: it is not what `parse` returns.
    """
    if isinstance(request, ChatRequest):
        return convert_chat(request, options)
    if isinstance(request, ResponsesRequest):
        return convert_responses(request, options)
    if isinstance(request, MessagesRequest):
        return convert_messages(request, options)
    raise OptionError(f"{shown(request)} is no parsed request; call `parse` on a body first.")


def reply_stream(
    converted: ConvertedRequest,
    *,
    response_id: str,
    model: str,
    tokenizer: PromptTokenizer | None = None,
    created: int | None = None,
    echo: bool = True,
    signature: str | None = None,
    call_id: Callable[[int], str] = call_ids.call_id,
) -> ReplyStream:
    """Return what turns the backend's chunks into the events and the response of the protocol.

    Args:
        converted: the request that is answered.
        response_id: id of the response.
        model: the model's name for the client.
        tokenizer: needed where chunks hold token ids.
        created: seconds since 1970; None is now.
        echo: Responses only: repeat `instructions` and sampling fields in the response.
        signature: Messages only: of thinking blocks; None is the response's id.
        call_id: makes the id of the n-th tool call.
    """
    moment = int(time.time()) if created is None else created
    writer: ReplyWriter
    if converted.protocol == "chat":
        writer = ChatWriter(
            converted,
            response_id=response_id,
            model=model,
            created=moment,
            tokenizer=tokenizer,
            call_id=call_id,
        )
    elif converted.protocol == "responses":
        writer = ResponsesWriter(
            converted,
            response_id=response_id,
            model=model,
            created=moment,
            echo=echo,
            tokenizer=tokenizer,
            call_id=call_id,
        )
    else:
        writer = MessagesWriter(
            converted,
            response_id=response_id,
            model=model,
            signature=signature,
            call_id=call_id,
        )
    conversation = converted.conversation
    continues = bool(conversation.messages) and conversation.messages[-1].prefix
    machine = ReplyMachine(
        converted.parsing,
        converted.profile,
        tokenizer,
        continues_content=continues and not conversation.thinking,
    )
    return ReplyStream(writer, machine, tokenizer)
