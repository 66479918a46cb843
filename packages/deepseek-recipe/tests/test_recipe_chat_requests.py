"""Requests of Chat Completions: what they mean, and why some are refused."""

from __future__ import annotations

from typing import Any

import pytest

from deepseek_recipe.conversation import ImageSource, OutputConstraint, text_of
from deepseek_recipe.errors import BodyError, ConversionError
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.chat.convert import convert_chat
from deepseek_recipe.protocols.chat.models import ChatRequest

V4, V41 = "DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash"
USER = {"role": "user", "content": "q"}
PREFIX = {"role": "assistant", "content": "Once", "prefix": True}
OFF = {"type": "disabled"}
PNG = "data:image/png;base64,iVBORw0KGgo="


def convert(*, model: str = V4, options: dict[str, Any] | None = None, **body: Any) -> Any:
    request = {"model": model, "messages": [USER], "thinking": OFF, **body}
    return convert_chat(parse_body(ChatRequest, request), ConversionOptions(**(options or {})))


def refusal(**body: Any) -> str:
    with pytest.raises(ConversionError) as caught:
        convert(**body)
    return caught.value.message


def body_error(**body: Any) -> str:
    with pytest.raises(BodyError) as caught:
        convert(**body)
    return caught.value.message


def call(*call_ids: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": each, "type": "function", "function": function} for each in call_ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "r"}


def tool(name: str = "a", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# ---- fields -------------------------------------------------------------------------------------


def test_max_completion_tokens_wins() -> None:
    assert convert(max_completion_tokens=7, max_tokens=9).settings.max_tokens == 7
    assert convert(max_completion_tokens=None, max_tokens=9).settings.max_tokens == 9


@pytest.mark.parametrize(
    ("field", "harmless", "effect"),
    [
        ("presence_penalty", 0, 0.5),
        ("frequency_penalty", 0.0, -1),
        ("logit_bias", {}, {"5": 1}),
        ("functions", [], [{"name": "f"}]),
        ("function_call", "auto", {"name": "f"}),
        ("modalities", ["text"], ["text", "audio"]),
        ("audio", None, {"voice": "x", "format": "wav"}),
        ("prediction", None, {"type": "content", "content": "x"}),
        ("store", False, True),
        ("web_search_options", None, {}),
        ("moderation", None, {"model": "m"}),
        ("top_k", None, 5),
    ],
)
def test_field_with_an_effect_we_do_not_have_is_refused(
    field: str, harmless: object, effect: object
) -> None:
    assert convert(**{field: harmless}).left_out == ()
    assert f"`{field}`" in refusal(**{field: effect})
    ignored = convert(options={"unsupported": "ignore"}, **{field: effect})
    assert ignored.left_out == (field,)


@pytest.mark.parametrize(
    "field",
    [
        *("user", "user_id", "safety_identifier", "metadata", "prompt_cache_key", "verbosity"),
        *("prompt_cache_options", "prompt_cache_retention", "service_tier"),
    ],
)
def test_hint_of_any_type_is_accepted(field: str) -> None:
    assert convert(**{field: {"a": [1]}}).left_out == ()


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({**USER, "prefix": True}, "messages[0].prefix"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "messages[0].refusal"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "content": "x", "function_call": {}}, "messages[0].function_call"),
        ({**USER, "content": [{"type": "text", "text": "x", "a": 1}]}, "messages[0].content[0].a"),
    ],
)
def test_refused_field_of_a_message_is_named(message: dict[str, Any], place: str) -> None:
    assert f"`{place}`" in refusal(messages=[message])


def test_message_of_a_response_can_be_sent_back() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [{"index": 0, **call("a")["tool_calls"][0]}],
    }
    assert convert(messages=[USER, message, result("a")]).left_out == ()


