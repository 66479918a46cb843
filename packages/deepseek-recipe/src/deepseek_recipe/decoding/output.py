"""`Output`: the events of a reply, and what waits to become one."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from deepseek_recipe.decoding.events import Event, Malformed, Reasoning, Text, TokenLogprob
from deepseek_recipe.decoding.marks import Spelling

__all__ = ["Kind", "Output", "Waste"]

Kind: TypeAlias = type[Reasoning] | type[Text]


class Output:
    """Writes events of reasoning and content.

    Attributes:
        events: what was written and not yet taken.
        position: offset in the reply of the text that is being dealt with.
        has_marks: the reply has had private characters.
    """

    __slots__ = ("_logprobs", "_newlines", "_spelling", "events", "has_marks", "position")

    def __init__(self, spelling: Spelling) -> None:
        """Begin at the start of the reply."""
        self.events: list[Event] = []
        self.position = 0
        self.has_marks = False
        self._spelling = spelling
        self._newlines = 0  # how many wait; they end at `position`
        # (first offset, offset behind the last, log-probability) of tokens not yet shown
        self._logprobs: deque[tuple[int, int, TokenLogprob]] = deque()

    def emit(self, kind: Kind, text: str, start: int) -> None:
        """Write an event for a text that begins at an offset, if it is not empty."""
        if not text:
            return
        if self._logprobs:
            logprobs = self._taken_logprobs(start, start + len(text))
            self.events.append(kind(self.spelled(text), logprobs))
        else:
            self.events.append(kind(self.spelled(text)))

    def malformed(self, text: str, why: str) -> None:
        """Write an event for text that fits nowhere."""
        self.events.append(Malformed(self.spelled(text), why))

    def spelled(self, text: str) -> str:
        """Return a text with its private characters spelled out."""
        return self._spelling.of(text) if self.has_marks else text

    # -- newlines that are dropped when a certain thing follows -----------------------------------

    def without_newlines(self, text: str) -> tuple[str, int]:
        """Return what need not wait and where it begins; newlines at the end wait."""
        body = text.rstrip("\n")
        start = self.position - self._newlines
        if body:
            text, held = "\n" * self._newlines + body, len(text) - len(body)
            self._newlines = held
            return text, start
        self._newlines += len(text)
        return "", start

    def newlines(self) -> tuple[str, int]:
        """Return the newlines that waited, and where they begin."""
        held, self._newlines = self._newlines, 0
        return "\n" * held, self.position - held

    # -- log-probabilities ------------------------------------------------------------------------

    def shown_later(self, start: int, end: int, logprob: TokenLogprob) -> None:
        """Keep a token's log-probability until its text, at these offsets, is shown."""
        self._logprobs.append((start, end, logprob))

    def _taken_logprobs(self, start: int, end: int) -> tuple[TokenLogprob, ...]:
        """Return those of the tokens that are shown first by the text at these offsets."""
        queue = self._logprobs
        taken = []
        while queue and queue[0][0] < end:
            _, last, logprob = queue.popleft()
            if last > start:  # else its text was dropped
                taken.append(logprob)
        return tuple(taken)


class Waste:
    """A run of text that fits nowhere, with the layout around it."""

    __slots__ = ("_output", "_parts", "_why")

    def __init__(self, output: Output) -> None:
        """Begin without any."""
        self._output = output
        self._parts: list[str] = []
        self._why: str | None = None

    def add(self, text: str, why: str) -> None:
        """Add text; blanks alone are layout and need no reason."""
        self._parts.append(text)
        if self._why is None and text.strip():
            self._why = why

    def flush(self) -> None:
        """Write what came together, if it is more than layout."""
        if self._why is not None:
            self._output.malformed("".join(self._parts), self._why)
        self._why = None
        self._parts.clear()
