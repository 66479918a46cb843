"""`MessagesWriter`: a reply's events as the Messages protocol tells them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from json import JSONEncoder
from json.encoder import encode_basestring
from typing import Literal

from deepseek_recipe.conversation import JsonValue
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
from deepseek_recipe.json_text import load
from deepseek_recipe.protocols import call_ids
from deepseek_recipe.protocols.converted import ConvertedRequest

__all__ = ["MessagesWriter"]

_dumps = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "content_filter": "refusal",
    "tool_calls": "tool_use",
}
# type of block -> type of its deltas, and the field in which both have the text
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass(slots=True)
class _Block:
    """The content block that is growing."""

    kind: Literal["thinking", "text", "tool_use"]
    delta_head: str
    tool: dict[str, object] = field(default_factory=dict)  # id and name of a call
    pieces: list[str] = field(default_factory=list)

    def value(self, signature: str) -> dict[str, object]:
        """Return the block with all its text."""
        text = "".join(self.pieces)
        if self.kind == "text":
            return {"type": "text", "text": text}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": signature}
        return {"type": "tool_use", **self.tool, "input": _object_in(text)}

    def empty(self) -> dict[str, object]:
        """Return the block as it begins."""
        if self.kind == "text":
            return {"type": "text", "text": ""}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", **self.tool, "input": {}}


class MessagesWriter:
    """Writes one reply. For the order of calls see `ReplyWriter`."""

    done_data: str | None = None
    malformed: tuple[Malformed, ...] = ()  # there is a place for everything

    def __init__(
        self,
        converted: ConvertedRequest,
        *,
        response_id: str,
        model: str,
        signature: str | None = None,
        call_id: Callable[[int], str] = call_ids.call_id,
    ) -> None:
        """Begin a reply to a request.

        Args:
            response_id: id of the message.
            model: the model's name for the client.
            signature: of the thinking block; None is the message's id.
            call_id: makes the id of the n-th tool call.
        """
        self._thinking = converted.parsing.thinking_initial_stage is not None
        self._id = response_id
        self._model = model
        self._signature = response_id if signature is None else signature
        self._call_id = call_id
        self._block: _Block | None = None
        self._content: list[dict[str, object]] = []
        self._end: dict[str, object] = {"stop_reason": None, "stop_sequence": None}
        self._usage: dict[str, object] = {}

    def start(self, ready: Ready) -> list[ServerEvent]:
        """Return `message_start`, and in thinking mode the start of the thinking block."""
        self._usage = _usage(ready.prompt_tokens, ready.cached_tokens, 0)
        out = [_event("message_start", message=self.response())]
        return out + self._begin("thinking") if self._thinking else out

    def write(self, event: Event) -> list[ServerEvent]:
        """Return the events that tell a part of the reply."""
        if isinstance(event, Text):
            return self._text("text", event.text)
        if isinstance(event, Reasoning):
            return self._text("thinking", event.text)
        if isinstance(event, ToolArguments):
            return self._text("tool_use", event.text)
        if isinstance(event, ToolStart):
            return self._begin("tool_use", {"id": self._call_id(event.index), "name": event.name})
        return []  # the end of a call: its block ends when the next begins

    def finish(self, finish: Finish, usage: Usage) -> list[ServerEvent]:
        """Return the events that end the message."""
        out = self._close()
        if finish.stop_sequence is None:
            self._end["stop_reason"] = _STOP_REASONS[finish.reason]
        else:
            self._end = {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_sequence}
        self._usage = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        out.append(_event("message_delta", delta=self._end, usage=self._usage))
        out.append(_event("message_stop"))
        return out

    def response(self) -> dict[str, object]:
        """Return the whole message."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": deepcopy(self._content),
            **self._end,
            "usage": dict(self._usage),
        }

    def _text(self, kind: Literal["thinking", "text", "tool_use"], text: str) -> list[ServerEvent]:
        block = self._block
        out = [] if block is not None and block.kind == kind else self._begin(kind)
        block = self._block
        assert block is not None, "a block has begun"
        block.pieces.append(text)
        # One for each token: all but the text was made into JSON when the block began.
        delta = f"{block.delta_head}{encode_basestring(text)}}}}}"
        out.append(ServerEvent("content_block_delta", delta))
        return out

    def _begin(
        self, kind: Literal["thinking", "text", "tool_use"], tool: dict[str, object] | None = None
    ) -> list[ServerEvent]:
        out = self._close()
        index = len(self._content)
        delta_type, name = _DELTAS[kind]
        head = f'{{"type":"content_block_delta","index":{index},"delta":{{"type":'
        self._block = block = _Block(kind, f'{head}"{delta_type}","{name}":', tool or {})
        out.append(_event("content_block_start", index=index, content_block=block.empty()))
        if index == 0:
            out.append(_event("ping"))
        return out

    def _close(self) -> list[ServerEvent]:
        block, self._block = self._block, None
        if block is None:
            return []
        index = len(self._content)
        self._content.append(block.value(self._signature))
        out = []
        if block.kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature}
            out.append(_event("content_block_delta", index=index, delta=delta))
        out.append(_event("content_block_stop", index=index))
        return out


def _event(name: str, **fields: object) -> ServerEvent:
    return ServerEvent(name, _dumps({"type": name, **fields}))


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, object]:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "service_tier": "standard",
    }


def _object_in(arguments: str) -> JsonValue:
    # The protocol has no place for the text of a call that was cut off.
    try:
        value = load(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
