"""The output items of a Responses reply: what each looks like, and the events that tell it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import ClassVar, Literal, TypeAlias

from deepseek_recipe.decoding.stream import ServerEvent
from deepseek_recipe.json_text import load
from deepseek_recipe.protocols.responses.custom_input import CustomInput
from deepseek_recipe.protocols.responses.sequence import Sequence, delta_head

__all__ = [
    "CallItem",
    "CustomToolCall",
    "FunctionCall",
    "MessageItem",
    "OutputItem",
    "ReasoningItem",
    "Status",
    "ToolSearchCall",
]

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
_Object: TypeAlias = dict[str, object]


class OutputItem(ABC):
    """One item of a response's output, while it grows."""

    prefix: ClassVar[str]

    def __init__(self, response_id: str, index: int) -> None:
        """Begin the item that is the `index`-th of the output."""
        self.id = f"{self.prefix}_{response_id}_{index}"
        self.index = index

    @abstractmethod
    def value(self, status: Status) -> _Object:
        """Return the item as the client sees it, with what was taken in so far."""

    @property
    def place(self) -> _Object:
        """What events say about where they belong."""
        return {"item_id": self.id, "output_index": self.index}

    def opened(self, sequence: Sequence) -> list[ServerEvent]:
        """Return the events that announce the item."""
        fields: _Object = {"item": self.value("in_progress"), "output_index": self.index}
        return [sequence.event("response.output_item.added", fields)]

    def closed(self, sequence: Sequence, status: Status) -> list[ServerEvent]:
        """Return the events that end the item, which is then `completed` or `incomplete`."""
        fields: _Object = {"item": self.value(status), "output_index": self.index}
        return [sequence.event("response.output_item.done", fields)]


class _TextItem(OutputItem):
    """An item with one part, which is text. `kind` names the part and the events of its text."""

    kind: ClassVar[str]
    # JSON text of what a delta event has beside its text
    beside_delta: ClassVar[str] = ""

    def __init__(self, response_id: str, index: int) -> None:
        super().__init__(response_id, index)
        self._pieces: list[str] = []
        self._delta_name = f"response.{self.kind}.delta"
        self._delta_head = delta_head(self._delta_name, self.place)

    @property
    def place(self) -> _Object:
        return {**super().place, "content_index": 0}

    def text_fields(self) -> _Object:
        """Return the text so far, as the part and the event of the whole text have it."""
        return {"text": "".join(self._pieces)}

    def part(self) -> _Object:
        """Return the part with the text so far."""
        return {"type": self.kind, **self.text_fields()}

    def opened(self, sequence: Sequence) -> list[ServerEvent]:
        out = super().opened(sequence)
        part = {**self.place, "part": self.part()}
        out.append(sequence.event("response.content_part.added", part))
        return out

    def delta(self, sequence: Sequence, text: str) -> ServerEvent:
        """Take in a piece of the text and return its event."""
        self._pieces.append(text)
        return sequence.delta(self._delta_name, self._delta_head, text, self.beside_delta)

    def closed(self, sequence: Sequence, status: Status) -> list[ServerEvent]:
        text, part = self.text_fields(), self.part()
        return [
            sequence.event(f"response.{self.kind}.done", {**self.place, **text}),
            sequence.event("response.content_part.done", {**self.place, "part": part}),
            *super().closed(sequence, status),
        ]


class ReasoningItem(_TextItem):
    """The reasoning."""

    prefix = "rs"
    kind = "reasoning_text"

    def __init__(self, response_id: str, index: int) -> None:
        """Begin the item that is the `index`-th of the output."""
        super().__init__(response_id, index)
        self._encrypted_content = f"{response_id}-{index}"

    def value(self, status: Status) -> _Object:
        """Return the item as the client sees it."""
        return {
            "type": "reasoning",
            "id": self.id,
            "status": status,
            "content": [] if status == "in_progress" else [self.part()],
            "summary": [],
            "encrypted_content": self._encrypted_content,
        }


class MessageItem(_TextItem):
    """A text for the user."""

    prefix = "msg"
    kind = "output_text"
    beside_delta = ',"logprobs":[]'

    def __init__(self, response_id: str, index: int) -> None:
        """Begin the item that is the `index`-th of the output."""
        super().__init__(response_id, index)
        self._logprobs: list[str] = []  # JSON text
        self.phase: Literal["final_answer", "commentary"] = "final_answer"

    def text_fields(self) -> _Object:
        """Return the text and its log-probabilities so far."""
        logprobs = json.loads(f"[{','.join(self._logprobs)}]")
        return {"logprobs": logprobs, **super().text_fields()}

    def part(self) -> _Object:
        """Return the part with the text so far."""
        return {"annotations": [], **super().part()}

    def delta_with(self, sequence: Sequence, text: str, logprobs: str) -> ServerEvent:
        """Take in a piece of the text with its log-probabilities and return its event.

        Args:
            logprobs: JSON text of the entries, with commas between them.
        """
        self._pieces.append(text)
        self._logprobs.append(logprobs)
        beside = f',"logprobs":[{logprobs}]'
        return sequence.delta(self._delta_name, self._delta_head, text, beside)

    def value(self, status: Status) -> _Object:
        """Return the item as the client sees it."""
        return {
            "type": "message",
            "id": self.id,
            "status": status,
            "role": "assistant",
            "phase": self.phase,
            "content": [] if status == "in_progress" else [self.part()],
        }