def test_obfuscation_is_refused() -> None:
    options = {"include_usage": True, "include_obfuscation": True}
    assert "`stream_options.include_obfuscation`" in refusal(stream=True, stream_options=options)


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "seed", "n", "top_logprobs"])
def test_boolean_is_no_number(field: str) -> None:
    assert f"`{field}`" in body_error(**{field: True})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 10.0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"messages": "q"}, "messages"),
        ({"messages": ["q"]}, "messages[0]"),
        ({"messages": [{"content": "q"}]}, "messages[0]"),
        ({"messages": [{"role": "function", "content": "q"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "q"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "latest_reminder", "content": []}]}, "messages[0].content"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"thinking": {}}, "thinking.type"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": ["x"]}}, "structured_outputs.grammar"),
    ],
)
def test_body_error_names_the_field(body: dict[str, Any], field: str) -> None:
    assert f"`{field}`" in body_error(**body)


def test_unknown_model_is_refused_with_the_known_names() -> None:
    assert refusal(model="x") == (
        "The supported API model names are DeepSeek-V4-Pro, DeepSeek-V4.1-Flash, but you passed x."
    )


# ---- order of checks ----------------------------------------------------------------------------

# One violation each, in the order in which they are reported. A prefix fits no tools, so that the
# two are not in one list with a missing result.
VIOLATIONS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"messages": [USER, call("a")]}, "insufficient"),
    ({"response_format": {"type": "json_object"}}, "word 'json'"),
    ({"tools": [tool("a")], "tool_choice": named("z")}, "no function named 'z'"),
    ({"stop": [""]}, "stop[0]"),
    ({"stream_options": {}}, "stream_options"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "Invalid json schema: 5 is not of types",
    ),
    ({"n": 2}, "Invalid n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 2}, "logprobs must be set to true"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
]


@pytest.mark.parametrize("index", range(len(VIOLATIONS) - 1))
def test_first_violation_is_reported(index: int) -> None:
    body = {key: value for each, _ in reversed(VIOLATIONS[index:]) for key, value in each.items()}
    assert VIOLATIONS[index][1] in refusal(options={"unsupported": "ignore"}, **body)


# ---- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "Empty input messages"),
        ([USER, call("a", "a"), result("a")], "'tool_call_id' of a in message[1]"),
        ([USER, call("a", "b"), result("a"), result("a")], "'tool_call_id' of a in message[3]"),
        ([USER, call("a"), result("a"), result("a")], "must be a response to a preceding"),
        ([USER, call("a", "b"), result("zz"), result("yy")], "response messages: zz"),
        ([USER, call("a"), call("b"), result("b")], "insufficient tool messages"),
        ([USER, call("a"), {"role": "system", "content": ""}, result("a")], "insufficient"),
        ([USER, {"role": "assistant", "reasoning_content": "x"}], "content or tool_calls must be"),
        ([PREFIX, USER], "prefix set true with message which is not final"),
    ],
)
def test_messages_that_do_not_fit_are_refused(messages: list[Any], reason: str) -> None:
    assert reason in refusal(messages=messages)


def test_id_of_an_earlier_exchange_can_be_used_again() -> None:
    assert convert(messages=[USER, call("a"), result("a"), call("a"), result("a")])


def test_developer_is_system_in_place_or_user() -> None:
    messages = [USER, {"role": "developer", "content": "be brief"}, USER]
    roles = {
        model: [each.role for each in convert(model=model, messages=messages).conversation.messages]
        for model in (V4, V41)
    }
    assert roles == {V4: ["user", "user", "user"], V41: ["user", "system", "user"]}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_instructions_without_text_are_dropped(role: str, content: object) -> None:
    converted = convert(messages=[{"role": role, "content": content}, USER])
    assert [each.role for each in converted.conversation.messages] == ["user"]


def test_parts_are_joined_around_images() -> None:
    image = {"type": "image_url", "image_url": {"url": PNG}}
    parts = [{"type": "text", "text": "a"}, image, image, {"type": "text", "text": ""}]
    message = {"role": "user", "content": parts}
    content = convert(model=V41, messages=[message]).conversation.messages[0].content
    source = ImageSource("data_url", PNG, "high", ".messages[0]")
    assert content == ("a\n\n", source, "\n\n", source, "\n\n")
    content = convert(messages=[message]).conversation.messages[0].content
    assert content == ("a\n\n[Unsupported Image]\n\n[Unsupported Image]\n\n",)


