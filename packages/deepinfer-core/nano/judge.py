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
        right: text and calls are the expected ones, arguments and a text that should be JSON
            compared as values. What was thought does not count.
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
            return Verdict(equal and wanted.text == found.text, exact, equal, None)
        if wanted.text.startswith(("{", "[")) and _is_json(wanted.text):
            is_json = ended and _is_json(found.text)
            same = is_json and _canonical(found.text) == _canonical(wanted.text)
            return Verdict(same and not found.malformed, exact, None, is_json)
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
    """Return JSON in one form: 1, 1.0 and true stay three things; other text as it is."""
    if not _is_json(text):
        return text
    return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)


def _is_json(text: str) -> bool:
    """Return whether it is strict JSON: no NaN, no key twice."""
    try:
        json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except ValueError:
        return False
    return True


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found