class CallItem(OutputItem):
    """A tool call, whose arguments come in pieces of JSON text."""

    def __init__(self, response_id: str, index: int, *, call_id: str, name: str) -> None:
        """Begin the item that is the `index`-th of the output."""
        super().__init__(response_id, index)
        self.call_id = call_id
        self.name = name
        self._pieces: list[str] = []

    @abstractmethod
    def arguments(self, sequence: Sequence, text: str) -> list[ServerEvent]:
        """Take in a piece of the arguments and return its events."""

    def left_out(self) -> str:
        """Return what of the arguments so far no event and no value shows."""
        return ""


class FunctionCall(CallItem):
    """A call of a function."""

    prefix = "fc"

    def __init__(
        self, response_id: str, index: int, *, call_id: str, name: str, namespace: str | None
    ) -> None:
        """Begin the item that is the `index`-th of the output."""
        super().__init__(response_id, index, call_id=call_id, name=name)
        self._namespace: _Object = {} if namespace is None else {"namespace": namespace}
        self._delta_name = "response.function_call_arguments.delta"
        self._delta_head = delta_head(self._delta_name, self.place)

    def arguments(self, sequence: Sequence, text: str) -> list[ServerEvent]:
        """Take in a piece of the arguments and return its event."""
        self._pieces.append(text)
        return [sequence.delta(self._delta_name, self._delta_head, text)]

    def closed(self, sequence: Sequence, status: Status) -> list[ServerEvent]:
        """Return the events that end the item."""
        fields = {**self.place, "arguments": "".join(self._pieces)}
        done = sequence.event("response.function_call_arguments.done", fields)
        return [done, *super().closed(sequence, status)]

    def value(self, status: Status) -> _Object:
        """Return the item as the client sees it."""
        return {
            "type": "function_call",
            "id": self.id,
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            **self._namespace,
            "arguments": "".join(self._pieces),
        }


class CustomToolCall(CallItem):
    """A call of a tool that takes one text."""

    prefix = "ctc"

    def __init__(self, response_id: str, index: int, *, call_id: str, name: str) -> None:
        """Begin the item that is the `index`-th of the output."""
        super().__init__(response_id, index, call_id=call_id, name=name)
        self._input = CustomInput()
        self._delta_name = "response.custom_tool_call_input.delta"
        self._delta_head = delta_head(self._delta_name, self.place)

    def arguments(self, sequence: Sequence, text: str) -> list[ServerEvent]:
        """Take in a piece of the arguments and return the event of the text it adds, if any."""
        added = self._input.feed(text)
        if not added:
            return []
        self._pieces.append(added)
        return [sequence.delta(self._delta_name, self._delta_head, added)]

    def left_out(self) -> str:
        """Return what does not belong to the text."""
        return self._input.left_out()

    def closed(self, sequence: Sequence, status: Status) -> list[ServerEvent]:
        """Return the events that end the item."""
        fields = {**self.place, "input": "".join(self._pieces)}
        done = sequence.event("response.custom_tool_call_input.done", fields)
        return [done, *super().closed(sequence, status)]

    def value(self, status: Status) -> _Object:
        """Return the item as the client sees it."""
        return {
            "type": "custom_tool_call",
            "id": self.id,
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "input": "".join(self._pieces),
        }


class ToolSearchCall(CallItem):
    """A call of the client's tool search; the client gets its arguments once they are complete."""

    prefix = "tsc"

    def arguments(self, sequence: Sequence, text: str) -> list[ServerEvent]:
        """Take in a piece of the arguments, of which no event tells."""
        self._pieces.append(text)
        return []

    def value(self, status: Status) -> _Object:
        """Return the item as the client sees it; without an object it is never `completed`."""
        arguments = self._parsed()
        if arguments is None and status == "completed":
            status = "incomplete"
        return {
            "type": "tool_search_call",
            "id": self.id,
            "status": status,
            "call_id": self.call_id,
            "execution": "client",
            "arguments": {} if arguments is None else arguments,
        }

    def left_out(self) -> str:
        """Return the arguments that are no object."""
        return "".join(self._pieces) if self._parsed() is None else ""

    def _parsed(self) -> _Object | None:
        try:
            arguments = load("".join(self._pieces))
        except ValueError:
            return None
        return arguments if isinstance(arguments, dict) else None
