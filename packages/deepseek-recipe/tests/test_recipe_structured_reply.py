"""Replies: free reasoning, then a form; tool calls by token id; tags; second opinions."""

from __future__ import annotations

import json
import random
from functools import cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from deepseek_recipe.encoding.tokenizer import packaged_folder
from deepseek_recipe.errors import ConstraintError, ConversionError, RequestError
from deepseek_recipe.recipe import DeepseekV4, DeepseekV41, Prepared
from deepseek_recipe.structured import Matcher, Spec, compile, fill_windows
from deepseek_recipe.structured.grammar import build
from deepseek_recipe.structured.reply import ReplyGrammar, ReplyMatcher
from deepseek_recipe.structured.schema.formats import FORMAT_PATTERNS
from deepseek_recipe.structured.schema.pattern import read_pattern
from deepseek_recipe.structured.schema.raw import raw_terminal
from deepseek_recipe.structured.schema.shapes import String
from deepseek_recipe.structured.tools import CalledTool, CallMarkup, lower_calls

V41_NAMES = {"<｜System｜>": 128799, "<｜image｜>": 129264, "<｜image2｜>": 129279}
EOS, THINK_END, MARK = 1, 128822, 128825
ASK = {"messages": [{"role": "user", "content": "json please"}]}
UUID = "01234567-89ab-cdef-0123-456789abcdef"
OFF = {"thinking": {"type": "disabled"}}

ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z ]{1,8}$"},
        "days": {"type": ["integer", "null"]},
        "unit": {"type": "string", "enum": ["C", "F </x", ""]},
        "host": {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "boolean"}]},
        "list": {"type": "array", "items": {"type": "boolean"}},
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": ARGUMENTS, "strict": True},
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {}},
            "strict": True,
        },
    },
    {
        "type": "function",
        "function": {"name": "any", "parameters": {"type": "object", "properties": {}}},
    },
]
NAMED = {"type": "function", "function": {"name": "look"}}


@cache
def recipe(version: str) -> DeepseekV4 | DeepseekV41:
    if version == "v4":
        return DeepseekV4(packaged_folder())
    return DeepseekV41(packaged_folder(), token_map=V41_NAMES)


def prepared(version: str = "v41", **fields: Any) -> Prepared:
    return recipe(version).prepare({**ASK, **OFF, **fields})


def grammar(version: str = "v41", **fields: Any) -> ReplyGrammar:
    found = prepared(version, **fields).grammar()
    assert found is not None
    return found


def plain(text: str) -> list[int]:
    return recipe("v41").tokenizer.encode_plain(text)


def allowed(matcher: Matcher | ReplyMatcher) -> np.ndarray:
    row = np.full(recipe("v41").token_vocabulary.num_words, -1, np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def walk(matcher: ReplyMatcher, seed: int, limit: int = 600) -> list[int] | None:
    """Return a reply at random that ends soon, None if it does not end."""
    rng = random.Random(seed)
    ends = [*(plain(each)[0] for each in ("</", "<", "}", "]", '"', "e")), MARK, THINK_END]
    ids: list[int] = []
    while len(ids) < limit:
        if matcher.done:
            return ids
        choice = allowed(matcher)
        wanted = [
            each
            for each in ends
            if choice[min(np.searchsorted(choice, each), len(choice) - 1)] == each
        ]
        token = rng.choice(wanted) if wanted and rng.random() < 0.4 else int(rng.choice(choice))
        assert matcher.accept([token]) == 1
        if token == EOS:
            return ids
        ids.append(token)
    return None


def message_of(request: Prepared, ids: list[int]) -> tuple[dict[str, Any], list[str]]:
    reply = request.reply("x", "m", 0)
    reply.push(ids)
    reply.finish("stop")
    response: Any = reply.response()
    return response["choices"][0]["message"], list(reply.malformed)


@pytest.mark.parametrize("version", ["v4", "v41"])
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
        {"tool_choice": "auto"},
        {"tool_choice": "auto", "thinking": {"type": "enabled"}},
    ],
    ids=["required", "named", "auto", "auto, thinking"],
)
def test_replies_by_mask_are_calls_that_parse_and_follow_their_schemas(
    version: str, fields: dict[str, Any]
) -> None:
    request = prepared(version, tools=TOOLS, **fields)
    found = request.grammar()
    assert found is not None
    strict = request.converted.conversation.tools[0].parameters
    calls = ended = 0
    for seed in range(12):
        ids = walk(found.matcher(), seed)
        if ids is None:
            continue
        ended += 1
        message, malformed = message_of(request, ids)
        assert not malformed
        for call in message.get("tool_calls") or ():
            calls += 1
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "look":
                jsonschema.validate(arguments, strict)
                assert list(arguments) == list(ARGUMENTS["properties"])
            elif call["function"]["name"] == "now":
                assert arguments == {}
            else:
                assert call["function"]["name"] == "any" and fields["tool_choice"] != NAMED
        if fields["tool_choice"] != "auto":
            assert message["tool_calls"] and not message["content"]
    assert ended >= 6 and calls >= 4


