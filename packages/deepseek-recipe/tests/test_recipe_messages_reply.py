"""Replies in the Messages protocol: events and whole messages."""

from __future__ import annotations

import json
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
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from deepseek_recipe.decoding.machine import ReplyMachine
from deepseek_recipe.decoding.stream import ReplyStream, ServerEvent, Usage
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.messages.convert import convert_messages
from deepseek_recipe.protocols.messages.models import MessagesRequest
from deepseek_recipe.protocols.messages.reply import MessagesWriter

GOLDENS = Path(__file__).parents[3] / "tests/conformance/prompts/streams.jsonl"
REQUEST = {
    "model": "DeepSeek-V4.1-Flash",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 64,
}
USAGE = Usage(prompt_tokens=12, cached_tokens=4, completion_tokens=7, reasoning_tokens=3)


def rows() -> list[dict]:
    lines = GOLDENS.read_text(encoding="utf-8").split("\n")
    all_rows = [json.loads(line) for line in lines if line]
    return [row for row in all_rows if row["protocol"] == "messages"]


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


@cache
def converted(thinking: bool = False) -> ConvertedRequest:
    mode = {"type": "enabled" if thinking else "disabled"}
    request = parse_body(MessagesRequest, {**REQUEST, "thinking": mode})
    return convert_messages(request, ConversionOptions(unsupported="ignore"))


def writer_for(request: ConvertedRequest, **options: object) -> MessagesWriter:
    fixed = {"call_id": lambda index: f"call_{index:02d}_*"}
    return MessagesWriter(request, response_id="RID", model="MODEL", **{**fixed, **options})


def played(writer: MessagesWriter, events: list[Event], finish: Finish) -> list[dict]:
    out = writer.start(Ready(12, 4, "fp"))
    for event in events:
        out += writer.write(event)
    return payloads(out + writer.finish(finish, USAGE))


def payloads(events: list[ServerEvent]) -> list[dict]:
    values = [event.payload() for event in events]
    assert [event.name for event in events] == [value["type"] for value in values]
    return values


def text_in(delta: dict) -> tuple[str, str]:
    """The field of a delta that has its text, and that text."""
    ((name, text),) = [(key, value) for key, value in delta.items() if key != "type"]
    return name, text


def joined(events: list[dict]) -> list[dict]:
    """Join neighbouring deltas of one block, drop empty ones."""
    out: list[dict] = []
    for event in events:
        if event["type"] != "content_block_delta":
            out.append(event)
            continue
        name, text = text_in(event["delta"])
        last = out[-1] if out else {}
        if text == "":
            continue
        if last.get("type") == event["type"] and last["delta"]["type"] == event["delta"]["type"]:
            out[-1] = {**last, "delta": {**last["delta"], name: last["delta"][name] + text}}
        else:
            out.append(event)
    return out


def call(name: str, *pieces: str, index: int = 0) -> list[Event]:
    arguments = [ToolArguments(index, piece) for piece in pieces]
    return [ToolStart(index, name), *arguments, ToolEnd(index)]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["id"])
def test_golden_stream(row: dict, v41_tokenizer: PromptTokenizer) -> None:
    assert row["version"] == "v41"
    request = convert_messages(
        parse_body(MessagesRequest, row["request"]), ConversionOptions(unsupported="ignore")
    )
    writer = writer_for(request, signature=row.get("signature"))
    machine = ReplyMachine(request.parsing, request.profile, v41_tokenizer)
    stream = ReplyStream(writer, machine, v41_tokenizer)
    events = replied(stream, row)
    assert joined(payloads(events)) == joined([event["data"] for event in row["events"]])
    assert stream.response() == row["response"]
    assert writer.done_data == row["done_data"]
    assert stream.finished


def test_thinking_block_opens_at_once_and_is_signed_even_when_empty() -> None:
    events = played(writer_for(converted(True)), [], Finish("stop"))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[3]["delta"] == {"type": "signature_delta", "signature": "RID"}


