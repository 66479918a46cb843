"""Replies in the Chat Completions protocol: chunks and whole responses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from deepseek_recipe.decoding.events import (
    BackendFinish,
    Chunk,
    Ready,
    TextChunk,
    TokenChunk,
    TokenLogprob,
)
from deepseek_recipe.decoding.machine import ReplyMachine
from deepseek_recipe.decoding.stream import ReplyStream, ServerEvent
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.errors import ReplyError
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.chat.convert import convert_chat
from deepseek_recipe.protocols.chat.models import ChatRequest
from deepseek_recipe.protocols.chat.reply import ChatWriter

IGNORE = ConversionOptions(unsupported="ignore")
SIMPLE = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "hi"}]}
OFF = {**SIMPLE, "thinking": {"type": "disabled"}}
READY = Ready(prompt_tokens=12, cached_tokens=4, fingerprint="fp")


def chunk_of(row: dict[str, Any]) -> Chunk:
    kind = row["kind"]
    if kind == "ready":
        usage = (row.get("prompt_tokens", 0), row.get("cache_hit", 0))
        return Ready(*usage, row.get("fingerprint") or "")
    if kind == "text":
        return TextChunk(row["text"], row["n"])
    if kind == "finish":
        return BackendFinish(row["reason"])
    if "logprobs" not in row:
        return TokenChunk(row["ids"])
    pairs = zip(row["ids"], row["logprobs"], strict=False)
    return TokenChunk(
        row["ids"], tuple(TokenLogprob(i, own, tuple(top)) for i, (own, top) in pairs)
    )


def stream_for(
    request: dict[str, Any],
    tokenizer: PromptTokenizer | None = None,
    continues: bool = False,
    **names: Any,
) -> ReplyStream:
    converted = convert_chat(parse_body(ChatRequest, request), IGNORE)
    fields = {"response_id": "ID", "model": "M", "created": 0, "tokenizer": tokenizer, **names}
    writer = ChatWriter(converted, **fields)
    machine = ReplyMachine(
        converted.parsing, converted.profile, tokenizer, continues_content=continues
    )
    return ReplyStream(writer, machine, tokenizer)


def run(stream: ReplyStream, chunks: Iterable[Chunk]) -> tuple[list[ServerEvent], str | None]:
    events: list[ServerEvent] = []
    try:
        for chunk in chunks:
            if stream.finished:
                break
            events += stream.push(chunk)
        events += stream.finish()
    except ReplyError as error:
        return events, str(error)
    return events, None


def joined(payloads: Iterable[Any]) -> list[Any]:
    """Neighbouring deltas of one kind as one, empty ones left out."""
    out: list[Any] = []
    for payload in payloads:
        (choice,) = payload["choices"]
        delta, finish = choice["delta"], choice["finish_reason"]
        calls = delta.get("tool_calls")
        for call in calls or ():
            call["id"] = re.sub(r"^(call_\d\d_)[0-9A-Za-z]{20}\d{4}$", r"\1*", call.get("id", ""))
        if "role" in delta or finish is not None or (calls and "name" in calls[0]["function"]):
            out.append(payload)
            continue
        if calls:
            kind, text = ("arguments", calls[0]["index"]), calls[0]["function"]["arguments"]
        else:
            kind = "reasoning_content" if delta.get("reasoning_content") is not None else "content"
            text = delta[kind]
            assert not choice["logprobs"] or list(choice["logprobs"]) == [kind]
        entries = (choice["logprobs"] or {}).get(kind, [])
        if not text:
            assert not entries
        elif out and isinstance(out[-1], list) and out[-1][0] == kind:
            out[-1][1] += text
            out[-1][2] += entries
        else:
            shape = json.dumps({**payload, "choices": sorted(delta)}, sort_keys=True)
            out.append([kind, text, list(entries), shape])
    return out


def masked(response: Any) -> Any:
    for choice in (response or {}).get("choices", ()):
        for call in choice["message"].get("tool_calls", ()):
            call["id"] = re.sub(r"^(call_\d\d_)[0-9A-Za-z]{20}\d{4}$", r"\1*", call["id"])
    return response


def outcome(row: dict[str, Any], tokenizers: dict[str, PromptTokenizer]) -> dict[str, Any]:
    tokenizer = tokenizers[row["version"]] if row["tokenizer"] else None
    stream = stream_for(
        row["request"], tokenizer, response_id=row["response_id"], model=row["model"]
    )
    events, error = run(stream, map(chunk_of, row["model_output_chunks"]))
    return {
        "events": joined(event.payload() for event in events),
        "error": error,
        "finished": stream.finished,
        "response": masked(stream.response()) if stream.finished else None,
        "done_data": stream.done_data,
    }


@pytest.fixture(scope="module")
def tokenizers(
    v4_tokenizer: PromptTokenizer, v41_tokenizer: PromptTokenizer
) -> dict[str, PromptTokenizer]:
    return {"v4": v4_tokenizer, "v41": v41_tokenizer}


def test_golden_rows_that_are_no_quirks_give_the_same_chunks_and_response(
    golden_rows: Callable[[str], list[dict[str, Any]]], tokenizers: dict[str, PromptTokenizer]
) -> None:
    rows = [row for row in golden_rows("streams") if row["protocol"] == "chat"]
    plain = [row for row in rows if not row.get("quirk")]
    assert len(plain) > 60
    for row in plain:
        want = {
            "events": joined(event["data"] for event in row["events"]),
            "error": row["error"],
            "finished": row["finished"],
            "response": row.get("response"),
            "done_data": row["done_data"],
        }
        assert outcome(row, tokenizers) == want, row["id"]


# What we answer instead of the recorded peer, and why: arguments (or content), and what is told.
QUIRKS: dict[str, tuple[str, list[str], str | None, int]] = {
    # a value that is not JSON becomes a string, so that the arguments stay JSON
    "chat/dsml-false-broken/v41": ("", ['{"o": "{\\"x\\": [1"}'], "tool_calls", 1),
    # a name goes to the quote before ` string=`, blanks included
    "chat/dsml-name-spaces-chars/v41": (
        "",
        ['{"shipping address": "Paris\\n日本", " string= mode ": {"on":true}, "": "empty key"}'],
        "tool_calls",
        0,
    ),
    "chat/dsml-name-spaces-tokens/v41": (
        "",
        ['{"shipping address": "Paris\\n日本", " string= mode ": {"on":true}, "": "empty key"}'],
        "tool_calls",
        0,
    ),
    # an object has each name once: the first value counts
    "chat/dsml-dup-param/v41": ("", ['{"a": "1"}'], "tool_calls", 1),
    # nobody can execute a call without a name
    "chat/dsml-empty-name/v41": ("", [], "stop", 1),
    # parameters belong to the call that they are written in, not to an unclosed one before
    "chat/dsml-invoke-unclosed/v41": ("", ["{}", '{"a": "1"}'], "tool_calls", 0),
    # as the peer, but what is dropped is told
    "chat/dsml-foo-tag/v41": ("abc ", [], "stop", 1),
    "chat/dsml-param-no-invoke/v41": ("", [], "stop", 1),
    # a continued answer keeps its first newlines
    "chat/prefix-nothink/v41": ("\n\nmore", [], "stop", 0),
    # a tool block behind JSON is a tool block
    "chat/json-then-tool/v41": (' {"a":1}', ["{}"], "tool_calls", 1),
}


def test_golden_rows_that_are_quirks_are_answered_as_stated(
    golden_rows: Callable[[str], list[dict[str, Any]]], v41_tokenizer: PromptTokenizer
) -> None:
    rows = [row for row in golden_rows("streams") if row["protocol"] == "chat"]
    quirks = {row["id"]: row for row in rows if row.get("quirk")}
    assert quirks.keys() == QUIRKS.keys()
    for name, row in quirks.items():
        content, arguments, reason, num_told = QUIRKS[name]
        stream = stream_for(
            row["request"], v41_tokenizer, continues=name == "chat/prefix-nothink/v41"
        )
        run(stream, map(chunk_of, row["model_output_chunks"]))
        (choice,) = stream.response()["choices"]
        calls = choice["message"].get("tool_calls", [])
        assert choice["message"]["content"] == content, name
        assert [call["function"]["arguments"] for call in calls] == arguments, name
        assert choice["finish_reason"] == reason, name
        assert len(stream.malformed) == num_told, name


def test_deltas_together_are_the_whole_response() -> None:
    stream = stream_for(SIMPLE)
    events, _ = run(stream, [READY, TextChunk("a b</think>c", 3), TextChunk("d", 1)])
    deltas = [event.payload()["choices"][0]["delta"] for event in events]
    (choice,) = stream.response()["choices"]
    for key in ("content", "reasoning_content"):
        assert "".join(delta.get(key) or "" for delta in deltas) == choice["message"][key]
    assert choice["message"] == {"role": "assistant", "content": "cd", "reasoning_content": "a b"}


def test_call_ids_can_be_given() -> None:
    request = {**OFF, "tools": [{"type": "function", "function": {"name": "f"}}]}
    stream = stream_for(request, call_id=lambda index: f"id-{index}")
    text = '<｜DSML｜tool_calls><｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜tool_calls>'
    events, _ = run(stream, [TextChunk(text, 9)])
    assert events[1].payload()["choices"][0]["delta"] == {
        "tool_calls": [
            {
                "index": 0,
                "id": "id-0",
                "type": "function",
                "function": {"name": "f", "arguments": ""},
            }
        ]
    }
    (call,) = stream.response()["choices"][0]["message"]["tool_calls"]
    assert call["id"] == "id-0"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, True),
        ({"stream": False}, True),
        ({"stream": True}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": False}}, False),
    ],
)
def test_chunks_before_the_last_tell_of_usage_when_asked(
    fields: dict[str, Any], told: bool
) -> None:
    events, _ = run(stream_for({**OFF, **fields}), [READY, TextChunk("a", 1)])
    *before, last = [event.payload() for event in events]
    assert all(("usage" in payload) is told for payload in before)
    assert last["usage"]["completion_tokens"] == 1


def test_usage_counts_all_ids_and_the_reasoning_text(v4_tokenizer: PromptTokenizer) -> None:
    stream = stream_for(SIMPLE, v4_tokenizer)
    run(stream, [READY, TokenChunk([19923, 2058, 128822, 68, 128822]), TextChunk("x", 2)])
    assert stream.response()["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 7,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
        "prompt_cache_hit_tokens": 4,
        "prompt_cache_miss_tokens": 8,
    }


def test_a_missing_ready_and_a_missing_finish_are_implied() -> None:
    stream = stream_for(OFF)
    assert len(stream.push(TextChunk("a", 1))) == 2
    (last,) = stream.finish()
    assert last.payload()["choices"][0]["finish_reason"] == "stop"
    assert last.payload()["system_fingerprint"] is None
    assert stream.finish() == []


def test_a_stop_text_finishes_the_stream_at_once() -> None:
    stream = stream_for({**OFF, "stop": "END"})
    events = stream.push(TextChunk("aENDb", 4))
    assert stream.finished
    assert events[-1].payload()["choices"][0]["finish_reason"] == "stop"
    for chunk in (TextChunk("c", 1), BackendFinish("stop"), READY):
        with pytest.raises(ReplyError, match="stream processor has finished"):
            stream.push(chunk)
    assert stream.finish() == []
    assert stream.response()["choices"][0]["message"]["content"] == "a"


def test_a_refused_chunk_leaves_the_stream_as_it_was(v4_tokenizer: PromptTokenizer) -> None:
    stream = stream_for(OFF, v4_tokenizer)
    stream.push(READY)
    stream.push(TokenChunk([68]))
    one = (TokenLogprob(69, -1.0),)
    for chunk in (TokenChunk([69, 10**7]), TokenChunk([69, 70], one), READY, "text"):
        with pytest.raises(ReplyError):
            stream.push(chunk)
    stream.push(TokenChunk([70]))
    stream.finish()
    assert stream.response()["choices"][0]["message"]["content"] == "bd"
    assert stream.response()["usage"]["completion_tokens"] == 2


def test_there_is_no_response_before_the_end() -> None:
    with pytest.raises(ReplyError, match="not finished"):
        stream_for(OFF).response()


def test_what_the_model_garbled_is_told_on_the_stream_alone() -> None:
    request = {**OFF, "tools": [{"type": "function", "function": {"name": "f"}}]}
    stream = stream_for(request)
    events, _ = run(stream, [TextChunk("a <｜DSML｜tool_calls>loose", 3)])
    assert [each.text for each in stream.malformed] == ["loose"]
    assert "loose" not in "".join(event.data for event in events)


def test_logprobs_of_a_token_that_is_no_text_show_its_bytes(v4_tokenizer: PromptTokenizer) -> None:
    stream = stream_for({**OFF, "logprobs": True, "top_logprobs": 1}, v4_tokenizer)
    first = (TokenLogprob(28927, -1.0, ((28927, -1.0),)),)
    events, _ = run(
        stream, [TokenChunk([28927], first), TokenChunk([225], (TokenLogprob(225, -2.0),))]
    )
    (_, told, _) = (event.payload()["choices"][0] for event in events)
    assert told["delta"] == {"content": "😀"}
    assert [entry["token"] for entry in told["logprobs"]["content"]] == ["\\xf0\\x9f\\x98", "\\x80"]
    assert told["logprobs"]["content"][0]["top_logprobs"][0]["bytes"] == [0xF0, 0x9F, 0x98]
    assert stream.response()["choices"][0]["logprobs"] == told["logprobs"]


def test_logprobs_need_a_tokenizer_of_the_writer(v4_tokenizer: PromptTokenizer) -> None:
    converted = convert_chat(parse_body(ChatRequest, {**OFF, "logprobs": True}), IGNORE)
    writer = ChatWriter(converted, response_id="ID", model="M", created=0)
    machine = ReplyMachine(converted.parsing, converted.profile, v4_tokenizer)
    with pytest.raises(ReplyError, match="tokenizer"):
        ReplyStream(writer, machine).push(TokenChunk([68], (TokenLogprob(68, -1.0),)))


@pytest.mark.parametrize("text", ['"\\\n\r\t\b\f\x00\x7f', "é😀\u2028\u2029", "</script>"])
def test_any_text_is_framed_as_one_line_of_json(text: str) -> None:
    events, _ = run(stream_for(OFF), [TextChunk(f"a{text}", 1)])
    for event in events:
        framed = event.sse()
        # also for a reader that takes every line break of Unicode for one
        assert framed.splitlines() == [framed[:-2], ""] and framed.startswith("data: ")
        assert json.loads(framed.removeprefix("data: ")) == event.payload()
        assert not {"\n", "\r"} & set(event.data)
    assert events[1].payload()["choices"][0]["delta"] == {"content": f"a{text}"}


def test_named_events_are_framed_with_their_name() -> None:
    assert ServerEvent("ping", "{}").sse() == "event: ping\ndata: {}\n\n"
