"""`ChatWriter`: a reply's events as the Chat Completions protocol tells them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from deepseek_recipe.protocols.chat.models import ChatRequest
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.logprobs import LogprobTexts

if TYPE_CHECKING:
    from deepseek_recipe.encoding.tokenizer import PromptTokenizer

__all__ = ["ChatWriter"]

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_KEYS = ("content", "reasoning_content")
_NO_LOGPROBS = '"logprobs":null,"finish_reason":null}]'


@dataclass(slots=True)
class _Call:
    """One call of the answer."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    def value(self, index: int) -> dict[str, object]:
        """Return the call as the whole response has it."""
        function = {"name": self.name, "arguments": "".join(self.pieces)}
        return {"index": index, "id": self.id, "type": "function", "function": function}


class ChatWriter:
    """Writes one reply. For the order of calls see `ReplyWriter`.

    A chunk is put together from texts that are the same in all of a reply's chunks and the one
    text that is new, since it is made for every token.
    """

    done_data: str | None = "[DONE]"
    malformed: tuple[Malformed, ...] = ()  # there is a place for everything

    def __init__(
        self,
        converted: ConvertedRequest,
        *,
        response_id: str,
        model: str,
        created: int,
        tokenizer: PromptTokenizer | None = None,
        call_id: Callable[[int], str] = call_ids.call_id,
    ) -> None:
        """Take what all chunks of the reply have in common.

        Args:
            converted: the request that is answered.
            model: its name for the client.
            created: seconds since 1970.
            tokenizer: spells the tokens of log-probabilities.
            call_id: makes the id of the n-th call.
        """
        self._id = response_id
        self._model = model
        self._created = created
        self._told: LogprobTexts | None = None
        if tokenizer is not None and converted.settings.logprobs:
            self._told = LogprobTexts(tokenizer)
        self._call_id = call_id
        self._thinking = converted.conversation.thinking
        # the answer's begin is the client's own text, so there is no reasoning to tell of
        self._continues = converted.parsing.thinking_initial_stage == "content_continuation"
        self._usage_null = ',"usage":null' if _tells_usage(converted) else ""
        self._fingerprint: str | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._logprobs: dict[str, list[str]] = {}  # JSON text
        self._end = ("", "")  # the reason and the usage's JSON text
        self._head = self._tail = ""
        self._before = self._ends = self._behind = ("", "")

    def start(self, ready: Ready) -> list[ServerEvent]:
        """Return the chunk with the role."""
        self._fingerprint = ready.fingerprint or None
        common = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }
        self._head = f'{_dumps(common)[:-1]},"choices":[{{"index":0,"delta":'
        self._tail = f"{self._usage_null}}}"
        plain = f",{_NO_LOGPROBS}{self._tail}"
        no_reasoning = ',"reasoning_content":null' if self._thinking else ""
        # of content and reasoning: what stands before the text, and behind it up to the delta's end
        # or to the chunk's
        self._before = (
            f'{self._head}{{"content":',
            f'{self._head}{{"content":null,"reasoning_content":',
        )
        self._ends = (f"{no_reasoning}}}", "}")
        self._behind = (self._ends[0] + plain, self._ends[1] + plain)
        delta: dict[str, object] = {"role": "assistant", "content": ""}
        if self._continues:
            delta["reasoning_content"] = None
        elif self._thinking:
            delta.update(content=None, reasoning_content="")
        return [self._chunk(_dumps(delta))]

    def write(self, event: Event) -> list[ServerEvent]:
        """Return the chunk for an event."""
        if isinstance(event, Text):
            self._content.append(event.text)
            if event.logprobs and self._told is not None:
                return [self._chunk_with_logprobs(0, event, self._told)]
            return [ServerEvent(None, self._before[0] + _dumps(event.text) + self._behind[0])]
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)
            if event.logprobs and self._told is not None:
                return [self._chunk_with_logprobs(1, event, self._told)]
            return [ServerEvent(None, self._before[1] + _dumps(event.text) + self._behind[1])]
        if isinstance(event, ToolArguments):
            self._calls[event.index].pieces.append(event.text)
            return [
                self._chunk(
                    f'{{"tool_calls":[{{"index":{event.index},"function":'
                    f'{{"arguments":{_dumps(event.text)}}}}}]}}'
                )
            ]
        if isinstance(event, ToolStart):
            call = _Call(self._call_id(event.index), event.name)
            self._calls.append(call)
            return [self._chunk(_dumps({"tool_calls": [call.value(event.index)]}))]
        return []

    def finish(self, finish: Finish, usage: Usage) -> list[ServerEvent]:
        """Return the last chunk."""
        delta: dict[str, object] = {"content": ""}
        if self._thinking:
            delta["reasoning_content"] = None
        counts = _dumps(self._usage(usage))
        self._end = (finish.reason, counts)
        ending = f',"logprobs":null,"finish_reason":"{finish.reason}"}}],"usage":{counts}}}'
        return [ServerEvent(None, self._head + _dumps(delta) + ending)]

    def response(self) -> dict[str, object]:
        """Return the whole response."""
        reason, counts = self._end
        logprobs = {
            key: json.loads(f"[{','.join(entries)}]") for key, entries in self._logprobs.items()
        }
        choice = {
            "index": 0,
            "message": self._message(),
            "logprobs": logprobs or None,
            "finish_reason": reason,
        }
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice],
            "usage": json.loads(counts),
            "system_fingerprint": self._fingerprint,
        }

    def _chunk(self, delta: str) -> ServerEvent:
        return ServerEvent(None, f"{self._head}{delta},{_NO_LOGPROBS}{self._tail}")

    def _chunk_with_logprobs(
        self, place: int, event: Text | Reasoning, told: LogprobTexts
    ) -> ServerEvent:
        key = _KEYS[place]
        entries = told.entries(event.logprobs)
        self._logprobs.setdefault(key, []).append(entries)
        delta = f"{self._before[place]}{_dumps(event.text)}{self._ends[place]}"
        told_of = f'"logprobs":{{"{key}":[{entries}]}},"finish_reason":null}}]'
        return ServerEvent(None, f"{delta},{told_of}{self._tail}")

    def _message(self) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": "".join(self._content)}
        if self._thinking and not self._continues:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [call.value(index) for index, call in enumerate(self._calls)]
        return message

    def _usage(self, usage: Usage) -> dict[str, object]:
        counts: dict[str, object] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        if self._thinking and usage.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        counts["prompt_cache_hit_tokens"] = usage.cached_tokens
        counts["prompt_cache_miss_tokens"] = usage.prompt_tokens - usage.cached_tokens
        return counts


def _tells_usage(converted: ConvertedRequest) -> bool:
    """Whether chunks before the last say that their usage is null."""
    request = converted.request
    if not converted.stream or not isinstance(request, ChatRequest):
        return True
    return request.stream_options is not None and bool(request.stream_options.include_usage)
