"""What a tool of the data is: how it is declared, asked for, called, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from deepseek_recipe.conversation import JsonValue, Tool, ToolCall
from nano.data.values import word

__all__ = [
    "Arguments",
    "Call",
    "Field",
    "Intent",
    "Offer",
    "Result",
    "Slot",
    "joined",
    "offer",
    "spoken",
]

Arguments = Mapping[str, JsonValue]
STRING: Mapping[str, JsonValue] = {"type": "string"}


@dataclass(frozen=True)
class Slot:
    """A parameter.

    Attributes:
        names: its spellings; the first one is its name in templates.
        make: draws a value.
        schema: its JSON Schema.
        about: a description.
        said: of an optional one: what is added to the question when it is given.
        denied: of an optional boolean: what is added for false.
        words: how values are said that are not said as they are.
        long: the value is a text; reasoning does not repeat it.
    """

    names: tuple[str, ...]
    make: Callable[[Random], JsonValue]
    schema: Mapping[str, JsonValue] = field(default_factory=lambda: STRING)
    about: str = ""
    said: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    words: tuple[tuple[JsonValue, str], ...] = ()
    long: bool = False

    @property
    def key(self) -> str:
        """The name in templates."""
        return self.names[0]

    def say(self, value: JsonValue) -> str:
        """Return the value as a question says it."""
        return next((words for known, words in self.words if known == value), spoken(value))


@dataclass(frozen=True)
class Field:
    """A field of a tool's result; the first of `names` is its name in templates."""

    names: tuple[str, ...]
    make: Callable[[Random, Arguments], JsonValue]


@dataclass(frozen=True)
class Intent:
    """What one tool does.

    Attributes:
        names: spellings of the tool, in snake case.
        about: descriptions.
        goal: completes `The user wants`.
        asks: questions; `{more}` is the place of what optional parameters add.
        answer: the sentence made of the result.
        vary: the slot that several calls of one question, and follow-ups, differ in.
        several: questions with `{items}` in the place of that slot.
        again: follow-ups with a new value of that slot; the rest stays.
        lookup: it finds something out and changes nothing.
        live: no one could answer without a tool.
    """

    names: tuple[str, ...]
    about: tuple[str, ...]
    slots: tuple[Slot, ...]
    goal: str
    asks: tuple[str, ...]
    fields: tuple[Field, ...]
    answer: str
    vary: str = ""
    several: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    lookup: bool = False
    live: bool = True

    @property
    def key(self) -> str:
        """What it is called in links and keys."""
        return self.names[0]

    def slot(self, key: str) -> Slot:
        """Return a slot by its name in templates."""
        return next(slot for slot in self.slots if slot.key == key)

    def draw(self, random: Random, given: Arguments | None = None) -> dict[str, JsonValue]:
        """Return arguments by template names: the required ones, and some optional ones.

        Args:
            given: values that are fixed; with them, no optional one is drawn.
        """
        values: dict[str, JsonValue] = {}
        for slot in self.slots:
            if given is not None and slot.key in given:
                values[slot.key] = given[slot.key]
            elif not slot.said or (given is None and random.random() < 0.4):
                # Two places or currencies of one question differ.
                values[slot.key] = _unlike(random, slot, values)
        return values

    def words(self, random: Random, arguments: Arguments) -> dict[str, str]:
        """Return what fills the templates of a question."""
        words = {slot.key: slot.say(arguments[slot.key]) for slot in self._given(arguments)}
        more = []
        for slot in self._given(arguments):
            if slot.said:
                denied = arguments[slot.key] is False
                text = random.choice(slot.denied if denied else slot.said)
                more.append(text.format(words[slot.key]))
        random.shuffle(more)
        more.sort(key=lambda text: text.startswith(","))  # `with x, pinned`, not `, pinned with x`
        return {**words, "more": "".join(more)}

    def goal_of(self, arguments: Arguments) -> str:
        """Return what the user wants, with values."""
        return self.goal.format(
            **{slot.key: slot.say(arguments[slot.key]) for slot in self._given(arguments)}
        )

    def _given(self, arguments: Arguments) -> list[Slot]:
        return [slot for slot in self.slots if slot.key in arguments]


@dataclass(frozen=True)
class Offer:
    """An intent as one conversation offers it.

    Attributes:
        tool: its declaration.
        names: template names -> names of the declaration, in the order of the declaration.
    """

    intent: Intent
    tool: Tool
    names: Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """What a call gave: values by template names, the text, and the sentence to say."""

    values: Arguments
    text: str
    answer: str
    names: Mapping[str, str]


