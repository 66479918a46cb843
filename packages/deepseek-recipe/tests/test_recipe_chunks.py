"""What a reply stream is given: a chunk is taken as a whole, or refused as a whole by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepseek_recipe import (
    BackendFinish,
    PromptTokenizer,
    Ready,
    ReplyError,
    ReplyStream,
    TextChunk,
    TokenChunk,
    TokenLogprob,
    convert,
    parse,
    reply_stream,
)

SAID = [{"role": "user", "content": "json"}]
OFF = {"thinking": {"type": "disabled"}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": SAID, **OFF, "logprobs": True, "top_logprobs": 1},
    "responses": {"input": "json", "reasoning": {"effort": "none"}, "top_logprobs": 1},
    "messages": {"messages": SAID, **OFF, "max_tokens": 99},
}

Make = Callable[..., ReplyStream]


@pytest.fixture(scope="session")
def stream(v4_tokenizer: PromptTokenizer) -> Make:
    def make(protocol: str = "chat", **fields: Any) -> ReplyStream:
        body = {"model": "DeepSeek-V4-Pro", **BODIES[protocol], **fields}
        names: dict[str, Any] = {"response_id": "r", "model": "m", "created": 0}
        return reply_stream(convert(parse(protocol, body)), tokenizer=v4_tokenizer, **names)

    return make


class Integer:
    """An integer of another library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Real(Integer):
    """A number of another library."""

    def __float__(self) -> float:
        return float(self.value)


def one(logprob: Any = -1.0, token_id: Any = 68, top: Any = ()) -> tuple[TokenLogprob]:
    return (TokenLogprob(token_id, logprob, top),)


BAD: list[tuple[Any, str]] = [
    (TokenChunk(None), "None"),  # type: ignore[arg-type]
    (TokenChunk(5), "5"),  # type: ignore[arg-type]
    (TokenChunk("ab"), "'ab'"),  # type: ignore[arg-type]
    (TokenChunk(b"ab"), "b'ab'"),
    (TokenChunk({68: 1}), "68"),  # type: ignore[arg-type]
    *((TokenChunk([68, bad]), repr(bad)) for bad in (1.5, 1.0, "a", None, [1], True)),  # type: ignore[list-item]
    (TokenChunk([68, -1]), "-1"),
    (TokenChunk([68, 10**6]), "1000000"),
    (TokenChunk([68, 10**5000]), "too long"),
    (TokenChunk([68], one(None)), "None"),
    (TokenChunk([68], one("x")), "'x'"),
    (TokenChunk([68], one(True)), "True"),
    (TokenChunk([68], one(10**400)), "log-probability"),
    (TokenChunk([68], one(-1.0, 10**7)), "10000000"),
    (TokenChunk([68], one(-1.0, "a")), "'a'"),
    (TokenChunk([68], one(-1.0, 68, ((10**7, -1.0),))), "10000000"),
    (TokenChunk([68], one(-1.0, 68, ((68, None),))), "None"),
    (TokenChunk([68], one(-1.0, 68, ((68,),))), "68"),
    (TokenChunk([68], one(-1.0, 68, 7)), "7"),
    (TokenChunk([68], (-1.0,)), "-1.0"),  # type: ignore[arg-type]
    (TokenChunk([68], 3), "3"),  # type: ignore[arg-type]
    (TokenChunk([68], ()), "0 log probabilities"),
    *((TextChunk(bad, 1), repr(bad)) for bad in (None, 5, b"a")),  # type: ignore[arg-type]
    *((TextChunk("a", bad), repr(bad)) for bad in (None, "1", -1, 1.0, True)),  # type: ignore[arg-type]
    (BackendFinish("weird"), "'weird'"),  # type: ignore[arg-type]
    (BackendFinish([]), r"\[\]"),  # type: ignore[arg-type]
    (BackendFinish(None), "None"),  # type: ignore[arg-type]
    ("a", "'a'"),
    (None, "None"),
]  # fmt: skip


@pytest.mark.parametrize("protocol", BODIES)
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(("chunk", "word"), BAD)
def test_a_bad_chunk_is_refused_by_name_and_nothing_of_it_is_taken(
    stream: Make, protocol: str, begun: bool, chunk: Any, word: str
) -> None:
    bad, good = stream(protocol), stream(protocol)
    if begun:
        for each in (bad, good):
            each.push(Ready(5))
            each.push(TokenChunk([70, 1]))  # an end-of-sequence token is held
    with pytest.raises(ReplyError, match=word):
        bad.push(chunk)
    for each in (TokenChunk([69]), BackendFinish("length")):
        assert [event.data for event in bad.push(each)] != []
        good.push(each)

    def timeless(response: dict[str, Any]) -> dict[str, Any]:
        return {**response, "completed_at": 0}

    assert timeless(bad.response()) == timeless(good.response())


