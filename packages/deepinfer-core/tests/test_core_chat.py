"""`LLM.chat` and `generate --chat` over a recipe of a few lines; the engine is scripted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepinfer_core import LLM, ConfigError, FinishReason, RequestError
from deepinfer_core.cli import main
from deepinfer_core.loader import find_recipe
from deepinfer_core.testing.driven_loop import AnyToken

HELLO = [{"role": "user", "content": "hi"}]


class Unknown(Exception):
    pass


class Refused(Exception):
    param, code, status_code = "messages", "invalid_request_error", 400


@dataclass
class Grammar:
    """Says of a text whether it is the wanted one; the scripted engine follows no masks."""

    wanted: str
    warnings: tuple[str, ...] = ()
    judged: list[str] = field(default_factory=list)

    def matcher(self) -> AnyToken:
        return AnyToken()

    def fault_of(self, text: str) -> str | None:
        self.judged.append(text)
        return None if text == self.wanted else f"it is not {self.wanted!r}"


@dataclass
class Reply:
    """Ends behind id 13; remembers what it was given."""

    calls: bool = False
    prompt_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    reason: str | None = None
    malformed: tuple[str, ...] = ("odd",)

    @property
    def finished(self) -> bool:
        return self.reason is not None

    def start(self, prompt_tokens: int, cached_tokens: int) -> list[object]:
        assert cached_tokens == 0
        self.prompt_tokens = prompt_tokens
        return []

    def push(self, token_ids: Sequence[int], logprobs: object = None) -> list[object]:
        assert not self.finished
        if 400 in token_ids or "400" in str(logprobs):
            raise Unknown
        self.ids += token_ids
        self.logprobs.append(logprobs)
        if 13 in token_ids:
            self.reason = "stop"
        return []

    def finish(self, reason: str) -> list[object]:
        self.reason = self.reason or reason
        return []

    def response(self) -> dict[str, object]:
        message = {"role": "assistant", "content": " ".join(map(str, self.ids))}
        if self.calls:
            message |= {"content": None, "tool_calls": [{"id": "1"}]}
        choice = {"message": message, "finish_reason": self.reason, "logprobs": None}
        return {"choices": [choice], "usage": {"prompt_tokens": self.prompt_tokens}}


class Recipe:
    """One id for each character; a body's `response_format` is the text that its reply must be."""

    request_error = Refused
    reply_error = Unknown
    tokenizer_error = OSError

    def __init__(self, tokenizer_file: Path) -> None:
        assert tokenizer_file.name == "tokenizer.json"
        self.bodies: list[Mapping[str, object]] = []
        self.replies: list[Reply] = []

    def prepare(self, request: Mapping[str, object], protocol: str = "chat") -> SimpleNamespace:
        self.bodies.append(request)
        messages = request.get("messages")
        if not messages:
            raise Refused("`messages` is missing")
        reply = Reply(calls=bool(request.get("tools")))
        self.replies.append(reply)
        logprobs = request.get("logprobs", False)
        return SimpleNamespace(
            token_ids=[ord(each) for each in messages[0]["content"]],
            settings=SimpleNamespace(
                temperature=request.get("temperature", 1.0),
                top_p=0.5,
                seed=7,
                logprobs=logprobs,
                top_logprobs=2 if logprobs else None,
            ),
            grammar=lambda: self._grammar(request.get("response_format")),
            images=request.get("images", ()),
            left_out=(),
            overridden=("top_p",),
            max_tokens=lambda limit: min(limit, request.get("max_tokens", 5)),
            reply=lambda response_id, model, created: reply,
        )

    def _grammar(self, wanted: object) -> Grammar | None:
        if wanted == "impossible":
            error = Refused("no text is that")
            error.param, error.code = "response_format.json_schema", "unsupported_schema"
            raise error
        return None if wanted is None else Grammar(str(wanted))


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    made = Recipe(Path("tokenizer.json"))
    monkeypatch.setattr("deepinfer_core.llm.find_recipe", lambda model_type, file: made)
    return made


@pytest.fixture
def llm(scripted, recipe: Recipe, tmp_path: Path) -> Iterator[LLM]:
    scripted.model_config.model_type = "deepseek_v41"
    with LLM(tmp_path / "model") as made:
        yield made


def test_a_conversation_is_answered_by_what_the_recipe_reads(llm: LLM, scripted) -> None:
    (output,) = llm.chat(HELLO)
    assert output.content == "104 105 104 105 104"
    assert output.finish_reason == "length"
    assert output.output.token_ids == (104, 105, 104, 105, 104)
    params = scripted.requests[0].params
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (1.0, 0.5, 7, 5)
    assert params.stop == () and params.logprobs is None


def test_conversations_come_back_in_order_and_bodies_win_over_fields(llm: LLM, recipe) -> None:
    outputs = llm.chat(
        [HELLO, {"messages": HELLO, "temperature": 0.25}, HELLO], temperature=0.5, max_tokens=2
    )
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [body["temperature"] for body in recipe.bodies] == [0.5, 0.25, 0.5]
    assert {output.content for output in outputs} == {"104 105"}