def test_a_call_of_the_prompts_own_form_is_accepted() -> None:
    """What the template writes for past calls is what the grammar takes, to the token."""
    arguments = {"city": "Bonn", "days": None, "unit": "", "host": True, "list": [True]}
    calls = [("look", arguments), ("now", {}), ("any", {"x": "</｜DSML｜ invoke>", "y": 1.5})]
    for version in ("v4", "v41"):
        asked = prepared(version, tools=TOOLS, tool_choice="required")
        past = {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": str(number),
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(given)},
                }
                for number, (name, given) in enumerate(calls)
            ],
        }
        results = [{"role": "tool", "tool_call_id": str(n), "content": ""} for n in range(3)]
        messages = [*ASK["messages"], past, *results]
        shown = list(
            recipe(version).prepare({"messages": messages, "tools": TOOLS, **OFF}).token_ids
        )
        start = len(asked.token_ids)
        assert shown[:start] == list(asked.token_ids)
        reply = shown[start : shown.index(EOS, start) + 1]
        found = asked.grammar()
        assert found is not None
        matcher = found.matcher()
        assert matcher.accept(reply) == len(reply) and matcher.ended


def test_one_call_where_several_are_not_wanted() -> None:
    call = [*plain("<"), MARK, *plain(' invoke name="now">\n\n</'), MARK, *plain(" invoke>\n")]
    asked = {"tools": TOOLS, "tool_choice": "required"}
    several, single = grammar(**asked), grammar(**asked, parallel_tool_calls=False)
    assert several.matcher().accept([*call, *plain("<")]) == len(call) + 1
    matcher = single.matcher()
    assert matcher.accept([*call, *plain("<")]) == len(call)
    assert matcher.forced() == [*plain("</"), MARK, *plain(" calls>")]
    # A promise like any other: tools that may be called need masks for it.
    assert prepared(tools=TOOLS[2:], parallel_tool_calls=False).grammar() is not None


