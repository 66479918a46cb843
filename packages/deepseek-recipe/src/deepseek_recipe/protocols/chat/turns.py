"""Messages of Chat Completions to those of a conversation, with the rules of tool exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepseek_recipe.conversation import Content, ImageSource, Message, ToolCall
from deepseek_recipe.encoding.profile import JOINER, UNSUPPORTED_IMAGE, Profile
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.protocols.chat.messages import (
    AssistantMessage,
    ChatMessage,
    FilePart,
    Part,
    TextPart,
    ToolMessage,
)
from deepseek_recipe.protocols.images import image_piece

__all__ = ["read_messages"]

_EXCHANGE = (
    "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
    "'tool_call_id'"
)


def read_messages(messages: Sequence[ChatMessage], profile: Profile) -> tuple[Message, ...]:
    """Return the messages of a conversation; those of the system without content are left out.

    Raises:
        ConversionError: there are none; one has no content, or content that is not supported; calls
            and their results do not fit together; a prefix is not last.
    """
    if not messages:
        raise ConversionError("Empty input messages")
    read: list[Message] = []
    exchange = _Exchange()
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            exchange.result(message.tool_call_id, index)
        else:
            exchange.check_closed()
        if isinstance(message, AssistantMessage):
            read.append(_assistant(message, index, profile))
            if message.tool_calls:
                exchange = _Exchange({call.id for call in message.tool_calls})
            continue
        content = _content(message.content, index, profile)
        if isinstance(message, ToolMessage):
            read.append(Message("tool", content, tool_call_id=message.tool_call_id))
        elif message.role in ("latest_reminder", "user"):
            read.append(Message(message.role, content))
        elif content:
            # what a developer says has the rank of the system, where a later place can have it
            in_place = message.role == "system" or profile.systems_in_place
            read.append(Message("system" if in_place else "user", content))
    exchange.check_closed()
    for message in messages[:-1]:
        if isinstance(message, AssistantMessage) and message.prefix:
            raise ConversionError(
                "Invalid completion message: prefix set true with message which is not final "
                "message or message role is not assistant"
            )
    return tuple(read)


@dataclass(slots=True)
class _Exchange:
    """Calls of one assistant message, and which of them have a result."""

    calls: set[str] = field(default_factory=set)
    results: set[str] = field(default_factory=set)

    def result(self, call_id: str, index: int) -> None:
        if len(self.results) == len(self.calls):
            raise ConversionError(
                "Messages with role 'tool' must be a response to a preceding message with "
                "'tool_calls'"
            )
        if call_id in self.results:
            raise ConversionError(
                f"Duplicate value for 'tool_call_id' of {call_id} in message[{index}]"
            )
        if call_id not in self.calls:
            raise ConversionError(
                f"{_EXCHANGE}, The following tool_call_ids did not have response messages: "
                f"{call_id}"
            )
        self.results.add(call_id)

    def check_closed(self) -> None:
        if len(self.results) < len(self.calls):
            raise ConversionError(
                f"{_EXCHANGE}. (insufficient tool messages following tool_calls message)"
            )


def _assistant(message: AssistantMessage, index: int, profile: Profile) -> Message:
    parts = message.content if isinstance(message.content, list) else ()
    if profile.vision and any(part.type == "image_url" for part in parts):
        raise ConversionError("Image in assistant message is not supported")
    if message.tool_calls is None and message.content is None:
        raise ConversionError("Invalid assistant message: content or tool_calls must be set")
    return Message(
        "assistant",
        () if message.content is None else _content(message.content, index, profile),
        reasoning=message.reasoning_content,
        tool_calls=() if message.tool_calls is None else _calls(message, index),
        prefix=bool(message.prefix),
    )


def _calls(message: AssistantMessage, index: int) -> tuple[ToolCall, ...]:
    calls = tuple(
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    )
    if not calls:
        raise ConversionError(
            f"Invalid 'messages[{index}].tool_calls': empty array. Expected an array with minimum "
            "length 1, but got an empty array instead."
        )
    seen: set[str] = set()
    for call in calls:
        if call.id in seen:
            raise ConversionError(
                f"Duplicate value for 'tool_call_id' of {call.id} in message[{index}]"
            )
        seen.add(call.id)
    return calls


def _content(content: str | list[Part], index: int, profile: Profile) -> Content:
    if isinstance(content, str):
        return (content,) if content else ()
    texts: list[str] = []
    pieces: list[str | ImageSource] = []
    for part in content:
        piece = _piece(part, index, profile)
        if texts or pieces:
            texts.append(JOINER)
        if isinstance(piece, str):
            texts.append(piece)
        else:
            pieces += ("".join(texts), piece) if texts else (piece,)
            texts.clear()
    rest = "".join(texts)
    return (*pieces, rest) if rest else tuple(pieces)


def _piece(part: Part, index: int, profile: Profile) -> str | ImageSource:
    if isinstance(part, TextPart):
        return part.text
    path = f".messages[{index}]"
    if isinstance(part, FilePart):
        if profile.vision:
            raise ConversionError(f"{path}: file parts are not supported")
        return UNSUPPORTED_IMAGE
    image = part.image_url
    return image_piece(image.url, image.detail, profile=profile, prefix=f"{path}: ", path=path)