def test_thinking_and_tools_are_fields_of_the_request(llm: LLM, recipe) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    llm.chat(HELLO, thinking=False, tools=(tool,))
    llm.chat(HELLO, thinking=True)
    llm.chat(HELLO)
    first, second, third = recipe.bodies
    assert first["thinking"] == {"type": "disabled"} and first["tools"] == [tool]
    assert second["thinking"] == {"type": "enabled"} and "tools" not in second
    assert "thinking" not in third


def test_the_request_ends_when_the_reply_does(llm: LLM, scripted) -> None:
    scripted.script = lambda request: iter([10, 13, 11, 12, 12])
    (output,) = llm.chat(HELLO)
    assert output.content == "10 13"
    assert output.finish_reason == "stop"
    assert scripted.finished == [(0, FinishReason.STOP)]


def test_the_end_of_sequence_is_no_part_of_the_reply(llm: LLM, scripted) -> None:
    scripted.script = lambda request: iter([10, 1])
    (output,) = llm.chat(HELLO)
    assert output.content == "10"
    assert output.output.token_ids == (10, 1)
    assert output.finish_reason == "stop"


def test_ids_that_the_tokenizer_does_not_know_have_no_text(llm: LLM, scripted, recipe) -> None:
    scripted.script = lambda request: iter([10, 400, 399, 398, 11])
    (output,) = llm.chat(HELLO, logprobs=True)
    # 399 and 398 are known, an alternative of theirs is not
    assert output.content == "10 399 398 11" and output.output.token_ids[1] == 400
    assert [each is None for each in recipe.replies[0].logprobs] == [False, True, False, False]


def test_logprobs_reach_the_reply(llm: LLM, recipe) -> None:
    llm.chat(HELLO, logprobs=True, max_tokens=1)
    assert recipe.replies[0].logprobs == [((-0.5, ((104, -0.5), (105, -1.5))),)]


def test_what_the_recipe_refuses_is_a_request_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="`messages` is missing") as caught:
        llm.chat([{"messages": []}])
    assert caught.value.param == "messages"
    good, bad = llm.chat([HELLO, []], on_error="output")
    assert good.content and bad.finish_reason == "error"
    assert bad.response is None and bad.message == {} and bad.content == ""
    assert bad.error is not None and "`messages` is missing" in bad.error


def test_grammar_of_a_conversation_reaches_the_engine_fresh(llm: LLM, scripted) -> None:
    llm.chat([HELLO, {"messages": HELLO, "response_format": "a"}, HELLO], response_format="b")
    matchers = [request.constraint for request in scripted.requests]
    assert all(isinstance(each, AnyToken) for each in matchers) and len(set(matchers)) == 3
    assert all(request.params.constraint is None for request in scripted.requests)
    llm.chat(HELLO)
    assert scripted.requests[-1].constraint is None


def test_grammar_that_cannot_be_enforced_refuses_its_request_alone(llm: LLM, scripted) -> None:
    body = {"messages": HELLO, "response_format": "impossible"}
    with pytest.raises(RequestError, match="no text is that") as caught:
        llm.chat([body])
    wanted = ("response_format.json_schema", "unsupported_schema")
    assert (caught.value.param, caught.value.code) == wanted
    bad, good = llm.chat([body, HELLO], on_error="output")
    assert (bad.output.error_param, bad.output.error_code) == wanted and good.content
    assert scripted.constrained == []


def test_answer_is_judged_when_the_model_has_ended_it(llm: LLM, scripted) -> None:
    scripted.script = lambda request: iter([10, 1])
    good, bad = (llm.chat(HELLO, response_format=each)[0] for each in ("10", "another"))
    assert good.output.constraint_fault is None and good.content == bad.content == "10"
    assert bad.output.constraint_fault == "it is not 'another'"
    assert bad.finish_reason == "stop" and bad.error is None
    assert scripted.constrained == ["valid", "invalid"]


@pytest.mark.parametrize("script", [[10, 10, 10, 10, 10], [10, 13], [10, -1]])
def test_answer_that_was_cut_is_not_judged(llm: LLM, scripted, script: list[int]) -> None:
    scripted.script = lambda request: iter(script)  # by its length, by the reply, by an error
    (output,) = llm.chat(HELLO, response_format="another")
    assert output.output.constraint_fault is None and scripted.constrained == ["unfinished"]


def test_reply_that_calls_tools_has_no_text_to_judge(llm: LLM, scripted) -> None:
    scripted.script = lambda request: iter([10, 1])
    tools = [{"type": "function", "function": {"name": "f"}}]
    (output,) = llm.chat(HELLO, tools=tools, response_format="another")
    assert output.output.constraint_fault is None and scripted.constrained == ["valid"]


def test_streaming_is_refused_where_a_whole_reply_is_returned(llm: LLM) -> None:
    with pytest.raises(RequestError, match="`stream` is set"):
        llm.chat(HELLO, stream=True)
    assert llm.chat(HELLO, stream=False)[0].content


