"""The request of the Chat Completions protocol: its fields, and what becomes of each."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Tag

from deepseek_recipe.protocols.chat.messages import ChatMessage
from deepseek_recipe.protocols.fields import Body, hint, refused
from deepseek_recipe.protocols.structured_outputs import StructuredOutputs
from deepseek_recipe.protocols.thinking import Effort, ThinkingKind
from deepseek_recipe.protocols.unions import by_type, string_or

__all__ = [
    "ChatRequest",
    "ChatTool",
    "JsonObjectForm",
    "JsonSchemaForm",
    "NamedChoice",
    "RegexForm",
    "TextForm",
]

_CACHE = "What is cached is the server's choice."
_CALLER = "Who asks makes no difference to the answer."
_NO_PENALTIES = "The checkpoint is sampled with `temperature` and `top_p` only."
_TEXT_ONLY = "The model answers in text."
_USE_TOOLS = "Declare functions in `tools`, and choose with `tool_choice`."
_SHAPE_ALONE = "The model sees the schema alone."

_Count: TypeAlias = Annotated[int, Field(ge=0)]


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: ThinkingKind
    budget_tokens: Annotated[
        object, hint("The model decides how long it reasons, guided by the effort.")
    ] = None


class Function(Body):
    """What a tool is called, does and takes."""

    name: str
    description: str | None = None
    parameters: object = None
    strict: bool | None = None


class ChatTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class TextForm(Body):
    """An answer of any form."""

    type: Literal["text"]


class JsonObjectForm(Body):
    """An answer that is a JSON object."""

    type: Literal["json_object"]


class AnswerSchema(Body):
    """The JSON Schema of an answer."""

    json_schema: object = Field(alias="schema")
    strict: bool | None = None
    name: Annotated[object, hint(_SHAPE_ALONE)] = None
    description: Annotated[object, hint(_SHAPE_ALONE)] = None


class JsonSchemaForm(Body):
    """An answer that follows a JSON Schema."""

    type: Literal["json_schema"]
    json_schema: AnswerSchema


class RegexForm(Body):
    """An answer that matches a regular expression."""

    type: Literal["regex"]
    regex: str


_FORMS = ("text", "json_object", "json_schema", "regex")
_Form: TypeAlias = Annotated[
    Annotated[TextForm, Tag("<text>")]
    | Annotated[JsonObjectForm, Tag("<json_object>")]
    | Annotated[JsonSchemaForm, Tag("<json_schema>")]
    | Annotated[RegexForm, Tag("<regex>")],
    by_type(_FORMS, f"an object whose `type` is one of {', '.join(_FORMS)}"),
]
_ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<str>")]
    | Annotated[NamedChoice, Tag("<shape>")],
    string_or(dict, "auto, none, required or an object that names a function"),
]
_Stop: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[str], Tag("<shape>")],
    string_or(list, "a string or a list of strings"),
]


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[
        object, refused("Chunks are not padded to hide their length.", False)
    ] = None


class ChatRequest(Body):
    """A request of the Chat Completions protocol."""

    model: str
    messages: list[ChatMessage]
    thinking: Thinking | None = None
    reasoning_effort: Effort | None = None
    tools: list[ChatTool] | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _Form | None = None
    structured_outputs: StructuredOutputs | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: _Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: _Count | None = None
    seed: _Count | None = None
    n: _Count | None = None
    presence_penalty: Annotated[float | None, refused(_NO_PENALTIES, 0.0)] = None
    frequency_penalty: Annotated[float | None, refused(_NO_PENALTIES, 0.0)] = None
    logit_bias: Annotated[object, refused(_NO_PENALTIES, {})] = None
    functions: Annotated[object, refused(_USE_TOOLS, [])] = None
    function_call: Annotated[object, refused(_USE_TOOLS, "auto", "none")] = None
    modalities: Annotated[object, refused(_TEXT_ONLY, ["text"])] = None
    audio: Annotated[object, refused(_TEXT_ONLY)] = None
    prediction: Annotated[object, refused("The answer is not compared with an expected one.")] = (
        None
    )
    store: Annotated[object, refused("No answer is kept for later.", False)] = None
    web_search_options: Annotated[object, refused("The server searches nothing.")] = None
    moderation: Annotated[object, refused("Neither question nor answer is moderated.")] = None
    user: Annotated[object, hint(_CALLER)] = None
    user_id: Annotated[object, hint(_CALLER)] = None
    safety_identifier: Annotated[object, hint(_CALLER)] = None
    metadata: Annotated[object, hint("Nothing is stored that it could describe.")] = None
    prompt_cache_key: Annotated[object, hint(_CACHE)] = None
    prompt_cache_options: Annotated[object, hint(_CACHE)] = None
    prompt_cache_retention: Annotated[object, hint(_CACHE)] = None
    service_tier: Annotated[object, hint("There is one tier.")] = None
    verbosity: Annotated[object, hint("Ask for a short or long answer in a message.")] = None
