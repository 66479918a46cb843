"""The body of a Responses request."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Tag

from deepseek_recipe.protocols.fields import Body, hint, refused
from deepseek_recipe.protocols.responses.input_items import InputItem
from deepseek_recipe.protocols.responses.tool_models import RequestTool
from deepseek_recipe.protocols.structured_outputs import StructuredOutputs
from deepseek_recipe.protocols.thinking import Effort
from deepseek_recipe.protocols.unions import by_type, string_or

__all__ = [
    "CustomChoice",
    "FunctionChoice",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "PlainFormat",
    "ReasoningConfig",
    "ResponsesRequest",
    "TextConfig",
    "ToolChoice",
    "WebSearchChoice",
]

_Count: TypeAlias = Annotated[int, Field(ge=0, le=2**32 - 1)]

_NO_SUMMARY = "The reasoning itself is returned; the response repeats the wish."
_NOTHING_KEPT = "No response is kept. Send the items of the conversation in `input`."
_CACHE = "What is cached is the server's choice."


class ReasoningConfig(Body):
    """How much the model is to think."""

    effort: Effort | None = None
    summary: Annotated[Literal["auto", "concise", "detailed"] | None, hint(_NO_SUMMARY)] = None
    generate_summary: Annotated[object, hint(_NO_SUMMARY)] = None
    context: Annotated[
        object, refused("Which past reasoning the model sees is a rule of the checkpoint.", "auto")
    ] = None
    mode: Annotated[object, refused("There is one mode.", "standard")] = None


class PlainFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: str
    json_schema: object = Field(alias="schema")
    strict: bool | None = None
    description: Annotated[str | None, hint("The model sees the schema alone.")] = None


class TextConfig(Body):
    """The form of the answer."""

    format: Annotated[
        Annotated[PlainFormat, Tag("<text>")]
        | Annotated[JsonObjectFormat, Tag("<json_object>")]
        | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
        by_type(
            ("text", "json_object", "json_schema"),
            "an object whose `type` is one of text, json_object, json_schema",
        ),
    ] = Field(default_factory=lambda: PlainFormat(type="text"))
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None,
        hint("Ask for it in the instructions; the response repeats the wish."),
    ] = None


class FunctionChoice(Body):
    """This function, by its full name, must be called."""

    type: Literal["function"]
    name: str


class CustomChoice(Body):
    """This custom tool must be called."""

    type: Literal["custom"]
    name: str


class WebSearchChoice(Body):
    """The server's web search, which is not there: dropped or refused by an option."""

    type: Literal["web_search", "web_search_2025_08_26"]


_CHOICES = ("function", "custom", "web_search")

ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<str>")]
    | Annotated[
        Annotated[FunctionChoice, Tag("<function>")]
        | Annotated[CustomChoice, Tag("<custom>")]
        | Annotated[WebSearchChoice, Tag("<web_search>")],
        by_type(
            _CHOICES,
            f"an object whose `type` is one of {', '.join(_CHOICES)}",
            shared={"web_search_2025_08_26": "web_search"},
        ),
        Tag("<shape>"),
    ],
    string_or(dict, "auto, none, required or an object"),
]


class ResponsesRequest(Body):
    """The body of `POST /v1/responses`."""

    model: str
    input: (
        Annotated[
            Annotated[str, Tag("<str>")] | Annotated[list[InputItem], Tag("<shape>")],
            string_or(list, "a string or a list of input items"),
        ]
        | None
    ) = None
    instructions: str | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: list[RequestTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: _Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: _Count | None = None
    stream: bool | None = None
    user: str | None = None

    stream_options: Annotated[object, hint("No event is padded.")] = None
    metadata: Annotated[object, hint("It is for the client's own use; no response is kept.")] = None
    client_metadata: Annotated[object, hint("It is for the client's own use.")] = None
    safety_identifier: Annotated[object, hint("It is about the service, not the reply.")] = None
    prompt_cache_key: Annotated[object, hint(_CACHE)] = None
    prompt_cache_options: Annotated[object, hint(_CACHE)] = None
    prompt_cache_retention: Annotated[object, hint(_CACHE)] = None

    store: Annotated[object, refused("No response is kept.", False)] = None
    previous_response_id: Annotated[object, refused(_NOTHING_KEPT)] = None
    conversation: Annotated[object, refused(_NOTHING_KEPT)] = None
    prompt: Annotated[object, refused("No prompt templates are kept.")] = None
    background: Annotated[object, refused("A response is made while the client waits.", False)] = (
        None
    )
    background_options: Annotated[object, refused("There is no background mode.")] = None
    truncation: Annotated[
        object, refused("Input that is too long for the model is an error.", "disabled")
    ] = None
    context_management: Annotated[object, refused("Input is never shortened.", [])] = None
    image: Annotated[
        object,
        refused(
            "Images are scaled as the checkpoint wants it.",
            {"context_compression": "auto"},
            {"context_compression": "disabled"},
        ),
    ] = None
    include: Annotated[
        object,
        refused(
            "Nothing can be added to the response, and its reasoning items always have "
            "`encrypted_content`.",
            [],
            ["reasoning.encrypted_content"],
        ),
    ] = None
    max_tool_calls: Annotated[object, refused("Calls are not counted.")] = None
    service_tier: Annotated[object, refused("There is one tier.", "auto", "default")] = None
    moderation: Annotated[object, refused("Nothing is moderated.")] = None
    access_programs: Annotated[object, refused("There are no access programs.")] = None