@dataclass(frozen=True)
class Call:
    """A call of an offered tool; `arguments` by template names."""

    offer: Offer
    arguments: Arguments

    def message_call(self, number: int) -> ToolCall:
        """Return the call as a message holds it."""
        named = {
            name: self.arguments[key]
            for key, name in self.offer.names.items()
            if key in self.arguments
        }
        text = json.dumps(named, ensure_ascii=False)
        return ToolCall(f"call_{number}", self.offer.tool.name, text)

    @property
    def goal(self) -> str:
        """What the user wants by it."""
        return self.offer.intent.goal_of(self.arguments)

    @property
    def plan(self) -> str:
        """The call in words, e.g. `get_weather with city Oslo and unit celsius`."""
        parts = []
        for key, name in self.offer.names.items():
            if key in self.arguments:
                value = self.arguments[key]
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                parts.append(f"{name} as given" if self._slot(key).long else f"{name} {text}")
        name = self.offer.tool.name
        return f"{name} with {joined(parts)}" if parts else name

    @property
    def key(self) -> str:
        """What the call is about, whatever the wording."""
        return json.dumps([self.offer.tool.name, self.arguments], ensure_ascii=False)

    def run(self, random: Random) -> Result:
        """Return a result; one of twenty is an error."""
        if random.random() < 0.05:
            reason = random.choice(_ERRORS)
            key = random.choice(("error", "error", "message", "problem"))
            text = _written(random, {key: reason})
            return Result({}, text, f"That did not work: {reason}.", {})
        intent = self.offer.intent
        values = {each.names[0]: each.make(random, self.arguments) for each in intent.fields}
        names = {each.names[0]: random.choice(each.names) for each in intent.fields}
        named = {names[key]: value for key, value in values.items()}
        if random.random() < 0.25:
            named[random.choice(("request", "trace", "server"))] = f"r{random.randrange(1000)}"
        items = list(named.items())
        if random.random() < 0.4:
            random.shuffle(items)
        words = {slot.key: slot.say(self.arguments[slot.key]) for slot in self._given_slots()}
        words |= {key: spoken(value) for key, value in values.items()}
        return Result(values, _written(random, dict(items)), intent.answer.format(**words), names)

    def _slot(self, key: str) -> Slot:
        return self.offer.intent.slot(key)

    def _given_slots(self) -> list[Slot]:
        return [slot for slot in self.offer.intent.slots if slot.key in self.arguments]


_ERRORS = (
    "not found",
    "access denied",
    "service not available",
    "timeout",
    "too many requests",
    "internal error",
)


def offer(random: Random, intents: Sequence[Intent]) -> list[Offer]:
    """Declare the intents as tools, in the spelling of one conversation."""
    camel = random.random() < 0.25
    suffix = random.choice(
        ("", "", "", "", "", f"_v{random.randint(2, 9)}", f"_{_letters(random)}")
    )
    described = random.random() < 0.2
    closed = random.random() < 0.1
    found = []
    for intent in intents:
        slots = list(intent.slots)
        if random.random() < 0.3:
            random.shuffle(slots)
        names = {slot.key: _cased(random.choice(slot.names), camel) for slot in slots}
        properties: dict[str, JsonValue] = {}
        for slot in slots:
            about = {"description": slot.about} if described and slot.about else {}
            properties[names[slot.key]] = {**slot.schema, **about}
        parameters: dict[str, JsonValue] = {"type": "object", "properties": properties}
        required = [names[slot.key] for slot in slots if not slot.said]
        if required:
            parameters["required"] = required
        if closed:
            parameters["additionalProperties"] = False
        known = random.random() < 0.95  # else only the description tells what the tool does
        name = random.choice(intent.names) if known else f"{word(random)}_{word(random)}"
        name = _cased(name + suffix, camel)
        found.append(Offer(intent, Tool(name, random.choice(intent.about), parameters), names))
    return found


def spoken(value: JsonValue) -> str:
    """Return a value as a sentence says it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return joined([str(each) for each in value])
    return str(value)


def joined(parts: Sequence[str]) -> str:
    """Return `a`, `a and b` or `a, b and c`."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _unlike(random: Random, slot: Slot, values: Arguments) -> JsonValue:
    value = slot.make(random)
    while isinstance(value, str) and value in values.values():
        value = slot.make(random)
    return value


def _cased(name: str, camel: bool) -> str:
    if not camel:
        return name
    first, *rest = name.split("_")
    return first + "".join(each.capitalize() for each in rest)


def _letters(random: Random) -> str:
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 3)))


def _written(random: Random, values: Mapping[str, JsonValue]) -> str:
    kind = random.random()
    if kind < 0.4:
        return json.dumps(values, ensure_ascii=False)
    if kind < 0.7:
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    pairs = [f"{key}: {spoken(value)}" for key, value in values.items()]
    return ("\n" if kind < 0.85 else ", ").join(pairs)
