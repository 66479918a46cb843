"""`Toolbox`: the tools of a Responses request as declarations, and the names the model knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.encoding.profile import Profile
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.protocols.fields import Refusals
from deepseek_recipe.protocols.responses.tool_models import (
    CustomTool,
    FunctionTool,
    NamespaceTool,
    RequestTool,
    ToolSearchTool,
)
from deepseek_recipe.protocols.tools import Declaration, check_name

__all__ = ["NO_SERVER_TOOLS", "TOOL_SEARCH", "Toolbox"]

NO_SERVER_TOOLS = "Server tools are not supported"
TOOL_SEARCH = "tool_search"

# A namespace's description stands once in the request and in each of its tools in the prompt.
_MAX_COPIED_CHARS = 2**22
_WEB_SEARCH = re.compile(r"web_search(?:_preview)?(?:_[0-9]{4}_[0-9]{2}_[0-9]{2})?")
_CUSTOM_PARAMETERS: Mapping[str, JsonValue] = MappingProxyType(
    {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
)


class Toolbox:
    """Reads declarations in order: those of the request first, then those that searches found.

    Attributes:
        declarations: what was read, to be checked by `declared_tools`.
        namespaces: a namespaced tool's full name -> (namespace, name).
        custom_tools: names of tools that take one text.
    """

    def __init__(
        self, profile: Profile, refusals: Refusals, web_search: Literal["drop", "reject"]
    ) -> None:
        """Begin without tools; `web_search` says what becomes of the server's web search."""
        self._profile = profile
        self._refusals = refusals
        self._web_search = web_search
        self._names = _FullNames(profile.namespace_separator)
        # (namespace, name) -> what is declared under it, to know a found tool again
        self._known: dict[tuple[str | None, str], list[JsonValue]] = {}
        self._copied_chars = 0
        self.declarations: list[Declaration] = []
        self.namespaces: dict[str, tuple[str, str]] = {}
        self.custom_tools: set[str] = set()

    def declare(self, tools: Sequence[RequestTool]) -> None:
        """Read the request's `tools`.

        Raises:
            ConversionError: a name is not allowed, a namespace holds a name twice or a custom tool,
                or a tool of that type is refused.
        """
        self._names.reserve(
            tool.name for tool in tools if isinstance(tool, (FunctionTool, CustomTool))
        )
        for index, tool in enumerate(tools):
            path = f"tools[{index}]"
            if isinstance(tool, ToolSearchTool):
                self._declare_search(tool, path)
            elif isinstance(tool, dict):
                self._leave_out(tool, path)
            else:
                self._read(tool, path, deferred=False)

    def find(self, tools: Sequence[RequestTool], path: str) -> None:
        """Read the tools that a search found; those known already are not declared again.

        Args:
            path: place of the list in the request.

        Raises:
            ConversionError: as for `declare`.
        """
        for index, tool in enumerate(tools):
            place = f"{path}[{index}]"
            if isinstance(tool, dict):
                self._leave_out(tool, place)
            elif isinstance(tool, ToolSearchTool):
                self._refuse(tool.type, place)
            else:
                self._read(tool, place, deferred=True)

    def full_name(self, namespace: str | None, name: str) -> str:
        """Return the name for the model of the tool that a call names."""
        return name if namespace is None else self._names.known(namespace, name)

    def _read(
        self, tool: FunctionTool | CustomTool | NamespaceTool, path: str, *, deferred: bool
    ) -> None:
        check_name(tool.name, f"{path}.name")
        if not isinstance(tool, NamespaceTool):
            self._add(tool, None, path, deferred=deferred)
            return
        names: set[str] = set()
        for index, member in enumerate(tool.tools):
            place = f"{path}.tools[{index}]"
            if isinstance(member, CustomTool):
                raise ConversionError(
                    "Currently custom tools are not allowed inside a namespace. Found custom tool "
                    f"'{member.name}' in {place}."
                )
            check_name(member.name, f"{place}.name")
            if member.name in names:
                raise ConversionError("Tool names within a namespace must be unique.")
            names.add(member.name)
            self._add(member, tool, place, deferred=deferred)

    def _add(
        self,
        tool: FunctionTool | CustomTool,
        namespace: NamespaceTool | None,
        path: str,
        *,
        deferred: bool,
    ) -> None:
        description = tool.description
        if namespace is not None and namespace.description and self._profile.namespace_described:
            self._copied_chars += len(namespace.description)
            if self._copied_chars > _MAX_COPIED_CHARS:
                raise ConversionError(
                    f"{path}: descriptions of namespaces, which each of their tools repeats, come "
                    f"to more than {_MAX_COPIED_CHARS} characters. Shorten them."
                )
            description = f"{namespace.description}\n{description or ''}"
        parameters = dict(_CUSTOM_PARAMETERS) if isinstance(tool, CustomTool) else tool.parameters
        strict = None if isinstance(tool, CustomTool) else tool.strict
        key = (namespace.name if namespace else None, tool.name)
        definition: list[JsonValue] = [tool.type, description, parameters, strict]
        if deferred and self._known.get(key) == definition:
            return
        self._known[key] = definition
        full_name = None
        if namespace is not None:
            full_name = self._names.new(namespace.name, tool.name)
            self.namespaces[full_name] = (namespace.name, tool.name)
        if isinstance(tool, CustomTool):
            self.custom_tools.add(tool.name)
        self.declarations.append(
            Declaration(
                name=tool.name,
                description=description,
                parameters=parameters,
                strict=strict,
                path=f"{path}.name",
                deferred=deferred,
                full_name=full_name,
            )
        )

    def _declare_search(self, tool: ToolSearchTool, path: str) -> None:
        if not self._profile.late_tools:
            self._refuse(tool.type, path, "the model cannot take in tools during a conversation")
        elif tool.execution != "client":
            self._refuse(tool.type, path, "the client has to search, with `execution` `client`")
        else:
            self.declarations.append(
                Declaration(
                    name=TOOL_SEARCH,
                    description=tool.description,
                    parameters=tool.parameters,
                    strict=None,
                    path=f"{path}.name",
                )
            )

    def _leave_out(self, tool: Mapping[str, object], path: str) -> None:
        kind = tool["type"]
        if not (isinstance(kind, str) and _WEB_SEARCH.fullmatch(kind)):
            self._refuse(kind, path)
        elif self._web_search == "reject":
            raise ConversionError(NO_SERVER_TOOLS)
        else:
            self._refusals.leave_out(path)

    def _refuse(self, kind: object, path: str, why: str = "") -> None:
        reason = f": {why}" if why else ""
        self._refusals.refuse(
            path, f"{path}: unsupported tool type '{kind}'{reason}. Leave it out of the request."
        )


class _FullNames:
    """Names of namespaced tools for the model, each different from all others."""

    def __init__(self, separator: str) -> None:
        self._separator = separator
        self._taken: set[str] = set()
        self._full: dict[tuple[str, str], str] = {}
        self._next: dict[str, int] = {}

    def reserve(self, names: Iterable[str]) -> None:
        self._taken.update(names)

    def new(self, namespace: str, name: str) -> str:
        full = self._joined(namespace, name)
        number = self._next.get(full, 0)
        unused = f"{full}_{number}" if number else full
        while unused in self._taken:
            number += 1
            unused = f"{full}_{number}"
        self._next[full] = number
        self._taken.add(unused)
        self._full.setdefault((namespace, name), unused)
        return unused

    def known(self, namespace: str, name: str) -> str:
        # A tool that is no longer declared gets a name here, as it had one when it was called.
        key = (namespace, name)
        return self._full[key] if key in self._full else self.new(namespace, name)

    def _joined(self, namespace: str, name: str) -> str:
        # Without a separator of its own kind, an underscore at the seam takes its place.
        if self._separator == "__" and (namespace.endswith("_") or name.startswith("_")):
            return namespace + name
        return f"{namespace}{self._separator}{name}"
