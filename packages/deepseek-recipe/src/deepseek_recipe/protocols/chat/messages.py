"""Messages of the Chat Completions protocol, as the client sends them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Tag

from deepseek_recipe.protocols.fields import Body, hint, refused
from deepseek_recipe.protocols.images import ImageDetail
from deepseek_recipe.protocols.unions import by_type, string_or

__all__ = [
    "AssistantMessage",
    "ChatMessage",
    "FilePart",
    "ImagePart",
    "Part",
    "ReminderMessage",
    "TextMessage",
    "TextPart",
    "ToolMessage",
]

_Breakpoint: TypeAlias = Annotated[object, hint("What is cached is the server's choice.")]
_Name: TypeAlias = Annotated[
    object, hint("Participants of one role are not told apart; say it in the text.")
]
_NoPrefix: TypeAlias = Annotated[
    object, refused("A reply can only continue the last message, of the assistant.", False)
]


class TextPart(Body):
    """A text."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: _Breakpoint = None


class ImageUrl(Body):
    """Where an image is, or the image itself as a data URL."""

    url: str
    detail: ImageDetail | None = None


class ImagePart(Body):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageUrl
    prompt_cache_breakpoint: _Breakpoint = None


class FilePart(Body):
    """A file; the model cannot read it."""

    type: Literal["file"]
    file: Annotated[
        object, hint("A file is refused, or stands as a note that it cannot be seen.")
    ] = None
    prompt_cache_breakpoint: _Breakpoint = None


_PARTS = ("text", "image_url", "file")
Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ImagePart, Tag("<image_url>")]
    | Annotated[FilePart, Tag("<file>")],
    by_type(_PARTS, f"an object whose `type` is one of {', '.join(_PARTS)}"),
]
_Content: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[Part], Tag("<shape>")],
    string_or(list, "a string or a list of parts"),
]


class TextMessage(Body):
    """A message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: _Content
    name: _Name = None
    prefix: _NoPrefix = None


class CalledFunction(Body):
    """A function and the arguments it was called with, which should be JSON."""

    name: str
    arguments: str


class Call(Body):
    """A call that the assistant made."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: Annotated[object, hint("Calls are taken in the order of the list.")] = None


class AssistantMessage(Body):
    """A reply of the assistant; with `prefix`, the beginning of the one that is asked for."""

    role: Literal["assistant"]
    content: _Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    prefix: bool | None = None
    name: _Name = None
    refusal: Annotated[object, refused("Send the text of a refusal as `content`.")] = None
    audio: Annotated[object, refused("The model has no audio; send the text.")] = None
    function_call: Annotated[object, refused("Send it as one of `tool_calls`.")] = None
    annotations: Annotated[object, hint("Sources of an earlier reply are not shown again.")] = None


class ToolMessage(Body):
    """The answer to a call."""

    role: Literal["tool"]
    tool_call_id: str
    content: _Content
    name: _Name = None
    prefix: _NoPrefix = None


class ReminderMessage(Body):
    """A short-lived note to the model."""

    role: Literal["latest_reminder"]
    content: str
    name: _Name = None
    prefix: _NoPrefix = None


_TAGS = {
    "system": "<text>",
    "developer": "<text>",
    "user": "<text>",
    "assistant": "<assistant>",
    "tool": "<tool>",
    "latest_reminder": "<reminder>",
}


def _tag(value: object) -> str | None:
    role = value.get("role") if isinstance(value, dict) else None
    return _TAGS.get(role) if isinstance(role, str) else None


ChatMessage: TypeAlias = Annotated[
    Annotated[TextMessage, Tag("<text>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")]
    | Annotated[ReminderMessage, Tag("<reminder>")],
    Discriminator(
        _tag,
        custom_error_type="shape",
        custom_error_message=f"Input should be an object whose `role` is one of {', '.join(_TAGS)}",
    ),
]
