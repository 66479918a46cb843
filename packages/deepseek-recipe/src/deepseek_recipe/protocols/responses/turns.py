"""Input items of the Responses protocol to messages of a conversation.

Items that the assistant made one after another are one turn: reasoning, texts, then calls. A turn
with calls must be followed by one output for each of them before anything else comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from deepseek_recipe.conversation import Content, ImageSource, Message, Tool, ToolCall
from deepseek_recipe.encoding.profile import JOINER, UNSUPPORTED_IMAGE, Profile
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_text import dump_compact
from deepseek_recipe.protocols.fields import Refusals
from deepseek_recipe.protocols.images import image_piece
from deepseek_recipe.protocols.responses.input_items import (
    CallOutput,
    CustomToolCall,
    FunctionCall,
    InputFile,
    InputImage,
    InputItem,
    InputMessage,
    InputText,
    OutputText,
    Reasoning,
    ToolSearchCall,
    ToolSearchOutput,
)
from deepseek_recipe.protocols.responses.search import found_text
from deepseek_recipe.protocols.responses.toolbox import NO_SERVER_TOOLS, TOOL_SEARCH, Toolbox

__all__ = ["Turns"]

_DOCUMENT = "[Unsupported Document]"
_NO_SEARCH = "the model cannot take in tools during a conversation"


@dataclass(slots=True)
class _Turn:
    """The assistant's turn in the making, and the outputs of its calls."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[Content] = field(default_factory=list)
    calls: dict[str, ToolCall] = field(default_factory=dict)
    outputs: dict[str, Content] = field(default_factory=dict)
    found: list[Message] = field(default_factory=list)  # new tools, in the order of the outputs
    begun: bool = False


