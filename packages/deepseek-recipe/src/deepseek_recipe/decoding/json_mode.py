"""JSON mode: what stands around the JSON value becomes blanks, and is kept to be told."""

from __future__ import annotations

from collections import deque

__all__ = ["Prose"]


class Prose:
    """Counts the blanks that stand for replaced text: one for each piece of output it came in.

    So a client sees that output is produced, at the pace at which it is produced. It is the one
    thing that depends on how the output is cut, and blanks around a JSON value mean nothing.
    """

    __slots__ = ("_starts", "_text")

    def __init__(self) -> None:
        """Begin before the first piece."""
        self._starts: deque[int] = deque()
        self._text: list[str] = []

    def piece(self, start: int) -> None:
        """Note where a piece begins, as an offset in the whole output."""
        if not self._starts or self._starts[-1] != start:
            self._starts.append(start)

    def replaced(self, text: str, start: int) -> str:
        """Return the blanks for a text that begins at an offset and is replaced."""
        if not text:
            return ""
        self._text.append(text)
        end = start + len(text)
        starts = self._starts
        count = 0
        while starts and starts[0] < end:
            starts.popleft()
            # else the piece was dropped as a whole before this text
            count += not starts or starts[0] > start
        return " " * count

    def taken(self) -> str:
        """Return the text that was replaced since the last call."""
        text = "".join(self._text)
        self._text.clear()
        return text
