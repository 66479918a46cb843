"""What goes into a reply decoder (chunks) and what comes out of it (events). Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = [
    "NEED_MORE",
    "BackendFinish",
    "Chunk",
    "Event",
    "Finish",
    "Malformed",
    "NeedMore",
    "Ready",
    "Reasoning",
    "Text",
    "TextChunk",
    "TokenChunk",
    "TokenLogprob",
    "ToolArguments",
    "ToolEnd",
    "ToolStart",
]


# ---- in -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One produced token's log-probability, and alternatives' (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """The prompt was taken in: its length, how much of it was cached, the system's fingerprint."""

    prompt_tokens: int
    cached_tokens: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text from a backend that keeps its ids, and how many tokens it was."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Token ids, each with its log-probability or none of them."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class BackendFinish:
    """The backend has ended the reply."""

    reason: Literal["stop", "length", "content_filter"]


Chunk: TypeAlias = Ready | TextChunk | TokenChunk | BackendFinish


# ---- out ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning, never empty."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer, never empty."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins; `index` counts the calls of the reply from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the call's arguments: all pieces of an ended call together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """The call is complete. A reply that was cut off inside a call has none for it."""

    index: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text of the model that fits nowhere, as it was.

    It is part of no other event, except for the value of a parameter that should be JSON and is
    not, which the arguments have as a string.
    """

    text: str
    why: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The reply is over.

    Attributes:
        reason: `stop`, `length`, `content_filter` or `tool_calls`.
        stop_sequence: the requested stop text that ended it.
        open_tool: index of the call that was cut off, if one was.
    """

    reason: Literal["stop", "length", "content_filter", "tool_calls"]
    stop_sequence: str | None = None
    open_tool: int | None = None


Event: TypeAlias = Reasoning | Text | ToolStart | ToolArguments | ToolEnd | Malformed | Finish


class NeedMore:
    """Type of `NEED_MORE`."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return its name."""
        return "NEED_MORE"


NEED_MORE: Final = NeedMore()
