"""Requests whose answers must have a form, of every kind, and a judge that knows nothing of masks.

The small model that comes with the package has seen such questions; whatever it says, the answer
must have the form, and every variant of the engine must give the same one.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from deepinfer_core.llm import LLM
from deepinfer_core.types import ChatOutput, RequestOutput, SamplingParams

__all__ = ["Answer", "ConstrainedRequest", "answers_of", "constrained_requests"]

# Says what is wrong with a text, None for nothing.
Judge = Callable[[str], str | None]

_NAMES = ("Anna Keller", "Paul Weber", "Laura Rossi", "David Novak")
_CITIES = ("Rome", "Paris", "Vienna", "Madrid", "Oslo")
_JOBS = ("teacher", "nurse", "pilot", "baker")
_MOST_TOKENS = 320


@dataclass(frozen=True)
class ConstrainedRequest:
    """One request.

    Attributes:
        kind: for tables.
        body: of Chat Completions; without `messages` a plain completion, with `prompt` and
            `constraint`.
        judge: of the answer's text, or of the calls as JSON text.
        calls: the answer must be calls; None if it may be.
    """

    kind: str
    body: Mapping[str, Any]
    judge: Judge
    calls: bool | None = False


@dataclass(frozen=True)
class Answer:
    """What must be equal in every variant, and what is wrong with it."""

    token_ids: tuple[int, ...]
    text: str
    ended: str
    fault: str | None


def constrained_requests(count: int, seed: int = 0) -> list[ConstrainedRequest]:
    """Return requests of all kinds in turn, half of the answers behind reasoning where that goes.

    Args:
        count: how many; the first ones of more are the same.
        seed: decides them.
    """
    random = Random(seed)
    made = []
    for place in range(count):
        kind = _KINDS[place % len(_KINDS)]
        made.append(kind(random, thinking=place // len(_KINDS) % 2 == 1, seed=place))
    return made


def answers_of(llm: LLM, requests: Sequence[ConstrainedRequest]) -> list[Answer]:
    """Return the answers to all requests, conversations and plain completions each at once."""
    places = [place for place, each in enumerate(requests) if "messages" in each.body]
    chats = llm.chat([requests[place].body for place in places]) if places else []
    found = {
        place: _of_chat(requests[place], out) for place, out in zip(places, chats, strict=True)
    }
    rest = [place for place in range(len(requests)) if place not in found]
    if rest:
        texts = llm.generate(
            [requests[place].body["prompt"] for place in rest],
            [_params(requests[place].body) for place in rest],
        )
        found |= {
            place: _of_text(requests[place], out) for place, out in zip(rest, texts, strict=True)
        }
    return [found[place] for place in range(len(requests))]


def _params(body: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=_MOST_TOKENS,
        temperature=1.5,
        seed=body["seed"],
        constraint=body["constraint"],
    )


def _of_text(request: ConstrainedRequest, output: RequestOutput) -> Answer:
    fault = output.error or output.constraint_fault or request.judge(output.text)
    return Answer(output.token_ids, output.text, str(output.finish_reason), fault)


def _of_chat(request: ConstrainedRequest, output: ChatOutput) -> Answer:
    message, raw = output.message, output.output
    calls: Any = message.get("tool_calls")
    fault = raw.error or raw.constraint_fault
    if fault is None and output.malformed:
        fault = f"malformed: {output.malformed}"
    if fault is None and request.calls is not None and bool(calls) is not request.calls:
        fault = f"calls: {calls}"
    if fault is None and "thinking" in request.body:
        thinks = request.body["thinking"]["type"] == "enabled"
        if not thinks and message.get("reasoning_content"):
            fault = "it reasoned"
    if fault is None and (calls or request.calls is False):
        told = [(each["function"]["name"], each["function"]["arguments"]) for each in calls or ()]
        fault = request.judge(json.dumps(told) if calls else output.content)
    return Answer(raw.token_ids, raw.text, str(output.finish_reason), fault)


# ---- kinds --------------------------------------------------------------------------------------


def _asked(question: str, *, thinking: bool, seed: int, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "thinking": {"type": "enabled" if thinking else "disabled"},
        "max_tokens": _MOST_TOKENS,
        "temperature": 1.2,
        "seed": seed,
        **fields,
    }


def _schema(random: Random, *, thinking: bool, seed: int) -> ConstrainedRequest:
    properties = _person(random)
    schema = {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if random.random() < 0.7],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    question = (
        f"Extract {', '.join(properties)} as JSON: {random.choice(_NAMES)} from "
        f"{random.choice(_CITIES)} is {random.randint(20, 70)} years old and works as a "
        f"{random.choice(_JOBS)}."
    )
    body = _asked(question, thinking=thinking, seed=seed, response_format=form)
    return ConstrainedRequest("schema", body, lambda text: _judge_json(text, schema))


def _person(random: Random) -> dict[str, Any]:
    possible: dict[str, Any] = {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9} [A-Z][a-z]{1,9}$"},
        "city": {"enum": list(random.sample(_CITIES, 3))},
        "age": {"type": "integer", "minimum": 18, "maximum": random.randint(30, 99)},
        "job": {"anyOf": [{"type": "string", "maxLength": 12}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 1]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"owned": {"type": "boolean"}, "rooms": {"enum": [1, 2, 3]}},
            "required": ["owned"],
            "additionalProperties": False,
        },
    }
    names = sorted(random.sample(list(possible), random.randint(1, 5)), key=list(possible).index)
    return {name: possible[name] for name in names}


_PATTERNS = (
    ("[0-9]{1,4} bytes", "How many bytes are 2 KiB?"),
    ("(yes|no)(, (surely|maybe)){0,2}[.]", "Is 7 a prime number?"),
    ("\\d{4}-(0[1-9]|1[0-2])-[0-3]\\d", "Give a date."),
    ("[A-Z][a-z]{2,8}( [a-z]{2,8}){1,4}\\.", "Say a short sentence."),
    ("#[0-9a-f]{6}( #[0-9a-f]{6})?", "Name a color."),
    ('"[^"\\n]{0,12}"', "Quote a word."),
)


def _regex(random: Random, *, thinking: bool, seed: int) -> ConstrainedRequest:
    pattern, question = random.choice(_PATTERNS)
    asked: dict[str, Any] = {"structured_outputs": {"regex": pattern}}
    if random.random() < 0.5:
        asked = {"response_format": {"type": "regex", "regex": pattern}}
    body = _asked(question, thinking=thinking, seed=seed, **asked)
    return ConstrainedRequest("regex", body, lambda text: _judge_pattern(text, pattern))


_ITEMS = "[a-z]{1,8}(, [a-z]{1,8}){0,5}"
_SUM = (
    'root ::= term (("+" | "-") term){0,4}\n'
    'term ::= [1-9] [0-9]{0,2} | "(" [1-9] ("*" | "+") [1-9] ")"\n'
)
_ITEM_GRAMMARS = (
    'root ::= item (", " item){0,5}\nitem ::= [a-z]{1,8}\n',
    'start: ITEM (", " ITEM)~0..5\nITEM: /[a-z]{1,8}/\n',
)


def _grammar(random: Random, *, thinking: bool, seed: int) -> ConstrainedRequest:
    if random.random() < 0.5:
        grammar, question, judge = _SUM, "What is 27 + 58?", _judge_sum
    else:
        grammar, question = random.choice(_ITEM_GRAMMARS), "List some fruits."
        judge = lambda text: _judge_pattern(text, _ITEMS)  # noqa: E731
    body = _asked(question, thinking=thinking, seed=seed, structured_outputs={"grammar": grammar})
    return ConstrainedRequest("grammar", body, judge)


_WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": list(_CITIES)},
        "days": {"type": "integer", "enum": [1, 2, 3]},
        "unit": {"type": ["string", "null"], "enum": ["C", "F", None]},
        "parts": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["city", "days", "unit", "parts"],
    "additionalProperties": False,
}
_SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string", "pattern": "^[a-z ]{1,16}$"}},
    "required": ["query"],
    "additionalProperties": False,
}


def _calls(random: Random, *, thinking: bool, seed: int) -> ConstrainedRequest:
    schemas = {"get_weather": _WEATHER, "search": _SEARCH}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in schemas.items()
    ]
    choice: Any = random.choice(("required", {"type": "function", "function": {"name": "search"}}))
    fields = {
        "tools": tools,
        "tool_choice": "auto" if thinking else choice,
        "parallel_tool_calls": random.random() < 0.3,
    }
    question = f"What is the weather in {random.choice(_CITIES)}?"
    body = _asked(question, thinking=thinking, seed=seed, **fields)
    several, named = fields["parallel_tool_calls"], not thinking and choice != "required"

    def judge(text: str) -> str | None:
        calls = json.loads(text)
        if len(calls) > 1 and not several:
            return f"{len(calls)} calls"
        for name, arguments in calls:
            if name not in schemas or (named and name != "search"):
                return f"the call of {name}"
            if fault := _judge_json(arguments, schemas[name]):
                return fault
        return None

    return ConstrainedRequest("calls", body, judge, calls=None if thinking else True)


def _choice(random: Random, *, thinking: bool, seed: int) -> ConstrainedRequest:
    texts = list(random.sample([*_CITIES, "Rome or Paris", "none", "Oslo, Norway"], 4))
    body = _asked(
        "Which city is it?", thinking=thinking, seed=seed, structured_outputs={"choice": texts}
    )
    return ConstrainedRequest("choice", body, lambda text: None if text in texts else text)


def _completion(random: Random, *, thinking: bool, seed: int) -> ConstrainedRequest:
    """Return a plain completion; nothing is said of reasoning there."""
    if thinking:
        schema: dict[str, Any] = {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 40},
            "minItems": 2,
            "maxItems": 5,
        }
        constraint: dict[str, Any] = {"json": schema}
        judge: Judge = lambda text: _judge_json(text, schema)  # noqa: E731
    else:
        pattern, _ = random.choice(_PATTERNS)
        constraint = {"regex": pattern}
        judge = lambda text: _judge_pattern(text, pattern)  # noqa: E731
    body = {"prompt": "The answer is ", "constraint": constraint, "seed": seed}
    return ConstrainedRequest("completion", body, judge)


_KINDS = (_schema, _regex, _grammar, _calls, _choice, _completion)


# ---- judges -------------------------------------------------------------------------------------


def _judge_pattern(text: str, pattern: str) -> str | None:
    return None if re.fullmatch(pattern, text, re.ASCII) else f"{text!r} is not {pattern}"


def _judge_sum(text: str) -> str | None:
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return f"{text!r} is no sum"
    return _judge_pattern(text, "[0-9+*()-]+")


def _judge_json(text: str, schema: Mapping[str, Any]) -> str | None:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"{text!r}: {error}"
    return None if _fits(value, schema) else f"{text} does not follow {json.dumps(schema)}"


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: not isinstance(value, bool) and value == int(value),
}


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Judge by the few keywords that are used here."""
    named = schema.get("type", [])
    types = [named] if isinstance(named, str) else named
    right = [
        not types or any(_is(value, name) for name in types),
        "enum" not in schema or any(_equal(value, each) for each in schema["enum"]),
        "anyOf" not in schema or any(_fits(value, each) for each in schema["anyOf"]),
    ]
    if isinstance(value, str):
        right.append(re.search(schema.get("pattern", ""), value) is not None)
        right.append(len(value) <= schema.get("maxLength", len(value)))
    elif isinstance(value, dict):
        known = schema.get("properties", {})
        right.append(all(name in value for name in schema.get("required", ())))
        right.append(
            all(name in known and _fits(each, known[name]) for name, each in value.items())
        )
    elif isinstance(value, list):
        right.append(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)))
        right.append(all(_fits(each, schema.get("items", {})) for each in value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        right.append(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return all(right)


def _is(value: Any, name: str) -> bool:
    return not (name == "integer" and not isinstance(value, int | float)) and _TYPES[name](value)


def _equal(one: Any, two: Any) -> bool:
    return one == two and isinstance(one, bool) == isinstance(two, bool)