@dataclass(slots=True)
class Turns:
    """Takes the items of a request in order and collects the messages of the conversation.

    Attributes:
        toolbox: knows the full names of called tools.
        found: index of a search's output -> the tools that are new with it.
        web_search: what becomes of the server's web searches.
        messages: the conversation so far.
    """

    profile: Profile
    toolbox: Toolbox
    found: Mapping[int, tuple[Tool, ...]]
    web_search: Literal["drop", "reject"]
    refusals: Refusals
    messages: list[Message] = field(default_factory=list)
    _turn: _Turn = field(default_factory=_Turn)
    _call_ids: set[str] = field(default_factory=set)
    _answered: set[str] = field(default_factory=set)

    def read(self, items: Sequence[InputItem]) -> None:
        """Take all items of the request.

        Raises:
            ConversionError: calls and outputs do not match, an image is not allowed where it
                stands, or an item is refused.
        """
        for index, item in enumerate(items):
            if isinstance(item, InputMessage):
                self._read_message(item, index)
            elif isinstance(item, Reasoning):
                self._read_reasoning(item)
            elif isinstance(item, dict):
                self._leave_out(item, index)
            elif isinstance(item, (ToolSearchCall, ToolSearchOutput)):
                self._read_search(item, index)
            elif isinstance(item, CallOutput):
                self._add_output(item.call_id, self._output(item, index))
            else:
                self._add_call(self._call(item), index)
        self._end_turn()

    def _read_message(self, item: InputMessage, index: int) -> None:
        content = self._content(item.content, f"input[{index}]", assistant=item.role == "assistant")
        if item.role != "assistant":
            self._end_turn()
            role = item.role
            if role == "developer":
                # Where all system text moves to the front, this is told by the user, in its place.
                role = "system" if self.profile.systems_in_place else "user"
            self.messages.append(Message(role, content))
            return
        if self._turn.calls:
            self._end_turn()
        self._turn.begun = True
        if any(content):
            self._turn.texts.append(content)

    def _read_reasoning(self, item: Reasoning) -> None:
        text = "\n".join(part.text for part in item.content or ())
        if not text:
            return
        if self._turn.texts or self._turn.calls:
            self._end_turn()
        self._turn.begun = True
        self._turn.reasoning.append(text)

    def _read_search(self, item: ToolSearchCall | ToolSearchOutput, index: int) -> None:
        if not self.profile.late_tools:
            self._refuse(item.type, index, _NO_SEARCH)
        elif isinstance(item, ToolSearchCall):
            arguments = dump_compact(item.arguments)
            self._add_call(ToolCall(item.call_id, TOOL_SEARCH, arguments), index)
        else:
            self._add_output(item.call_id, (found_text(item.tools),))
            if self.found[index]:
                self._turn.found.append(Message("system", tools=self.found[index]))

    def _call(self, item: FunctionCall | CustomToolCall) -> ToolCall:
        if isinstance(item, FunctionCall):
            arguments = item.arguments
        else:
            arguments = dump_compact({"input": item.input})
        return ToolCall(item.call_id, self.toolbox.full_name(item.namespace, item.name), arguments)

    def _add_call(self, call: ToolCall, index: int) -> None:
        if not call.id:
            raise ConversionError(
                f"Invalid 'input[{index}].call_id': empty string. Expected a string with minimum "
                "length 1, but got an empty string instead."
            )
        if call.id in self._call_ids:
            raise ConversionError(f"Duplicate 'call_id': {call.id}.")
        if self._turn.outputs:
            self._end_turn()
        self._call_ids.add(call.id)
        self._turn.begun = True
        self._turn.calls[call.id] = call

    def _output(self, item: CallOutput, index: int) -> Content:
        return self._content(item.output, f"input[{index}]", key="output")

    def _add_output(self, call_id: str, content: Content) -> None:
        if call_id in self._answered:
            raise ConversionError(f"Duplicate tool output for call_id: {call_id}.")
        if call_id not in self._turn.calls:
            raise ConversionError(f"No tool call found for tool output with call_id {call_id}.")
        self._answered.add(call_id)
        self._turn.outputs[call_id] = content

    def _end_turn(self) -> None:
        turn = self._turn
        if not turn.begun:
            return
        for call_id in turn.calls:
            if call_id not in turn.outputs:
                raise ConversionError(f"No tool output found for tool call {call_id}.")
        self.messages.append(
            Message(
                "assistant",
                _joined(turn.texts),
                reasoning="\n".join(turn.reasoning) or None,
                tool_calls=tuple(turn.calls.values()),
            )
        )
        for call_id in turn.calls:
            self.messages.append(Message("tool", turn.outputs[call_id], tool_call_id=call_id))
        self.messages += turn.found
        self._turn = _Turn()

    def _leave_out(self, item: Mapping[str, object], index: int) -> None:
        if item["type"] != "web_search_call":
            self._refuse(item["type"], index)
        elif self.web_search == "reject":
            raise ConversionError(NO_SERVER_TOOLS)
        else:
            self.refusals.leave_out(f"input[{index}]")

    def _refuse(self, kind: object, index: int, why: str = "") -> None:
        reason = f": {why}" if why else ""
        path = f"input[{index}]"
        self.refusals.refuse(
            path, f"{path}: unsupported item type '{kind}'{reason}. Leave it out of the request."
        )

    def _content(
        self,
        parts: str | Sequence[InputText | OutputText | InputImage | InputFile],
        path: str,
        *,
        key: str = "content",
        assistant: bool = False,
    ) -> Content:
        if isinstance(parts, str):
            return (parts,)
        pieces: list[Content] = []
        for place, part in enumerate(parts):
            if isinstance(part, InputImage):
                if assistant and self.profile.vision:
                    raise ConversionError(f"{path}: Image in assistant message is unsupported")
                pieces.append((self._image(part, path, f"{path}.{key}[{place}]"),))
            else:
                pieces.append((_DOCUMENT if isinstance(part, InputFile) else part.text,))
        return _joined(pieces)

    def _image(self, part: InputImage, item_path: str, path: str) -> str | ImageSource:
        if not self.profile.vision:
            return UNSUPPORTED_IMAGE
        if part.image_url is None:
            if part.file_id is None:
                raise ConversionError(f"{path}: input_image must have image_url or file_id")
            raise ConversionError(
                f"{path}: file_id is not supported. Pass the image as a base64 data url instead."
            )
        if part.file_id is not None:
            raise ConversionError(f"{path}: input_image cannot have both image_url and file_id")
        return image_piece(
            part.image_url,
            part.detail,
            profile=self.profile,
            prefix=f"{item_path}: ",
            path=item_path,
        )


def _joined(parts: Sequence[Content]) -> Content:
    if len(parts) < 2:
        return parts[0] if parts else ()
    return tuple(chain.from_iterable((JOINER, *part) for part in parts))[1:]
