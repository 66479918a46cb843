"""Items of a Responses request's input, as the client sends them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Tag

from deepseek_recipe.protocols.fields import Body, hint, refused
from deepseek_recipe.protocols.images import ImageDetail
from deepseek_recipe.protocols.responses.tool_models import RequestTool
from deepseek_recipe.protocols.unions import OTHER, by_type, string_or

__all__ = [
    "CallOutput",
    "CustomToolCall",
    "FunctionCall",
    "InputFile",
    "InputImage",
    "InputItem",
    "InputMessage",
    "InputText",
    "OutputText",
    "Reasoning",
    "ReasoningText",
    "ToolSearchCall",
    "ToolSearchOutput",
]

_NO_DOCUMENTS = "The model is told that it cannot read the document."

_Id: TypeAlias = Annotated[object, hint("Items are told apart by their place; none is stored.")]
_Status: TypeAlias = Annotated[object, hint("What is there of the item counts.")]
_Breakpoint: TypeAlias = Annotated[object, hint("What is cached is the server's choice.")]
_Caller: TypeAlias = Annotated[
    object, refused("Only the model itself calls tools.", {"type": "direct"})
]
_Execution: TypeAlias = Annotated[object, hint("The model sees the same, whoever searched.")]
_Document: TypeAlias = Annotated[object, hint(_NO_DOCUMENTS)]


class InputText(Body):
    """A text."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: _Breakpoint = None


class OutputText(Body):
    """A text of an earlier reply."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[object, hint("Sources of an earlier reply are not shown again.")] = None
    logprobs: Annotated[object, hint("The model sees the text alone.")] = None


class InputImage(Body):
    """An image."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: ImageDetail | None = None
    prompt_cache_breakpoint: _Breakpoint = None


class InputFile(Body):
    """A document: the model cannot read it and is told so."""

    type: Literal["input_file"]
    file_data: _Document = None
    file_id: _Document = None
    file_url: _Document = None
    filename: _Document = None
    detail: _Document = None
    prompt_cache_breakpoint: _Breakpoint = None


_MESSAGE_PARTS = ("input_text", "output_text", "input_image", "input_file")
_OUTPUT_PARTS = ("input_text", "input_image", "input_file")
_STRING_OR_LIST = string_or(list, "a string or a list of content parts")

_Part: TypeAlias = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[InputFile, Tag("<input_file>")],
    by_type(_MESSAGE_PARTS, f"an object whose `type` is one of {', '.join(_MESSAGE_PARTS)}"),
]
_OutputPart: TypeAlias = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[InputFile, Tag("<input_file>")],
    by_type(_OUTPUT_PARTS, f"an object whose `type` is one of {', '.join(_OUTPUT_PARTS)}"),
]


class InputMessage(Body):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[list[_Part], Tag("<shape>")], _STRING_OR_LIST
    ]
    id: _Id = None
    status: _Status = None
    phase: Annotated[object, hint("Messages of one turn stand together, whatever their phase.")] = (
        None
    )


class ReasoningText(Body):
    """A piece of the reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


class Reasoning(Body):
    """Reasoning of an earlier reply."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: Annotated[object, hint("The model sees its reasoning, not a summary of it.")] = None
    encrypted_content: Annotated[object, hint("It holds nothing but a name: see `content`.")] = None
    id: _Id = None
    status: _Status = None


class FunctionCall(Body):
    """A call of a function that the assistant made; `arguments` may be no JSON."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: _Id = None
    status: _Status = None
    caller: _Caller = None


class CustomToolCall(Body):
    """A call of a custom tool that the assistant made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    id: _Id = None
    status: _Status = None
    caller: _Caller = None


class CallOutput(Body):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[list[_OutputPart], Tag("<shape>")],
        _STRING_OR_LIST,
    ]
    name: Annotated[object, hint("The call itself names the tool.")] = None
    namespace: Annotated[object, hint("The call itself names the tool.")] = None
    id: _Id = None
    status: _Status = None
    caller: _Caller = None


class ToolSearchCall(Body):
    """A search for tools that the assistant made."""

    type: Literal["tool_search_call"]
    call_id: str
    arguments: dict[str, object]
    execution: _Execution = None
    id: _Id = None
    status: _Status = None


class ToolSearchOutput(Body):
    """The tools that a search found; the model can call them from here on."""

    type: Literal["tool_search_output"]
    call_id: str
    tools: list[RequestTool]
    execution: _Execution = None
    id: _Id = None
    status: _Status = None


_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "tool_search_call",
    "tool_search_output",
)
# An item of a type that we do not have stays an object: it is refused by name, not by its fields.
InputItem: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[Reasoning, Tag("<reasoning>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[CallOutput, Tag("<function_call_output>")]
    | Annotated[CustomToolCall, Tag("<custom_tool_call>")]
    | Annotated[ToolSearchCall, Tag("<tool_search_call>")]
    | Annotated[ToolSearchOutput, Tag("<tool_search_output>")]
    | Annotated[dict[str, object], Tag(OTHER)],
    by_type(
        _ITEMS,
        "an object with a string `type`",
        shared={"custom_tool_call_output": "function_call_output"},
        absent="message",
        other=True,
    ),
]
