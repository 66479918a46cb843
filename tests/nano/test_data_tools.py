"""Tasks with tools and JSON: declarations, calls, answers, and what they may say."""

from __future__ import annotations

import json
import string
from functools import cache
from importlib import resources
from pathlib import Path
from random import Random

import pytest
from jsonschema import Draft202012Validator
from nano.data import extraction, refusal, tool_turns, tools
from nano.data.dialogue import INTENTS, MAX_CHARS, intent_named
from nano.data.domains import DOMAINS
from nano.data.encoding import encode, spelled
from nano.data.example import Draw, Example, is_held_out
from nano.data.tool_turns import LINKS
from nano.geometry import SEQUENCE_LEN
from tokenizers import Tokenizer

from deepseek_recipe.conversation import text_of

NUM_DRAWS = 300
TOKENIZER = Path(str(resources.files("deepinfer_core") / "nano_model" / "tokenizer.json"))
TASKS: dict[str, tuple[Draw, float]] = {
    **tools.TASKS,
    **tool_turns.TASKS,
    **refusal.TASKS,
    **extraction.TASKS,
}


@cache
def examples(task: str) -> list[Example]:
    return draw_examples(task, NUM_DRAWS)


def draw_examples(task: str, count: int) -> list[Example]:
    draw, _ = TASKS[task]
    return [draw(Random(f"{task}/{number}")) for number in range(count)]


