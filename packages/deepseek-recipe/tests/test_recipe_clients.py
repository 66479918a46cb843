"""The real `openai` and `anthropic` clients read what we send: events, whole responses, errors."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from deepseek_recipe.decoding.events import (
    BackendFinish,
    Chunk,
    Ready,
    TextChunk,
    TokenChunk,
    TokenLogprob,
)
from deepseek_recipe.decoding.stream import ReplyStream, ServerEvent
from deepseek_recipe.errors import RequestError, error_body
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.dispatch import convert, parse, reply_stream

httpx = pytest.importorskip("httpx2", reason="the clients' HTTP library is not installed")
openai = pytest.importorskip("openai", reason="the openai client is not installed")
anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")

from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

GOLDENS = Path(__file__).parents[3] / "tests/conformance/prompts/streams.jsonl"
JSON, EVENTS = "application/json", "text/event-stream"
# Odd line ends and other characters that a reader of lines or of JSON could trip over.
ODD = 'a\u2028b\u2029c\x85d\x0be\x00f\r\ng\\"h\ufffei🙂'

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "Q"}]}
RESPONSES = {"model": "DeepSeek-V4.1-Flash", "input": "Q"}
ODD_TEXT = {"kind": "text", "text": f"{ODD}</think>{ODD}", "n": 2}
LOGPROBS = [[-1.0, [[19923, -1.0]]], [-2.0, []]]
HELLO_WORLD = {"kind": "tokens", "ids": [19923, 2058], "logprobs": LOGPROBS}
CALLS = (
    "why</think>look\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="sql">\n<｜DSML｜ parameter name="input" string="true">'
    f"{ODD}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n"
    '<｜DSML｜ invoke name="crm::find">\n<｜DSML｜ parameter name="city" string="true">'
    f"{ODD}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def row(name: str, protocol: str, request: dict, *output: dict, **options: object) -> dict:
    chunks = [{"kind": "ready", "prompt_tokens": 9}, *output, {"kind": "finish", "reason": "stop"}]
    return {
        "id": f"{protocol}/{name}",
        "protocol": protocol,
        "version": "v41",
        "request": request,
        "model_output_chunks": chunks,
        **options,
    }


# What the golden rows have no example of.
MORE = [
    row("odd-text", "chat", CHAT, ODD_TEXT),
    row("odd-text", "responses", RESPONSES, ODD_TEXT),
    row("odd-text", "messages", {**CHAT, "max_tokens": 9}, ODD_TEXT, signature="SIG"),
    row(
        "everything",
        "responses",
        {
            **RESPONSES,
            "instructions": "I",
            "max_output_tokens": 99,
            "temperature": 0.5,
            "top_p": 0.9,
            "user": "U",
            "reasoning": {"effort": "high", "summary": "auto"},
            "text": {
                "format": {"type": "json_schema", "name": "n", "schema": WEATHER},
                "verbosity": "low",
            },
            "tools": [
                {"type": "function", "name": "f", "parameters": WEATHER},
                {
                    "type": "custom",
                    "name": "sql",
                    "description": "d",
                    "format": {"type": "grammar", "syntax": "regex", "definition": "a"},
                },
                {
                    "type": "namespace",
                    "name": "crm",
                    "description": "d",
                    "tools": [{"type": "function", "name": "find", "parameters": WEATHER}],
                },
            ],
        },
        {"kind": "text", "text": CALLS, "n": 30},
        echo=True,
    ),
    row(
        "logprobs",
        "responses",
        {**RESPONSES, "reasoning": {"effort": "none"}, "top_logprobs": 1},
        HELLO_WORLD,
    ),
    row(
        "logprobs",
        "chat",
        {**CHAT, "thinking": {"type": "disabled"}, "logprobs": True, "top_logprobs": 1},
        HELLO_WORLD,
    ),
]


def rows(*protocols: str) -> list[Any]:
    lines = GOLDENS.read_text(encoding="utf-8").split("\n")
    golden = [json.loads(line) for line in lines if line]
    return [
        pytest.param(each, id=each["id"])
        for each in [*golden, *MORE]
        if each["protocol"] in protocols and not each.get("error")
    ]


def chunk_of(value: dict) -> Chunk:
    if value["kind"] == "ready":
        usage = (value.get("prompt_tokens", 0), value.get("cache_hit", 0))
        return Ready(*usage, value.get("fingerprint") or "")
    if value["kind"] == "text":
        return TextChunk(value["text"], value["n"])
    if value["kind"] == "finish":
        return BackendFinish(value["reason"])
    ids = tuple(value["ids"])
    logprobs = value.get("logprobs")
    if logprobs is None:
        return TokenChunk(ids)
    pairs = zip(ids, logprobs, strict=True)
    return TokenChunk(
        ids, tuple(TokenLogprob(i, own, tuple(map(tuple, top))) for i, (own, top) in pairs)
    )


class Reply:
    """Our answer to a row: the events, their bytes, the whole response."""

    def __init__(self, row: dict, tokenizer: object) -> None:
        request = parse(row["protocol"], row["request"])
        converted = convert(request, ConversionOptions(unsupported="ignore"))
        stream: ReplyStream = reply_stream(
            converted,
            response_id="RID",
            model="MODEL",
            tokenizer=tokenizer if row.get("tokenizer", True) else None,
            created=1_700_000_000,
            echo=row.get("echo", False),
            signature=row.get("signature"),
        )
        self.events: list[ServerEvent] = []
        for chunk in map(chunk_of, row["model_output_chunks"]):
            if not stream.finished:  # a stop sequence ends it early
                self.events += stream.push(chunk)
        self.events += stream.finish()
        self.payloads: list[Any] = [event.payload() for event in self.events]
        self.whole: dict[str, Any] = stream.response()
        done = "data: [DONE]\n\n" if row["protocol"] == "chat" else ""
        self.sse = ("".join(event.sse() for event in self.events) + done).encode()
        self.body = json.dumps(self.whole, ensure_ascii=False).encode()


@pytest.fixture
def reply(row: dict, v4_tokenizer: object, v41_tokenizer: object) -> Reply:
    return Reply(row, v41_tokenizer if row["version"] == "v41" else v4_tokenizer)


def in_pieces(data: bytes, size: int = 61) -> Iterator[bytes]:
    # an odd size, so that pieces end within lines and within characters
    for start in range(0, len(data), size):
        yield data[start : start + size]


def client(kind: Any, body: bytes, content_type: str, status: int = 200) -> Any:
    """A real client whose every request gets this answer."""

    def answer(request: object) -> object:
        headers = {"content-type": content_type}
        return httpx.Response(status, headers=headers, content=in_pieces(body))

    http_client = httpx.Client(transport=httpx.MockTransport(answer))
    return kind(
        api_key="none", base_url="http://localhost/v1", http_client=http_client, max_retries=0
    )


def read_as(got: BaseModel) -> Any:
    """What a client's object holds, without the fields that it fills with nothing itself."""
    return without_none(got.to_dict())  # type: ignore[attr-defined]


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