def test_file_is_refused_with_vision_and_noted_without() -> None:
    message = {"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}
    assert refusal(model=V41, messages=[message]) == ".messages[0]: file parts are not supported"
    content = convert(messages=[message]).conversation.messages[0].content
    assert text_of(content) == "[Unsupported Image]"


def test_prefix_fits_no_tools_and_no_json_object() -> None:
    messages = [{"role": "user", "content": "json"}, PREFIX]
    assert "Function call" in refusal(messages=messages, tools=[tool()], tool_choice="none")
    assert "json_object" in refusal(messages=messages, response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("content", "reasoning", "stage"),
    [
        ("", None, "reasoning_start"),
        ("", "", "reasoning_start"),
        ("", "r", "reasoning_continuation"),
        ("x", None, "content_continuation"),
        ("x", "r", "content_continuation"),
    ],
)
def test_prefix_decides_where_the_reply_begins(
    content: str, reasoning: str | None, stage: str
) -> None:
    message = {**PREFIX, "content": content, "reasoning_content": reasoning}
    converted = convert(messages=[USER, message], thinking={"type": "enabled"})
    assert converted.parsing.thinking_initial_stage == stage
    assert convert(messages=[USER, message]).parsing.thinking_initial_stage is None


@pytest.mark.parametrize(
    ("messages", "missing"),
    [
        ([USER, call("a"), result("a")], True),
        ([call("a"), result("a")], True),
        ([USER, call("a"), result("a"), {"role": "system", "content": "s"}], True),
        ([USER, call("a"), result("a"), USER], False),
        ([USER, {"role": "assistant", "content": "x"}], False),
        ([USER, {**call("a"), "reasoning_content": ""}, result("a")], False),
    ],
)
def test_missing_reasoning_is_refused_since_the_last_user_message(
    messages: list[Any], missing: bool
) -> None:
    body = {"messages": messages, "thinking": None, "options": {"missing_reasoning": "reject"}}
    if missing:
        assert "`reasoning_content` in the thinking mode" in refusal(**body)
    else:
        assert convert(**body)


def test_word_json_must_stand_in_one_message() -> None:
    parts = [{"type": "text", "text": "js"}, {"type": "text", "text": "on"}]
    form = {"type": "json_object"}
    assert "word 'json'" in refusal(
        messages=[{"role": "user", "content": parts}], response_format=form
    )
    answer = {"role": "assistant", "content": "JSON"}
    assert convert(messages=[USER, answer, USER], response_format=form)


# ---- what is enforced ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structured", "kind", "schema"),
    [
        ({"json": {"type": "object", "title": "é"}}, "json", '{"type":"object","title":"é"}'),
        ({"json": ' {"type": "object"}\n'}, "json", '{"type":"object"}'),
        ({"json": False}, "json", "false"),
        ({"json": "true"}, "json", "true"),
        ({"json_object": True}, "json", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", "né"]}, "choice", '["yes","né"]'),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"structural_tag": {"a": [1, 2]}}, "structural_tag", '{"a":[1,2]}'),
        ({"structural_tag": '{"a": 1e-7}'}, "structural_tag", '{"a":1e-7}'),
        ({"regex": "a", "json": None, "choice": None}, "regex", "a"),
    ],
)
@pytest.mark.parametrize("model", [V4, V41])
def test_structured_outputs_are_enforced_and_not_shown(
    structured: dict[str, Any], kind: str, schema: str, model: str
) -> None:
    plain = convert(model=model)
    asked = convert(model=model, structured_outputs=structured, response_format={"type": "text"})
    assert asked.settings.output_constraint == OutputConstraint(kind, schema)  # type: ignore[arg-type]
    assert (asked.conversation, asked.parsing) == (plain.conversation, plain.parsing)
    assert convert(model=model, structured_outputs=None).settings == plain.settings


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        ({}, "`structured_outputs` has no member; allowed: exactly one of `json`, `json_object`"),
        ({"json": None}, "`structured_outputs` has no member"),
        ({"json": False, "regex": "a"}, "`structured_outputs` has `json` and `regex`; allowed"),
        ({"json_object": False}, "`structured_outputs.json_object` is false; allowed: true."),
        ({"json": 5}, "Invalid 'structured_outputs.json': 5 is not of types"),
        ({"json": "[]"}, "Invalid 'structured_outputs.json': [] is not of types"),
        ({"json": {"$ref": "#/x"}}, "Invalid 'structured_outputs.json': Pointer '/x' does not"),
        ({"json": "{"}, "Invalid 'structured_outputs.json': the text '{' is not JSON"),
        ({"json": "[" * 9999}, "Invalid 'structured_outputs.json': the text '[[[["),
        ({"structural_tag": []}, "Invalid 'structured_outputs.structural_tag': [] is no object."),
        ({"structural_tag": "5"}, "Invalid 'structured_outputs.structural_tag': 5 is no object."),
        ({"structural_tag": "x"}, "Invalid 'structured_outputs.structural_tag': the text 'x' is"),
        ({"regex": "a", "whitespace_pattern": "b"}, "Unknown field `structured_outputs.white"),
    ],
)
def test_structured_outputs_that_are_none_are_refused(
    structured: dict[str, Any], reason: str
) -> None:
    assert refusal(structured_outputs=structured).startswith(reason)


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
FORMS = [JSON_SCHEMA, {"type": "regex", "regex": "a"}, {"type": "json_object"}]


