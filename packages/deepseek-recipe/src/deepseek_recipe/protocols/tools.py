"""Tools of a request: their declarations, the choice among them, what is enforced on the output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepseek_recipe.conversation import JsonValue, OutputConstraint, ResponseFormat, Tool
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_text import dump_compact
from deepseek_recipe.protocols.fields import Refusals
from deepseek_recipe.protocols.schema_check import SchemaChecker, json_shown
from deepseek_recipe.protocols.strict import (
    DEFINITIONS,
    STRICT_ANSWER,
    STRICT_TOOL,
    closed,
    normalise,
)

__all__ = [
    "Declaration",
    "NamedTool",
    "ToolChoice",
    "check_beside_tools",
    "check_name",
    "checked_answer_schema",
    "choose_tools",
    "declared_tools",
    "output_constraint",
]

_NAME = re.compile(r"[a-zA-Z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Declaration:
    """A tool as a request declares it, before it is checked.

    Attributes:
        parameters: as sent; None where absent.
        path: of the name in the request, for messages: `tools[0].function.name`.
        full_name: with the namespace, for the model; None where there is none.
    """

    name: str
    description: str | None
    parameters: JsonValue
    strict: bool | None
    path: str
    deferred: bool = False
    full_name: str | None = None

    @property
    def model_name(self) -> str:
        """The name for the model."""
        return self.name if self.full_name is None else self.full_name


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A choice of one tool, which must then be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"]


def declared_tools(
    declarations: Sequence[Declaration],
    *,
    max_name_len: int | None = None,
    missing_parameters: Literal["empty", "error"] = "empty",
) -> tuple[Tool, ...]:
    """Return the tools of a request.

    Args:
        max_name_len: longest name, in characters; None for no limit.
        missing_parameters: whether a tool without parameters has `{}`, or is refused.

    Raises:
        ConversionError: a name is empty, too long, not unique or has a character that is not
            allowed; parameters are no JSON Schema of an object, or cannot be made strict.
    """
    for each in declarations:
        check_name(each.name, each.path, max_len=max_name_len)
    if len({each.model_name for each in declarations}) < len(declarations):
        raise ConversionError("Tool names must be unique.")
    checker = SchemaChecker()
    may_miss = missing_parameters == "empty"
    return tuple(
        _strict_tool(each) if each.strict else _tool(each, may_miss, checker)
        for each in declarations
    )


def choose_tools(
    tools: tuple[Tool, ...], choice: ToolChoice | NamedTool, *, thinking: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that are left and the choice, after a request's `tool_choice`.

    Without tools every choice but `none` is `auto`.

    Raises:
        ConversionError: no tool has the name, or a call is forced in thinking mode.
    """
    if choice == "none":
        return (), "none"
    if not tools:
        return (), "auto"
    if choice == "auto":
        return tools, "auto"
    if isinstance(choice, NamedTool):
        tools = tuple(tool for tool in tools if tool.name == choice.name)
        if not tools:
            raise ConversionError(
                f"Invalid value for 'tool_call': no function named '{choice.name}' was specified "
                "in the 'tools' parameter."
            )
    if thinking:
        raise ConversionError("Thinking mode does not support this tool_choice")
    return tools, "required"


def checked_answer_schema(schema: JsonValue, strict: bool | None) -> JsonValue:
    """Return the schema that an answer of form `json_schema` must follow.

    Raises:
        ConversionError: it is no JSON Schema, or cannot be made strict.
    """
    if strict:
        return normalise(schema, STRICT_ANSWER)
    SchemaChecker().check(schema, STRICT_ANSWER.lead)
    return schema


def check_beside_tools(
    tools: tuple[Tool, ...],
    response_format: ResponseFormat,
    path: str,
    structured: OutputConstraint | None,
    refusals: Refusals,
) -> None:
    """Refuse a form of the answer beside tools: what is enforced then is the calls alone.

    Args:
        path: place of `response_format` in the request. Any JSON is no such form there.
        structured: what `structured_outputs` of the request asks for.

    Raises:
        ConversionError: there are both and the policy is `reject`.
    """
    asked = response_format.kind
    if structured is not None:
        path, asked_for = "structured_outputs", "a form of the answer"
    elif asked in ("json_schema", "regex"):
        asked_for = f"a {asked}"
    else:
        return
    if tools:
        refusals.refuse(
            path,
            f"The field `{path}` asks for {asked_for}, which is not enforced where tools may be "
            "called. Leave out one of the two, or set `tool_choice` to `none`.",
        )


