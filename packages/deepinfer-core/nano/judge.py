"""What is asked of the model in the evaluation, and whether its replies are right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepseek_recipe.conversation import ParsingOptions
from deepseek_recipe.decoding.events import (
    Event,
    Malformed,
    NeedMore,
    Reasoning,
    Text,
    ToolArguments,
    ToolStart,
)
from deepseek_recipe.decoding.machine import ReplyMachine
from deepseek_recipe.encoding.profile import V41
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from nano.data.encoding import Encoded

__all__ = ["Ask", "Judge", "Reading", "Verdict", "asks_of"]


@dataclass(frozen=True)
class Ask:
    """One reply to be given: the prompt with the true history, and the true reply with its EOS."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]


def asks_of(encoded: Encoded) -> list[Ask]:
    """Return every reply of an example that the model has to give, in order."""
    ids = tuple(map(int, encoded.token_ids))
    return [Ask(ids[:start], ids[start:end]) for start, end in encoded.replies]


@dataclass(frozen=True)
class Reading:
    """A reply, read.

    Attributes:
        calls: name and arguments of each call; arguments as JSON text in one canonical form, or as
            they are where they are no JSON.
        malformed: it has text that fits nowhere.
    """

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]
    malformed: bool


@dataclass(frozen=True)
class Verdict:
    """What is true of one reply.

    Attributes:
        right: the calls are the expected ones; without calls the answer is, compared as JSON if it
            should be JSON. What was thought does not count.
        exact: all ids are the expected ones.
        calls_equal: the same calls with the same arguments; None if none are expected or made.
        is_json: the answer is JSON; None if it need not be.
    """

    right: bool
    exact: bool
    calls_equal: bool | None
    is_json: bool | None


class Judge:
    """Compares replies with what they should be."""

    def __init__(self, folder: Path) -> None:
        """Read the model's tokenizer."""
        self._tokenizer = PromptTokenizer.from_path(folder / "tokenizer.json")
        tokens = V41.tokens
        self._eos = self._tokenizer.special_id(tokens.eos)
        self._think = self._tokenizer.special_id(tokens.think)
        self._think_end = self._tokenizer.special_id(tokens.think_end)

    def verdict(self, ask: Ask, reply: Sequence[int]) -> Verdict:
        """Judge a reply; `reply` has its EOS if it has ended."""
        exact = tuple(reply) == ask.expected
        wanted, found = self.read(ask.prompt, ask.expected), self.read(ask.prompt, reply)
        ended = bool(reply) and reply[-1] == self._eos
        if wanted.calls or found.calls:
            equal = ended and not found.malformed and wanted.calls == found.calls
            return Verdict(equal, exact, equal, None)
        value = _json(wanted.text)
        if isinstance(value, dict | list):
            is_json = ended and _is_json(found.text)
            return Verdict(is_json and _json(found.text) == value, exact, None, is_json)
        return Verdict(ended and wanted.text == found.text, exact, None, None)

    def read(self, prompt: Sequence[int], reply: Sequence[int]) -> Reading:
        """Read a reply as a server would."""
        last = prompt[-1]
        parsing = ParsingOptions(
            parse_tool_calls=True,
            # behind a marker of thinking the reply is free; else the prompt opened the calls
            starts_in_tool_calls=last not in (self._think, self._think_end),
            thinking_initial_stage="reasoning_start" if last == self._think else None,
        )
        machine = ReplyMachine(parsing, V41, self._tokenizer)
        machine.feed_all(reply)
        events: list[Event] = []
        while not isinstance(event := machine.next_event(), NeedMore):
            events.append(event)
        events += machine.close()
        names = [each.name for each in events if isinstance(each, ToolStart)]
        arguments = [
            "".join(e.text for e in events if isinstance(e, ToolArguments) and e.index == index)
            for index in range(len(names))
        ]
        return Reading(
            reasoning="".join(each.text for each in events if isinstance(each, Reasoning)),
            text="".join(each.text for each in events if isinstance(each, Text)),
            calls=tuple(zip(names, map(_canonical, arguments), strict=True)),
            malformed=any(isinstance(each, Malformed) for each in events),
        )


def _canonical(text: str) -> str:
    if not _is_json(text):
        return text
    return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _json(text: str) -> object:
    return json.loads(text) if _is_json(text) else None
