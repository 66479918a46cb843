"""Chat end to end: core's engine and a random model, behind the recipe of the package beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_core import LLM, ConfigError, RequestError
from deepinfer_core.bench.make_checkpoint import demo_config, write_checkpoint
from deepinfer_core.cli import demo, main
from deepinfer_core.loader import find_recipe
from deepseek_recipe.encoding.profile import V41

HELLO = [{"role": "user", "content": "Hello <｜User｜>"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    write_checkpoint(folder, demo_config(), seed=0)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, accelerator="cpu", determinism="strict") as made:
        yield made


def test_prompt_has_the_tokens_of_the_format_and_text_stays_text(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, thinking=False, max_tokens=3, seed=1)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    names = V41.tokens
    control = {tokenizer.token_to_id(name): name for name in names.spellings}
    seen = [control[each] for each in output.output.prompt_token_ids if each in control]
    assert seen == [names.bos, names.user, names.assistant, names.think_end]


def test_reply_is_read_by_id_whatever_the_model_says(llm: LLM) -> None:
    outputs = llm.chat([HELLO] * 4, tools=[TOOL], max_tokens=24, temperature=1.0)
    for output in outputs:
        assert output.finish_reason in ("stop", "length", "tool_calls")
        assert output.message["role"] == "assistant"
        assert V41.tokens.dsml not in output.content
        assert output.response is not None
        usage = output.response["usage"]
        assert usage["prompt_tokens"] == len(output.output.prompt_token_ids)  # type: ignore[index]


def test_same_conversation_is_answered_alike_alone_and_in_a_batch(llm: LLM) -> None:
    fields = {"thinking": True, "seed": 5, "max_tokens": 12}
    (alone,) = llm.chat(HELLO, **fields)  # type: ignore[arg-type]
    other = [{"role": "user", "content": "Another, longer conversation."}]
    first, _, third = llm.chat([HELLO, other, HELLO], **fields)  # type: ignore[arg-type]
    assert alone.message == first.message == third.message


def test_usage_tells_what_was_found_in_the_cache(model: Path) -> None:
    with LLM(model, accelerator="cpu", block_size=4) as llm:
        cold, warm = (llm.chat(HELLO, max_tokens=3, seed=1)[0] for _ in range(2))
    usage = [each.response["usage"]["prompt_tokens_details"] for each in (cold, warm)]  # type: ignore[index]
    assert usage[0]["cached_tokens"] == 0
    assert usage[1]["cached_tokens"] == warm.output.num_cached_tokens > 0


def test_logprobs_of_the_answer_come_with_the_response(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, thinking=False, seed=2, max_tokens=6, logprobs=True, top_logprobs=2)
    assert output.response is not None
    entries = output.response["choices"][0]["logprobs"]["content"]  # type: ignore[index]
    assert len(entries) <= 6 and all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"colour": 1}, "colour"),
        ({"temperature": 9}, "temperature"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": 100_000}, "4096"),
        ({"model": "other"}, "other"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_bad_requests_are_named(llm: LLM, fields: dict[str, object], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        llm.chat(HELLO, **fields)  # type: ignore[arg-type]


def test_images_are_refused(llm: LLM) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    with pytest.raises(RequestError, match="image"):
        llm.chat([{"role": "user", "content": [part]}])


def test_a_tokenizer_without_the_format_has_no_chat(tmp_path: Path, llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    text = tokenizer.to_str().replace("<｜System｜>", "<｜Sysop｜>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="System"):
        find_recipe("deepseek_v41", tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="tokenizer"):
        find_recipe("deepseek_v41", tmp_path / "missing.json")


def test_the_command_answers_conversations(model: Path, tmp_path: Path) -> None:
    lines = [{"messages": HELLO, "thinking": {"type": "disabled"}}, {"messages": HELLO, "x": 1}]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    arguments = ("--chat", "--input", str(source), "--out", str(out), "--max-tokens", "4")
    with pytest.raises(SystemExit) as left:
        main(["generate", "--model", str(model), *arguments])
    assert left.value.code == 1
    good, bad = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert good["message"]["role"] == "assistant" and good["usage"]["completion_tokens"] <= 4
    assert bad["error"]["message"].startswith("Line 2:") and "`x`" in bad["error"]["message"]


def test_demo_thinks_calls_and_measures(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MAX_TOKENS", 6)
    with pytest.raises(SystemExit) as left:
        main(["demo", "--model", str(model), "--accelerator", "cpu"])
    assert not left.value.code
    out = capfd.readouterr().out
    for prompt in demo.PROMPTS:
        assert f"{prompt.title}: {prompt.question}" in out
    assert "decode" in out and "tok/s" in out
    assert re.search(r"drafter: [1-6]\.\d of at most 6 tokens a step \(measured on", out)
    assert "\x1b" not in out
