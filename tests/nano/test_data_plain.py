"""The plain tasks, their token ids and the stream of training rows."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from random import Random

import numpy as np
import pytest
from nano.data import stream
from nano.data.encoding import Encoded, encode, is_document, spelled
from nano.data.example import Example, is_held_out
from nano.data.stream import BLOCK_LEN, held_out, rows
from nano.data.tasks import TASKS
from nano.data.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from nano.geometry import SEQUENCE_LEN
from tokenizers import Tokenizer

from deepinfer_core.engine.tokenizer import TextCodec
from deepseek_recipe.conversation import Message, ParsingOptions, text_of
from deepseek_recipe.decoding.events import Malformed, Reasoning, Text, ToolArguments, ToolStart
from deepseek_recipe.decoding.machine import ReplyMachine
from deepseek_recipe.encoding.profile import V41
from deepseek_recipe.encoding.prompt import render
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.recipe import DeepseekV41

FILE = Path(str(resources.files("deepinfer_core") / "nano_model" / "tokenizer.json"))
PLAIN = (
    "addition2",
    "addition2_think",
    "arithmetic",
    "lists",
    "strings",
    "units",
    "dates",
    "facts",
    "greetings",
    "copying",
)
EOS = 1


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return Tokenizer.from_file(str(FILE))


@pytest.fixture(scope="module")
def prompts() -> PromptTokenizer:
    return PromptTokenizer.from_path(FILE)


def drawn(task: str, count: int) -> list[Example]:
    draw, _ = TASKS[task]
    random = Random(f"test/{task}")
    return [draw(random) for _ in range(count)]


def question_of(example: Example) -> str:
    return text_of(example.conversation.messages[-2].content)


def answer_of(example: Example) -> str:
    return text_of(example.conversation.messages[-1].content)


# ---- token ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_prompt_ids_are_those_of_the_recipe(
    task: str, vocabulary: Tokenizer, prompts: PromptTokenizer
) -> None:
    for example in drawn(task, 40):
        conversation = example.conversation
        encoded = encode(example, vocabulary)
        ids = encoded.token_ids.tolist()
        if is_document(conversation):
            assert ids == [0, *prompts.encode_plain(answer_of(example)), EOS]
            continue
        before = replace(conversation, messages=conversation.messages[:-1])
        start, end = encoded.replies[-1]
        assert ids[:start] == prompts.encode(render(before, V41))
        assert end == len(ids)


@pytest.mark.parametrize("task", TASKS)
def test_recipe_reads_the_reply_as_it_was_meant(
    task: str, vocabulary: Tokenizer, prompts: PromptTokenizer
) -> None:
    for example in drawn(task, 40):
        conversation = example.conversation
        if is_document(conversation):
            continue
        encoded = encode(example, vocabulary)
        is_forced = bool(conversation.tools) and conversation.tool_choice == "required"
        parsing = ParsingOptions(
            parse_tool_calls=bool(conversation.tools),
            starts_in_tool_calls=is_forced,
            thinking_initial_stage="reasoning_start" if conversation.thinking else None,
        )
        machine = ReplyMachine(parsing, V41, prompts)
        start, end = encoded.replies[-1]
        machine.feed_all(encoded.token_ids[start:end].tolist())
        events = [*machine.drain(), *machine.close("stop")]
        assert not any(isinstance(event, Malformed) for event in events)
        reply = conversation.messages[-1]
        assert _joined(events, Reasoning) == (reply.reasoning or "")
        assert _joined(events, Text) == text_of(reply.content)
        calls = [event for event in events if isinstance(event, ToolStart)]
        assert [call.name for call in calls] == [call.name for call in reply.tool_calls]
        for index, call in enumerate(reply.tool_calls):
            pieces = [e.text for e in events if isinstance(e, ToolArguments) and e.index == index]
            assert json.loads("".join(pieces)) == json.loads(call.arguments)


def _joined(events: Sequence[object], kind: type[Reasoning] | type[Text]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@pytest.mark.parametrize("task", TASKS)
def test_weights_mark_the_replies_that_can_be_learned(task: str, vocabulary: Tokenizer) -> None:
    for example in drawn(task, 20):
        conversation = example.conversation
        encoded = encode(example, vocabulary)
        assert encoded.weights[0] == 0
        if is_document(conversation):
            assert set(encoded.weights[1:].tolist()) == {30}
            continue
        replies = sum(message.role == "assistant" for message in conversation.messages)
        drops_reasoning = conversation.thinking and not conversation.tools
        assert len(encoded.replies) == (1 if drops_reasoning else replies)
        inside = np.zeros(len(encoded.token_ids), dtype=bool)
        for start, end in encoded.replies:
            inside[start:end] = True
            assert encoded.token_ids[end - 1] == EOS
        assert set(encoded.weights[inside].tolist()) == {100}
        assert set(encoded.weights[1:][~inside[1:]].tolist()) == {5}


def test_earlier_replies_lose_their_reasoning_and_are_not_learned(vocabulary: Tokenizer) -> None:
    first, second = drawn("addition2_think", 2)
    messages = (
        *(each for each in first.conversation.messages if each.role != "system"),
        *(each for each in second.conversation.messages if each.role != "system"),
    )
    both = Example("two", "key", replace(first.conversation, messages=messages))
    assert str(messages[1].reasoning) not in spelled(both.conversation)
    assert str(messages[3].reasoning) in spelled(both.conversation)
    assert len(encode(both, vocabulary).replies) == 1


def test_no_text_spells_a_control_token() -> None:
    for task in TASKS:
        for example in drawn(task, 40):
            for message in example.conversation.messages:
                text = text_of(message.content) + (message.reasoning or "")
                assert not any(token in text for token in SPECIAL_TOKENS)


# ---- tasks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", PLAIN)
def test_a_prompt_has_one_answer(task: str) -> None:
    answers: dict[tuple[str, bool], tuple[str | None, str]] = {}
    for example in drawn(task, 3000):
        thinking = example.conversation.thinking
        reply = (example.conversation.messages[-1].reasoning, answer_of(example))
        assert answers.setdefault((question_of(example), thinking), reply) == reply


@pytest.mark.parametrize("task", PLAIN)
def test_every_step_of_a_calculation_is_right(task: str) -> None:
    equation = re.compile(r"(?<![\d*+-])(-?\d+)([-+*/])(\d+)(?:([-+])(\d+))?=(-?\d+)")
    for example in drawn(task, 1000):
        for a, sign, b, second, c, result in equation.findall(
            example.conversation.messages[-1].reasoning or ""
        ):
            value = _calculated(int(a), sign, int(b))
            assert int(result) == (_calculated(value, second, int(c)) if c else value)


def _calculated(a: int, sign: str, b: int) -> int:
    if sign == "/":
        assert a % b == 0
        return a // b
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def test_sums_are_right_and_end_the_thought() -> None:
    for task in ("addition2", "addition2_think"):
        for example in drawn(task, 1000):
            a, b = map(int, example.key.split("+"))
            assert answer_of(example).split(" = ")[-1] == str(a + b)
            reasoning = example.conversation.messages[-1].reasoning
            assert (reasoning is None) == (task == "addition2")
            assert reasoning is None or reasoning.endswith(f" So {a + b}.")


def test_no_sum_is_held_out_by_one_task_and_learned_by_the_other() -> None:
    for task, other in itertools.permutations(("addition2", "addition2_think")):
        learned = {example.key for example in drawn(task, 20_000) if not is_held_out(example)}
        asked = {example.key for example in held_out(None, other, 200, seed=1)}
        assert len(asked) == 200
        assert not learned & asked


@pytest.mark.parametrize("task", PLAIN)
def test_held_out_examples_are_distinct_and_repeatable(task: str) -> None:
    found = held_out(None, task, 30, seed=3)
    assert len(found) == len({example.key for example in found}) == 30
    assert all(is_held_out(example) and example.task == task for example in found)
    assert held_out(None, task, 30, seed=3) == found


# ---- rows ---------------------------------------------------------------------------------------


def test_rows_are_full_and_documents_start_at_even_places(vocabulary: Tokenizer) -> None:
    made = list(itertools.islice(rows(vocabulary, 1, 0), BLOCK_LEN))
    for row in made:
        assert row.token_ids.shape == row.documents.shape == row.weights.shape == (SEQUENCE_LEN,)
        assert row.token_ids.dtype == np.uint16
        assert row.documents.dtype == row.weights.dtype == np.uint8
        starts = np.flatnonzero(np.diff(row.documents, prepend=-1))
        assert not (starts % 2).any()
        assert (row.token_ids[starts] == 0).all()
        assert (row.token_ids == 0).sum() == len(starts) == row.documents[-1] + 1
        assert not row.weights[row.token_ids == 2].any()
    assert np.mean([(row.token_ids == 2).mean() for row in made]) < 0.03


def test_rows_depend_on_seed_worker_and_number_alone(vocabulary: Tokenizer) -> None:
    def ids(seed: int, worker: int, start: int, count: int) -> list[bytes]:
        made = itertools.islice(rows(vocabulary, seed, worker, start), count)
        return [row.token_ids.tobytes() for row in made]

    first = ids(1, 0, 0, BLOCK_LEN + 3)
    assert ids(1, 0, BLOCK_LEN - 2, 5) == first[BLOCK_LEN - 2 :]
    assert not {*first} & {*ids(1, 1, 0, 3), *ids(2, 0, 0, 3)}


def test_rows_begin_no_conversation_with_a_held_out_example(
    vocabulary: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Example] = []

    def noted(example: Example, tokenizer: Tokenizer) -> Encoded:
        seen.append(example)
        return encode(example, tokenizer)

    made = rows(vocabulary, 3, 0)
    next(made)  # the mean lengths are known now
    monkeypatch.setattr(stream, "encode", noted)
    for _ in range(2 * BLOCK_LEN):
        next(made)
    assert {example.task for example in seen} == {*TASKS}
    assert not any(is_held_out(example) for example in seen)


def test_rows_hold_no_held_out_sum(vocabulary: Tokenizer) -> None:
    answer = re.compile(r"</think>(\d+) \+ (\d+) = \d+<｜end")
    seen = 0
    for row in itertools.islice(rows(vocabulary, 2, 0), 2 * BLOCK_LEN):
        text = vocabulary.decode(row.token_ids.tolist(), skip_special_tokens=False)
        for a, b in answer.findall(text):
            if int(a) < 100:
                key = f"{a}+{b}"
                empty = Message("assistant")
                conversation = replace(drawn("addition2", 1)[0].conversation, messages=(empty,))
                assert not is_held_out(Example("addition2", key, conversation))
                assert not is_held_out(Example("addition2_think", key, conversation))
                seen += 1
    assert seen > 20


# ---- vocabulary ---------------------------------------------------------------------------------


def test_vocabulary_has_the_control_tokens_first(vocabulary: Tokenizer) -> None:
    assert vocabulary.get_vocab_size() == VOCAB_SIZE
    assert [vocabulary.id_to_token(token_id) for token_id in range(len(SPECIAL_TOKENS))] == [
        *SPECIAL_TOKENS
    ]
    assert {*V41.tokens.spellings, *V41.tokens.grounding} < {*SPECIAL_TOKENS}
    assert vocabulary.token_to_id(V41.tokens.system or "") == 3


def test_vocabulary_splits_every_digit(vocabulary: Tokenizer) -> None:
    assert vocabulary.encode("a 1234-56").tokens[-7:] == ["1", "2", "3", "4", "-", "5", "6"]


def test_vocabulary_gives_any_text_back(vocabulary: Tokenizer) -> None:
    random = Random("round trip")
    texts = ["", "\n\n \t", "naïve Straße ¿qué? 日本 🙂", "\x00\x7f\x85"]
    points = [*range(32, 127), *range(0xA0, 0x2FF), *range(0x4E00, 0x4E40), 0x1F600]
    texts += ["".join(map(chr, random.choices(points, k=60))) for _ in range(200)]
    for text in texts:
        assert vocabulary.decode(vocabulary.encode(text).ids) == text


def test_recipe_and_engine_take_the_file() -> None:
    recipe = DeepseekV41(FILE)
    prepared = recipe.prepare({"messages": [{"role": "user", "content": "2+2?"}]})
    codec = TextCodec(FILE.parent)
    assert prepared.token_ids[0] == 0
    assert codec.decode(codec.encode("12 apples <think>")) == "12 apples <think>"
