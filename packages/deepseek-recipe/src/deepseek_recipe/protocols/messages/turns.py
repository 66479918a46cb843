"""Messages of the Messages protocol to messages of a conversation, and the rules of tool exchanges.

A message with calls must be followed by one user message that begins with one result for each call;
what stands behind the results is said by the user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from deepseek_recipe.conversation import Content, ImageSource, Message, Tool, ToolCall
from deepseek_recipe.encoding.profile import JOINER, Profile
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_text import dump_prompt
from deepseek_recipe.protocols.fields import Refusals
from deepseek_recipe.protocols.messages.blocks import (
    Block,
    DocumentBlock,
    ImageBlock,
    ServerToolUseBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    WebSearchResultBlock,
)
from deepseek_recipe.protocols.messages.content import block_piece, joined, merged
from deepseek_recipe.protocols.messages.models import InputMessage

__all__ = ["Turns"]

_NO_SERVER_TOOLS = "Unsupported content block: server tools are not supported"
_ROLE_OF_BLOCK = {"tool_result": "user", "tool_addition": "system"}


@dataclass(slots=True)
class Turns:
    """Takes the messages of a request in order and collects those of the conversation.

    Attributes:
        tools: declared tools by name.
        offered: names of those that `tool_choice` leaves.
        web_search: what becomes of the server's web searches.
        messages: the conversation so far.
    """

    profile: Profile
    tools: Mapping[str, Tool]
    offered: Collection[str]
    web_search: Literal["drop", "reject"]
    refusals: Refusals
    messages: list[Message] = field(default_factory=list)
    _open_calls: dict[str, None] = field(default_factory=dict)  # ids without a result

    def read(self, messages: list[InputMessage]) -> None:
        """Take all messages of the request.

        Raises:
            ConversionError: there are none, one is empty, a block is not allowed where it stands,
                or calls and results do not match.
        """
        if not messages:
            raise ConversionError("messages: at least one message is required")
        for index, message in enumerate(messages):
            if message.role != "user":
                self._check_no_open_calls(f"messages.{index}: ")
            if message.content == [] and message.role != "system":
                raise ConversionError(f"messages.{index}: all messages must have non-empty content")
            _READERS[message.role](self, message, index)
        self._check_no_open_calls(f"messages.{len(messages) - 1}:")

    def _read_user(self, message: InputMessage, index: int) -> None:
        if isinstance(message.content, str):
            self._check_no_open_calls(f"messages.{index}: ")
            self.messages.append(Message("user", (message.content,)))
            return
        answered: set[str] = set()
        found: dict[str, Tool] = {}
        for place, block in enumerate(message.content):
            if isinstance(block, ToolResultBlock):
                self._read_result(block, f"messages.{index}.content.{place}", answered, found)
            elif isinstance(block, TextBlock | ImageBlock | DocumentBlock):
                self._check_no_open_calls(f"messages.{index}: ")
                piece = block_piece(block, self.profile, f"messages.{index}.content[{place}]")
                self.messages.append(Message("user", (piece,)))
            else:
                raise _misplaced(block, index)
        self._check_no_open_calls(f"messages.{index - 1}:")
        self._add_system((), found)

    def _read_result(
        self, block: ToolResultBlock, path: str, answered: set[str], found: dict[str, Tool]
    ) -> None:
        call_id = block.tool_use_id
        if call_id in answered:
            raise ConversionError(
                f"{path}: each tool_use must have a single result. Found multiple `tool_result` "
                f"blocks with id: {call_id}"
            )
        if call_id not in self._open_calls:
            raise ConversionError(
                f"unexpected `{path}: tool_use_id` found in `tool_result` blocks: {call_id}. Each "
                "`tool_result` block must have a corresponding `tool_use` block in the previous "
                "message."
            )
        del self._open_calls[call_id]
        answered.add(call_id)
        content = self._result_content(block, path, found)
        self.messages.append(Message("tool", content, tool_call_id=call_id))

    def _result_content(self, block: ToolResultBlock, path: str, found: dict[str, Tool]) -> Content:
        if block.content is None or isinstance(block.content, str):
            return (block.content or "",)
        pieces: list[str | ImageSource] = []
        for place, part in enumerate(block.content):
            if not isinstance(part, ToolReferenceBlock):
                part_path = f"{path}.tool_result.content[{place}]"
                pieces.append(block_piece(part, self.profile, part_path))
                continue
            name = part.tool_name
            if name not in self.tools:
                raise ConversionError(
                    f"{path}: tool reference '{name}' not found in available tools"
                )
            found[name] = self.tools[name]
            pieces.append(name)
        return joined(pieces)

    def _read_assistant(self, message: InputMessage, index: int) -> None:
        if isinstance(message.content, str):
            self.messages.append(Message("assistant", (message.content,)))
            return
        pieces: list[str | ImageSource] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for place, block in enumerate(message.content):
            if isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                calls.append(self._call(block, f"messages.{index}.content.{place}"))
            elif isinstance(block, TextBlock | ImageBlock | DocumentBlock):
                # the prompt has calls behind all text, so text behind calls has no place
                self._check_no_open_calls(f"messages.{index}.{place}: ")
                if isinstance(block, ImageBlock) and self.profile.vision:
                    raise ConversionError("Image in assistant message is unsupported")
                piece = block_piece(block, self.profile, f"messages.{index}.content[{place}]")
                if piece or pieces:  # an empty start says nothing, and would add an empty line
                    pieces.append(piece)
            elif isinstance(block, ServerToolUseBlock | WebSearchResultBlock):
                self._drop(block, f"messages[{index}].content[{place}]")
            else:
                raise _misplaced(block, index)
        reasoning = JOINER.join(thoughts) if thoughts else None
        self.messages.append(
            Message("assistant", joined(pieces), reasoning=reasoning, tool_calls=tuple(calls))
        )

    def _call(self, block: ToolUseBlock, path: str) -> ToolCall:
        if block.id in self._open_calls:
            raise ConversionError(f"{path}: `tool_use` ids must be unique")
        self._open_calls[block.id] = None
        return ToolCall(block.id, block.name, dump_prompt(block.input, "shortest"))

    def _drop(self, block: ServerToolUseBlock | WebSearchResultBlock, path: str) -> None:
        if self.web_search == "reject":
            raise ConversionError(_NO_SERVER_TOOLS)
        if isinstance(block, WebSearchResultBlock) or block.name == "web_search":
            self.refusals.leave_out(path)
        else:
            self.refusals.refuse(path, f"{_NO_SERVER_TOOLS}. Leave `{path}` out.")

    def _read_system(self, message: InputMessage, index: int) -> None:
        if isinstance(message.content, str):
            self._add_system((message.content,), {}, keep_empty=True)
            return
        pieces: list[str | ImageSource] = []
        added: dict[str, Tool] = {}
        for place, block in enumerate(message.content):
            if isinstance(block, ToolAdditionBlock):
                name = block.tool.name
                if name not in self.tools:
                    raise ConversionError(
                        f"messages.{index}.content.{place}: `tool_addition` references unknown "
                        f"tool '{name}'"
                    )
                added[name] = self.tools[name]
            elif isinstance(block, TextBlock | ImageBlock | DocumentBlock):
                path = f"messages.{index}.content[{place}]"
                pieces.append(block_piece(block, self.profile, path))
            else:
                raise _misplaced(block, index)
        self._add_system(joined(pieces), added, keep_empty=not added)

    def _add_system(
        self, content: Content, late: Mapping[str, Tool], *, keep_empty: bool = False
    ) -> None:
        if not self.profile.systems_in_place:
            # All system text would move to the front, so what is said here is told by the user.
            if any(content):
                text = ("<system-reminder>\n", *content, "\n</system-reminder>")
                self.messages.append(Message("user", merged(text)))
            return
        tools = tuple(tool for name, tool in late.items() if name in self.offered)
        if any(content) or tools or keep_empty:
            self.messages.append(Message("system", content, tools=tools))

    def _check_no_open_calls(self, where: str) -> None:
        if self._open_calls:
            ids = ", ".join(sorted(self._open_calls))
            raise ConversionError(
                f"{where}`tool_use` ids were found without `tool_result` blocks immediately after: "
                f"{ids}. Each `tool_use` block must have a corresponding `tool_result` block in "
                "the next message."
            )


_READERS = {
    "user": Turns._read_user,
    "assistant": Turns._read_assistant,
    "system": Turns._read_system,
}


def _misplaced(block: Block, index: int) -> ConversionError:
    if isinstance(block, ThinkingBlock):
        return ConversionError(
            f"messages.{index}.content: thinking blocks may only be in `assistant` messages"
        )
    role = _ROLE_OF_BLOCK.get(block.type, "assistant")
    return ConversionError(
        f"messages.{index}: `{block.type}` blocks can only be in `{role}` messages"
    )