# ---- exact types --------------------------------------------------------------------------------

# Fields that the clients' models ask for and the protocols of the golden rows lack.
ABSENT = {("response", "usage", "input_tokens_details", "cache_write_tokens")}


def by_type(union: Any) -> dict[str, type[BaseModel]]:
    members = typing.get_args(typing.get_args(union)[0])
    return {typing.get_args(each.model_fields["type"].annotation)[0]: each for each in members}


RESPONSES_EVENTS = by_type(ResponseStreamEvent)
MESSAGES_EVENTS = by_type(RawMessageStreamEvent)


def event_model(protocol: str, payload: dict) -> type[BaseModel]:
    if protocol == "chat":
        return ChatCompletionChunk
    models = RESPONSES_EVENTS if protocol == "responses" else MESSAGES_EVENTS
    return models[payload["type"]]


def mistakes(model: type[BaseModel], data: bytes | str, inside: tuple = ()) -> list[dict]:
    try:
        model.model_validate_json(data, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
        return [each for each in found if (*inside, *each["loc"]) not in ABSENT]
    return []


@pytest.mark.parametrize("row", rows("chat", "responses", "messages"))
def test_every_field_has_the_type_that_the_clients_declare(row: dict, reply: Reply) -> None:
    for event, payload in zip(reply.events, reply.payloads, strict=True):
        if event.name == "ping":
            assert payload == {"type": "ping"}  # the client's types leave it out
        else:
            assert mistakes(event_model(row["protocol"], payload), event.data) == []
    whole = {"chat": ChatCompletion, "responses": Response, "messages": Message}[row["protocol"]]
    assert mistakes(whole, reply.body, ("response",)) == []


def test_a_field_of_another_type_is_a_mistake() -> None:
    event = '{"type": "content_block_stop", "index": "0"}'
    (found,) = mistakes(MESSAGES_EVENTS["content_block_stop"], event)
    assert found["loc"] == ("index",)


# ---- Chat Completions ---------------------------------------------------------------------------


def told_by_chunks(chunks: list[Any]) -> dict:
    """The message and the end that a client adds up from the chunks."""
    texts: dict[str, str] = {}
    calls: dict[int, dict] = {}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        for name in ("content", "reasoning_content"):
            if getattr(delta, name, None) is not None:
                texts[name] = texts.get(name, "") + getattr(delta, name)
        for part in delta.tool_calls or ():
            call = calls.setdefault(part.index, {"arguments": ""})
            call |= {"id": part.id, "name": part.function.name} if part.id else {}
            call["arguments"] += part.function.arguments
    last = chunks[-1]
    return {
        **texts,
        "calls": list(calls.values()),
        "finish_reason": last.choices[0].finish_reason,
        "usage": last.usage.to_dict(),
    }


@pytest.mark.parametrize("row", rows("chat"))
def test_chat_stream(row: dict, reply: Reply) -> None:
    create = client(openai.OpenAI, reply.sse, EVENTS).chat.completions.create
    chunks = list(create(model="m", messages=[], stream=True))
    assert [chunk.to_dict() for chunk in chunks] == reply.payloads
    told = told_by_chunks(chunks)
    (choice,) = reply.whole["choices"]
    message = choice["message"]
    assert told.get("content", "") == message["content"]
    assert told.get("reasoning_content", "") == message.get("reasoning_content", "")
    assert told["calls"] == [
        {"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())
    ]
    assert told["finish_reason"] == choice["finish_reason"]
    assert told["usage"] == reply.whole["usage"]


@pytest.mark.parametrize("row", rows("chat"))
def test_chat_stream_helper(row: dict, reply: Reply) -> None:
    (choice,) = reply.whole["choices"]
    with client(openai.OpenAI, reply.sse, EVENTS).chat.completions.stream(
        model="m", messages=[]
    ) as stream:
        # the helper hands out no answer that was cut off: it raises instead
        cut_off = {
            "length": openai.LengthFinishReasonError,
            "content_filter": openai.ContentFilterFinishReasonError,
        }.get(choice["finish_reason"])
        if cut_off is not None:
            with pytest.raises(cut_off):
                stream.get_final_completion()
            return
        final = read_as(stream.get_final_completion())
    expected = without_none(reply.whole)
    # the helper knows no log-probabilities but those of the content
    expected["choices"][0].get("logprobs", {}).pop("reasoning_content", None)
    assert final == expected


@pytest.mark.parametrize("row", rows("chat"))
def test_chat_whole(row: dict, reply: Reply) -> None:
    create = client(openai.OpenAI, reply.body, JSON).chat.completions.create
    assert create(model="m", messages=[]).to_dict() == reply.whole


# ---- Responses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("responses"))
def test_responses_stream(row: dict, reply: Reply) -> None:
    create = client(openai.OpenAI, reply.sse, EVENTS).responses.create
    events = list(create(model="m", input="", stream=True))
    assert [event.to_dict() for event in events] == reply.payloads
    assert [type(event) for event in events] == [
        event_model("responses", payload) for payload in reply.payloads
    ]


@pytest.mark.parametrize("row", rows("responses"))
def test_responses_stream_helper(row: dict, reply: Reply) -> None:
    with client(openai.OpenAI, reply.sse, EVENTS).responses.stream(model="m", input="") as stream:
        *_, last = stream
        if reply.whole["status"] == "incomplete":
            # the helper keeps completed responses only; the last event has it all the same
            assert last.type == "response.incomplete"
            final = last.response
        else:
            final = stream.get_final_response()
    assert read_as(final) == without_none(reply.whole)
    assert final.output_text == "".join(
        part["text"]
        for item in reply.whole["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


@pytest.mark.parametrize("row", rows("responses"))
def test_responses_whole(row: dict, reply: Reply) -> None:
    response = client(openai.OpenAI, reply.body, JSON).responses.create(model="m", input="")
    assert response.to_dict() == reply.whole


# ---- Messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("messages"))
def test_messages_stream(row: dict, reply: Reply) -> None:
    create = client(anthropic.Anthropic, reply.sse, EVENTS).messages.create
    events = list(create(model="m", messages=[], max_tokens=9, stream=True))
    expected = [payload for payload in reply.payloads if payload["type"] != "ping"]
    assert [event.to_dict() for event in events] == expected


@pytest.mark.parametrize("row", rows("messages"))
def test_messages_stream_helper(row: dict, reply: Reply) -> None:
    with client(anthropic.Anthropic, reply.sse, EVENTS).messages.stream(
        model="m", messages=[], max_tokens=9
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    told = read_as(final)
    for block, ours in zip(told["content"], reply.whole["content"], strict=True):
        if ours == {**block, "input": {}}:
            block["input"] = {}  # the helper guesses at the input of a call that was cut off
    assert told == without_none(reply.whole)
    blocks = reply.whole["content"]
    assert text == "".join(block["text"] for block in blocks if block["type"] == "text")


@pytest.mark.parametrize("row", rows("messages"))
def test_messages_whole(row: dict, reply: Reply) -> None:
    create = client(anthropic.Anthropic, reply.body, JSON).messages.create
    assert create(model="m", messages=[], max_tokens=9).to_dict() == reply.whole


# ---- errors -------------------------------------------------------------------------------------


def ask_chat(answer: bytes) -> object:
    create = client(openai.OpenAI, answer, JSON, 400).chat.completions.create
    return create(model="m", messages=[])


def ask_responses(answer: bytes) -> object:
    return client(openai.OpenAI, answer, JSON, 400).responses.create(model="m", input="")


def ask_messages(answer: bytes) -> object:
    create = client(anthropic.Anthropic, answer, JSON, 400).messages.create
    return create(model="m", messages=[], max_tokens=9)


def refused(protocol: str, body: dict | str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        convert(parse(protocol, body))
    return caught.value


BAD = [
    pytest.param({**CHAT, **RESPONSES, "max_tokens": 9, "temperature": 9}, id="convert"),
    pytest.param("{", id="parse"),
]


@pytest.mark.parametrize("body", BAD)
@pytest.mark.parametrize(("protocol", "ask"), [("chat", ask_chat), ("responses", ask_responses)])
def test_openai_client_raises_our_error(
    protocol: str, ask: Callable[[bytes], object], body: dict | str
) -> None:
    error = refused(protocol, body)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(json.dumps(error_body(error, protocol)).encode())
    assert caught.value.body["message"] == error.message
    told = (caught.value.type, caught.value.code, caught.value.param)
    assert told == ("invalid_request_error", "invalid_request_error", None)


@pytest.mark.parametrize("body", BAD)
def test_anthropic_client_raises_our_error(body: dict | str) -> None:
    error = refused("messages", body)
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask_messages(json.dumps(error_body(error, "messages")).encode())
    assert caught.value.body["error"]["message"] == error.message
    assert caught.value.type == "invalid_request_error"
