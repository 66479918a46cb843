"""Extraction of JSON from a short text, by a schema or by the names of the keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from deepseek_recipe.conversation import Conversation, JsonValue, Message, ResponseFormat
from nano.data.catalogue import spoken
from nano.data.domains import DOMAINS, Domain, Entry
from nano.data.example import Draw, Example
from nano.data.question import SYSTEM_TEXTS

__all__ = ["TASKS"]

# What stands around the text where a schema says what to extract.
_BY_SCHEMA = (
    "{text}",
    "{text}",
    "Extract the data: {text}",
    "Extract the fields of the schema from this text:\n{text}",
    "Read this {noun} and fill in the schema.\n\n{text}",
    "{text}\n\nGive me this as JSON.",
    "Turn this {noun} into JSON: {text}",
    "What does this {noun} say?\n{text}",
)
# And where the question does.
_BY_NAME = (
    "Extract {keys} as JSON: {text}",
    "Extract {keys} as JSON.{missing}\n\n{text}",
    "{text}\n\nGive me {keys} as JSON.{missing}",
    "Return a JSON object with the keys {keys}.{missing}\n{text}",
    "Text: {text}\nKeys: {typed}{missing}\nAnswer with JSON.",
    "Which {keys} does this {noun} have? Answer in JSON.{missing}\n{text}",
    "Turn this {noun} into JSON with {typed}.{missing}\n{text}",
)
_MISSING = " Use null for what is missing."
# Labels that cannot stand behind `the`.
_NO_NOUNS = ("From", "To", "By", "Due", "Ordered on")
_TITLES = ("Note", "Form", "Record", "Entry")
_SYSTEM_SHARE = 0.15


@dataclass(frozen=True)
class _Wanted:
    """An entry that is asked for: the key, whether null is allowed, and the value."""

    entry: Entry
    key: str
    nullable: bool
    value: JsonValue


def _json_extract(random: Random) -> Example:
    domain = random.choice(DOMAINS)
    values = {entry.keys[0]: entry.make(random) for entry in domain.entries}
    entries = random.sample(domain.entries, random.randint(3, min(7, len(domain.entries))))
    camel = random.random() < 0.2
    # With a lead, what it tells is there; else anything can be missing.
    lead = random.choice(domain.leads) if random.random() < 0.35 else ""
    told = {entry.keys[0] for entry in domain.entries if f"{{{entry.keys[0]}}}" in lead}
    wanted = []
    for entry in entries:
        nullable = not entry.choices and random.random() < 0.25
        absent = nullable and entry.keys[0] not in told and random.random() < 0.6
        value = None if absent else values[entry.keys[0]]
        wanted.append(_Wanted(entry, _cased(random.choice(entry.keys), camel), nullable, value))
    text = _text(random, domain, values, wanted, lead, told)
    return _example(random, domain, wanted, text)


def _example(random: Random, domain: Domain, wanted: Sequence[_Wanted], text: str) -> Example:
    kind = random.random()
    thinking = kind > 0.8
    by_schema = kind < 0.5 or kind > 0.87
    if by_schema:
        question = random.choice(_BY_SCHEMA).format(text=text, noun=domain.noun)
        answer_format = ResponseFormat("json_schema", schema=_schema(random, wanted))
    else:
        question = _question(random, domain, wanted, text)
        bare = random.random() < 0.8
        answer_format = ResponseFormat() if bare else ResponseFormat("json_object")
    answer = json.dumps(
        {each.key: each.value for each in wanted}, ensure_ascii=False, separators=(", ", ": ")
    )
    messages = [
        Message("user", (question,)),
        Message("assistant", (answer,), reasoning=_reasoning(wanted) if thinking else None),
    ]
    if random.random() < _SYSTEM_SHARE:
        messages.insert(0, Message("system", (random.choice(SYSTEM_TEXTS),)))
    conversation = Conversation(
        tuple(messages),
        thinking=thinking,
        reasoning_effort="high" if thinking else None,
        response_format=answer_format,
    )
    return Example("json_extract", f"{domain.noun} {answer}", conversation)


def _question(random: Random, domain: Domain, wanted: Sequence[_Wanted], text: str) -> str:
    keys = [each.key for each in wanted]
    missing = ""
    if any(each.value is None for each in wanted) or random.random() < 0.2:
        missing = _MISSING
    template = random.choice(_BY_NAME)
    while missing and "{missing}" not in template:
        template = random.choice(_BY_NAME)
    if missing and template.startswith("Text"):
        missing = "." + missing
    return template.format(
        text=text,
        noun=domain.noun,
        missing=missing,
        keys=", ".join(keys) if random.random() < 0.5 else f"{', '.join(keys[:-1])} and {keys[-1]}",
        typed=", ".join(f"{each.key} ({_type_words(each.entry)})" for each in wanted),
    )


def _reasoning(wanted: Sequence[_Wanted]) -> str:
    text = f"Fields: {', '.join(each.key for each in wanted)}."
    absent = [each.key for each in wanted if each.value is None]
    return f"{text} Not given: {', '.join(absent)}." if absent else text


def _schema(random: Random, wanted: Sequence[_Wanted]) -> JsonValue:
    titled = random.random() < 0.07
    alternatives = random.random() < 0.2
    properties: dict[str, JsonValue] = {}
    for each in wanted:
        one = _type_schema(each.entry)
        if each.nullable and (alternatives or each.entry.kind == "array"):
            one = {"anyOf": [one, {"type": "null"}]}
        elif each.nullable:
            one = {"type": [each.entry.kind, "null"]}
        title = {"title": each.entry.label} if titled else {}
        properties[each.key] = {**title, **one}
    schema: dict[str, JsonValue] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }
    if random.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _type_schema(entry: Entry) -> dict[str, JsonValue]:
    if entry.choices:
        return {"type": "string", "enum": list(entry.choices)}
    if entry.kind == "array":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": entry.kind}


def _type_words(entry: Entry) -> str:
    if entry.choices:
        return " or ".join(entry.choices) if len(entry.choices) < 4 else "string"
    return "list of strings" if entry.kind == "array" else entry.kind


def _text(
    random: Random,
    domain: Domain,
    values: Mapping[str, JsonValue],
    wanted: Sequence[_Wanted],
    lead: str,
    told: set[str],
) -> str:
    # What is asked for and there, and now and then something nobody asks for.
    asked = {each.entry.keys[0]: each.value is not None for each in wanted}
    extra = random.choice((0.0, 0.2, 0.5))
    entries = [
        entry
        for entry in domain.entries
        if entry.keys[0] not in told and asked.get(entry.keys[0], random.random() < extra)
    ]
    if not lead and (not entries or random.random() < 0.3):
        return _form(random, domain, entries, values)
    if random.random() < 0.7:
        random.shuffle(entries)
    sentences = [_sentence(random, entry, values[entry.keys[0]]) for entry in entries]
    if lead:
        first = lead.format(**{key: spoken(value) for key, value in values.items()})
        sentences.insert(0 if random.random() < 0.8 else len(sentences), first)
    if random.random() < 0.3:
        sentences.insert(random.randint(0, len(sentences)), random.choice(domain.chatter))
    return " ".join(sentences)


def _form(
    random: Random, domain: Domain, entries: list[Entry], values: Mapping[str, JsonValue]
) -> str:
    if random.random() < 0.5:
        random.shuffle(entries)
    lower = random.random() < 0.2
    lines = []
    for entry in entries:
        value = values[entry.keys[0]]
        items = ", ".join(value) if isinstance(value, list) else spoken(value)
        lines.append(f"{entry.label.lower() if lower else entry.label}: {items}")
    if random.random() < 0.3 or not lines:
        lines.insert(0, f"{random.choice(_TITLES)}: {domain.noun}")
    lists = any(entry.kind == "array" for entry in entries)
    return random.choice(("\n", "\n", "\n- ", "\n" if lists else ", ", "; ")).join(lines)


def _sentence(random: Random, entry: Entry, value: JsonValue) -> str:
    if entry.kind == "boolean":
        return random.choice(entry.says if value else entry.denies)
    templates = (*entry.says, f"{entry.label}: {{}}.")
    if not (entry.label in _NO_NOUNS or entry.label.endswith("s")):
        templates = (*templates, f"The {entry.label.lower()} is {{}}.")
    return random.choice(templates).format(spoken(value))


def _cased(name: str, camel: bool) -> str:
    if not camel:
        return name
    first, *rest = name.split("_")
    return first + "".join(each.capitalize() for each in rest)


TASKS: dict[str, tuple[Draw, float]] = {"json_extract": (_json_extract, 0.12)}
