"""`ReplyStream`: a backend's chunks in, one protocol's server events out. No I/O, no clock."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from deepseek_recipe.decoding.checks import checked_count, checked_ready, checked_reason
from deepseek_recipe.decoding.events import (
    BackendFinish,
    Chunk,
    Event,
    Finish,
    Malformed,
    Ready,
    Reasoning,
    TextChunk,
    TokenChunk,
)
from deepseek_recipe.decoding.machine import ReplyMachine
from deepseek_recipe.errors import ReplyError, shown

if TYPE_CHECKING:
    from deepseek_recipe.encoding.tokenizer import PromptTokenizer

__all__ = ["ReplyStream", "ReplyWriter", "ServerEvent", "Usage"]


# Beside those that JSON escapes anyway; they can stand inside JSON strings only.
_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")

# Reasoning up to this many characters is counted in tokens, which takes up to half a second there;
# the longest replies of the checkpoints have fewer.
_MAX_COUNTED = 2**20


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event for the client.

    Attributes:
        name: of the event, None where the protocol names none.
        data: JSON text without the line breaks of JSON; U+0085, U+2028 and U+2029 may stand in it,
            and `sse` escapes them.
    """

    name: str | None
    data: str

    def payload(self) -> object:
        """Return the parsed data."""
        return json.loads(self.data)

    def sse(self) -> str:
        """Return the event as it goes over the wire.

        What some readers take for a line break is escaped: the data stays the same JSON.
        """
        data = self.data
        if not data.isascii():
            data = _LINE_BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", data)
        return f"data: {data}\n\n" if self.name is None else f"event: {self.name}\ndata: {data}\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a reply took.

    Attributes:
        cached_tokens: those of the prompt that the cache held.
        completion_tokens: all that were produced, those without text included.
        reasoning_tokens: length of the reasoning text in tokens (0 without reasoning), of a text
            over 1 Mi characters all tokens; None when there is no tokenizer to count it.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None


class ReplyWriter(Protocol):
    """One protocol's way to tell a reply. Called in this order: start, write..., finish, response.

    Attributes:
        done_data: data of the message that ends a stream of this protocol, None without one.
    """

    done_data: str | None

    @property
    def malformed(self) -> Sequence[Malformed]:
        """Text of the model that the protocol has no place for, so far."""
        ...

    def start(self, ready: Ready) -> list[ServerEvent]:
        """Return what the client is sent before any output."""
        ...

    def write(self, event: Event) -> list[ServerEvent]:
        """Return what the client is sent for an event; never gets a `Finish` or `Malformed`."""
        ...

    def finish(self, finish: Finish, usage: Usage) -> list[ServerEvent]:
        """Return what the client is sent at the end."""
        ...

    def response(self) -> dict[str, object]:
        """Return the whole response, once `finish` was called; a new value each time."""
        ...


class ReplyStream:
    """Turns the chunks of one reply into server events.

    A chunk is taken as a whole or refused as a whole: after a `ReplyError` the stream is as it was
    before, so that it can go on or be finished.
    """

    __slots__ = (
        "_completion_tokens",
        "_ids_only",
        "_machine",
        "_malformed",
        "_ready",
        "_reasoning",
        "_tokenizer",
        "_writer",
        "finished",
    )

    def __init__(
        self, writer: ReplyWriter, machine: ReplyMachine, tokenizer: PromptTokenizer | None = None
    ) -> None:
        """Join a writer and a machine.

        Args:
            tokenizer: counts the reasoning's tokens; None leaves the count out.
        """
        self._writer = writer
        self._machine = machine
        self._tokenizer = tokenizer
        self._ready: Ready | None = None
        self._completion_tokens = 0
        self._ids_only = True
        self._reasoning: list[str] = []
        self._malformed: list[Malformed] = []
        self.finished = False

    @property
    def done_data(self) -> str | None:
        """Data of the message that ends a stream of this protocol, None without one."""
        return self._writer.done_data

    @property
    def malformed(self) -> tuple[Malformed, ...]:
        """The model's text that fits nowhere so far; no server event holds it."""
        return (*self._malformed, *self._writer.malformed)

    def push(self, chunk: Chunk) -> list[ServerEvent]:
        """Take in a chunk and return the server events that it completes.

        A stop sequence finishes the stream at once. A missing `Ready` is implied.

        Raises:
            ReplyError: the stream has finished, a second `Ready`, a token id outside the
                vocabulary, token ids or log-probabilities without a tokenizer, not one
                log-probability for each id, or a field of the chunk has a wrong type or value.
        """
        if self.finished:
            raise ReplyError("stream processor has finished")
        machine = self._machine
        reason = None
        if isinstance(chunk, TokenChunk):
            if chunk.logprobs is not None and self._tokenizer is None:
                raise ReplyError("Log-probabilities came, but there is no `tokenizer`; pass one.")
            self._completion_tokens += machine.feed_all(chunk.token_ids, chunk.logprobs)
        elif isinstance(chunk, TextChunk):
            num_tokens = checked_count(chunk.num_tokens, "number of tokens")
            machine.feed_text(chunk.text)
            self._ids_only = False
            self._completion_tokens += num_tokens
        elif isinstance(chunk, Ready):
            if self._ready is not None:
                raise ReplyError("ready chunk received after the reply has begun")
            return self._start(checked_ready(chunk))
        elif isinstance(chunk, BackendFinish):
            reason = checked_reason(chunk.reason)
        else:
            raise ReplyError(
                f"{shown(chunk)} is no chunk; push Ready, TextChunk, TokenChunk or BackendFinish."
            )
        out = self._start(Ready(prompt_tokens=0)) if self._ready is None else []
        for event in machine.drain():
            out += self._written(event)
        if reason is not None:
            out += self._end(reason)
        elif machine.finished:
            out += self._end("stop")
        return out

    def finish(self) -> list[ServerEvent]:
        """End the reply as a plain stop and return the last server events; nothing when it ended.

        Reads what the backend leaves open: a stream without a `BackendFinish` is one that stopped.
        """
        return [] if self.finished else self.push(BackendFinish("stop"))

    def response(self) -> dict[str, object]:
        """Return the whole response, a new value each time.

        Raises:
            ReplyError: the stream has not finished.
        """
        if not self.finished:
            raise ReplyError("The reply has not finished; call finish() before response().")
        return self._writer.response()

    def _start(self, ready: Ready) -> list[ServerEvent]:
        self._ready = ready
        return self._writer.start(ready)

    def _written(self, event: Event) -> list[ServerEvent]:
        if isinstance(event, Malformed):
            self._malformed.append(event)
            return []
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        return self._writer.write(event)

    def _end(self, reason: str) -> list[ServerEvent]:
        *events, last = self._machine.close(reason)
        self.finished = True
        out = [each for event in events for each in self._written(event)]
        assert isinstance(last, Finish), "a machine's last event is Finish"
        return out + self._writer.finish(last, self._usage())

    def _usage(self) -> Usage:
        assert self._ready is not None, "a reply starts before it ends"
        text = "".join(self._reasoning)
        if self._tokenizer is None:
            count = None
        elif len(text) > _MAX_COUNTED:
            count = self._completion_tokens
        else:
            count = self._tokenizer.count(text)
            if self._ids_only:
                # a model may write a text in fewer tokens than the tokenizer would
                count = min(count, self._completion_tokens)
        return Usage(
            prompt_tokens=self._ready.prompt_tokens,
            cached_tokens=self._ready.cached_tokens,
            completion_tokens=self._completion_tokens,
            reasoning_tokens=count,
        )