def output_constraint(
    tools: tuple[Tool, ...],
    tool_choice: ToolChoice,
    response_format: ResponseFormat,
    strict_schema: JsonValue,
    *,
    structured: OutputConstraint | None = None,
    parallel: bool = True,
    strict: bool = False,
) -> OutputConstraint | None:
    """Return what decoding must enforce: tools come before the form of the answer.

    Args:
        tools: all that are left after `choose_tools`.
        strict_schema: result of `checked_answer_schema`; used with form `json_schema` only.
        structured: what `structured_outputs` of the request asks for; then the form is `text`.
        parallel: whether the model may call several tools at once.
        strict: of form `json_schema`: its schema was made strict.
    """
    if tools:
        exact = {tool.name: tool.exact for tool in tools if tool.exact is not None}
        needed = {tool.name: tool.definitions for tool in tools if tool.definitions}
        return OutputConstraint(
            "tool_call_required" if tool_choice == "required" else "tool_call",
            dump_compact([_function(tool) for tool in tools]),
            parallel=parallel,
            definitions=dump_compact(needed) if needed else "",
            exact=dump_compact(exact) if exact else "",
        )
    if structured is not None:
        return structured
    if response_format.kind == "json_object":
        return OutputConstraint("json", "")
    if response_format.kind == "json_schema":
        exact_schema = dump_compact(closed(response_format.schema)) if strict else ""
        return OutputConstraint("json", dump_compact(strict_schema), exact=exact_schema)
    if response_format.kind == "regex":
        return OutputConstraint("regex", response_format.regex or "")
    return None


def _function(tool: Tool) -> JsonValue:
    function: dict[str, JsonValue] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    if tool.deferred:
        return {"type": "function", "function": function, "defer_loading": True}
    return {"type": "function", "function": function}


def check_name(name: str, path: str, *, max_len: int | None = None) -> None:
    """Raise ConversionError unless `name`, which stands at `path`, is fit for a tool."""
    if not name:
        raise ConversionError(
            f"Invalid '{path}': empty string. Expected a string with minimum length 1, but "
            "got an empty string instead."
        )
    if max_len is not None and len(name) > max_len:
        raise ConversionError(
            f"Invalid '{path}': string too long. Expected a string with maximum length "
            f"{max_len}, but got a string with length {len(name)} instead."
        )
    if not _NAME.fullmatch(name):
        raise ConversionError(
            f"Invalid '{path}': string does not match pattern. Expected a string that matches "
            "the pattern '^[a-zA-Z0-9_-]+$'."
        )


def _strict_tool(each: Declaration) -> Tool:
    sent = {"type": "object"} if each.parameters is None else each.parameters
    parameters = normalise(sent, STRICT_TOOL)
    # the checkpoint is shown strict parameters without definitions
    definitions = {name: parameters.pop(name) for name in DEFINITIONS if name in parameters}
    return Tool(
        each.model_name,
        each.description,
        parameters,
        strict=True,
        deferred=each.deferred,
        definitions=definitions or None,
        exact=closed(sent),
    )


def _tool(each: Declaration, may_miss: bool, checker: SchemaChecker) -> Tool:
    parameters = _checked_parameters(each, may_miss, checker)
    return Tool(
        each.model_name, each.description, parameters, strict=each.strict, deferred=each.deferred
    )


def _checked_parameters(each: Declaration, may_miss: bool, checker: SchemaChecker) -> JsonValue:
    if each.parameters is None and may_miss:
        return {}
    lead = f"Invalid schema for function '{each.model_name}': "
    checker.check(each.parameters, lead)
    kind = each.parameters.get("type") if isinstance(each.parameters, dict) else None
    if kind != "object":
        raise ConversionError(
            f"{lead}schema must be a JSON Schema of 'type: \"object\"', got 'type: "
            f"{json_shown(kind)}'."
        )
    return each.parameters
