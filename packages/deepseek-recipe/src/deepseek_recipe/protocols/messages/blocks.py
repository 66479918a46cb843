"""Content blocks of the Messages protocol, as the client sends them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, Tag

from deepseek_recipe.protocols.fields import Body, hint, refused
from deepseek_recipe.protocols.unions import string_or

__all__ = [
    "Base64Image",
    "Block",
    "CacheControl",
    "Content",
    "DocumentBlock",
    "FileImage",
    "ImageBlock",
    "ResultBlock",
    "ResultContent",
    "ServerToolUseBlock",
    "SystemText",
    "TextBlock",
    "ThinkingBlock",
    "ToolAdditionBlock",
    "ToolReferenceBlock",
    "ToolResultBlock",
    "ToolUseBlock",
    "UrlImage",
    "WebSearchResultBlock",
]

_NO_DOCUMENTS = "The model is told the document's media type, and that it cannot read it."
_NO_FILES = "There is no file store: an image in it is refused where the checkpoint has vision."
_BY_OPTION = "The whole block is dropped or refused, as the server's option for web search says."

CacheControl: TypeAlias = Annotated[object, hint("What is cached is the server's choice.")]
_Toolset: TypeAlias = Annotated[object, refused("There are no toolsets.")]
_Caller: TypeAlias = Annotated[
    object, refused("Only the model itself calls tools.", {"type": "direct"})
]


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[object, hint("Sources of an earlier reply are not shown again.")] = None


class Base64Image(Body):
    """An image that is part of the request."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/jpg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlImage(Body):
    """An image at an http(s) address."""

    type: Literal["url"]
    url: str


class FileImage(Body):
    """An image in the provider's file store, which is not there."""

    type: Literal["file"]
    file_id: Annotated[str, hint(_NO_FILES)]


class ImageBlock(Body):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Image | UrlImage | FileImage, Field(discriminator="type")]
    cache_control: CacheControl = None
    transformations: Annotated[
        object,
        refused("Large images are always scaled down.", {}, {"oversized_image": "downsize"}),
    ] = None


class DocumentSource(Body):
    """Where a document's content is; only its media type is shown to the model."""

    type: Annotated[object, hint(_NO_DOCUMENTS)] = None
    media_type: str | None = None
    data: Annotated[object, hint(_NO_DOCUMENTS)] = None
    url: Annotated[object, hint(_NO_DOCUMENTS)] = None
    file_id: Annotated[object, hint(_NO_DOCUMENTS)] = None
    content: Annotated[object, hint(_NO_DOCUMENTS)] = None


class DocumentBlock(Body):
    """A document: the model cannot read it and is told so."""

    type: Literal["document"]
    source: DocumentSource
    cache_control: CacheControl = None
    citations: Annotated[object, hint(_NO_DOCUMENTS)] = None
    context: Annotated[object, hint(_NO_DOCUMENTS)] = None
    title: Annotated[object, hint(_NO_DOCUMENTS)] = None


class ThinkingBlock(Body):
    """Reasoning of an earlier reply."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[object, hint("Where reasoning comes from is not checked.")] = None


class ToolUseBlock(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: object
    cache_control: CacheControl = None
    caller: _Caller = None
    toolset_name: _Toolset = None


class ToolReferenceBlock(Body):
    """In a tool's result: a deferred tool that was found and becomes available."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl = None


class ToolPointer(Body):
    """Names a declared tool."""

    type: Literal["tool_reference"]
    name: str


class ToolAdditionBlock(Body):
    """In a system message: a deferred tool that becomes available."""

    type: Literal["tool_addition"]
    tool: ToolPointer
    cache_control: CacheControl = None


class ServerToolUseBlock(Body):
    """A call that the server made by itself; dropped or refused as a whole."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[Literal["server_tool_use"], hint(_BY_OPTION)]
    name: Annotated[str, hint(_BY_OPTION)]


class WebSearchResultBlock(Body):
    """What the server's web search found; dropped or refused as a whole."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[Literal["web_search_tool_result"], hint(_BY_OPTION)]


_TEXT_OR_BLOCKS = string_or(list, "a string or a list of blocks")

ResultBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock
ResultContent: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[list[Annotated[ResultBlock, Field(discriminator="type")]], Tag("<shape>")],
    _TEXT_OR_BLOCKS,
]


class ToolResultBlock(Body):
    """The answer to a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    is_error: Annotated[object, hint("The content of the result says what went wrong.")] = None
    cache_control: CacheControl = None
    toolset_name: _Toolset = None


Block: TypeAlias = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolAdditionBlock
    | ServerToolUseBlock
    | WebSearchResultBlock
)
Content: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[list[Annotated[Block, Field(discriminator="type")]], Tag("<shape>")],
    _TEXT_OR_BLOCKS,
]
SystemText: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[TextBlock], Tag("<shape>")], _TEXT_OR_BLOCKS
]
