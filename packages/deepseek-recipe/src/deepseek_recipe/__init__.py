"""DeepSeek V4 / V4.1 conversations: API requests to token ids, token ids to API responses.

from deepseek_recipe import PromptTokenizer, convert, parse, render

converted = convert(parse("chat", body))
token_ids = PromptTokenizer.from_path(folder).encode(
    render(converted.conversation, converted.profile)
)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from deepseek_recipe.conversation import (
    Conversation,
    GenerationSettings,
    ImageSource,
    Message,
    OutputConstraint,
    ParsingOptions,
    ResponseFormat,
    Tool,
    ToolCall,
)
from deepseek_recipe.decoding.events import (
    NEED_MORE,
    BackendFinish,
    Event,
    Finish,
    Malformed,
    Ready,
    Reasoning,
    Text,
    TextChunk,
    TokenChunk,
    TokenLogprob,
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from deepseek_recipe.encoding.profile import V4, V41, Profile, SpecialTokens
from deepseek_recipe.errors import (
    BodyError,
    ConversionError,
    OptionError,
    RecipeError,
    ReplyError,
    RequestError,
    TokenizerError,
    error_body,
)
from deepseek_recipe.options import ConversionOptions

if TYPE_CHECKING:
    from deepseek_recipe.decoding.machine import ReplyMachine
    from deepseek_recipe.decoding.stream import ReplyStream, ServerEvent
    from deepseek_recipe.encoding.prompt import Prompt, Special, render
    from deepseek_recipe.encoding.tokenizer import PromptTokenizer
    from deepseek_recipe.protocols.converted import ConvertedRequest
    from deepseek_recipe.protocols.dispatch import convert, parse, reply_stream

__all__ = [
    "NEED_MORE",
    "V4",
    "V41",
    "BackendFinish",
    "BodyError",
    "Conversation",
    "ConversionError",
    "ConversionOptions",
    "ConvertedRequest",
    "Event",
    "Finish",
    "GenerationSettings",
    "ImageSource",
    "Malformed",
    "Message",
    "OptionError",
    "OutputConstraint",
    "ParsingOptions",
    "Profile",
    "Prompt",
    "PromptTokenizer",
    "Ready",
    "Reasoning",
    "RecipeError",
    "ReplyError",
    "ReplyMachine",
    "ReplyStream",
    "RequestError",
    "ResponseFormat",
    "ServerEvent",
    "Special",
    "SpecialTokens",
    "Text",
    "TextChunk",
    "TokenChunk",
    "TokenLogprob",
    "TokenizerError",
    "Tool",
    "ToolArguments",
    "ToolCall",
    "ToolEnd",
    "ToolStart",
    "__version__",
    "convert",
    "error_body",
    "parse",
    "render",
    "reply_stream",
]

__version__ = "0.1.0"

# What needs pydantic, from where: imported when it is first asked for.
_LATER = {
    "ReplyMachine": "decoding.machine",
    "ReplyStream": "decoding.stream",
    "ServerEvent": "decoding.stream",
    "Prompt": "encoding.prompt",
    "Special": "encoding.prompt",
    "render": "encoding.prompt",
    "PromptTokenizer": "encoding.tokenizer",
    "ConvertedRequest": "protocols.converted",
    "convert": "protocols.dispatch",
    "parse": "protocols.dispatch",
    "reply_stream": "protocols.dispatch",
}


def __getattr__(name: str) -> object:
    """Import what needs pydantic when it is first used."""
    if name in _LATER:
        module = importlib.import_module(f"{__name__}.{_LATER[name]}")
        value: object = getattr(module, name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
