"""Tool search: what it found, as the model reads it and as tools it can call from there on."""

from __future__ import annotations

from collections.abc import Sequence

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.json_text import dump_compact
from deepseek_recipe.protocols.responses.tool_models import (
    CustomTool,
    FunctionTool,
    NamespaceTool,
    RequestTool,
)

__all__ = ["found_text"]


def found_text(tools: Sequence[RequestTool]) -> str:
    """Return the result of a search: a JSON array of tools, members of namespaces one by one."""
    entries: list[JsonValue] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            namespace = {"name": tool.name, "description": tool.description or ""}
            entries += [{**_entry(member), "namespace": namespace} for member in tool.tools]
        elif isinstance(tool, (FunctionTool, CustomTool)):
            entries.append(_entry(tool))
    return dump_compact(entries)


def _entry(tool: FunctionTool | CustomTool) -> dict[str, JsonValue]:
    entry: dict[str, JsonValue] = {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
    }
    if isinstance(tool, FunctionTool):
        entry |= {"parameters": tool.parameters, "strict": tool.strict}
    return entry
