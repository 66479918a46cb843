"""`ResponsesWriter`: a reply's events as the Responses protocol tells them."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Literal, TypeVar

from deepseek_recipe.decoding.events import (
    Event,
    Finish,
    Malformed,
    Ready,
    Reasoning,
    Text,
    ToolArguments,
    ToolStart,
)
from deepseek_recipe.decoding.stream import ServerEvent, Usage
from deepseek_recipe.protocols import call_ids
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.logprobs import LogprobTexts
from deepseek_recipe.protocols.responses.items import (
    CallItem,
    CustomToolCall,
    FunctionCall,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ToolSearchCall,
)
from deepseek_recipe.protocols.responses.models import ResponsesRequest
from deepseek_recipe.protocols.responses.response_object import response_object, usage_object
from deepseek_recipe.protocols.responses.sequence import Sequence
from deepseek_recipe.protocols.responses.tool_models import ToolSearchTool

if TYPE_CHECKING:
    from deepseek_recipe.encoding.tokenizer import PromptTokenizer

__all__ = ["ResponsesWriter"]

_ItemT = TypeVar("_ItemT", MessageItem, ReasoningItem)
# why the backend ended a reply that is not complete -> the protocol's word for it
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesWriter:
    """Writes one reply. For the order of calls see `ReplyWriter`."""

    done_data: str | None = None

    def __init__(
        self,
        converted: ConvertedRequest,
        *,
        response_id: str,
        model: str,
        created: int,
        echo: bool = False,
        tokenizer: PromptTokenizer | None = None,
        clock: Callable[[], float] = time.time,
        call_id: Callable[[int], str] = call_ids.call_id,
    ) -> None:
        """Begin a reply to a request.

        Args:
            response_id: id of the response; ids of its items are made from it.
            model: the model's name for the client.
            created: seconds since 1970.
            echo: repeat sampling fields and instructions of the request in the response.
            tokenizer: spells the tokens of log-probabilities.
            clock: seconds since 1970, read once, at the end.
            call_id: makes the id of the n-th tool call.
        """
        request = converted.request
        assert isinstance(request, ResponsesRequest), "a Responses request was converted"
        self._response = response_object(
            request, response_id=response_id, model=model, created=created, echo=echo
        )
        self._id = response_id
        self._converted = converted
        self._searches = converted.profile.late_tools and any(
            isinstance(tool, ToolSearchTool) and tool.execution == "client"
            for tool in request.tools or ()
        )
        self.malformed: list[Malformed] = []
        self._logprobs = None
        if tokenizer is not None and converted.settings.logprobs:
            self._logprobs = LogprobTexts(tokenizer)
        self._clock = clock
        self._call_id = call_id
        self._sequence = Sequence()
        self._item: OutputItem | None = None
        self._output: list[dict[str, object]] = []

    def start(self, ready: Ready) -> list[ServerEvent]:
        """Return the events that announce the response."""
        fields: dict[str, object] = {"response": self._response}
        return [
            self._sequence.event("response.created", fields),
            self._sequence.event("response.in_progress", fields),
        ]

    def write(self, event: Event) -> list[ServerEvent]:
        """Return the events that tell a part of the reply."""
        if isinstance(event, Text):
            return self._write_text(event)
        if isinstance(event, Reasoning):
            out, item = self._text_item(ReasoningItem)
            out.append(item.delta(self._sequence, event.text))
            return out
        if isinstance(event, ToolStart):
            return self._begin_call(event)
        if isinstance(event, ToolArguments):
            call = self._item
            assert isinstance(call, CallItem), "a call has begun"
            return call.arguments(self._sequence, event.text)
        return []  # the end of a call: its item is closed when the next begins

    def finish(self, finish: Finish, usage: Usage) -> list[ServerEvent]:
        """Return the events that end the response."""
        reason = _INCOMPLETE.get(finish.reason)
        status: Literal["completed", "incomplete"] = "completed" if reason is None else "incomplete"
        out = self._close(status)
        self._response |= {
            "status": status,
            "completed_at": int(self._clock()),
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": self._output,
            "usage": usage_object(usage),
        }
        out.append(self._sequence.event(f"response.{status}", {"response": self._response}))
        return out

    def response(self) -> dict[str, object]:
        """Return the whole response."""
        return deepcopy(self._response)

    def _write_text(self, event: Text) -> list[ServerEvent]:
        out, item = self._text_item(MessageItem)
        if event.logprobs and self._logprobs is not None:
            entries = self._logprobs.entries(event.logprobs)
            out.append(item.delta_with(self._sequence, event.text, entries))
        else:
            out.append(item.delta(self._sequence, event.text))
        return out

    def _text_item(self, kind: type[_ItemT]) -> tuple[list[ServerEvent], _ItemT]:
        item = self._item
        if isinstance(item, kind):
            return [], item
        out = self._close("completed")
        item = kind(self._id, len(self._output))
        self._item = item
        return out + item.opened(self._sequence), item

    def _begin_call(self, start: ToolStart) -> list[ServerEvent]:
        if isinstance(self._item, MessageItem):
            self._item.phase = "commentary"
        out = self._close("completed")
        self._item = item = self._new_call(start)
        return out + item.opened(self._sequence)

    def _new_call(self, start: ToolStart) -> CallItem:
        index, name = len(self._output), start.name
        call_id = self._call_id(start.index)
        if name in self._converted.custom_tools:
            return CustomToolCall(self._id, index, call_id=call_id, name=name)
        if self._searches and name == "tool_search":
            return ToolSearchCall(self._id, index, call_id=call_id, name=name)
        namespace, name = self._converted.namespaces.get(name, (None, name))
        return FunctionCall(self._id, index, call_id=call_id, name=name, namespace=namespace)

    def _close(self, status: Literal["completed", "incomplete"]) -> list[ServerEvent]:
        item, self._item = self._item, None
        if item is None:
            return []
        if isinstance(item, CallItem) and (left_out := item.left_out()):
            why = f"arguments that a call of {item.name!r} has no place for"
            self.malformed.append(Malformed(left_out, why))
        self._output.append(item.value(status))
        return item.closed(self._sequence, status)
