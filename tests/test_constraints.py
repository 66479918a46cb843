"""Answers that must have a form, end to end: the small model, the engine, the recipe's grammars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer_core import LLM, RequestError, SamplingParams
from deepinfer_core.testing.constrained_requests import Answer, answers_of, constrained_requests

OPTIONS = {
    "accelerator": "cpu",
    "determinism": "strict",
    "max_sequences": 12,
    "max_model_len": 1024,
}
# Every kind, some with reasoning in front; `benchmarks/constrained_equality.py` takes 500.
DRAWN = constrained_requests(12, seed=2)
REQUESTS = [DRAWN[place] for place in (0, 2, 3, 7, 10, 11)]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def plain() -> list[Answer]:
    """What plain decoding answers, one thing at a time."""
    with LLM(speculation="off", depth=0, **OPTIONS) as llm:  # type: ignore[arg-type]
        return answers_of(llm, REQUESTS)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(depth=2, **OPTIONS) as made:  # type: ignore[arg-type]
        yield made


def test_answers_have_their_form(plain: list[Answer]) -> None:
    assert [(each.ended, each.fault) for each in plain] == [
        ("tool_calls" if each.kind == "calls" else "stop", None) for each in REQUESTS
    ]


def test_drafts_and_overlap_change_no_answer(llm: LLM, plain: list[Answer]) -> None:
    assert answers_of(llm, REQUESTS) == plain
    llm.engine.audit()
    [ended] = llm.engine.metrics()["constrained_requests_total"].values.items()
    assert ended == (("valid",), len(REQUESTS))


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json": {"properties": {"a": {"pattern": "(?=x)"}}}}, "/properties/a/pattern"),
        ({"regex": "("}, "1:1"),
        ({"grammar": "root ::= item"}, "1:10"),
        ({"choice": []}, "choice"),
        ({"regx": "a"}, "regx"),
        ({"regex": "a", "json": True}, "exactly one"),
    ],
    ids=str,
)
def test_constraints_that_cannot_be_enforced_are_refused(
    llm: LLM, constraint: dict[str, object], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        llm.generate("x", SamplingParams(constraint=constraint))
    assert refused.value.param == "constraint"
    fine = SamplingParams(max_tokens=4, constraint={"regex": "ab"})
    good, bad = llm.generate(
        ["x", "x"], [fine, SamplingParams(constraint=constraint)], on_error="output"
    )
    assert good.text == "ab" and bad.error is not None and words in bad.error


def test_chat_refuses_what_cannot_be_enforced(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"$dynamicRef": "#x"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(RequestError, match="/properties/a"):
        llm.chat(HELLO, response_format=form)


def test_json_mode_is_an_object_whatever_the_model_would_say(llm: LLM) -> None:
    asked = [{"role": "user", "content": "What is 2 + 2? No JSON."}]
    form = {"type": "json_object"}
    (output,) = llm.chat(
        asked, thinking=False, max_tokens=200, response_format=form, temperature=0.0
    )
    assert output.content.startswith("{")
    if output.finish_reason == "stop":
        assert output.content.rstrip().endswith("}")