@pytest.mark.parametrize("form", FORMS)
def test_structured_outputs_and_response_format_are_two_wishes(form: dict[str, Any]) -> None:
    reason = refusal(response_format=form, structured_outputs={"regex": "a"})
    assert reason == (
        f"`structured_outputs` and `response_format` of type '{form['type']}' both say what the "
        "answer must be. Leave out one of the two."
    )


def test_structured_outputs_are_refused_where_tools_may_be_called() -> None:
    body: dict[str, Any] = {"tools": [tool()], "structured_outputs": {"regex": "a"}}
    assert refusal(**body).startswith("The field `structured_outputs` asks for a form of the ans")
    ignored = convert(options={"unsupported": "ignore"}, **body)
    assert ignored.left_out == ("structured_outputs",)
    assert ignored.settings.output_constraint.kind == "tool_call"
    chosen = convert(tool_choice="none", **body)
    assert chosen.settings.output_constraint == OutputConstraint("regex", "a")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"response_format": JSON_SCHEMA}, "response_format json_schema"),
        ({"response_format": {"type": "regex", "regex": "a"}}, "response_format regex"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ],
)
def test_prefix_fits_no_constraint_on_the_whole_answer(body: dict[str, Any], named: str) -> None:
    reason = refusal(messages=[USER, PREFIX], **body)
    assert reason.startswith(f"{named} should not be used with prefix: it is about the whole")
    assert convert(**body).settings.output_constraint is not None


@pytest.mark.parametrize("wish", [None, True, False])
@pytest.mark.parametrize("choice", ["auto", "required", named("a")])
def test_parallel_calls_are_as_asked(wish: bool | None, choice: Any) -> None:
    body = {"tools": [tool("a"), tool("b")], "tool_choice": choice, "parallel_tool_calls": wish}
    converted = convert(**body)
    assert converted.settings.output_constraint.parallel is (wish is not False)
    assert converted.left_out == ()


def test_parallel_calls_mean_nothing_without_tools() -> None:
    for body in ({}, {"tools": [tool()], "tool_choice": "none"}):
        assert convert(parallel_tool_calls=False, **body).settings.output_constraint is None


# ---- hostile input ------------------------------------------------------------------------------


def test_many_messages_convert() -> None:
    messages = [USER, {"role": "assistant", "content": "a"}] * 50_000
    assert len(convert(messages=messages).conversation.messages) == 100_000


def test_many_calls_of_one_message_convert() -> None:
    names = [f"c{index}" for index in range(10_000)]
    messages = [USER, call(*names), *map(result, reversed(names))]
    assert len(convert(messages=messages).conversation.messages) == 10_002
