"""Tools of the Messages protocol: what may be called, and whether something must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from deepseek_recipe.conversation import Tool
from deepseek_recipe.encoding.profile import Profile
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.protocols.fields import Refusals
from deepseek_recipe.protocols.messages.models import (
    ClientTool,
    MessagesRequest,
    NamedChoice,
    ToolChoice,
)
from deepseek_recipe.protocols.tools import Declaration, NamedTool, choose_tools, declared_tools

__all__ = ["MAX_NAME_LEN", "offered_tools", "read_tools"]

MAX_NAME_LEN = 128
# As named by the protocol -> as all protocols mean it.
_PLAIN_CHOICES: Mapping[str, Literal["auto", "none", "required"]] = MappingProxyType(
    {"auto": "auto", "any": "required", "none": "none"}
)


def read_tools(
    request: MessagesRequest,
    profile: Profile,
    web_search: Literal["drop", "reject"],
    refusals: Refusals,
) -> tuple[Tool, ...]:
    """Return the declared tools.

    Args:
        web_search: what becomes of the server's web search.
        refusals: takes note of what is dropped.

    Raises:
        ConversionError: a tool is the server's, its name or schema is wrong, or all are deferred.
    """
    declarations = []
    for index, tool in enumerate(request.tools or ()):
        if isinstance(tool, ClientTool):
            declarations.append(
                Declaration(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=None,
                    path=f"tools[{index}].name",
                    deferred=bool(tool.defer_loading) and profile.late_tools,
                )
            )
        elif web_search == "drop" and tool.type.startswith("web_search"):
            refusals.leave_out(f"tools[{index}]")
        else:
            raise ConversionError(f"tools[{index}]: server tools are not supported")
    tools = declared_tools(declarations, max_name_len=MAX_NAME_LEN, missing_parameters="error")
    if tools and all(tool.deferred for tool in tools):
        raise ConversionError(
            "tools: at least one tool must have defer_loading=false. All tools cannot be deferred."
        )
    return tools


def offered_tools(
    tools: tuple[Tool, ...], choice: ToolChoice | None, *, thinking: bool
) -> tuple[tuple[Tool, ...], Literal["auto", "none", "required"]]:
    """Return the tools that `tool_choice` leaves, and its kind.

    Raises:
        ConversionError: it names a tool that is not declared, or forces a call while thinking.
    """
    if not isinstance(choice, NamedChoice):
        plain = "auto" if choice is None else _PLAIN_CHOICES[choice.type]
        return choose_tools(tools, plain, thinking=thinking)
    named, kind = choose_tools(tools, NamedTool(choice.name), thinking=thinking)
    # What must be called has to be seen, so it cannot be loaded later.
    return tuple(replace(tool, deferred=False) for tool in named), kind
