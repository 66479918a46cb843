"""`Sequence`: numbers the events of one Responses stream and writes their JSON text."""

from __future__ import annotations

from json import JSONEncoder
from json.encoder import encode_basestring

from deepseek_recipe.decoding.stream import ServerEvent

__all__ = ["Sequence", "delta_head"]

_dumps = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def delta_head(name: str, fields: dict[str, object]) -> str:
    """Return the JSON text of a delta event up to its text, for `Sequence.delta`."""
    return f'{_dumps({"type": name, **fields})[:-1]},"delta":'


class Sequence:
    """Gives each event of a stream the next `sequence_number`, from 0."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        """Start at 0."""
        self._next = 0

    def event(self, name: str, fields: dict[str, object]) -> ServerEvent:
        """Return an event with these fields."""
        payload = {"type": name, **fields, "sequence_number": self._next}
        self._next += 1
        return ServerEvent(name, _dumps(payload))

    def delta(self, name: str, head: str, text: str, beside: str = "") -> ServerEvent:
        """Return an event that differs from its neighbours in text and number only.

        There is one for each token, so all else was written once, by `delta_head`. `beside` is the
        JSON text of more fields, each with a comma in front.
        """
        number = self._next
        self._next = number + 1
        data = f'{head}{encode_basestring(text)}{beside},"sequence_number":{number}}}'
        return ServerEvent(name, data)
