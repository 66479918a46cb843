"""Golden requests of Chat Completions, and what becomes of them when one value is another."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.encoding.prompt import render
from deepseek_recipe.errors import BodyError, ConversionError, RequestError
from deepseek_recipe.options import MODELS, ConversionOptions
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.chat.convert import convert_chat
from deepseek_recipe.protocols.chat.models import ChatRequest
from deepseek_recipe.protocols.converted import ConvertedRequest

GOLDENS = Path(__file__).parents[3] / "tests/conformance/prompts/requests.jsonl"
# Rows that record a defect of the program they were made with: what we do instead.
OURS = {
    "chat/file-part/v41": "the reason names what is not supported",
    "chat/ok-unknown-fields/v4": "`max_completion_tokens` is honoured",
    "chat/ok-unknown-fields/v41": "`max_completion_tokens` is honoured",
    "chat/reminder-consecutive/v41": "every reminder is rendered",
}
# Rows that succeed, but have a field that is refused unless the server ignores those: the field.
REFUSED_ROWS = {
    "chat/ok-limits/v4": "presence_penalty",
    "chat/ok-limits/v41": "presence_penalty",
    "chat/ok-unknown-fields/v4": "foo",
    "chat/ok-unknown-fields/v41": "foo",
    "chat/tool-extra-fields/v4": "tools[0].function.foo",
}


@cache
def golden_rows() -> dict[str, dict[str, Any]]:
    lines = GOLDENS.read_text(encoding="utf-8").split("\n")
    rows = (json.loads(line) for line in lines if line)
    return {row["id"]: row for row in rows if row["protocol"] == "chat"}


def ids(kind: str) -> list[str]:
    """Ids of the rows that succeed (`ok`), or fail at the stage `parse` or `convert`."""
    rows = golden_rows().items()
    return [name for name, row in rows if (row.get("error") or {}).get("stage", "ok") == kind]


def unfolded(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$repeat"}:
            text, times = value["$repeat"]
            return text * times
        return {key: unfolded(item) for key, item in value.items()}
    return [unfolded(item) for item in value] if isinstance(value, list) else value


def convert_row(row: dict[str, Any], unsupported: str = "ignore") -> ConvertedRequest:
    options = dict(row.get("options") or {})
    models = {**MODELS, **options.pop("aliases", {})}
    body = row["request_body"] if "request_body" in row else unfolded(row["request"])
    return convert_chat(
        parse_body(ChatRequest, body),
        ConversionOptions(models=models, unsupported=unsupported, **options),
    )


def golden_options(converted: ConvertedRequest) -> dict[str, Any]:
    """Settings as the goldens have them, whose constraints are a kind and a schema."""
    options = asdict(converted.settings)
    if options["output_constraint"]:
        constraint = options["output_constraint"]
        options["output_constraint"] = {name: constraint[name] for name in ("kind", "schema")}
    return options


@pytest.mark.parametrize("name", sorted(set(ids("ok")) - OURS.keys()))
def test_golden_request_means_the_same(name: str) -> None:
    row = golden_rows()[name]
    converted = convert_row(row)
    conversation = converted.conversation
    assert golden_options(converted) == row["inference_options"]
    parsing = asdict(converted.parsing)
    assert {**parsing, "stop_sequences": list(parsing["stop_sequences"])} == row["parsing_options"]
    assert row["conversation"] == {
        "thinking_mode": conversation.thinking,
        "reasoning_effort": conversation.reasoning_effort,
        "tool_choice": conversation.tool_choice,
        "response_format": conversation.response_format.kind,
        "roles": [message.role for message in conversation.messages],
        "stream": converted.stream,
    }
    prompt = render(conversation, converted.profile)
    assert [asdict(image) for image in prompt.images] == (row.get("images") or [])
    if "prompt" in row:
        assert prompt.text == row["prompt"]


@pytest.mark.parametrize("name", sorted(set(ids("convert")) - OURS.keys()))
def test_golden_refusal_says_the_same(name: str) -> None:
    row = golden_rows()[name]
    with pytest.raises(ConversionError) as caught:
        convert_row(row)
    assert caught.value.message == row["error"]["message"]


@pytest.mark.parametrize("name", sorted(ids("parse")))
def test_golden_body_error_is_one(name: str) -> None:
    with pytest.raises(BodyError):
        convert_row(golden_rows()[name])


def test_rows_with_a_refused_field_are_the_listed_ones() -> None:
    refused = {}
    for name in set(ids("ok")):
        try:
            convert_row(golden_rows()[name], "reject")
        except RequestError as error:
            refused[name] = error.message.split("`")[1]
    assert refused == REFUSED_ROWS


def test_what_is_ignored_is_listed() -> None:
    converted = convert_row(golden_rows()["chat/ok-unknown-fields/v4"])
    assert converted.left_out == ("foo", "reasoning")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=5),  # no lone surrogates: they are no JSON
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "name", "schema"]), inner)
    ),
    max_leaves=6,
)


@given(st.sampled_from(ids("ok")), st.sampled_from(["reject", "ignore"]), st.data())
def test_any_value_anywhere_converts_or_is_refused(name: str, policy: str, data: Any) -> None:
    # a copy of the request in which one value, at any depth, is another
    request = json.loads(json.dumps(golden_rows()[name]["request"]))
    place = request
    while True:
        key = data.draw(
            st.sampled_from(list(place) if isinstance(place, dict) else range(len(place)))
        )
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(json_values)
    try:
        converted = convert_chat(
            parse_body(ChatRequest, request), ConversionOptions(unsupported=policy)
        )
        render(converted.conversation, converted.profile)
    except RequestError as error:
        assert error.message
