"""Tools of a Responses request, as the client sends them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Tag

from deepseek_recipe.protocols.fields import Body, hint, refused
from deepseek_recipe.protocols.unions import OTHER, by_type

__all__ = ["CustomTool", "FunctionTool", "NamespaceTool", "RequestTool", "ToolSearchTool"]

_Callers: TypeAlias = Annotated[
    object, refused("Only the model itself calls tools.", ["direct"], [])
]
_DeferLoading: TypeAlias = Annotated[
    object, hint("A declared tool is shown to the model from the start.")
]


class FunctionTool(Body):
    """A function with a JSON Schema of its arguments."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: object = None
    strict: bool | None = None
    defer_loading: _DeferLoading = None
    output_schema: Annotated[object, hint("The model sees what a call gives, not its schema.")] = (
        None
    )
    allowed_callers: _Callers = None


class CustomTool(Body):
    """A tool that takes one text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Annotated[object, hint("A grammar of the text is neither shown nor enforced.")] = None
    defer_loading: _DeferLoading = None
    allowed_callers: _Callers = None


class NamespaceTool(Body):
    """Functions under one name. A custom tool among them is an error of the conversion."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
            by_type(("function", "custom"), "an object whose `type` is one of function, custom"),
        ]
    ]


class ToolSearchTool(Body):
    """A tool with which the model looks for more tools; the client does the search."""

    type: Literal["tool_search"]
    execution: Literal["client", "server"] | None = None
    description: str | None = None
    parameters: object = None


# A tool of another type stays an object: it is refused by name, not by its fields.
RequestTool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[ToolSearchTool, Tag("<tool_search>")]
    | Annotated[dict[str, object], Tag(OTHER)],
    by_type(
        ("function", "custom", "namespace", "tool_search"),
        "an object with a string `type`",
        other=True,
    ),
]