@pytest.mark.parametrize(
    "ready",
    [
        Ready(5, 10),
        Ready(-1),
        Ready(5, -1),
        Ready("5"),  # type: ignore[arg-type]
        Ready(5.0),  # type: ignore[arg-type]
        Ready(True),
        Ready(None),  # type: ignore[arg-type]
        Ready(5, 0, None),  # type: ignore[arg-type]
    ],
)
def test_a_begin_with_impossible_counts_is_refused(stream: Make, ready: Ready) -> None:
    each = stream()
    with pytest.raises(ReplyError, match="allowed"):
        each.push(ready)
    assert len(each.push(Ready(5, 5, "fp"))) == 1


def test_numbers_of_other_libraries_are_numbers(stream: Make) -> None:
    each = stream()
    each.push(Ready(Integer(5), Integer(2)))  # type: ignore[arg-type]
    each.push(TextChunk("a", Integer(1)))  # type: ignore[arg-type]
    logprob = TokenLogprob(Integer(68), Real(-2), ((Integer(69), Real(-3)),))  # type: ignore[arg-type]
    each.push(TokenChunk([Integer(68)], [logprob]))  # type: ignore[list-item]
    each.finish()
    (choice,) = each.response()["choices"]  # type: ignore[misc, attr-defined]
    assert choice["message"]["content"] == "ab"
    (entry,) = choice["logprobs"]["content"]
    assert entry["logprob"] == -2.0 and entry["top_logprobs"][0]["token"] == "c"
    assert each.response()["usage"]["completion_tokens"] == 2  # type: ignore[index]


def test_ids_may_come_in_any_sequence(stream: Make) -> None:
    each = stream()
    for ids in ([68], (69,), range(70, 71), iter([71])):
        each.push(TokenChunk(ids))  # type: ignore[arg-type]
    each.finish()
    assert "bcde" in str(each.response())
    assert each.response()["usage"]["completion_tokens"] == 4  # type: ignore[index]


EMPTY = (TextChunk("", 1), TokenChunk([]))


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize(
    "chunks",
    [
        [TextChunk("a</thi", 1), TextChunk("nk>b", 1)],
        [TokenChunk([28927]), TokenChunk([225])],
        [TokenChunk([68, 1]), BackendFinish("stop")],
        [TextChunk("a E", 1), TextChunk("ND b", 1)],
    ],
)
def test_an_empty_chunk_changes_nothing(stream: Make, chunks: list[Any], empty: Any) -> None:
    def content(parts: list[Any]) -> Any:
        each = stream(stop="END")
        for part in parts:
            if not each.finished:
                each.push(part)
        each.finish()
        return each.response()["choices"]

    within = [each for chunk in chunks for each in (empty, chunk)]
    assert content(within) == content(chunks)


@pytest.mark.parametrize("protocol", BODIES)
def test_a_response_is_a_new_value_each_time(stream: Make, protocol: str) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    each = stream(protocol, **({"tools": tools} if protocol == "messages" else {}))
    each.push(TokenChunk([68], one(-1.0, 68, ((68, -1.0),))))
    call = '<｜DSML｜tool_calls><｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜tool_calls>'
    each.push(TextChunk(call, 1))
    each.push(BackendFinish("stop"))
    before = repr(each.response())

    def spoil(value: Any) -> None:
        for inner in list(value.values()) if isinstance(value, dict) else list(value):
            if isinstance(inner, (dict, list)):
                spoil(inner)
        value.clear()

    spoil(each.response())
    assert repr(each.response()) == before


@pytest.mark.parametrize("blanks", [62_501, 9_000])
def test_reasoning_that_is_too_long_to_count_does_not_cost_the_end(
    stream: Make, blanks: int
) -> None:
    each = stream(thinking={"type": "enabled"})
    each.push(TokenChunk([69933] * blanks))  # of 128 blanks
    each.push(TokenChunk([128822, 68]))
    each.push(BackendFinish("stop"))
    usage: Any = each.response()["usage"]
    assert usage["completion_tokens"] == blanks + 2
    assert usage["completion_tokens_details"]["reasoning_tokens"] == blanks + 2


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_logprobs_not_asked_for_are_not_told(stream: Make, protocol: str) -> None:
    fields = {"logprobs": False} if protocol == "chat" else {}
    each = stream(protocol, top_logprobs=None, **fields)
    events = each.push(TokenChunk([68], one())) + each.push(BackendFinish("stop"))
    assert '"token"' not in "".join(event.data for event in events)
    assert "'token'" not in str(each.response())
