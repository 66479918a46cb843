"""Replies in the Responses protocol: events and whole responses."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.decoding.events import (
    BackendFinish,
    Chunk,
    Event,
    Finish,
    Ready,
    Reasoning,
    Text,
    TextChunk,
    TokenChunk,
    TokenLogprob,
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from deepseek_recipe.decoding.machine import ReplyMachine
from deepseek_recipe.decoding.stream import ReplyStream, ServerEvent, Usage
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.call_ids import call_id
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.responses.convert import convert_responses
from deepseek_recipe.protocols.responses.models import ResponsesRequest
from deepseek_recipe.protocols.responses.reply import ResponsesWriter

GOLDENS = Path(__file__).parents[3] / "tests/conformance/prompts/streams.jsonl"
REQUEST = {"model": "DeepSeek-V4.1-Flash", "input": "hi", "reasoning": {"effort": "none"}}
PATCH = {"type": "custom", "name": "apply_patch"}
USAGE = Usage(prompt_tokens=12, cached_tokens=4, completion_tokens=7, reasoning_tokens=3)
# Rows that record a defect of the program they were made with: what we send instead.
OURS = {
    "responses/apply-patch-trunc/v41": "a custom call that was cut off has the raw text of `input` "
    "read so far, not the JSON around it; here nothing of it was read",
}


def rows() -> list[dict]:
    lines = GOLDENS.read_text(encoding="utf-8").split("\n")
    all_rows = [json.loads(line) for line in lines if line]
    return [row for row in all_rows if row["protocol"] == "responses"]


@pytest.fixture
def tokenizers(
    v4_tokenizer: PromptTokenizer, v41_tokenizer: PromptTokenizer
) -> dict[str, PromptTokenizer]:
    return {"v4": v4_tokenizer, "v41": v41_tokenizer}


def chunk_of(row: dict) -> Chunk:
    kind = row["kind"]
    if kind == "ready":
        usage = (row.get("prompt_tokens", 0), row.get("cache_hit", 0))
        return Ready(*usage, row.get("fingerprint") or "")
    if kind == "text":
        return TextChunk(row["text"], row["n"])
    if kind == "tokens":
        return TokenChunk(tuple(row["ids"]))
    return BackendFinish(row["reason"])


def replied(stream: ReplyStream, row: dict) -> list[ServerEvent]:
    events: list[ServerEvent] = []
    for chunk in map(chunk_of, row["model_output_chunks"]):
        if stream.finished:  # at a stop sequence
            break
        events += stream.push(chunk)
    return events + stream.finish()


def converted(**fields: object) -> ConvertedRequest:
    request = parse_body(ResponsesRequest, {**REQUEST, **fields})
    return convert_responses(request, ConversionOptions())


def writer_for(request: ConvertedRequest, **options: object) -> ResponsesWriter:
    fixed = {"created": 0, "clock": lambda: 0.9, "call_id": lambda index: f"call_{index:02d}_*"}
    return ResponsesWriter(request, response_id="RID", model="MODEL", **{**fixed, **options})


def played(writer: ResponsesWriter, events: list[Event], finish: Finish) -> list[dict]:
    out = writer.start(Ready(12, 4, "fp"))
    for event in events:
        out += writer.write(event)
    return payloads(out + writer.finish(finish, USAGE))


def payloads(events: list[ServerEvent]) -> list[dict]:
    values = [event.payload() for event in events]
    assert [event.name for event in events] == [value["type"] for value in values]
    return values


def joined(events: list[dict]) -> list[dict]:
    """Join neighbouring deltas of one item, drop empty ones, number anew."""
    out: list[dict] = []
    for event in events:
        if event.get("delta") == "":
            continue
        last = out[-1] if out else {}
        if (
            "delta" in event
            and last.get("type") == event["type"]
            and last["item_id"] == event["item_id"]
        ):
            out[-1] = {**last, "delta": last["delta"] + event["delta"]}
            if "logprobs" in event:
                out[-1]["logprobs"] = last["logprobs"] + event["logprobs"]
        else:
            out.append(event)
    return [{**event, "sequence_number": number} for number, event in enumerate(out)]


def call(name: str, *pieces: str, index: int = 0) -> list[Event]:
    arguments = [ToolArguments(index, piece) for piece in pieces]
    return [ToolStart(index, name), *arguments, ToolEnd(index)]


def output_of(request: ConvertedRequest, events: list[Event], reason: str = "stop") -> list[dict]:
    return played(writer_for(request), events, Finish(reason))[-1]["response"]["output"]


# ---- goldens ------------------------------------------------------------------------------------


def run(row: dict, tokenizer: PromptTokenizer) -> tuple[list[dict], ReplyStream, ResponsesWriter]:
    request = convert_responses(
        parse_body(ResponsesRequest, row["request"]), ConversionOptions(unsupported="ignore")
    )
    writer = writer_for(request, echo=row.get("echo", False), tokenizer=tokenizer)
    machine = ReplyMachine(request.parsing, request.profile, tokenizer)
    stream = ReplyStream(writer, machine, tokenizer)
    return payloads(replied(stream, row)), stream, writer


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["id"])
def test_golden_stream(row: dict, tokenizers: dict[str, PromptTokenizer]) -> None:
    events, stream, writer = run(row, tokenizers[row["version"]])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (row["id"] in OURS) == row.get("quirk", False)
    if row["id"] in OURS:
        return
    assert joined(events) == joined([event["data"] for event in row["events"]])
    assert stream.response() == row["response"]
    assert writer.done_data == row["done_data"]
    assert stream.finished


def test_cut_off_custom_call_has_the_text_read_so_far(v41_tokenizer: PromptTokenizer) -> None:
    row = next(row for row in rows() if row["id"] == "responses/apply-patch-trunc/v41")
    row["model_output_chunks"][1]["text"] += 'rue">*** Begin\n"q"'
    events, stream, _ = run(row, v41_tokenizer)
    (item,) = stream.response()["output"]
    assert (item["status"], item["input"]) == ("incomplete", '*** Begin\n"q"')
    assert "".join(event["delta"] for event in events if "delta" in event) == item["input"]


# ---- items --------------------------------------------------------------------------------------


def test_message_before_a_call_is_commentary_and_the_last_one_is_the_answer() -> None:
    request = converted(tools=[{"type": "function", "name": "f"}])
    first, _ = output_of(request, [Text("look"), *call("f", "{}")], "tool_calls")
    assert first["phase"] == "commentary"
    (only,) = output_of(request, [Text("look")])
    assert only["phase"] == "final_answer"


def test_any_declared_custom_tool_becomes_a_custom_tool_call() -> None:
    request = converted(tools=[{"type": "custom", "name": "sql", "description": "Runs a query."}])
    (item,) = output_of(
        request, call("sql", '{"input": "select', ' \\"a\\"\\n', '"}'), "tool_calls"
    )
    assert item == {
        "type": "custom_tool_call",
        "id": "ctc_RID_0",
        "status": "completed",
        "call_id": "call_00_*",
        "name": "sql",
        "input": 'select "a"\n',
    }


def test_custom_input_is_streamed_while_the_model_writes_it() -> None:
    writer = writer_for(converted(tools=[PATCH]))
    writer.write(ToolStart(0, "apply_patch"))
    pieces = ['{"in', 'put": "', "ab", "c\\", "n", '"', "}"]
    sent = [
        [event.payload()["delta"] for event in writer.write(ToolArguments(0, piece))]
        for piece in pieces
    ]
    assert sent == [[], [], ["ab"], ["c"], ["\n"], [], []]


def test_search_call_arguments_that_are_no_object_leave_the_call_incomplete() -> None:
    request = converted(
        tools=[
            {
                "type": "tool_search",
                "execution": "client",
                "description": "d",
                "parameters": {"type": "object"},
            }
        ]
    )
    (item,) = output_of(request, call("tool_search", '{"q": ')[:-1], "tool_calls")
    assert (item["type"], item["status"], item["arguments"]) == (
        "tool_search_call",
        "incomplete",
        {},
    )


def test_function_that_is_called_tool_search_is_a_function() -> None:
    request = converted(tools=[{"type": "function", "name": "tool_search"}])
    (item,) = output_of(request, call("tool_search", "{}"), "tool_calls")
    assert item["type"] == "function_call"


@pytest.mark.parametrize("separator", ["::", "__"])
def test_call_in_a_namespace_has_its_own_name_and_the_namespace(separator: str) -> None:
    model = "DeepSeek-V4.1-Flash" if separator == "::" else "DeepSeek-V4-Pro"
    tool = {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]}
    request = converted(model=model, tools=[tool])
    (item,) = output_of(request, call(f"crm{separator}find", "{}"), "tool_calls")
    assert (item["namespace"], item["name"]) == ("crm", "find")


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_response_tells_why_it_ended(reason: str, status: str, details: object) -> None:
    last = played(writer_for(converted()), [Text("a")], Finish(reason))[-1]
    assert last["type"] == f"response.{status}"
    response = last["response"]
    assert (response["status"], response["incomplete_details"]) == (status, details)
    assert response["output"][0]["status"] == status
    assert response["completed_at"] == 0


def test_finished_items_stay_completed_when_the_reply_is_cut_off() -> None:
    first, second = output_of(converted(), [Reasoning("r"), Text("a")], "length")
    assert (first["status"], second["status"]) == ("completed", "incomplete")


# ---- response object ----------------------------------------------------------------------------


ECHOED = {
    "instructions": "I",
    "max_output_tokens": 5,
    "temperature": 0.3,
    "top_p": 0.9,
    "top_logprobs": 3,
    "user": "U",
}


def test_echo_repeats_sampling_fields_and_instructions() -> None:
    response = writer_for(converted(**ECHOED), echo=True).response()
    assert {key: response[key] for key in ECHOED} == ECHOED


def test_without_echo_they_have_their_defaults() -> None:
    response = writer_for(converted(**ECHOED)).response()
    assert [response[key] for key in ECHOED] == [None, None, 1.0, 1.0, 0, None]


def test_response_repeats_the_form_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}}}
    shape = {"type": "json_schema", "name": "n", "schema": schema}
    response = writer_for(converted(text={"format": shape, "verbosity": "low"})).response()
    assert response["text"] == {
        "format": {**shape, "description": None, "strict": None},
        "verbosity": "low",
    }


def test_response_repeats_tools_and_the_choice() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    function["description"] = "D"
    tools = [
        function,
        {"type": "custom", "name": "sql", "description": "q", "format": {"type": "text"}},
        {
            "type": "namespace",
            "name": "n",
            "description": "d",
            "tools": [{**function, "name": "g"}],
        },
    ]
    choice = {"type": "custom", "name": "sql"}
    response = writer_for(converted(tools=tools, tool_choice=choice)).response()
    assert response["tool_choice"] == choice
    assert response["tools"] == [
        {**tools[0], "strict": None},
        tools[1],
        {**tools[2], "tools": [{**function, "name": "g", "strict": None}]},
    ]


def test_usage_without_a_tokenizer_counts_no_reasoning() -> None:
    writer = writer_for(converted())
    writer.finish(Finish("stop"), Usage(5, 0, 2, None))
    assert writer.response()["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }


# ---- log-probabilities --------------------------------------------------------------------------


def logprob_events(vocabulary: PromptTokenizer) -> list[Event]:
    hello, smile = vocabulary.encode_plain("Hello"), vocabulary.encode_plain("🙂")
    assert (len(hello), len(smile)) == (1, 2), "the packaged vocabulary"
    first = TokenLogprob(hello[0], -0.5, ((hello[0], -0.5), (smile[0], float("-inf"))))
    second = tuple(TokenLogprob(each, -1.0) for each in smile)
    return [Text("Hello", (first,)), Text("🙂", second)]


def test_logprobs_asked_for_are_in_every_place_of_the_text(v4_tokenizer: PromptTokenizer) -> None:
    writer = writer_for(converted(top_logprobs=2), tokenizer=v4_tokenizer)
    events = played(writer, logprob_events(v4_tokenizer), Finish("stop"))
    by_type = {event["type"]: event for event in joined(events)}
    whole = by_type["response.output_text.done"]["logprobs"]
    assert whole[0] == {
        "token": "Hello",
        "logprob": -0.5,
        "bytes": list(b"Hello"),
        "top_logprobs": [
            {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")},
            {"token": "\\xf0\\x9f\\x99", "logprob": -9999.0, "bytes": [240, 159, 153]},
        ],
    }
    assert [entry["token"] for entry in whole[1:]] == ["\\xf0\\x9f\\x99", "\\x82"]
    assert by_type["response.output_text.delta"]["logprobs"] == whole
    assert by_type["response.content_part.done"]["part"]["logprobs"] == whole
    assert by_type["response.output_item.done"]["item"]["content"][0]["logprobs"] == whole


def test_logprobs_not_asked_for_are_not_told(v4_tokenizer: PromptTokenizer) -> None:
    writer = writer_for(converted(), tokenizer=v4_tokenizer)
    events = played(writer, logprob_events(v4_tokenizer), Finish("stop"))
    assert all(event.get("logprobs", []) == [] for event in events)


# ---- all replies --------------------------------------------------------------------------------


def any_reply() -> st.SearchStrategy[list[Event]]:
    texts = st.lists(st.text(min_size=1), max_size=3)
    names = st.sampled_from(["f", "sql", "tool_search", "crm::find"])
    calls = st.lists(
        st.tuples(names, st.dictionaries(st.text(), st.text(), max_size=2)), max_size=3
    )
    return st.builds(
        lambda reasoning, answer, made: [
            *map(Reasoning, reasoning),
            *map(Text, answer),
            *(
                event
                for index, (name, arguments) in enumerate(made)
                for event in call(name, *json.dumps(arguments), index=index)
            ),
        ],
        texts,
        texts,
        calls,
    )


TOOLS = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "sql"},
    {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]},
]


@cache
def with_tools() -> ConvertedRequest:
    return converted(tools=TOOLS)


@given(any_reply(), st.sampled_from(["stop", "length", "content_filter"]))
def test_stream_and_whole_response_tell_the_same(reply: list[Event], reason: str) -> None:
    writer = writer_for(with_tools())
    events = played(writer, reply, Finish(reason))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = writer.response()["output"]
    assert events[-1]["response"] == writer.response()
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == output
    assert [event["output_index"] for event in done] == list(range(len(output)))
    for item in output:
        deltas = [e["delta"] for e in events if e.get("item_id") == item["id"] and "delta" in e]
        told = item.get("arguments", item.get("input"))
        assert "".join(deltas) == (item["content"][0]["text"] if told is None else told)


@given(st.text())
def test_event_is_one_line_of_json(text: str) -> None:
    writer = writer_for(with_tools())
    for event in [*writer.write(Text(text)), *writer.write(Reasoning(text))]:
        assert "\n" not in event.data and "\r" not in event.data
        assert event.payload()["type"] == event.name


def test_call_ids_have_the_protocol_s_form_and_differ() -> None:
    made = {call_id(7) for _ in range(100)}
    assert len(made) == 100
    assert all(re.fullmatch(r"call_07_[A-Za-z0-9]{20}[0-9]{4}", each) for each in made)


SQL = {"type": "custom", "name": "sql"}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}


def stream_of(tool: dict) -> ReplyStream:
    request = converted(tools=[tool])
    writer = writer_for(request)
    return ReplyStream(writer, ReplyMachine(request.parsing, request.profile))


def call_of(name: str, inside: str) -> str:
    return f'<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n{inside}'


def test_a_cut_off_custom_call_never_has_half_a_character() -> None:
    stream = stream_of(SQL)
    inside = '<｜DSML｜ parameter name="input" string="false">"abc\\udc00'
    events = stream.push(TextChunk(call_of("sql", inside), 5))
    events += stream.push(BackendFinish("length"))
    assert "".join(event.sse() for event in events).encode()
    (item,) = stream.response()["output"]
    assert item["input"] == "abc\ufffd"


def test_arguments_that_a_protocol_has_no_place_for_are_told() -> None:
    value = '<｜DSML｜ parameter name="{}" string="true">{}</｜DSML｜ parameter>\n'
    stream = stream_of(SQL)
    inside = value.format("input", "a") + value.format("q", "b") + "</｜DSML｜ invoke>"
    stream.push(TextChunk(call_of("sql", inside), 5))
    stream.push(BackendFinish("stop"))
    (item,) = stream.response()["output"]
    assert item["input"] == "a"
    assert [each.text for each in stream.malformed] == [', "q": "b"}']
    stream = stream_of(SEARCH)
    stream.push(TextChunk(call_of("tool_search", value.format("query", "a")), 5))
    stream.push(BackendFinish("length"))
    assert [each.text for each in stream.malformed] == ['{"query": "a"']
