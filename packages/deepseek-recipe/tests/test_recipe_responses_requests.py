"""Requests of the Responses protocol: what they become, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.conversation import Message, OutputConstraint, text_of
from deepseek_recipe.encoding.prompt import render
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.errors import BodyError, ConversionError, RequestError
from deepseek_recipe.options import MODELS, ConversionOptions
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.fields import use_of
from deepseek_recipe.protocols.responses.convert import convert_responses
from deepseek_recipe.protocols.responses.models import ResponsesRequest
from deepseek_recipe.protocols.responses.response_object import response_object

GOLDEN = Path(__file__).parents[3] / "tests/conformance/prompts/requests.jsonl"
NAMES = {"v4": "DeepSeek-V4-Pro", "v41": "DeepSeek-V4.1-Flash"}
PNG = "data:image/png;base64,iVBORw0KGgo="

# What we do otherwise than the golden says, and why.
QUIRKS = {
    "responses/custom-other/v4": "every custom tool is accepted, not only `apply_patch`",
}
# Rows that carry something we refuse, and what the refusal names.
REFUSED = {
    "responses/tools-ignored-kinds/v4": "tools[1]: unsupported tool type 'file_search'",
    "responses/tool-search/v4": "tools[0]: unsupported tool type 'tool_search'",
    "responses/tool-search-server/v41": "tools[0]: unsupported tool type 'tool_search'",
    "responses/tool-search-result-ns/v4": "tools[0]: unsupported tool type 'tool_search'",
    "responses/items-ignored/v4": "input[0]: unsupported item type 'item_reference'",
    "responses/limits/v4": "`store`",
    "responses/limits/v41": "`store`",
}


def rows() -> list[dict[str, Any]]:
    # a fixture comes too late for the names of tests
    lines = GOLDEN.read_text(encoding="utf-8").split("\n")
    return [row for row in map(json.loads, filter(None, lines)) if row["protocol"] == "responses"]


def convert_row(row: dict[str, Any], policy: str) -> ConvertedRequest:
    options = dict(row.get("options") or {})
    models = {**MODELS, **options.pop("aliases", {})}
    body = row["request_body"] if "request_body" in row else row["request"]
    return convert_responses(
        parse_body(ResponsesRequest, body),
        ConversionOptions(models=models, unsupported=policy, **options),  # type: ignore[arg-type]
    )


def golden_options(converted: ConvertedRequest) -> dict[str, Any]:
    """Settings as the goldens have them, whose constraints are a kind and a schema."""
    options = asdict(converted.settings)
    if options["output_constraint"]:
        constraint = options["output_constraint"]
        options["output_constraint"] = {name: constraint[name] for name in ("kind", "schema")}
    return options


def convert(version: str = "v41", **fields: Any) -> ConvertedRequest:
    options = {name[1:]: fields.pop(name) for name in list(fields) if name.startswith("_")}
    body = {"model": NAMES[version], "reasoning": {"effort": "none"}, "input": "x", **fields}
    return convert_responses(parse_body(ResponsesRequest, body), ConversionOptions(**options))


def refusal(version: str = "v41", **fields: Any) -> str:
    with pytest.raises(ConversionError) as caught:
        convert(version, **fields)
    return caught.value.message


def body_error(**fields: Any) -> str:
    with pytest.raises(BodyError) as caught:
        convert(**fields)
    return caught.value.message


def prompt(converted: ConvertedRequest) -> str:
    return render(converted.conversation, converted.profile).text


def say(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def think(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "summary": [], "content": content}


def call(call_id: str, name: str = "f", **fields: Any) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": "{}",
        **fields,
    }


def output(call_id: str, text: Any = "out") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def search(call_id: str, *tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "tool_search_call", "call_id": call_id, "arguments": {"q": 1}},
        {"type": "tool_search_output", "call_id": call_id, "tools": list(tools)},
    ]


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


def namespace(name: str, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": list(tools), **fields}


def shape(converted: ConvertedRequest) -> list[tuple[str, str]]:
    return [(each.role, text_of(each.content)) for each in converted.conversation.messages]


# goldens


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["id"])
def test_golden_row_converts_as_recorded(
    row: dict[str, Any], v4_tokenizer: PromptTokenizer, v41_tokenizer: PromptTokenizer
) -> None:
    error = row.get("error")
    if row["id"] in QUIRKS:
        assert row["quirk"]
        assert convert_row(row, "ignore").custom_tools == {"other"}
        return
    if error:
        with pytest.raises(RequestError) as caught:
            convert_row(row, "ignore")
        assert caught.value.stage == error["stage"]
        if error["stage"] == "convert":
            assert caught.value.message == error["message"]
        return
    converted = convert_row(row, "ignore")
    conversation = converted.conversation
    assert golden_options(converted) == row["inference_options"]
    parsing = asdict(converted.parsing)
    assert {**parsing, "stop_sequences": list(parsing["stop_sequences"])} == row["parsing_options"]
    assert {
        "thinking_mode": conversation.thinking,
        "reasoning_effort": conversation.reasoning_effort,
        "tool_choice": conversation.tool_choice,
        "response_format": conversation.response_format.kind,
        "roles": [message.role for message in conversation.messages],
        "stream": converted.stream,
    } == row["conversation"]
    namespaces = {name: list(pair) for name, pair in converted.namespaces.items()}
    assert namespaces == (row.get("namespace_tool_map") or {})
    rendered = render(conversation, converted.profile)
    assert rendered.text == row["prompt"]
    assert [spelling for _, _, spelling in rendered.special_ranges] == row["special_tokens"]
    tokenizer = v4_tokenizer if row["version"] == "v4" else v41_tokenizer
    assert tokenizer.encode(rendered) == row["token_ids"]
    images = [
        {"kind": each.kind, "detail": each.detail, "path": each.path, "url": each.url}
        for each in rendered.images
    ]
    assert images == (row.get("images") or [])


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["id"])
def test_golden_row_is_refused_exactly_when_it_carries_what_we_do_not_honour(
    row: dict[str, Any],
) -> None:
    try:
        converted = convert_row(row, "reject")
    except RequestError as error:
        if row["id"] in REFUSED:
            assert REFUSED[row["id"]] in error.message
            assert convert_row(row, "ignore").left_out
        else:
            assert row["error"]["stage"] == error.stage
        return
    assert row["id"] not in REFUSED
    assert not row.get("error") or row["id"] in QUIRKS
    # what an option of the server drops is told nevertheless
    assert converted.left_out == (("tool_choice",) if "websearch" in row["id"] else ())


# body errors


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"model": None}, "`model`"),
        ({"input": 5}, "`input`"),
        ({"input": ["x"]}, "`input[0]`"),
        ({"input": [{"type": 5}]}, "`input[0]`"),
        ({"input": [{"role": "tool", "content": "x"}]}, "`input[0].role`"),
        ({"input": [{"role": "user"}]}, "`input[0].content`"),
        ({"input": [{"role": "user", "content": None}]}, "`input[0].content`"),
        ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "`input[0].content[0]`"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "content[0].text`"),
        ({"input": [call("c", arguments={})]}, "`input[0].arguments`"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "`input[0].output`"),
        ({"input": [output("c", [{"type": "output_text", "text": "x"}])]}, "`input[0].output[0]`"),
        ({"input": [{"type": "tool_search_output", "call_id": "c"}]}, "`input[0].tools`"),
        ({"tools": {}}, "`tools`"),
        ({"tools": [{"name": "f"}]}, "`tools[0]`"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "`tools[0].name`"),
        ({"tools": [namespace("n", {"type": "brand"})]}, "`tools[0].tools[0]`"),
        ({"tools": [{"type": "tool_search", "execution": "me"}]}, "`tools[0].execution`"),
        ({"tool_choice": "any"}, "`tool_choice`"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "`tool_choice`"),
        ({"tool_choice": {"type": "function"}}, "`tool_choice.name`"),
        ({"text": {"format": None}}, "`text.format`"),
        ({"text": {"format": {"type": "regex"}}}, "`text.format`"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "`text.format.schema`"),
        ({"text": {"verbosity": "huge"}}, "`text.verbosity`"),
        ({"reasoning": {"effort": "huge"}}, "`reasoning.effort`"),
        ({"max_output_tokens": 1.5}, "`max_output_tokens`"),
        ({"max_output_tokens": -1}, "`max_output_tokens`"),
        ({"temperature": "hot"}, "`temperature`"),
        ({"stream": "yes"}, "`stream`"),
        ({"instructions": ["x"]}, "`instructions`"),
        ({"parallel_tool_calls": 0}, "`parallel_tool_calls`"),
        ({"structured_outputs": "x"}, "`structured_outputs`"),
    ],
)
def test_body_error_names_the_place(fields: dict[str, Any], place: str) -> None:
    assert place in body_error(**fields)


# fields


def test_every_field_of_the_public_request_is_declared() -> None:
    create = pytest.importorskip("openai.types.responses.response_create_params")
    public = set(get_type_hints(create.ResponseCreateParamsNonStreaming))
    assert public <= set(ResponsesRequest.model_fields)


def test_request_of_a_coding_agent_passes() -> None:
    converted = convert(
        instructions="You are a coding agent.",
        input=[
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "D"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "e"},
            {**call("c", "shell"), "id": "fc", "status": "completed"},
            {**output("c"), "id": "fo", "status": "completed"},
            {
                "type": "custom_tool_call",
                "call_id": "p",
                "name": "apply_patch",
                "input": "*** Begin",
            },
            {"type": "custom_tool_call_output", "call_id": "p", "output": "Done"},
            {
                "type": "message",
                "id": "msg",
                "role": "assistant",
                "status": "completed",
                "phase": "final_answer",
                "content": [
                    {"type": "output_text", "text": "A", "annotations": [], "logprobs": []}
                ],
            },
            say("go on"),
        ],
        tools=[
            function("shell", parameters={"type": "object", "properties": {}}, strict=False),
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "Edits files.",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.*/"},
            },
            {"type": "web_search", "external_web_access": False},
        ],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        text={"verbosity": "low"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"k": "v"},
        service_tier="auto",
        metadata={"k": "v"},
        safety_identifier="s",
        truncation="disabled",
        background=False,
    )
    assert converted.left_out == ("tools[2]",)
    assert converted.custom_tools == {"apply_patch"}
    assert [role for role, _ in shape(converted)] == [
        *("system", "system", "user"),
        *("assistant", "tool", "assistant", "tool", "assistant", "user"),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("store", True),
        ("truncation", "auto"),
        ("include", ["message.output_text.logprobs"]),
        ("max_tool_calls", 3),
        ("prompt", {"id": "p"}),
        ("service_tier", "priority"),
        ("moderation", {"model": "m"}),
        ("context_management", [{"type": "compaction"}]),
        ("stop", ["a"]),
        ("seed", 3),
        ("thinking", {"type": "enabled"}),
    ],
)
def test_field_without_effect_is_refused_by_name_or_listed(name: str, value: Any) -> None:
    assert f"`{name}`" in refusal(**{name: value})
    assert convert(_unsupported="ignore", **{name: value}).left_out == (name,)
    assert convert(**{name: None}).left_out == ()


def test_nested_fields_are_refused_by_their_path() -> None:
    item = call("c", caller={"type": "program", "caller_id": "p"})
    assert "`input[0].caller`" in refusal(input=[item, output("c")])
    assert "`input[0].content[0].bold`" in refusal(
        input=[{"role": "user", "content": [{"type": "input_text", "text": "x", "bold": True}]}]
    )
    assert "`tools[0].allowed_callers`" in refusal(
        tools=[function("f", allowed_callers=["programmatic"])]
    )
    assert "`reasoning.mode`" in refusal(reasoning={"mode": "pro"})


def test_hints_may_have_any_type() -> None:
    hints = [
        name
        for name in ResponsesRequest.model_fields
        if use_of(ResponsesRequest, name).kind == "hint"
    ]
    assert "metadata" in hints
    for name in hints:
        assert convert(**{name: [5, {"k": None}]}).left_out == ()


# what is enforced


@pytest.mark.parametrize(
    ("structured", "kind", "schema"),
    [
        ({"json": {"type": "object"}}, "json", '{"type":"object"}'),
        ({"json_object": True}, "json", ""),
        ({"regex": "a"}, "regex", "a"),
        ({"choice": ["a", "b"]}, "choice", '["a","b"]'),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"structural_tag": "{}"}, "structural_tag", "{}"),
    ],
)
def test_structured_outputs_are_enforced_and_not_shown(
    structured: dict[str, Any], kind: str, schema: str
) -> None:
    plain = convert()
    asked = convert(structured_outputs=structured, text={"format": {"type": "text"}})
    assert asked.settings.output_constraint == OutputConstraint(kind, schema)  # type: ignore[arg-type]
    assert (asked.conversation, asked.parsing) == (plain.conversation, plain.parsing)


def test_structured_outputs_that_do_not_fit_are_refused() -> None:
    assert "`structured_outputs.choice[0]`" in body_error(structured_outputs={"choice": [5]})
    assert "`structured_outputs.x`" in refusal(structured_outputs={"x": 1, "regex": "a"})
    assert "`structured_outputs` has no member" in refusal(structured_outputs={})
    wish: dict[str, Any] = {"structured_outputs": {"regex": "a"}}
    for form in ({"type": "json_object"}, {"type": "json_schema", "name": "n", "schema": {}}):
        reason = refusal(input="json", text={"format": form}, **wish)
        assert reason.startswith(
            f"`structured_outputs` and `text.format` of type '{form['type']}' both say"
        )
    assert "`structured_outputs` asks for" in refusal(tools=[function("f")], **wish)
    ignored = convert(tools=[function("f")], _unsupported="ignore", **wish)
    assert ignored.left_out == ("structured_outputs",)
    chosen = convert(tools=[function("f")], tool_choice="none", **wish)
    assert chosen.settings.output_constraint == OutputConstraint("regex", "a")


@pytest.mark.parametrize("wish", [None, True, False])
def test_parallel_calls_are_as_asked_and_told(wish: bool | None) -> None:
    converted = convert(tools=[function("f")], parallel_tool_calls=wish)
    assert converted.settings.output_constraint is not None
    assert converted.settings.output_constraint.parallel is (wish is not False)
    request = parse_body(
        ResponsesRequest, {"model": NAMES["v4"], "input": "x", "parallel_tool_calls": wish}
    )
    for echo in (True, False):
        told = response_object(request, response_id="r", model="m", created=0, echo=echo)
        assert told["parallel_tool_calls"] is (wish is not False)
    assert convert(parallel_tool_calls=wish).settings.output_constraint is None


# the order of checks


def test_checks_come_in_the_stated_order() -> None:
    fields: dict[str, Any] = {
        "model": "other",
        "tools": [function("")],
        "input": [],
        "tool_choice": {"type": "function", "name": "zz"},
        "text": {"format": {"type": "json_object"}},
        "temperature": 9,
        "top_p": 9,
        "top_logprobs": 99,
        "max_output_tokens": 0,
    }
    steps: list[tuple[str, str, Any]] = [
        ("model names", "model", NAMES["v41"]),
        ("tools[0].name", "tools", [function("f")]),
        ("Input items array must not be empty", "input", [*search("s", function("")), output("q")]),
        ("input[1].tools[0].name", "input", [output("q")]),
        ("No tool call found", "input", "x"),
        ("no function named 'zz'", "tool_choice", "auto"),
        ("word 'json'", "input", "json"),
        ("temperature", "temperature", 1),
        ("top_p", "top_p", 1),
        ("top_logprobs", "top_logprobs", 20),
        ("max_tokens", "max_output_tokens", 1),
    ]
    for message, name, better in steps:
        assert message in refusal(**fields)
        fields[name] = better
    assert convert(**fields).settings.top_logprobs == 20


def test_input_or_instructions_must_be_there() -> None:
    assert refusal(input=None) == "Either input or instructions must be provided"
    assert refusal(input=None, instructions="") == "Either input or instructions must be provided"
    assert shape(convert(input=None, instructions="I")) == [("system", "I")]
    assert shape(convert(input="", instructions="")) == [("user", "")]


def test_top_logprobs_of_zero_asks_for_log_probabilities() -> None:
    settings = convert(top_logprobs=0).settings
    assert (settings.logprobs, settings.top_logprobs) == (True, 0)


# turns


def test_assistant_items_form_one_turn() -> None:
    said = [say(text, "assistant") for text in ("a", "", "b")]
    calls = [call("c"), call("d"), output("d", "D"), output("c", "C")]
    converted = convert(input=[think("r1"), think("r2"), *said, *calls])
    turn, first, second = converted.conversation.messages
    assert (turn.reasoning, text_of(turn.content)) == ("r1\nr2", "a\n\nb")
    assert [each.id for each in turn.tool_calls] == ["c", "d"]
    assert (first.tool_call_id, text_of(first.content)) == ("c", "C")
    assert (second.tool_call_id, text_of(second.content)) == ("d", "D")


def test_reasoning_after_text_or_calls_opens_a_new_turn() -> None:
    converted = convert(
        input=[say("a", "assistant"), think("r"), call("c"), output("c"), think("s")]
    )
    turns = [each for each in converted.conversation.messages if each.role == "assistant"]
    assert [(each.reasoning, text_of(each.content)) for each in turns] == [
        (None, "a"),
        ("r", ""),
        ("s", ""),
    ]


def test_reasoning_without_text_changes_nothing() -> None:
    empty = think("")
    items = [say("u"), call("c"), call("d"), output("c"), output("d"), say("a", "assistant")]
    with_empty = [part for item in items for part in (empty, item)] + [empty]
    assert shape(convert(input=with_empty)) == shape(convert(input=items))
    assert convert(input=[empty]).conversation.messages == ()


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([call("c")], "No tool output found for tool call c."),
        ([call("c"), say("u"), output("c")], "No tool output found for tool call c."),
        ([call("c"), say("a", "assistant"), output("c")], "No tool output found for tool call c."),
        ([call("c"), say("s", "system"), output("c")], "No tool output found for tool call c."),
        ([call("c"), think("r"), output("c")], "No tool output found for tool call c."),
        (
            [call("c"), call("d"), output("d"), call("e"), output("c"), output("e")],
            "No tool output found for tool call c.",
        ),
        ([output("q")], "No tool call found for tool output with call_id q."),
        ([call("c"), output("c"), output("c")], "Duplicate tool output for call_id: c."),
        ([call("c"), call("c"), output("c")], "Duplicate 'call_id': c."),
        ([call("c"), output("c"), call("c"), output("c")], "Duplicate 'call_id': c."),
        (
            [call("")],
            "Invalid 'input[0].call_id': empty string. Expected a string with minimum length 1, "
            "but got an empty string instead.",
        ),
    ],
)
def test_calls_and_outputs_must_match(items: list[dict[str, Any]], message: str) -> None:
    assert refusal(input=items) == message


def test_call_without_its_reasoning_is_refused_only_when_asked_for() -> None:
    items = [say("u"), call("c"), output("c")]
    low = {"effort": "low"}
    message = refusal(input=items, reasoning=low, _missing_reasoning="reject")
    assert message == "The `reasoning_text` in the thinking mode must be passed back to the API."
    assert convert(input=items, reasoning=low).conversation.thinking
    for harmless in (
        {"input": [say("u"), think("r"), call("c"), output("c")], "reasoning": low},
        {"input": [*items, say("v")], "reasoning": low},
        {"input": items},
    ):
        convert(_missing_reasoning="reject", **harmless)


def test_custom_call_has_one_text_parameter() -> None:
    item = {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": 'a"\n\u2028é'}
    done = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    turn = convert(input=[item, done]).conversation.messages[0]
    assert turn.tool_calls[0].arguments == '{"input":"a\\"\\n\u2028é"}'


# left out


def test_unknown_items_are_refused_by_name_or_listed() -> None:
    items = [call("c"), {"type": "whatever", "id": [1]}, output("c"), {"type": "mcp_call"}]
    assert refusal(input=items) == (
        "input[1]: unsupported item type 'whatever'. Leave it out of the request."
    )
    converted = convert(input=items, _unsupported="ignore")
    assert converted.left_out == ("input[1]", "input[3]")
    assert shape(converted) == [("assistant", ""), ("tool", "out")]


def test_unknown_tools_are_refused_by_name_or_listed() -> None:
    tools = [{"type": "local_shell"}, function("f"), {"type": "image_generation", "size": 5}]
    assert refusal(tools=tools).startswith("tools[0]: unsupported tool type 'local_shell'")
    converted = convert(tools=tools, _unsupported="ignore")
    assert converted.left_out == ("tools[0]", "tools[2]")
    assert [tool.name for tool in converted.conversation.tools] == ["f"]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"tools": [{"type": "web_search", "filters": 5}]}, "tools[0]"),
        ({"tools": [{"type": "web_search_2025_08_26"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search_preview"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search_preview_2025_03_11"}]}, "tools[0]"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0]"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [*search("s", {"type": "web_search"})]}, "input[1].tools[0]"),
    ],
)
def test_web_search_is_dropped_and_told_or_rejected(fields: dict[str, Any], place: str) -> None:
    assert convert(**fields).left_out == (place,)
    assert refusal(_responses_web_search="reject", **fields) == "Server tools are not supported"


def test_documents_and_images_without_vision_become_a_text() -> None:
    parts = [{"type": "input_file", "file_data": "x"}, {"type": "input_image", "file_id": "f"}]
    converted = convert("v4", input=[{"role": "user", "content": parts}])
    assert shape(converted) == [("user", "[Unsupported Document]\n\n[Unsupported Image]")]


@pytest.mark.parametrize(
    ("role", "part", "message"),
    [
        ("user", {"image_url": "ftp://x"}, "input[0]: Unsupported image_url format"),
        ("user", {}, "input[0].content[0]: input_image must have image_url or file_id"),
        (
            "user",
            {"image_url": PNG, "file_id": "f"},
            "input[0].content[0]: input_image cannot have both image_url and file_id",
        ),
        ("assistant", {"image_url": PNG}, "input[0]: Image in assistant message is unsupported"),
    ],
)
def test_image_that_cannot_be_seen_is_an_error(role: str, part: Any, message: str) -> None:
    part = {"type": "input_image", **part}
    assert refusal(input=[{"role": role, "content": [part]}]) == message


def test_images_of_outputs_stand_in_the_order_of_calls() -> None:
    urls = ["data:image/png;base64,AAAA", "data:image/png;base64,BBBB"]
    one, two = ([{"type": "input_image", "image_url": url}] for url in urls)
    converted = convert(input=[call("a"), call("b"), output("b", two), output("a", one)])
    images = render(converted.conversation, converted.profile).images
    assert [image.url for image in images] == urls


# tools


def test_custom_tool_has_the_description_of_the_client() -> None:
    converted = convert(tools=[{"type": "custom", "name": "p", "description": "D"}])
    tool = converted.conversation.tools[0]
    assert (tool.name, tool.description, tool.strict) == ("p", "D", None)
    assert tool.parameters == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    assert (
        convert(tools=[{"type": "custom", "name": "p"}]).conversation.tools[0].description is None
    )


def test_custom_tool_can_be_chosen() -> None:
    converted = convert(
        tools=[function("f"), {"type": "custom", "name": "p"}],
        tool_choice={"type": "custom", "name": "p"},
    )
    assert [tool.name for tool in converted.conversation.tools] == ["p"]
    assert converted.conversation.tool_choice == "required"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([namespace("", function("f"))], "Invalid 'tools[0].name': empty string."),
        ([namespace("a b")], "Invalid 'tools[0].name': string does not match pattern."),
        ([namespace("n", function(""))], "Invalid 'tools[0].tools[0].name': empty string."),
        ([namespace("n", function("f"), function("f"))], "Tool names within a namespace must be"),
        (
            [namespace("n", {"type": "custom", "name": "p"})],
            "Currently custom tools are not allowed inside a namespace. Found custom tool 'p' in "
            "tools[0].tools[0].",
        ),
        (
            [namespace("n", function("f", parameters={"type": "string"}))],
            "Invalid schema for function 'n::f'",
        ),
        ([function("f"), {"type": "custom", "name": "f"}], "Tool names must be unique."),
    ],
)
def test_declaration_errors(tools: list[dict[str, Any]], message: str) -> None:
    assert refusal(tools=tools).startswith(message)


def test_full_names_that_collide_are_numbered() -> None:
    tools = [
        namespace("a", function("f")),
        namespace("a_", function("_f")),
        namespace("a", function("f")),
        function("a__f_1"),
        namespace("b_", function("g")),
    ]
    converted = convert("v4", tools=tools, input=[call("c", "f", namespace="a"), output("c")])
    assert dict(converted.namespaces) == {
        "a__f": ("a", "f"),
        "a__f_2": ("a_", "_f"),
        "a__f_3": ("a", "f"),
        "b_g": ("b_", "g"),
    }
    assert converted.conversation.messages[0].tool_calls[0].name == "a__f"


def test_call_of_a_tool_that_is_no_longer_declared_has_a_full_name() -> None:
    items = [call("c", "f", namespace="n"), output("c")]
    for version, name in (("v4", "n__f_1"), ("v41", "n::f")):
        converted = convert(version, input=items, tools=[function("n__f")])
        assert converted.conversation.messages[0].tool_calls[0].name == name
        assert not converted.namespaces


# tool search


def test_found_tools_join_the_conversation_after_the_outputs_of_their_turn() -> None:
    first, last = search("s", namespace("n", function("f", description="F"), description="N"))
    converted = convert(input=[first, call("c"), last, output("c"), say("u")])
    roles = [role for role, _ in shape(converted)]
    assert roles == ["assistant", "tool", "tool", "system", "user"]
    late = converted.conversation.messages[3]
    assert [(each.name, each.description, each.deferred) for each in late.tools] == [
        ("n::f", "N\nF", True)
    ]
    assert converted.conversation.tools == late.tools
    assert dict(converted.namespaces) == {"n::f": ("n", "f")}
    assert converted.parsing.parse_tool_calls
    assert text_of(converted.conversation.messages[1].content) == (
        '[{"type":"function","name":"f","description":"F","parameters":null,"strict":null,'
        '"namespace":{"name":"n","description":"N"}}]'
    )


def test_tool_found_again_is_not_declared_again() -> None:
    found = (namespace("n", function("f")), function("g"))
    converted = convert(
        tools=[function("g")], input=[*search("s", *found), *search("t", *found), say("u")]
    )
    late = [each.tools for each in converted.conversation.messages if each.role == "system"]
    assert [[tool.name for tool in tools] for tools in late] == [["n::f"]]
    assert [tool.name for tool in converted.conversation.tools] == ["g", "n::f"]


def test_found_tool_with_another_definition_is_not_unique() -> None:
    items = search("s", function("g", description="other"))
    assert refusal(tools=[function("g")], input=items) == "Tool names must be unique."


def test_choice_takes_found_tools_away() -> None:
    items = search("s", function("a"), function("b"))
    named = convert(input=items, tool_choice={"type": "function", "name": "a"})
    assert [tool.name for tool in named.conversation.messages[-1].tools] == ["a"]
    assert [role for role, _ in shape(convert(input=items, tool_choice="none"))] == [
        "assistant",
        "tool",
    ]


def test_found_tool_of_an_unknown_type_is_refused_by_name() -> None:
    items = search("s", {"type": "mcp", "server_label": "m"}, function("f"))
    assert refusal(input=items).startswith("input[1].tools[0]: unsupported tool type 'mcp'")
    converted = convert(input=items, _unsupported="ignore")
    assert converted.left_out == ("input[1].tools[0]",)
    assert "mcp" not in prompt(converted)


def test_search_without_late_tools_is_refused_or_listed() -> None:
    items = [*search("s", function("f")), say("u")]
    assert refusal("v4", input=items).startswith("input[0]: unsupported item type 'tool_search_ca")
    converted = convert("v4", input=items, _unsupported="ignore")
    assert converted.left_out == ("input[0]", "input[1]")
    assert shape(converted) == [("user", "u")]
    assert converted.conversation.tools == ()


# any input


_ITEMS = st.one_of(
    st.builds(say, st.sampled_from(["", "t"]), st.sampled_from(["user", "assistant", "system"])),
    st.builds(think, st.sampled_from(["", "r"])),
    st.builds(call, st.sampled_from("abc")),
    st.builds(output, st.sampled_from("abc")),
    st.just({"type": "unheard_of"}),
    st.just({"type": "web_search_call"}),
)


@given(st.lists(_ITEMS, min_size=1, max_size=12), st.sampled_from(["v4", "v41"]))
def test_any_items_are_an_error_or_calls_with_their_outputs(
    items: list[dict[str, Any]], version: str
) -> None:
    try:
        converted = convert(version, input=items, _unsupported="ignore")
    except ConversionError:
        return
    open_calls: list[str] = []
    for message in converted.conversation.messages:
        if message.role == "tool":
            assert message.tool_call_id == open_calls.pop(0)
        else:
            assert not open_calls
            open_calls = [each.id for each in message.tool_calls]
    assert not open_calls
    dropped = ("unheard_of", "web_search_call")
    places = [f"input[{i}]" for i, item in enumerate(items) if item.get("type") in dropped]
    assert list(converted.left_out) == places
    kept = [item for item in items if item.get("type") not in dropped]
    expected: tuple[Message, ...] = ()
    if kept:
        expected = convert(version, input=kept).conversation.messages
    assert converted.conversation.messages == expected


def test_a_hundred_thousand_items_convert() -> None:
    turn = [say("u"), think("r"), {"type": "unheard_of"}]
    items = [
        item for index in range(20_000) for item in (*turn, call(f"c{index}"), output(f"c{index}"))
    ]
    converted = convert(input=items, _unsupported="ignore")
    assert len(converted.conversation.messages) == 60_000
    assert len(converted.left_out) == 20_000


def test_descriptions_of_namespaces_cannot_blow_up_a_request() -> None:
    def namespace(count: int, length: int) -> dict[str, Any]:
        tools = [{"type": "function", "name": f"f{index}"} for index in range(count)]
        return {"type": "namespace", "name": "n", "description": "d" * length, "tools": tools}

    assert len(convert(tools=[namespace(40, 100_000)]).conversation.tools) == 40
    with pytest.raises(ConversionError, match=r"tools\[0\]\.tools\[41\]: descriptions"):
        convert(tools=[namespace(1000, 100_000)])