def words_of(value: object) -> list[str]:
    """All strings of a JSON value, keys left out."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [word for each in value.values() for word in words_of(each)]
    if isinstance(value, list):
        return [word for each in value for word in words_of(each)]
    return []


def said_before(example: Example, index: int) -> str:
    """What was said ahead of a message, the declarations left out."""
    return "\n".join(text_of(each.content) for each in example.conversation.messages[:index])


def fields_of(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


@pytest.mark.parametrize("task", TASKS)
def test_draws_are_reproducible_and_mostly_trained(task: str) -> None:
    assert draw_examples(task, 60) == examples(task)[:60]
    assert {each.task for each in examples(task)} == {task}
    assert sum(map(is_held_out, examples(task))) < NUM_DRAWS / 8


@pytest.mark.parametrize("task", ["tool_call", "tool_turns", "refusal"])
def test_calls_fit_the_declarations_and_copy_what_was_said(task: str) -> None:
    num_calls = 0
    for example in examples(task):
        offered = {tool.name: tool for tool in example.conversation.tools}
        assert len(offered) == len(example.conversation.tools)
        for index, message in enumerate(example.conversation.messages):
            for call in message.tool_calls:
                num_calls += 1
                parameters = offered[call.name].parameters
                assert isinstance(parameters, dict)
                Draft202012Validator.check_schema(parameters)
                arguments = json.loads(call.arguments)
                validator = Draft202012Validator({**parameters, "additionalProperties": False})
                validator.validate(arguments)
                order = [name for name in parameters["properties"] if name in arguments]
                assert list(arguments) == order
                before = said_before(example, index)
                assert all(word in before for word in words_of(arguments)), arguments
    assert num_calls > NUM_DRAWS / 10


def test_numbers_of_a_call_were_said_before() -> None:
    for example in examples("tool_call"):
        last = example.conversation.messages[-1]
        before = said_before(example, len(example.conversation.messages) - 1)
        for call in last.tool_calls:
            for value in json.loads(call.arguments).values():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    assert json.dumps(value) in before


def test_a_tool_call_ends_with_new_calls() -> None:
    for example in examples("tool_call"):
        *before, last = example.conversation.messages
        assert 1 <= len(last.tool_calls) <= 3
        made = [(c.name, c.arguments) for message in before for c in message.tool_calls]
        assert not {(c.name, c.arguments) for c in last.tool_calls} & set(made)
        assert 1 <= len(example.conversation.tools) <= 3


def test_every_call_has_its_result_and_the_answer_uses_it() -> None:
    later_calls = 0
    for example in examples("tool_turns"):
        messages = example.conversation.messages
        for index, message in enumerate(messages[:-1]):
            if message.tool_calls:
                num_calls = len(message.tool_calls)
                results = messages[index + 1 : index + 1 + num_calls]
                assert [r.tool_call_id for r in results] == [c.id for c in message.tool_calls]
                assert messages[index + 1 + num_calls].role == "assistant"
        later_calls += sum(bool(message.tool_calls) for message in messages) > 1
        # names, ids and numbers of an answer stand in what was said
        last = messages[-1]
        before = said_before(example, len(messages) - 1)
        for word in text_of(last.content).replace('"', " ").split():
            if any(letter.isdigit() for letter in word):
                assert word.strip(".,;:") in before
    assert later_calls > 0.85 * NUM_DRAWS


def test_reasoning_stands_where_thinking_is_on() -> None:
    for task in TASKS:
        thinking = 0
        for example in examples(task):
            conversation = example.conversation
            replies = [each for each in conversation.messages if each.role == "assistant"]
            thinking += conversation.thinking
            assert (conversation.reasoning_effort is not None) == conversation.thinking
            assert all((each.reasoning is not None) == conversation.thinking for each in replies)
        assert 0.1 * NUM_DRAWS < thinking < 0.65 * NUM_DRAWS


def test_a_refusal_calls_nothing_and_names_only_what_is_there() -> None:
    kinds = {"no tool": 0, "no tools": 0, "direct": 0}
    for example in examples("refusal"):
        last = example.conversation.messages[-1]
        names = [tool.name for tool in example.conversation.tools]
        answer = text_of(last.content)
        assert not last.tool_calls and answer
        if not names:
            kinds["no tools"] += 1
            assert answer in (
                "I cannot look that up: no tools are available.",
                "I cannot do that: no tools are available.",
            )
        elif answer.startswith("I have no tool"):
            kinds["no tool"] += 1
            assert answer == f"I have no tool for that. I can use: {', '.join(names)}."
        else:
            kinds["direct"] += 1
    assert min(kinds.values()) > NUM_DRAWS / 20, kinds


def test_json_answers_fit_their_schema_and_copy_the_text() -> None:
    by_schema = 0
    for example in examples("json_extract"):
        conversation = example.conversation
        answer = text_of(conversation.messages[-1].content)
        value = json.loads(answer)
        assert answer == json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
        before = said_before(example, len(conversation.messages) - 1)
        for key, each in value.items():
            assert all(word in before for word in words_of(each)), (key, each)
            if isinstance(each, int | float) and not isinstance(each, bool):
                assert json.dumps(each) in before
        if conversation.response_format.kind == "json_schema":
            by_schema += 1
            schema = conversation.response_format.schema
            assert isinstance(schema, dict)
            Draft202012Validator.check_schema(schema)
            Draft202012Validator({**schema, "additionalProperties": False}).validate(value)
            assert list(value) == list(schema["properties"]) == schema["required"]
        else:
            assert all(key in before for key in value)
            assert None not in value.values() or "Use null for what is missing." in before
    assert 0.5 * NUM_DRAWS < by_schema < 0.75 * NUM_DRAWS


def test_the_catalogue_is_consistent() -> None:
    names = [name for intent in INTENTS for name in intent.names]
    assert len(names) == len(set(names)), "a name must tell which tool it is"
    for intent in INTENTS:
        spellings = [name for slot in intent.slots for name in slot.names]
        assert len(spellings) == len(set(spellings)), intent.key
        assert bool(intent.vary) == bool(intent.slots), intent.key
        required = {slot.key for slot in intent.slots if not slot.said}
        optional = any(slot.said for slot in intent.slots)
        for ask in intent.asks:
            assert fields_of(ask) == required | ({"more"} if optional else set()), ask
        for text in intent.several:
            assert fields_of(text) - {"more"} == required - {intent.vary} | {"items"}, text
            assert ("more" in fields_of(text)) <= optional, text
        for text in intent.again:
            assert fields_of(text) == {intent.vary}, text


def test_links_say_all_that_the_second_call_needs() -> None:
    for link in LINKS:
        source, target = intent_named(link.source), intent_named(link.target)
        given = {slot.key for slot in source.slots if not slot.said}
        results = {field.names[0] for field in source.fields}
        assert set(link.carried.values()) <= given | results
        needed = {slot.key for slot in target.slots if not slot.said} - set(link.carried)
        assert not needed & given, (link.source, link.target)
        for text in link.follow:
            assert fields_of(text) == needed, text
        for text in link.chain:
            assert fields_of(text) == needed | given, text
        if link.chain:
            assert set(link.carried.values()) <= results, "else one call would do"
            assert fields_of(link.goal) <= needed | given


def test_keys_of_a_domain_tell_entries_apart() -> None:
    for domain in DOMAINS:
        keys = [key for entry in domain.entries for key in entry.keys]
        assert len(keys) == len(set(keys)), domain.noun
        told = {name for lead in domain.leads for name in fields_of(lead)}
        assert told <= {entry.keys[0] for entry in domain.entries}
        assert all(("{}" in says) for e in domain.entries if e.kind != "boolean" for says in e.says)


@pytest.mark.parametrize("task", TASKS)
def test_an_example_fits_a_row(task: str) -> None:
    drawn = examples(task)
    assert max(len(spelled(each.conversation)) for each in drawn) <= MAX_CHARS
    if TOKENIZER.exists():
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        assert max(len(encode(each, tokenizer).token_ids) for each in drawn) <= SEQUENCE_LEN


@pytest.mark.parametrize("task", TASKS)
def test_no_text_spells_a_control_token(task: str) -> None:
    for example in examples(task):
        for message in example.conversation.messages:
            assert "｜" not in text_of(message.content) + (message.reasoning or "")
        assert spelled(example.conversation).endswith("<｜end▁of▁sentence｜>")