def test_signature_of_the_server_s_choice() -> None:
    writer = writer_for(converted(True), signature="SIG")
    events = played(writer, [Reasoning("r"), Text("a")], Finish("stop"))
    signed = [event["delta"] for event in events if "signature" in event.get("delta", {})]
    assert signed == [{"type": "signature_delta", "signature": "SIG"}]
    assert writer.response()["content"][0] == {
        "type": "thinking",
        "thinking": "r",
        "signature": "SIG",
    }


def test_empty_reply_without_thinking_has_no_block() -> None:
    writer = writer_for(converted())
    events = played(writer, [], Finish("stop"))
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
    assert writer.response()["content"] == []


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        (Finish("stop"), ("end_turn", None)),
        (Finish("length"), ("max_tokens", None)),
        (Finish("content_filter"), ("refusal", None)),
        (Finish("tool_calls"), ("tool_use", None)),
        (Finish("stop", stop_sequence="END"), ("stop_sequence", "END")),
    ],
)
def test_message_tells_why_it_ended(finish: Finish, told: tuple) -> None:
    writer = writer_for(converted())
    delta = played(writer, [Text("a")], finish)[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == told
    message = writer.response()
    assert (message["stop_reason"], message["stop_sequence"]) == told


def test_usage_counts_cached_tokens_apart() -> None:
    writer = writer_for(converted())
    start = played(writer, [Text("a")], Finish("stop"))[0]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (8, 4)
    assert (start["output_tokens"], writer.response()["usage"]["output_tokens"]) == (0, 7)


@pytest.mark.parametrize("arguments", ['{"a": "b', "[1]", ""])
def test_call_that_was_cut_off_has_an_empty_input(arguments: str) -> None:
    writer = writer_for(converted())
    events = played(writer, call("f", arguments)[:-1], Finish("length"))
    (block,) = writer.response()["content"]
    assert block == {"type": "tool_use", "id": "call_00_*", "name": "f", "input": {}}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == [{"type": "input_json_delta", "partial_json": arguments}]


def any_reply() -> st.SearchStrategy[list[Event]]:
    texts = st.lists(st.text(min_size=1), max_size=3)
    arguments = st.dictionaries(st.text(), st.integers() | st.text(), max_size=2)
    calls = st.lists(st.tuples(st.text(min_size=1), arguments), max_size=3)
    return st.builds(
        lambda reasoning, answer, made: [
            *map(Reasoning, reasoning),
            *map(Text, answer),
            *(
                event
                for index, (name, values) in enumerate(made)
                for event in call(name, *json.dumps(values), index=index)
            ),
        ],
        texts,
        texts,
        calls,
    )


@given(any_reply(), st.booleans())
def test_stream_and_whole_message_tell_the_same(reply: list[Event], thinking: bool) -> None:
    writer = writer_for(converted(thinking))
    told: list[dict] = []
    pieces: list[str] = []
    for event in played(writer, reply, Finish("stop")):
        if event["type"] == "content_block_start":
            assert event["index"] == len(told)
            told.append(event["content_block"])
            pieces = []
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(told) - 1
            name, text = text_in(event["delta"])
            if name == "signature":
                told[-1]["signature"] = text
            else:
                pieces.append(text)
        elif event["type"] == "content_block_stop":
            text = "".join(pieces)
            kind = told[-1]["type"]
            told[-1]["input" if kind == "tool_use" else kind] = (
                json.loads(text) if kind == "tool_use" else text
            )
    assert told == writer.response()["content"]


@given(st.text())
def test_event_is_one_line_of_json(text: str) -> None:
    writer = writer_for(converted())
    for event in [*writer.write(Text(text)), *writer.write(Reasoning(text))]:
        assert "\n" not in event.data and "\r" not in event.data
        assert event.payload()["type"] == event.name