def test_strict_schemas_are_enforced_with_all_their_keywords() -> None:
    """The checkpoint is shown a subset; what it leaves out counts anyway, or is refused."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 3},
            "k": {"type": "string", "const": "x"},
        },
        "$defs": {"unused": {"type": "integer"}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    found = grammar(response_format=form)
    for text, right in (
        ('{"a":"abc","k":"x"}', True),
        ('{"a":"abcd","k":"x"}', False),
        ('{"a":"abc","k":"y"}', False),
        ('{"a":"abc"}', False),
        ('{"a":"abc","k":"x","z":1}', False),
    ):
        ids = [*plain(text), EOS]
        assert (found.matcher().accept(ids) == len(ids)) == right, text
    assert found.fault_of('{"a":"abcd","k":"x"}')
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    called = grammar(tools=[tool], tool_choice="required").matcher()
    ids = [*plain("<"), MARK, *plain(' invoke name="f">\n<'), MARK]
    ids += plain(' parameter name="a" string="true">abc</')
    assert called.accept(ids) == len(ids) and called.accept(plain("d")) == 0
    unknown = {**schema, "properties": {"a": {"type": "string", "foo": 1}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": unknown, "strict": True}}
    with pytest.raises(ConversionError, match="/properties/a/foo: unknown keyword"):
        prepared(response_format=form).grammar()


def test_references_of_strict_tools_lead_to_their_definitions() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer"}},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": parameters, "strict": True},
    }
    matcher = grammar(tools=[tool], tool_choice="required").matcher()
    ids = [*plain("<"), MARK, *plain(' invoke name="f">\n<'), MARK, *plain(' parameter name="a"')]
    assert matcher.accept(ids) == len(ids)
    assert matcher.accept(plain(' string="false">12</')) and matcher.accept([MARK]) == 1


def test_tools_without_a_promise_need_no_masks() -> None:
    assert prepared(tools=TOOLS[2:]).grammar() is None
    assert prepared().grammar() is None
    assert prepared(tools=TOOLS[2:], tool_choice="required").grammar() is not None


def test_reasoning_is_free_but_for_what_would_skip_the_answer() -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": {"a": 1}}, "name": "x"}}
    asked = {"response_format": schema, "thinking": {"type": "enabled"}}
    matcher = grammar(**asked).matcher()
    size = recipe("v41").token_vocabulary.size
    assert size - len(allowed(matcher)) == 1  # the end
    assert matcher.accept([*plain("Hm {"), MARK, EOS]) == len(plain("Hm {")) + 1
    assert matcher.forced() == [] and not matcher.done
    assert matcher.accept([THINK_END]) == 1
    assert matcher.accept([MARK]) == matcher.accept([THINK_END]) == 0
    answer = plain('{"a":1}')
    assert matcher.accept([*answer, EOS]) == len(answer) + 1
    assert matcher.done and matcher.ended and matcher.accept([EOS]) == 0
    tools = grammar(tools=TOOLS, thinking={"type": "enabled"}).matcher()
    assert size - len(allowed(tools)) == 2
    assert tools.accept([*plain("<"), MARK]) == 1


def test_the_mark_begins_calls_only_behind_its_bracket() -> None:
    matcher = grammar(tools=TOOLS).matcher()
    assert matcher.accept([MARK]) == 0 and MARK not in allowed(matcher)
    ids = plain("Look:\n\n<")
    assert matcher.accept(ids) == len(ids) and MARK in allowed(matcher)
    assert matcher.accept(plain("b>")) and matcher.accept([MARK]) == 0
    again = plain(" <")
    assert matcher.accept([*again, MARK]) == len(again) + 1
    assert matcher.forced()[: len(plain(" calls>\n<"))] == plain(" calls>\n<")
    quiet = grammar(tools=TOOLS).matcher()
    assert quiet.accept([*plain("No."), EOS]) == len(plain("No.")) + 1
    assert quiet.done and quiet.ended and not len(allowed(quiet)) and quiet.accept([EOS]) == 0


@pytest.mark.parametrize("seed", range(6))
def test_windows_across_borders_are_what_single_steps_say(seed: int) -> None:
    rng = random.Random(seed)
    found = grammar(tools=TOOLS, thinking={"type": "enabled"})
    text = [*plain("I see."), THINK_END, *plain("So:\n\n<"), MARK]
    text += [*plain(" calls>\n<"), MARK, *plain(' invoke name="now">\n\n</'), MARK]
    text += [*plain(" invoke>\n</"), MARK, *plain(" calls>"), EOS]
    matcher, words = found.matcher(), recipe("v41").token_vocabulary.num_words
    at = 0
    while at < len(text):
        drafts = text[at : at + rng.randint(0, 6)]
        if drafts and rng.random() < 0.5:
            drafts[rng.randrange(len(drafts))] = rng.choice([EOS, MARK, THINK_END, 77])
        rows = np.full((len(drafts) + 1, words), -1, np.int32)
        before, free = matcher.num_accepted, allowed(matcher)
        taken = matcher.fill_window(rows, drafts)
        assert matcher.num_accepted == before and (allowed(matcher) == free).all()
        steps, single = found.matcher(), 0
        assert steps.accept(text[:at]) == at
        row = np.empty(words, np.int32)
        for place in range(len(drafts) + 1):
            steps.fill(row)
            assert (rows[place] == row).all()
            if place == len(drafts) or not steps.accept([drafts[place]]):
                break
            single += 1
        assert taken == single and not rows[single + 1 :].any()
        stride = rng.randint(1, 3)
        ahead = text[at : at + stride]
        assert matcher.accept(ahead) == len(ahead)
        matcher.rollback(back := rng.randint(0, len(ahead)))
        at += len(ahead) - back
    assert matcher.ended


def test_a_batch_may_hold_replies_in_any_phase() -> None:
    asked = grammar(tools=TOOLS, thinking={"type": "enabled"})
    text = [*plain("Hm"), THINK_END, *plain("<"), MARK, *plain(" calls>\n<")]
    matchers: list[Matcher | ReplyMatcher] = []
    for count in range(len(text) + 1):
        matcher = asked.matcher()
        assert matcher.accept(text[:count]) == count
        matchers.append(matcher)
    plain_text = compile(Spec.regex("[ab]+"), asked.vocabulary).matcher()
    drafts = [text[place : place + 3] for place in range(len(text) + 1)]
    words = asked.vocabulary.num_words
    rows = np.full((len(drafts) + 1 + sum(map(len, drafts)), words), -1, np.int32)
    taken = fill_windows([*matchers, plain_text], [*drafts, []], rows)
    assert taken == [*map(len, drafts), 0]
    first = 0
    for matcher, window in zip(matchers, drafts, strict=True):
        single = np.empty((len(window) + 1, words), np.int32)
        matcher.fill_window(single, window)
        assert (rows[first : first + len(window) + 1] == single).all()
        first += len(window) + 1
    assert (
        np.flatnonzero(np.unpackbits(rows[-1].view(np.uint8), bitorder="little"))
        == allowed(plain_text)
    ).all()


def test_roll_back_reaches_over_borders_and_no_further_than_the_begin() -> None:
    matcher = grammar(tools=TOOLS, thinking={"type": "enabled"}).matcher()
    first = allowed(matcher)
    ids = [*plain("Hm"), THINK_END, *plain("<"), MARK, *plain(" calls>\n")]
    assert matcher.accept(ids) == len(ids)
    matcher.rollback(len(ids))
    assert (allowed(matcher) == first).all() and matcher.num_accepted == 0
    with pytest.raises(ConstraintError, match="0 to 0"):
        matcher.rollback(1)
    with pytest.raises(ConstraintError, match="something else"):
        matcher.accept([1.5])  # type: ignore[list-item]
    with pytest.raises(ConstraintError, match="int32"):
        matcher.fill(np.empty(3, np.int32))


@pytest.mark.parametrize(
    ("shape", "right", "wrong"),
    [
        (String(), ["", "a\n</", 'q"\\'], []),
        (String(2, 3), ["ab", "né\n"], ["a", "abcd"]),
        (String(values=("a/b", "", "</")), ["a/b", "", "</"], ["a", "</</"]),
        (String(patterns=(read_pattern("^a+/$"),)), ["a/", "aaa/"], ["", "a", "a/x"]),
        (String(patterns=(read_pattern("b"),)), ["b", "\nb</"], ["", "a"]),
        (String(denied=(read_pattern("b"),)), ["", "a</"], ["ab", "b</"]),
        (String(excluded=frozenset({"x", ""})), ["y", "xx"], ["x", ""]),
        (String(formats=("email",)), ["a.b+c@d-e.org", "x@y"], ["a", "a@", ".a@b", "a@b.-c"]),
        (String(formats=("hostname",)), ["a", "a-1.b", "a" * 63], ["", "a.", "-a", "a" * 64]),
        (String(formats=("hostname",)), [], [".".join(["a" * 50] * 6)]),
        (String(patterns=(FORMAT_PATTERNS["uuid"],)), [UUID], ["0123", f"{UUID}a"]),
        (String(9, None, patterns=(FORMAT_PATTERNS["ipv4"],)), ["1.22.33.4"], ["1.2.3.4"]),
    ],
    ids=str,
)  # fmt: skip
def test_raw_texts_follow_their_schema(shape: String, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert fits(shape, text), text
    for text in wrong:
        assert not fits(shape, text), text


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_addresses_are_those_of_another_library(family: str) -> None:
    read = IPv4Address if family == "ipv4" else IPv6Address
    rng = random.Random(5)
    texts = [
        "::",
        "::1",
        "1::",
        "1:2:3:4:5:6:7:8",
        "1:2:3:4:5:6:7::",
        "::2:3:4:5:6:7:8",
        "1::3:4:5:6:7:8",
    ]
    texts += [
        "1:2:3:4:5:6:1.2.3.4",
        "::ffff:1.2.3.4",
        "1:2:3:4:5::1.2.3.4",
        "0.0.0.0",
        "255.255.255.255",
    ]
    texts += [
        "256.1.1.1",
        "1.2.3",
        "01.2.3.4",
        "1:2:3:4:5:6:7:8:9",
        "1::2::3",
        ":1",
        "12345::",
        ":::",
        "",
    ]
    for _ in range(150):
        parts = [
            rng.choice(["0", "ab", "9f", "1234", "", "12", "255"]) for _ in range(rng.randint(1, 9))
        ]
        texts.append(":".join(parts) if rng.random() < 0.7 else ".".join(parts))
    shape = String(patterns=(FORMAT_PATTERNS[family],))
    for text in texts:
        try:
            read(text)
            valid = True
        except AddressValueError:
            valid = False
        assert fits(shape, text) == valid, text


def fits(shape: String, text: str) -> bool:
    """Return whether a raw terminal takes a text, byte by byte."""
    matcher = LLMatcher(LLTokenizer("byte"), f"start: T\nT: {raw_terminal(shape, '/x')}")
    assert not matcher.is_error(), matcher.get_error()
    data = list(f"{text}</".encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


MARKUP = CallMarkup(MARK, " calls", " invoke", " parameter", "\n")


@pytest.mark.parametrize(
    ("parameters", "path", "words"),
    [
        ({"type": "object"}, "", "additionalProperties"),
        ({"type": "string"}, "", "contradicts"),
        ({**ARGUMENTS, "additionalProperties": False, "minProperties": 1}, "", "counted or"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "/properties/a/type", "strin"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string", "format": "uri"}},
                "additionalProperties": False,
            },
            "/properties/a",
            "cannot be enforced; allowed: date",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"enum": ["x"], "pattern": "^y"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "/properties/a",
            "contradicts",
        ),
        (
            {
                "type": "object",
                "properties": {'a" string=': {"type": "null"}},
                "additionalProperties": False,
            },
            '/properties/a" string=',
            "rename",
        ),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_enforced_are_refused_with_their_tool(
    parameters: Any, path: str, words: str
) -> None:
    tools = [CalledTool("free"), CalledTool("bad", parameters)]
    with pytest.raises(ConstraintError, match="tool 'bad'") as caught:
        lower_calls(tools, MARKUP, opened=True, several=True)
    assert caught.value.path == path and words in caught.value.message


def test_optional_arguments_may_be_left_out() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
        "required": ["b"],
        "additionalProperties": False,
    }
    lowered = lower_calls([CalledTool("f", schema)], MARKUP, opened=True, several=False)
    found = build(lowered, recipe("v41").token_vocabulary)

    def takes(*names: str) -> bool:
        ids = [*plain("<"), MARK, *plain(' invoke name="f">\n')]
        for name in names:
            value = "abc".index(name) + 1
            text = f' parameter name="{name}" string="false">{value}</'
            ids += [*plain("<"), MARK, *plain(text), MARK, *plain(" parameter>\n")]
        ids += [*plain("</"), MARK, *plain(" invoke>\n</"), MARK, *plain(" calls>"), EOS]
        return found.matcher().accept(ids) == len(ids)

    assert takes("b") and takes("a", "b") and takes("b", "c") and takes("a", "b", "c")
    assert not takes() and not takes("a") and not takes("b", "a") and not takes("b", "b")


TAGS = {
    "structures": [
        {"begin": "<f=add>", "schema": {"const": [1, 2]}, "end": "</f>"},
        {"begin": "<f=not>", "schema": {"type": "boolean"}, "end": ""},
        {"begin": "!", "schema": {"const": None}, "end": "!"},
    ],
    "triggers": ["<f=", "!"],
}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("", True), ("free < text <f", True), ("a <f=add>[1,2]</f> b <f=not>true", True),
        ("!null!!null!", True), ("<f=add>[1,2]", False), ("<f=", False), ("<f=x>", False),
        ("! null!", False), ("<f=not>1", False), ("a!", False),
    ],
)  # fmt: skip
def test_structural_tags(text: str, right: bool) -> None:
    matcher = compile(Spec.structural_tag(TAGS), recipe("v41").token_vocabulary).matcher()
    ids = [*plain(text), EOS]
    assert (matcher.accept(ids) == len(ids)) == right


def test_values_of_any_kind_beside_others_take_blanks() -> None:
    """The engine fails where two kinds of blanks may follow."""
    for schema, text in (
        (
            {
                "anyOf": [
                    {"type": "object", "properties": {"a": {"type": "string"}}},
                    {"type": "object"},
                ]
            },
            '{"a": "x", "b": [1, 2]}',
        ),
        (
            {
                "anyOf": [
                    {"type": "array", "minItems": 1},
                    {"type": "array", "items": {"type": "string"}},
                ]
            },
            '["a", "b"]',
        ),
        ({"type": "array", "contains": {"type": "number"}}, "[ 1, {}]"),
    ):
        matcher = compile(Spec.json_schema(schema), recipe("v41").token_vocabulary).matcher()
        for token in plain(text):
            assert token in allowed(matcher) and matcher.accept([token]) == 1


def test_a_grammar_that_the_engine_has_spoilt_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, vocabulary = Spec.choice(["spoilt"]), recipe("v41").token_vocabulary
    first = compile(spec, vocabulary)
    assert compile(spec, vocabulary) is first
    monkeypatch.setattr(type(first), "is_broken", property(lambda self: self is first))
    assert compile(spec, vocabulary) is not first


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"structures": []}, "/structures"),
        ({"triggers": [""]}, "/triggers/0"),
        ({"triggers": ["<g="]}, "/structures/0/begin"),
        ({"triggers": ["=", "!"]}, "/structures/0/begin"),
        ({"structures": [{"begin": "!", "schema": True}]}, "/structures/0"),
        ({"structures": [{"begin": "!", "schema": True, "end": "5"}]}, "/structures/0/end"),
        ({"structures": [{"begin": "!", "schema": True, "end": 1}]}, "/structures/0/end"),
        (
            {"structures": [{"begin": "!", "schema": {"items": {"type": "x"}}, "end": ""}]},
            "/structures/0/schema/items/type",
        ),
        ({"structures": [{"begin": "!", "schema": False, "end": ""}]}, "/structures/0/schema"),
        ({"format": {}}, ""),
    ],
)
def test_tags_that_are_refused(change: dict[str, Any], path: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        compile(Spec.structural_tag({**TAGS, **change}), recipe("v41").token_vocabulary)
    assert caught.value.path == path
    with pytest.raises(ConstraintError, match="not JSON"):
        compile(Spec.structural_tag("{"), recipe("v41").token_vocabulary)


def test_a_second_opinion_is_soon_given_and_never_fails() -> None:
    doubled: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(24)
    }
    slow = "a" * 40 + "!"
    for schema, text in (
        ({"type": "number"}, "1e99999999999999999999"),
        ({"type": "integer"}, "9" * 5000),
        ({"enum": [slow], "not": {"pattern": "^(a+)+$"}}, json.dumps(slow)),
        ({"$ref": "#/$defs/d0", "$defs": {**doubled, "d24": True}}, "1"),
        ({"type": "string", "pattern": "^\\W+$"}, '"é"'),
    ):
        found = compile(Spec.json_schema(schema), recipe("v41").token_vocabulary)
        assert found.fault_of(text) is None, schema


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        (Spec.json_schema({"multipleOf": 0.1, "type": "number"}), "0.3", "0.31"),
        (Spec.json_schema({"properties": {"a": {"type": "string"}}}), '{"a":"x"}', '{"a":1}'),
        (Spec.json_schema({"type": "integer", "multipleOf": 1.5}), "3.0", "3.5"),
        (Spec.json_schema({"type": "number"}), "1e999999999", '"1"'),
        (Spec.json_object(), "{}", "[]"),
        (Spec.choice(["a", "b"]), "b", "c"),
        (Spec.json_schema(True), "1", "1 1"),
    ],
)
def test_a_second_opinion_of_finished_texts(spec: Spec, right: str, wrong: str) -> None:
    found = compile(spec, recipe("v41").token_vocabulary)
    assert found.fault_of(right) is None and found.fault_of(wrong)
    assert compile(Spec.regex("a"), recipe("v41").token_vocabulary).fault_of("b") is None


ANSWER = {"type": "object", "properties": {"a": {"type": "null"}}}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": ANSWER}}},
        ),
        ("chat", {"structured_outputs": {"json": ANSWER}}),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": ANSWER}}},
        ),
        ("responses", {"structured_outputs": {"json": json.dumps(ANSWER)}}),
        ("messages", {"structured_outputs": {"json": ANSWER}, "max_tokens": 50}),
    ],
    ids=str,
)
def test_every_protocol_has_its_answer_enforced_behind_reasoning(
    protocol: str, fields: dict[str, Any], thinks: bool
) -> None:
    body: dict[str, Any] = {**fields, "messages": ASK["messages"]}
    if protocol == "responses":
        body = {**fields, "input": "x", "reasoning": {"effort": "high" if thinks else "none"}}
    elif thinks:
        body["thinking"] = {
            "type": "enabled",
            **({} if protocol == "chat" else {"budget_tokens": 9}),
        }
    else:
        body["thinking"] = {"type": "disabled"}
    found = recipe("v4").prepare(body, protocol).grammar()
    assert found is not None
    reply = [*plain('{"a":null}'), EOS]
    if thinks:
        reply = [*plain("{}"), THINK_END, *reply]
    assert found.matcher().accept(reply) == len(reply)
    wrong = [*(plain("x") if thinks else ()), *([THINK_END] if thinks else ()), *plain('{"a":1}')]
    assert found.matcher().accept(wrong) < len(wrong)


def test_a_request_that_cannot_be_enforced_is_refused_with_its_place() -> None:
    schema = {"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema, "name": "x"}}
    with pytest.raises(ConversionError, match="/properties/a/pattern: pattern"):
        prepared(response_format=form).grammar()
    assert grammar(response_format={"type": "json_object"}).matcher().accept(plain("[")) == 0
    assert grammar(response_format={"type": "regex", "regex": "a+"}).matcher().accept(plain("aa"))


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        ({"json": {"const": [1]}}, "[1]", "[2]"),
        ({"json": '{"type": "null"}'}, "null", "1"),
        ({"json": True}, "1", "x"),
        ({"json_object": True}, "{}", "[]"),
        ({"regex": "a|b", "json": None}, "b", "c"),
        ({"choice": ["x", "y"]}, "y", "z"),
        ({"grammar": 'root ::= "a" "b"'}, "ab", "b"),
        ({"structural_tag": TAGS}, "!null!", "!1!"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_constraints_of_plain_texts(constraint: Any, right: str, wrong: str) -> None:
    found = recipe("v4").grammar(constraint)
    for text, holds in ((right, True), (wrong, False)):
        ids = [*plain(text), EOS]
        assert (found.matcher().accept(ids) == len(ids)) == holds


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({}, "`constraint` has no member; allowed: exactly one of `json`"),
        ({"regex": "a", "choice": ["a"]}, "`regex` and `choice`"),
        ({"regex": 1}, "`regex`"),
        ({"choice": []}, "`choice`"),
        ({"json_object": False}, "`constraint.json_object` is false"),
        ({"json": {"type": "x"}}, "Invalid 'constraint.json'"),
        ({"json": "{"}, "not JSON"),
        ({"regx": "a"}, "regx"),
        ({"regex": "(?=a)"}, "The form of the answer cannot be enforced: 1:1"),
        ({"grammar": "a ::= b"}, "cannot be enforced: 1:7"),
        ({"json": {"properties": {"a": {"$ref": "http://x"}}}}, "Retrieval is disabled"),
    ],
    ids=str,
)
def test_constraints_that_are_refused(constraint: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        recipe("v4").grammar(constraint)
