"""The evaluation's judgement of replies, and one evaluation of a small random model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from nano import evaluate, judge, measure
from nano.data import stream
from nano.data.encoding import encode
from nano.data.example import Example
from nano.data.tasks import TASKS
from tokenizers import Tokenizer

from deepinfer_core.bench.make_checkpoint import demo_config, write_checkpoint
from deepinfer_core.engine.speculation import CALIBRATION_NAME
from deepinfer_core.model.fingerprint import checkpoint_hash
from deepinfer_specdec.calibrate import DrafterCalibration
from deepseek_recipe.conversation import Conversation, Message

ASKED = [task for task in TASKS if task != "text"]


class Inline:
    """A pool that works here: a new process takes long to import torch."""

    def __init__(self, *_: object, **__: object) -> None:
        self.map = map

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "model"
    write_checkpoint(folder, demo_config(), seed=3)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def judged(folder: Path) -> judge.Judge:
    return judge.Judge(folder)


def asks(task: str, tokenizer: Tokenizer, count: int = 5) -> list[judge.Ask]:
    draw, random = TASKS[task][0], Random(task)
    return [ask for _ in range(count) for ask in judge.asks_of(encode(draw(random), tokenizer))]


@pytest.mark.parametrize("task", ASKED)
def test_true_replies_are_right(task: str, tokenizer: Tokenizer, judged: judge.Judge) -> None:
    found = asks(task, tokenizer)
    assert found
    for ask in found:
        verdict = judged.verdict(ask, ask.expected)
        assert verdict.right and verdict.exact
        assert verdict.calls_equal is not False and verdict.is_json is not False
        assert not judged.read(ask.prompt, ask.expected).malformed


@pytest.mark.parametrize("task", ASKED)
def test_cut_replies_are_wrong(task: str, tokenizer: Tokenizer, judged: judge.Judge) -> None:
    for ask in asks(task, tokenizer):
        for reply in (ask.expected[:-1], ask.expected[: len(ask.expected) // 2], ()):
            verdict = judged.verdict(ask, reply)
            assert not verdict.right and not verdict.exact


def test_calls_are_compared_by_name_and_value(tokenizer: Tokenizer, judged: judge.Judge) -> None:
    calls = [
        (ask, reading)
        for ask in asks("tool_call", tokenizer)
        if (reading := judged.read(ask.prompt, ask.expected)).calls
    ]
    assert calls
    for ask, reading in calls:
        name, arguments = reading.calls[0]
        assert isinstance(json.loads(arguments), dict)
        text = tokenizer.decode(list(ask.expected), skip_special_tokens=False)
        other = text.replace(f'"{name}"', f'"{name}s"', 1)
        assert other != text
        changed = tuple(tokenizer.encode(other, add_special_tokens=False).ids)
        verdict = judged.verdict(ask, changed)
        assert verdict.calls_equal is False and not verdict.right


def test_json_is_compared_by_value(tokenizer: Tokenizer, judged: judge.Judge) -> None:
    for ask in asks("json_extract", tokenizer):
        reading = judged.read(ask.prompt, ask.expected)
        value = json.loads(reading.text)
        if reading.reasoning:
            continue

        def reply(text: str, eos: int = ask.expected[-1]) -> tuple[int, ...]:
            return (*tokenizer.encode(text, add_special_tokens=False).ids, eos)

        spaced = judged.verdict(ask, reply(json.dumps(value, indent=1, ensure_ascii=False)))
        assert spaced.right and spaced.is_json and not spaced.exact
        wrong = judged.verdict(ask, reply(json.dumps({**value, "more": 1})))
        assert wrong.is_json and not wrong.right
        broken = judged.verdict(ask, reply(reading.text[:-1]))
        assert broken.is_json is False and not broken.right


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ('{"a": true}', '{"a": 1}'),
        ('{"a": 34}', '{"a": 34.0}'),
        ('{"a": 1}', '{"a": "x", "a": 1}'),
        ('{"a": null}', '{"a": NaN}'),
    ],
)
def test_json_of_another_type_is_wrong(
    wanted: str, found: str, tokenizer: Tokenizer, judged: judge.Judge
) -> None:
    [ask, *_] = asks("addition2", tokenizer)
    eos = ask.expected[-1]

    def reply(text: str) -> tuple[int, ...]:
        return (*tokenizer.encode(text, add_special_tokens=False).ids, eos)

    asked = judge.Ask(ask.prompt, reply(wanted))
    assert judged.verdict(asked, reply(wanted)).right
    assert not judged.verdict(asked, reply(found)).right


def test_text_in_front_of_calls_is_not_right(tokenizer: Tokenizer, judged: judge.Judge) -> None:
    found = 0
    for ask in asks("tool_call", tokenizer, 12):
        reading = judged.read(ask.prompt, ask.expected)
        thinks = ask.prompt[-1] != tokenizer.token_to_id("</think>")
        if thinks or not reading.calls:
            continue
        extra = tokenizer.encode("Some rubbish.", add_special_tokens=False).ids
        verdict = judged.verdict(ask, (*extra, *ask.expected))
        assert verdict.calls_equal and not verdict.right
        found += 1
    assert found


def test_every_ask_gets_its_own_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replies come back from several processes, longest first; the sums of one task are right."""

    def work(share: measure.Share) -> measure.Done:
        # even sums are answered as expected, odd ones with nothing
        replies = [a.expected if sum(a.prompt) % 2 == 0 else () for a in share.asks]
        return measure.Done(tuple(replies), None, (), 1, 1.0, 1, 1.0)

    monkeypatch.setattr(evaluate, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(evaluate, "work", work)
    tasks = ("tool_turns", "addition2")
    settings = evaluate.Settings(folder, None, tasks, 12, 0, 0, 3)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for row, task in zip(evaluate.evaluate(settings).rows, tasks, strict=True):
        examples = [encode(e, tokenizer) for e in stream.held_out(tokenizer, task, 12, 0)]
        good = [[sum(a.prompt) % 2 == 0 for a in judge.asks_of(each)] for each in examples]
        turns = [each for turns in good for each in turns]
        assert row["examples"] == len(examples)
        assert row["right"] == round(100 * sum(map(all, good)) / len(good), 2)
        assert row["turns_right"] == round(100 * sum(turns) / len(turns), 2)
        assert 0 < row["turns_right"] < 100


def test_no_example_both_calibrates_and_tests() -> None:
    for task in ("addition2", "tool_call"):
        tests = {e.key for e in stream.held_out(None, task, 40, 0)}
        chosen = {e.key for e in stream.held_out(None, task, 40, 0, calibration=True)}
        assert len(tests) == len(chosen) == 40
        assert not tests & chosen


def test_reasoning_does_not_count(tokenizer: Tokenizer, judged: judge.Judge) -> None:
    end = tokenizer.token_to_id("</think>")
    for ask in asks("addition2_think", tokenizer):
        answer = ask.expected[ask.expected.index(end) :]
        verdict = judged.verdict(ask, (*tokenizer.encode("Hm.").ids, *answer))
        assert verdict.right and not verdict.exact


@pytest.fixture
def one_thread() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_evaluation_end_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread
) -> None:
    def held_out(
        tokenizer: Tokenizer, task: str, count: int, seed: int, *, calibration: bool
    ) -> list[Example]:
        if task == "text":  # reading the library takes seconds
            document = Message("assistant", ("A text that answers nobody.",))
            return [Example("text", "1", Conversation((document,), thinking=False))]
        return stream.held_out(tokenizer, task, count, seed, calibration=calibration)

    monkeypatch.setattr(evaluate, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(evaluate, "held_out", held_out)
    arguments = ["--model", str(folder), "--float", str(folder), "--count", "1", "--measured", "1"]
    evaluate.main([*arguments, "--tasks", "addition2", "text", "--calibrate"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    addition, text = line["tasks"]
    assert (addition["examples"], addition["right"], text["examples"]) == (1, 0.0, 0)
    assert addition["perplexity"] > 100 and text["perplexity_float"] > 100
    assert addition["accepted_len"] >= 1 and text["accepted_len"] is None
    checkpoint = checkpoint_hash(folder)
    assert line["checkpoint"] == checkpoint
    assert line["drafter"]["blocks"] >= line["drafter"]["complete_blocks"] > 0
    DrafterCalibration.load(folder / CALIBRATION_NAME, block_size=5, checkpoint=checkpoint)
    (folder / CALIBRATION_NAME).unlink()


def test_losses_are_those_of_prompt_logprobs(folder: Path, one_thread) -> None:
    from deepinfer_core import LLM, SamplingParams
    from deepinfer_core.bench.whole_texts import open_model
    from deepinfer_core.loader import find_backend

    ids = tuple(Random(1).choices(range(5, 300), k=40))
    text = measure.Text(ids, (1, 7, 39))
    backend = find_backend("cpu", "ideal").with_strict(False)
    found = measure._losses(open_model(folder, backend), backend, [text, replace(text, counted=())])
    with LLM(folder, accelerator="cpu", numerics="ideal") as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([{"prompt_token_ids": ids}], params)
    assert output.prompt_logprobs is not None
    wanted = -sum(output.prompt_logprobs[i - 1].logprob for i in text.counted)
    assert np.allclose(found, [wanted, 0.0], atol=1e-3)