def test_what_a_body_says_wins_over_all_fields_that_speak_of_the_same(llm: LLM, recipe) -> None:
    bodies = [
        {"messages": HELLO, "max_tokens": 3},
        {"messages": HELLO, "max_tokens": None},
        {"messages": HELLO, "logprobs": False},
    ]
    llm.chat(bodies, max_completion_tokens=9, logprobs=True, top_logprobs=2)
    first, second, third = recipe.bodies
    assert first["max_tokens"] == 3 and "max_completion_tokens" not in first
    assert second["max_completion_tokens"] == 9 and "max_tokens" not in second
    assert third["logprobs"] is False and "top_logprobs" not in third


@pytest.mark.parametrize("tools", [3, {"type": "function"}, "now"])
def test_tools_are_a_list(llm: LLM, tools: object) -> None:
    with pytest.raises(RequestError, match="`tools` is"):
        llm.chat(HELLO, tools=tools)  # type: ignore[arg-type]


def test_messages_are_given_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="beside the conversations"):
        llm.chat(HELLO, messages=HELLO)


def test_images_are_refused_before_anything_runs(llm: LLM, scripted) -> None:
    with pytest.raises(RequestError, match=r"2 image\(s\)"):
        llm.chat([{"messages": HELLO, "images": (1, 2)}])
    assert scripted.requests == []


def test_an_output_tells_what_was_malformed_and_what_was_overridden(llm: LLM) -> None:
    (output,) = llm.chat(HELLO)
    assert output.malformed == ("odd",) and output.overridden == ("top_p",)


@pytest.mark.parametrize("value", ["disabled", 0, 1, [True]])
def test_thinking_is_a_switch_or_the_field_itself(llm: LLM, recipe, value: object) -> None:
    llm.chat(HELLO, thinking={"type": "disabled"})
    assert recipe.bodies[0]["thinking"] == {"type": "disabled"}
    with pytest.raises(RequestError, match="`thinking` is"):
        llm.chat(HELLO, thinking=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["hi", b"hi", {"messages": HELLO}, 3, None, [3], ["hi"]])
def test_what_is_no_conversation_is_refused(llm: LLM, value: object) -> None:
    with pytest.raises(RequestError, match="A conversation is"):
        llm.chat(value)  # type: ignore[arg-type]


def test_without_a_recipe_the_error_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="deepseek-recipe"):
        find_recipe("another_model", tmp_path)


# the command


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, llm, tmp_path: Path):
    """Run `deepinfer generate --chat` in this process: status, lines, errors."""

    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, list[dict], str]:
        (tmp_path / "stdin").write_bytes(stdin)
        with (tmp_path / "stdin").open() as file, pytest.raises(SystemExit) as left:
            monkeypatch.setattr(sys, "stdin", file)
            main(["generate", "--chat", "--model", str(tmp_path / "model"), *arguments])
        out, err = capfd.readouterr()
        return int(left.value.code or 0), [json.loads(line) for line in out.splitlines()], err

    return call


def test_prompts_become_user_messages(run, recipe: Recipe) -> None:
    status, lines, _ = run("--prompt", "hi", "--max-tokens", "2", "--logprobs", "1")
    assert status == 0
    assert lines == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "104 105"},
            "finish_reason": "length",
            "logprobs": None,
            "usage": {"prompt_tokens": 2},
            "malformed": ["odd"],
            "overridden": ["top_p"],
        }
    ]
    assert recipe.bodies[0]["top_logprobs"] == 1 and recipe.bodies[0]["logprobs"] is True


def test_lines_are_requests_and_bad_ones_are_named(run) -> None:
    lines = [{"messages": HELLO, "max_tokens": 1}, {"prompt": "x"}, {"messages": []}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "{\n"
    status, answers, errors = run("-", stdin=text.encode())
    assert status == 1 and "3 of 4 prompts failed" in errors
    assert answers[0]["message"] == {"role": "assistant", "content": "104"}
    assert [set(answer) for answer in answers[1:]] == [{"index", "error"}] * 3
    messages = [answer["error"]["message"] for answer in answers[1:]]  # type: ignore[index]
    assert [message[:7] for message in messages] == ["Line 2:", "Line 3:", "Line 4:"]


def test_lines_state_what_a_reply_must_be_and_are_told_where_it_is_not(run, scripted) -> None:
    scripted.script = lambda request: iter([10, 1])
    lines = [{"messages": HELLO, "response_format": each} for each in ("10", "another")]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    status, (good, bad), _ = run("-", stdin=text.encode())
    assert status == 0 and "constraint_fault" not in good
    assert bad["constraint_fault"] == "it is not 'another'"


@pytest.mark.parametrize(
    "flags",
    [("--ignore-eos",), ("--bounded-replay", "off"), ("--constraint", '{"regex": "a"}')],
)
def test_flags_without_effect_on_chat_are_refused(run, flags: tuple[str, ...]) -> None:
    status, lines, errors = run("--prompt", "hi", *flags)
    assert status == 2 and not lines and flags[0] in errors
