"""Requests of the Messages protocol: what they mean, and why some are refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.conversation import OutputConstraint, text_of
from deepseek_recipe.encoding.prompt import render
from deepseek_recipe.errors import BodyError, ConversionError, RequestError, error_body
from deepseek_recipe.options import MODELS, ConversionOptions
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.messages.convert import convert_messages
from deepseek_recipe.protocols.messages.models import MessagesRequest

GOLDENS = Path(__file__).parents[3] / "tests/conformance/prompts/requests.jsonl"
V4, V41 = "DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash"
TOOL = {"name": "a", "description": "d", "input_schema": {"type": "object"}}
OTHER_TOOL = {"name": "b", "input_schema": {"type": "object"}}
LATE_TOOL = {**TOOL, "name": "late", "defer_loading": True}
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
# Rows that record a defect of the program they were made with: what we do instead.
OURS = {"messages/choice-any/v4": "`any` forces a call"}
# Rows with a field that is refused unless the server ignores those: the field.
REFUSED_ROWS = {
    "messages/tool-strict-ignored/v4": "tools[0].strict",
    "messages/sampling/v41": "top_k",
}


@cache
def golden_rows() -> dict[str, dict[str, Any]]:
    lines = GOLDENS.read_text(encoding="utf-8").split("\n")
    rows = (json.loads(line) for line in lines if line)
    return {row["id"]: row for row in rows if row["id"].startswith("messages/")}


def ids(kind: str) -> list[str]:
    """Ids of the rows that succeed (`ok`), or fail at the stage `parse` or `convert`."""
    rows = golden_rows().items()
    return [name for name, row in rows if (row.get("error") or {}).get("stage", "ok") == kind]


def convert_row(row: dict[str, Any], unsupported: str = "ignore") -> ConvertedRequest:
    options = dict(row.get("options") or {})
    models = {**MODELS, **options.pop("aliases", {})}
    body = row["request_body"] if "request_body" in row else row["request"]
    return convert_messages(
        parse_body(MessagesRequest, body),
        ConversionOptions(models=models, unsupported=unsupported, **options),
    )


def convert(
    messages: object = "x", *, model: str = V4, thinking: str | None = "disabled", **fields: Any
) -> ConvertedRequest:
    """Convert a request; `option_*` fields are options. A string is one user message."""
    options = {name[7:]: fields.pop(name) for name in list(fields) if name.startswith("option_")}
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if thinking is not None:
        fields["thinking"] = {"type": thinking}
    body = {"model": model, "messages": messages, **fields}
    return convert_messages(parse_body(MessagesRequest, body), ConversionOptions(**options))


def user(*blocks: object) -> dict[str, object]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: object) -> dict[str, object]:
    return {"role": "assistant", "content": list(blocks)}


def system(*blocks: object) -> dict[str, object]:
    return {"role": "system", "content": list(blocks)}


def text(value: str) -> dict[str, object]:
    return {"type": "text", "text": value}


def image(**source: object) -> dict[str, object]:
    return {"type": "image", "source": source}


def thought(value: str) -> dict[str, object]:
    return {"type": "thinking", "thinking": value, "signature": "s"}


def call(call_id: str, name: str = "a", arguments: object = None) -> dict[str, object]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments or {}}


def result(call_id: str, content: object = "r", **fields: object) -> dict[str, object]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def found(name: str) -> dict[str, object]:
    return {"type": "tool_reference", "tool_name": name}


def added(name: str) -> dict[str, object]:
    return {"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}


def shape(converted: ConvertedRequest) -> list[tuple[str, str]]:
    messages = converted.conversation.messages
    return [(message.role, text_of(message.content)) for message in messages]


# goldens


@pytest.mark.parametrize("name", [name for name in ids("ok") if name not in OURS])
def test_golden_request_gives_its_conversation_and_settings(name: str) -> None:
    row = golden_rows()[name]
    converted = convert_row(row)
    conversation, settings = converted.conversation, converted.settings
    constraint = settings.output_constraint
    assert {
        "thinking_mode": conversation.thinking,
        "reasoning_effort": conversation.reasoning_effort,
        "tool_choice": conversation.tool_choice,
        "response_format": conversation.response_format.kind,
        "roles": [message.role for message in conversation.messages],
        "stream": converted.stream,
    } == row["conversation"]
    assert {
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "logprobs": settings.logprobs,
        "top_logprobs": settings.top_logprobs,
        "seed": settings.seed,
        "output_constraint": constraint and {"kind": constraint.kind, "schema": constraint.schema},
    } == row["inference_options"]
    parsing = converted.parsing
    assert {
        "parse_tool_calls": parsing.parse_tool_calls,
        "starts_in_tool_calls": parsing.starts_in_tool_calls,
        "parse_json_output": parsing.parse_json_output,
        "thinking_initial_stage": parsing.thinking_initial_stage,
        "stop_sequences": list(parsing.stop_sequences),
    } == row["parsing_options"]
    prompt = render(conversation, converted.profile)
    images = [(each.kind, each.detail, each.path, each.url) for each in prompt.images]
    assert images == [
        (each["kind"], each["detail"], each["path"], each["url"]) for each in row.get("images", [])
    ]
    assert prompt.text == row["prompt"]


@pytest.mark.parametrize("name", ids("convert"))
def test_golden_refusal_has_its_message_in_the_protocols_own_envelope(name: str) -> None:
    row = golden_rows()[name]
    with pytest.raises(ConversionError) as refusal:
        convert_row(row)
    assert refusal.value.status_code == row["error"]["status_code"]
    assert error_body(refusal.value, "messages") == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": row["error"]["message"]},
    }


@pytest.mark.parametrize("name", ids("parse"))
def test_golden_body_error_is_one(name: str) -> None:
    with pytest.raises(BodyError):
        convert_row(golden_rows()[name])


def test_golden_rows_that_fail_by_default_are_those_with_a_refused_field() -> None:
    refused = {}
    for name in ids("ok"):
        try:
            convert_row(golden_rows()[name], "reject")
        except ConversionError as error:
            refused[name] = error.message
    assert refused.keys() == REFUSED_ROWS.keys()
    for name, field in REFUSED_ROWS.items():
        assert f"`{field}`" in refused[name]


def test_golden_refusals_do_not_depend_on_the_policy() -> None:
    for name in ids("convert"):
        row = golden_rows()[name]
        with pytest.raises(ConversionError) as refusal:
            convert_row(row, "reject")
        assert refusal.value.message == row["error"]["message"], name


# fields


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"top_k": 4}, "top_k"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, None),
        ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        ({"context_management": {"edits": [{"type": "x"}]}}, "context_management"),
        ({"compaction": {"type": "x"}}, "compaction"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"fallbacks": "default"}, "fallbacks"),
        ({"fallback_credit_token": "t"}, "fallback_credit_token"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"speed": "fast"}, "speed"),
        ({"billing_policy": {"bill_to": "user_profile"}}, "billing_policy"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"tools": [{**TOOL, "strict": True}]}, "tools[0].strict"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [{**TOOL, "allowed_callers": ["x"]}]}, "tools[0].allowed_callers"),
    ],
)
def test_field_without_effect_is_refused_by_name_or_left_out(
    fields: dict[str, object], place: str | None
) -> None:
    ((outer, value),) = fields.items()
    if place is None:
        assert isinstance(value, dict)
        place = f"{outer}.{list(value)[-1]}"
    with pytest.raises(ConversionError, match=r"not supported|Unknown field") as refusal:
        convert(**fields)
    assert f"`{place}`" in refusal.value.message
    assert convert(**fields, option_unsupported="ignore").left_out == (place,)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "system", "content": "s", "clear_at": "next_user_message"}, "clear_at"),
        ({"role": "system", "content": "s", "output_config": {"effort": "low"}}, "output_config"),
        ({"role": "user", "content": "x", "name": "n"}, "name"),
        (
            user({**image(**PNG), "transformations": {"oversized_image": "error"}}),
            "content[0].transformations",
        ),
        (user({**text("x"), "zz": 0}), "content[0].zz"),
    ],
)
def test_refused_field_of_a_message_is_named_with_its_place(
    message: dict[str, object], place: str
) -> None:
    messages = [{"role": "user", "content": "x"}, message]
    with pytest.raises(ConversionError) as refusal:
        convert(messages)
    assert f"`messages[1].{place}`" in refusal.value.message
    ignored = convert(messages, option_unsupported="ignore")
    assert ignored.left_out == (f"messages[1].{place}",)


def test_what_is_left_out_is_listed_in_the_order_of_the_fields() -> None:
    converted = convert(
        zz=1, speed="fast", top_k=1, tools=[{**TOOL, "strict": True}], option_unsupported="ignore"
    )
    assert converted.left_out == ("tools[0].strict", "top_k", "speed", "zz")


@pytest.mark.parametrize("odd", ["x", 3, [], {"a": None}, True, 0.5])
def test_hint_has_no_effect_whatever_its_value(odd: object) -> None:
    names = ("metadata", "service_tier", "cache_control", "diagnostics")
    converted = convert(
        [user({**text("x"), "cache_control": odd, "citations": odd})],
        tools=[{**TOOL, "cache_control": odd, "eager_input_streaming": odd}],
        **{name: odd for name in names},
    )
    assert shape(converted) == [("user", "x")]
    assert converted.left_out == ()


def test_values_that_ask_for_nothing_pass() -> None:
    convert(
        mcp_servers=[],
        context_management={"edits": []},
        speed="standard",
        inference_geo=None,
        top_k=None,
        nonsense=None,
        tools=[{**TOOL, "type": "custom", "strict": False, "allowed_callers": ["direct"]}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": False},
    )


def test_request_of_a_coding_agent_passes_by_default() -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    converted = convert(
        [
            user({**text("<system-reminder>today</system-reminder>"), **cached}, text("do it")),
            assistant(
                thought("hm"), {**call("c1", "a", {"path": "x"}), "caller": {"type": "direct"}}
            ),
            user({**result("c1", [text("no such file")]), "is_error": True, **cached}),
        ],
        model=V41,
        thinking=None,
        system=[{**text("You are an agent."), **cached}, text("cwd: /")],
        tools=[{**TOOL, "eager_input_streaming": True}, {**OTHER_TOOL, **cached}],
        metadata={"user_id": "u"},
        max_tokens=32_000,
        temperature=1,
        stream=True,
        output_config={"effort": "medium"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert shape(converted) == [
        ("system", "You are an agent.\n\ncwd: /"),
        ("user", "<system-reminder>today</system-reminder>"),
        ("user", "do it"),
        ("assistant", ""),
        ("tool", "no such file"),
    ]
    assert converted.conversation.reasoning_effort == "high"
    assert converted.stream


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 3.5}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"system": 3}, "system"),
        ({"system": [image(**PNG)]}, "system[0].type"),
        ({"thinking": {}}, "thinking.type"),
        ({"output_config": {"effort": "bogus"}}, "output_config.effort"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"}},
            "tool_choice.disable_parallel_tool_use",
        ),
        (
            {"messages": [user(image(type="base64", media_type="image/bmp", data=""))]},
            "messages[0].content[0].source.media_type",
        ),
        (
            {"messages": [user(result("c", [thought("t")]))]},
            "messages[0].content[0].content[0]",
        ),
    ],
)
def test_body_error_names_the_field(fields: dict[str, object], place: str) -> None:
    body = {"model": V4, "messages": [], **fields}
    with pytest.raises(BodyError) as error:
        parse_body(MessagesRequest, body)
    assert f"`{place}`" in error.value.message


# tools


def test_any_forces_a_call() -> None:
    converted = convert(tools=[TOOL, OTHER_TOOL], tool_choice={"type": "any"})
    assert converted.conversation.tool_choice == "required"
    assert converted.parsing.starts_in_tool_calls
    assert converted.settings.output_constraint is not None
    assert converted.settings.output_constraint.kind == "tool_call_required"


@pytest.mark.parametrize("kind", ["auto", "any", "tool"])
@pytest.mark.parametrize("disabled", [None, True, False])
def test_one_call_at_most_is_enforced(kind: str, disabled: bool | None) -> None:
    choice = {"type": kind, "disable_parallel_tool_use": disabled}
    if kind == "tool":
        choice["name"] = "a"
    constraint = convert(tools=[TOOL, OTHER_TOOL], tool_choice=choice).settings.output_constraint
    assert constraint is not None
    assert constraint.kind == ("tool_call" if kind == "auto" else "tool_call_required")
    assert constraint.parallel is (disabled is not True)
    assert convert(tool_choice=choice).settings.output_constraint is None


@pytest.mark.parametrize(
    ("structured", "kind", "schema"),
    [
        ({"json": {"type": "object"}}, "json", '{"type":"object"}'),
        ({"json_object": True}, "json", ""),
        ({"choice": ["a", "b"]}, "choice", '["a","b"]'),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ],
)
def test_structured_outputs_are_enforced_and_not_shown(
    structured: dict[str, Any], kind: str, schema: str
) -> None:
    plain, asked = convert(), convert(structured_outputs=structured)
    assert asked.settings.output_constraint == OutputConstraint(kind, schema)  # type: ignore[arg-type]
    assert (asked.conversation, asked.parsing) == (plain.conversation, plain.parsing)


def test_structured_outputs_are_refused_where_tools_may_be_called() -> None:
    wish: dict[str, Any] = {"tools": [TOOL], "structured_outputs": {"regex": "a"}}
    with pytest.raises(ConversionError, match="`structured_outputs` asks for a form"):
        convert(**wish)
    assert convert(**wish, option_unsupported="ignore").left_out == ("structured_outputs",)
    chosen = convert(**wish, tool_choice={"type": "none"})
    assert chosen.settings.output_constraint == OutputConstraint("regex", "a")
    with pytest.raises(ConversionError, match="`structured_outputs` has `json` and `regex`"):
        convert(structured_outputs={"json": True, "regex": "a"})


def test_any_is_refused_in_thinking_mode() -> None:
    with pytest.raises(ConversionError, match="Thinking mode does not support this tool_choice"):
        convert(tools=[TOOL], tool_choice={"type": "any"}, thinking="enabled")


def test_choice_without_tools_is_no_choice() -> None:
    converted = convert(tool_choice={"type": "tool", "name": "a"}, thinking="enabled")
    assert converted.conversation.tool_choice == "auto"
    assert not converted.parsing.parse_tool_calls


def test_custom_tool_is_an_ordinary_one() -> None:
    plain = convert(tools=[TOOL])
    custom = convert(tools=[{**TOOL, "type": "custom"}])
    assert custom.conversation == plain.conversation


@pytest.mark.parametrize("kind", ["bash_20250124", "web_fetch_20250910", "mcp_toolset", ""])
@pytest.mark.parametrize("policy", ["reject", "ignore"])
def test_tool_of_the_server_is_refused(kind: str, policy: str) -> None:
    with pytest.raises(ConversionError, match=r"^tools\[1\]: server tools are not supported$"):
        convert(
            tools=[TOOL, {"type": kind, "name": "x", "max_uses": 3}],
            option_messages_web_search="drop",
            option_unsupported=policy,
        )


def test_web_search_is_dropped_where_the_server_says_so() -> None:
    converted = convert(
        [
            user(text("q")),
            assistant(
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                text("a"),
            ),
        ],
        tools=[{"type": "web_search_20260209", "name": "web_search", "max_uses": 5}, TOOL],
        option_messages_web_search="drop",
    )
    assert shape(converted) == [("user", "q"), ("assistant", "a")]
    assert [tool.name for tool in converted.conversation.tools] == ["a"]
    assert converted.left_out == (
        "tools[0]",
        "messages[1].content[0]",
        "messages[1].content[1]",
    )


def test_dropping_web_search_does_not_drop_other_calls_of_the_server() -> None:
    block = {"type": "server_tool_use", "id": "s", "name": "code_execution", "input": {}}
    messages = [user(text("q")), assistant(block, text("a"))]
    with pytest.raises(ConversionError, match=r"server tools are not supported.*messages\[1\]"):
        convert(messages, option_messages_web_search="drop")
    ignored = convert(messages, option_messages_web_search="drop", option_unsupported="ignore")
    assert ignored.left_out == ("messages[1].content[0]",)


def test_name_of_128_characters_is_the_longest() -> None:
    convert(tools=[{**TOOL, "name": "a" * 128}])
    with pytest.raises(ConversionError, match=r"'tools\[0\].name': string too long"):
        convert(tools=[{**TOOL, "name": "a" * 129}])


def test_deferred_tool_becomes_available_where_it_is_found() -> None:
    converted = convert(
        [
            user(text("q")),
            assistant(call("c1"), call("c2")),
            user(
                result("c2", [text("see"), found("late"), found("late")]),
                result("c1"),
                text("go on"),
            ),
        ],
        model=V41,
        tools=[TOOL, LATE_TOOL],
    )
    assert shape(converted)[2:] == [
        ("tool", "see\n\nlate\n\nlate"),
        ("tool", "r"),
        ("user", "go on"),
        ("system", ""),
    ]
    last = converted.conversation.messages[-1]
    assert [tool.name for tool in last.tools] == ["late"]
    assert [tool.deferred for tool in converted.conversation.tools] == [False, True]


def test_addition_has_the_text_of_its_message_beside_it() -> None:
    messages = [system(text("s1"), added("late"), text("s2")), user(text("x"))]
    converted = convert(messages, model=V41, tools=[TOOL, LATE_TOOL])
    assert shape(converted) == [("system", "s1\n\ns2"), ("user", "x")]
    assert [tool.name for tool in converted.conversation.messages[0].tools] == ["late"]


@pytest.mark.parametrize("choice", [{"type": "none"}, {"type": "tool", "name": "a"}])
def test_tool_that_the_choice_removes_is_not_added_late(choice: dict[str, str]) -> None:
    messages = [
        user(text("x")),
        assistant(call("c")),
        user(result("c", [found("late")])),
        system(added("late")),
    ]
    converted = convert(messages, model=V41, tools=[TOOL, LATE_TOOL], tool_choice=choice)
    assert shape(converted) == [("user", "x"), ("assistant", ""), ("tool", "late")]


def test_deferred_tool_that_must_be_called_is_shown_from_the_start() -> None:
    converted = convert(
        model=V41, tools=[TOOL, LATE_TOOL], tool_choice={"type": "tool", "name": "late"}
    )
    assert [(tool.name, tool.deferred) for tool in converted.conversation.tools] == [
        ("late", False)
    ]


def test_v4_shows_deferred_tools_and_skips_additions() -> None:
    messages = [user(text("x")), system(added("late"))]
    converted = convert(messages, tools=[LATE_TOOL])
    assert shape(converted) == [("user", "x")]
    assert not converted.conversation.tools[0].deferred


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [assistant(call("c")), user(result("c", [found("zz")]))],
            "messages.1.content.0: tool reference 'zz' not found in available tools",
        ),
        (
            [system(text("s"), added("zz"))],
            "messages.0.content.1: `tool_addition` references unknown tool 'zz'",
        ),
    ],
)
def test_reference_to_an_undeclared_tool_is_refused(messages: object, expected: str) -> None:
    with pytest.raises(ConversionError) as refusal:
        convert(messages, tools=[TOOL])
    assert refusal.value.message == expected


# messages


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user(thought("t"))], "messages.0.content: thinking blocks may only be in `assistant`"),
        ([system(thought("t"))], "messages.0.content: thinking blocks may only be in `assistant`"),
        ([user(call("c"))], "messages.0: `tool_use` blocks can only be in `assistant`"),
        ([system(result("c"))], "messages.0: `tool_result` blocks can only be in `user`"),
        ([assistant(result("c"))], "messages.0: `tool_result` blocks can only be in `user`"),
        ([assistant(added("a"))], "messages.0: `tool_addition` blocks can only be in `system`"),
        (
            [user({"type": "server_tool_use", "id": "s", "name": "web_search"})],
            "messages.0: `server_tool_use` blocks can only be in `assistant`",
        ),
    ],
)
def test_block_in_a_message_of_the_wrong_role_is_refused(messages: object, expected: str) -> None:
    with pytest.raises(ConversionError) as refusal:
        convert(messages, tools=[TOOL])
    assert refusal.value.message == f"{expected} messages"


NEEDS_RESULT = (
    "`tool_use` ids were found without `tool_result` blocks immediately after: {}. Each "
    "`tool_use` block must have a corresponding `tool_result` block in the next message."
)


@pytest.mark.parametrize(
    ("messages", "where", "open_ids"),
    [
        ([assistant(call("c"))], "messages.0:", "c"),
        ([assistant(call("c"), text("x"))], "messages.0.1: ", "c"),
        ([assistant(call("c")), user(text("x"), result("c"))], "messages.1: ", "c"),
        ([assistant(call("c")), system(text("s"))], "messages.1: ", "c"),
        ([assistant(call("c")), assistant(text("x"))], "messages.1: ", "c"),
        ([assistant(call("d"), call("c"), call("e")), user(result("e"))], "messages.0:", "c, d"),
    ],
)
def test_call_without_its_result_behind_it_is_refused(
    messages: object, where: str, open_ids: str
) -> None:
    with pytest.raises(ConversionError) as refusal:
        convert(messages)
    assert refusal.value.message == where + NEEDS_RESULT.format(open_ids)


def test_id_used_twice_in_a_message_is_refused_but_not_in_later_ones() -> None:
    with pytest.raises(ConversionError) as refusal:
        convert([assistant(call("c"), call("c"))])
    assert refusal.value.message == "messages.0.content.1: `tool_use` ids must be unique"
    turn = [assistant(call("c")), user(result("c"))]
    assert len(convert(turn * 2).conversation.messages) == 4


def test_thinking_may_stand_between_calls() -> None:
    messages = [assistant(thought("1"), call("c"), thought("2"), call("d"))]
    messages.append(user(result("d"), result("c")))
    converted = convert(messages, tools=[TOOL], thinking="enabled")
    first = converted.conversation.messages[0]
    assert first.reasoning == "1\n\n2"
    assert [each.id for each in first.tool_calls] == ["c", "d"]


def test_empty_text_in_front_of_an_answer_adds_no_empty_line() -> None:
    converted = convert([assistant(text(""), text("a"), text(""), text("b"))])
    assert shape(converted) == [("assistant", "a\n\n\n\nb")]


def test_blocks_of_a_user_are_messages_of_their_own() -> None:
    converted = convert([user(text("a"), text(""), image(**PNG))], model=V41)
    assert [message.content for message in converted.conversation.messages[:2]] == [("a",), ("",)]
    assert len(render(converted.conversation, converted.profile).images) == 1


def test_last_answer_is_not_continued() -> None:
    converted = convert([user(text("a")), assistant(text("b"))])
    assert not converted.conversation.messages[-1].prefix
    assert converted.parsing.thinking_initial_stage is None


def test_document_is_told_by_its_type() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "d"}
    document = {"type": "document", "source": plain, "title": "t", "citations": {"enabled": True}}
    unknown = {"type": "document", "source": {"type": "url", "url": "https://x"}}
    assert shape(convert([user(document, unknown)])) == [
        ("user", "[Unsupported document type: text/plain]"),
        ("user", "[Unsupported document type: unknown]"),
    ]


def test_images_keep_their_places_on_v41() -> None:
    png, url = image(**PNG), image(type="url", url="https://x/y.png")
    messages = [
        system(text("s"), png),
        user(text("q"), url),
        assistant(call("c")),
        user(result("c", [text("z"), png, png]), png),
    ]
    converted = convert(messages, model=V41)
    images = render(converted.conversation, converted.profile).images
    assert [each.path for each in images] == [
        "messages.0.content[1]",
        "messages.1.content[1]",
        "messages.3.content.0.tool_result.content[1]",
        "messages.3.content.0.tool_result.content[2]",
        "messages.3.content[1]",
    ]
    assert images[0].url == "data:image/png;base64,aGk="
    assert images[1].kind == "url"
    first, second = images[2:4]
    assert converted.conversation.messages[4].content == ("z\n\n", first, "\n\n", second)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"type": "url", "url": "ftp://e"}, 'invalid url: "ftp://e"'),
        ({"type": "url", "url": "data:image/png;base64,aGk="}, "invalid url: "),
        ({"type": "file", "file_id": "f"}, "file_id is not supported. "),
        ({**PNG, "data": "!!"}, "Invalid base64 data"),
    ],
)
def test_image_that_is_none_is_refused_with_vision_only(
    source: dict[str, object], expected: str
) -> None:
    assert shape(convert([user(image(**source))])) == [("user", "[Unsupported Image]")]
    with pytest.raises(ConversionError) as refusal:
        convert([user(image(**source))], model=V41)
    assert refusal.value.message.startswith(f"messages.0.content[0]: {expected}")
    with pytest.raises(ConversionError) as refusal:
        convert([assistant(call("c")), user(result("c", [image(**source)]))], model=V41)
    assert refusal.value.message.startswith("messages.1.content.0.tool_result.content[0]: ")


def test_arguments_are_written_with_blanks_and_shortest_floats() -> None:
    messages = [assistant(call("c", "a", {"é": [1, 1.0, 1e-7]})), user(result("c"))]
    for model in (V4, V41):
        (made,) = convert(messages, model=model).conversation.messages[0].tool_calls
        assert made.arguments == '{"é": [1, 1.0, 1e-7]}'


# settings, thinking and the order of checks


def test_length_above_the_bound_is_lowered_to_the_bound_of_the_mode() -> None:
    bounds = {"option_max_tokens_bound": 10, "option_thinking_max_tokens_bound": 20}
    assert convert(max_tokens=50, **bounds).settings.max_tokens == 10
    assert convert(max_tokens=50, thinking="adaptive", **bounds).settings.max_tokens == 20
    with pytest.raises(ConversionError, match=r"range of max_tokens is \[1, 10\]"):
        convert(max_tokens=0, **bounds)


def test_thinking_type_wins_over_effort_and_effort_over_the_option() -> None:
    def mode(thinking: str | None, effort: str | None) -> tuple[bool, str | None]:
        converted = convert(
            thinking=thinking,
            output_config={"effort": effort},
            option_default_thinking_mode=False,
        )
        return converted.conversation.thinking, converted.conversation.reasoning_effort

    assert mode(None, None) == (False, None)
    assert mode(None, "ultra") == (True, "max")
    assert mode("enabled", "none") == (True, "high")
    assert mode("disabled", "max") == (False, None)


LOST = "The `content[].thinking` in the thinking mode must be passed back to the API."


@pytest.mark.parametrize(
    ("tail", "lost"),
    [
        ([assistant(call("c")), user(result("c"))], True),
        ([assistant(thought(""), call("c")), user(result("c"))], False),
        ([assistant(call("c")), user(result("c"), text("and"))], False),
        ([assistant(text("a"))], False),
    ],
)
def test_lost_reasoning_is_refused_where_the_server_says_so(tail: list[Any], lost: bool) -> None:
    messages = [user(text("x")), *tail]
    convert(messages, thinking="enabled")
    convert(messages, thinking="disabled", option_missing_reasoning="reject")
    if not lost:
        convert(messages, thinking="enabled", option_missing_reasoning="reject")
        return
    with pytest.raises(ConversionError) as refusal:
        convert(messages, thinking="enabled", option_missing_reasoning="reject")
    assert refusal.value.message == LOST


def test_first_of_several_faults_is_reported() -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"top_k": 1}, "The field `top_k`"),
        ({"model": "zz"}, "The supported API model names are DeepSeek-V4-Pro, DeepSeek-V4.1-"),
        ({"tools": [{"type": "bash_20250124", "name": "b"}]}, "tools[0]: server tools"),
        ({"tools": [{**TOOL, "name": "ä"}]}, "Invalid 'tools[0].name'"),
        ({"tool_choice": {"type": "tool", "name": "zz"}, "tools": [TOOL]}, "Invalid value for"),
        ({"messages": []}, "messages: at least one"),
        ({"stop_sequences": [""]}, "Invalid 'stop[0]'"),
        ({"temperature": 3}, "Invalid temperature"),
        ({"top_p": 0}, "Invalid top_p"),
        ({"max_tokens": 0}, "Invalid max_tokens"),
    ]
    for first, (_, expected) in enumerate(faults):
        fields = {"messages": [user(text("x"))]}
        for fault, _ in reversed(faults[first:]):
            fields.update(fault)
        with pytest.raises(ConversionError) as refusal:
            convert(fields.pop("messages"), **fields)
        assert refusal.value.message.startswith(expected)


# robustness


def test_hundred_thousand_messages_are_converted() -> None:
    turn = [assistant(call("c")), user(result("c"))]
    plain = {"role": "user", "content": "x"}
    messages = turn * 10_000 + [plain] * 80_000
    assert len(convert(messages).conversation.messages) == 100_000


def test_deeply_nested_input_is_a_body_error() -> None:
    nested = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    body = b'{"model":"DeepSeek-V4-Pro","messages":[],"tools":[{"input_schema":' + nested + b"}]}"
    with pytest.raises(BodyError, match="invalid JSON request"):
        parse_body(MessagesRequest, body)


_TEXTS = st.sampled_from(["", "a", "</think>", "<｜User｜>"])
_IDS = st.sampled_from(["1", "2", "3"])
_BLOCKS = st.one_of(
    st.builds(text, _TEXTS),
    st.builds(thought, _TEXTS),
    st.builds(call, _IDS),
    st.builds(result, _IDS, _TEXTS),
    st.just(added("a")),
    st.just(image(**PNG)),
    st.just({"type": "server_tool_use", "id": "s", "name": "web_search"}),
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": _TEXTS | st.lists(_BLOCKS, max_size=4),
        }
    ),
    max_size=5,
)


@given(_MESSAGES, st.sampled_from([V4, V41]))
def test_accepted_messages_have_one_result_for_each_call(messages: Any, model: str) -> None:
    try:
        converted = convert(messages, model=model, tools=[TOOL])
    except RequestError:
        return
    due: set[str] = set()
    for message in converted.conversation.messages:
        if message.role == "tool":
            assert message.tool_call_id in due
            due.discard(message.tool_call_id)
        else:
            assert not due
            due.update(each.id for each in message.tool_calls)
    assert not due


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "name"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_FIELDS = sorted(MessagesRequest.model_fields)


@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=5), st.booleans())
def test_any_body_is_converted_or_refused(fields: dict[str, Any], ignore: bool) -> None:
    body = {"model": V4, "messages": [user(text("x"))], **fields}
    policy = "ignore" if ignore else "reject"
    try:
        options = ConversionOptions(unsupported=policy)
        convert_messages(parse_body(MessagesRequest, json.dumps(body)), options)
    except RequestError as error:
        assert error.message


# the client library


def test_every_body_field_of_the_client_library_is_declared() -> None:
    params = pytest.importorskip("anthropic.types.beta.message_create_params")
    headers = {"betas", "user_profile_id", "workspace_id"}
    names = set(params.MessageCreateParamsStreaming.__annotations__)
    names |= set(params.MessageCreateParamsBase.__annotations__)
    assert names - headers - set(MessagesRequest.model_fields) == set()


def test_client_library_sends_what_passes_and_understands_refusals() -> None:
    anthropic = pytest.importorskip("anthropic")
    http = pytest.importorskip("httpx2")
    bodies: list[bytes] = []

    def answer(request: Any) -> Any:
        bodies.append(request.read())
        try:
            convert_messages(parse_body(MessagesRequest, bodies[-1]), ConversionOptions())
        except RequestError as error:
            return http.Response(error.status_code, json=error_body(error, "messages"))
        return http.Response(200, json={"type": "message", "id": "m", "content": []})

    client = anthropic.Anthropic(
        api_key="k",
        base_url="http://test",
        max_retries=0,
        http_client=http.Client(transport=http.MockTransport(answer)),
    )
    request: dict[str, Any] = {
        "model": V41,
        "max_tokens": 100,
        "messages": [user(text("q")), assistant(thought("t"), call("c")), user(result("c"))],
        "tools": [TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    client.messages.create(**request)
    assert len(bodies) == 1
    with pytest.raises(anthropic.BadRequestError) as refusal:
        client.messages.create(**request, tool_choice={"type": "any"})
    assert refusal.value.type == "invalid_request_error"
    assert "Thinking mode does not support this tool_choice" in refusal.value.message
