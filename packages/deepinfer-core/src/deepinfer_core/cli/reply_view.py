"""A reply on a terminal while it comes: reasoning dim, calls as `name(..)`, JSON in colours.

Colours are the console's business: none where no terminal is, or `NO_COLOR` is set.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from deepinfer_core.errors import OutputError
from deepinfer_core.interfaces import ReplyEvent

__all__ = ["JsonStyles", "ReplyView", "open_console"]

# Text of a model must not move the cursor or set colours.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def open_console() -> Console:
    """Return the console of standard output.

    Raises:
        OutputError: standard output is closed.
    """
    if sys.stdout is None:
        raise OutputError("Standard output is closed; the answers have nowhere to go.")
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=True)


class JsonStyles:
    """Tells the styles of JSON text that comes in pieces."""

    def __init__(self) -> None:
        """Start before a value."""
        self._open: list[str] = []  # brackets
        self._in_string = self._escaped = self._is_key = False

    def feed(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (characters, style) of the next piece; pieces of one style come together."""
        run, style = "", ""
        for character in text:
            found = self._style(character)
            if found != style and run:
                yield run, style
                run = ""
            run, style = run + character, found
        if run:
            yield run, style

    def _style(self, character: str) -> str:
        if self._in_string:
            style = "cyan" if self._is_key else "green"
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return style
        if character == '"':
            self._in_string = True
            return "cyan" if self._is_key else "green"
        if character in "{[":
            self._open.append(character)
        elif character in "}]" and self._open:
            self._open.pop()
        if character in "{,":
            self._is_key = self._open[-1:] == ["{"]
        elif character in ":[":
            self._is_key = False
        return "bold" if character in "{}[],:" else "magenta"


class ReplyView:
    """Shows the events of one reply in the protocol of Chat Completions."""

    def __init__(self, console: Console, *, is_json: bool = False) -> None:
        """Show nothing yet; `is_json` colours the answer as JSON."""
        self._console = console
        self._json = JsonStyles() if is_json else None
        self._section: object = None  # reasoning, answer, or the number of a call
        self._arguments = ""

    def take(self, events: Sequence[ReplyEvent]) -> None:
        """Show what is new."""
        for event in events:
            for choice in json.loads(event.data).get("choices", ()):
                self._show(choice["delta"])

    def close(self) -> None:
        """End the last line."""
        self._enter(None)

    def _show(self, delta: Mapping[str, Any]) -> None:
        if text := delta.get("reasoning_content"):
            self._enter("reasoning")
            self._write([(text, "dim italic")])
        if text := delta.get("content"):
            self._enter("answer")
            self._write([(text, "")] if self._json is None else self._json.feed(text))
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            self._enter(call["index"])
            if name := function.get("name"):
                self._write([(name, "bold yellow"), ("(", "")])
            self._arguments += function.get("arguments") or ""

    def _enter(self, section: object) -> None:
        if section == self._section:
            return
        if isinstance(self._section, int):
            self._write([*self._call_arguments(), (")", "")])
        if self._section is not None:
            self._console.print()
        self._section = section

    def _call_arguments(self) -> Iterator[tuple[str, str]]:
        text, self._arguments = self._arguments, ""
        try:
            values = json.loads(text)
        except ValueError:  # the reply was cut off inside of it
            yield text, ""
            return
        for place, (name, value) in enumerate(values.items()):
            yield f"{', ' if place else ''}{name}=", ""
            yield from JsonStyles().feed(json.dumps(value, ensure_ascii=False))

    def _write(self, pieces: Iterable[tuple[str, str]]) -> None:
        for text, style in pieces:
            shown = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
            self._console.print(shown, end="", style=style or None)
