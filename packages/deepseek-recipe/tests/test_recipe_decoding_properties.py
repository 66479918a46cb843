"""The reply machine on all sorts of output: cuts, broken markup, random ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.conversation import ParsingOptions
from deepseek_recipe.decoding.events import (
    Event,
    Finish,
    Malformed,
    Reasoning,
    Text,
    TokenLogprob,
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from deepseek_recipe.decoding.machine import ReplyMachine
from deepseek_recipe.encoding.profile import V41
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.json_text import load

MARK = "｜DSML｜"
# No stop text has a piece of a mark: by spelling it could end inside one, by id it cannot.
STOPS = ("END", "\n\n", "a<", "}")
FRAGMENTS = (
    "a", "b ", "END", "EN", "\n", "\n\n", "\r\n", "<", "</", ">", '"', "é", "😀", "`", "```",
    "```json\n", "\n```", "{", "}", '{"k": 1}', "</think>", "</thi", "<think>",
    f"<{MARK} calls>", f"<{MARK}tool_calls>\n", f"</{MARK} calls>", f"</{MARK}tool_calls>",
    f'<{MARK} invoke name="f">', f'<{MARK}invoke name="g" x="1">\n', f'<{MARK} invoke name="">',
    f"</{MARK} invoke>", f'<{MARK} parameter name="k" string="true">',
    f'<{MARK} parameter name="k 2" string="false">', f'<{MARK}parameter name="n">',
    f'<{MARK} parameter name="q" string="maybe">', f"</{MARK} parameter>", f"<{MARK} foo>",
    f"<{MARK}", f"</{MARK}", f'<{MARK} parameter name="', '" string="', 'true">', 'false">', "12",
)  # fmt: skip

fragments = st.lists(st.sampled_from(FRAGMENTS), max_size=25)
parsings = st.builds(
    ParsingOptions,
    parse_tool_calls=st.booleans(),
    parse_json_output=st.booleans(),
    thinking_initial_stage=st.sampled_from(
        [None, "reasoning_start", "reasoning_continuation", "content_continuation"]
    ),
    stop_sequences=st.lists(st.sampled_from(STOPS), max_size=2, unique=True).map(tuple),
)
with_tools = parsings.map(lambda parsing: replace(parsing, parse_tool_calls=True))
in_block = st.just(ParsingOptions(parse_tool_calls=True, starts_in_tool_calls=True))


def read(
    pieces: Iterable[str | Sequence[int]],
    parsing: ParsingOptions,
    tokenizer: PromptTokenizer | None = None,
) -> list[Event]:
    machine = ReplyMachine(parsing, V41, tokenizer)
    events: list[Event] = []
    for piece in pieces:
        if machine.finished:
            break
        if isinstance(piece, str):
            machine.feed_text(piece)
        else:
            machine.feed_all(piece)
        events += machine.drain()
    return events + machine.close()


def summary(events: Iterable[Event], parsing: ParsingOptions) -> list[Any]:
    """Events with neighbouring deltas as one; in JSON mode a run of blanks is one blank."""
    out: list[Any] = []
    for event in events:
        if isinstance(event, (Reasoning, Text, ToolArguments)):
            kind = type(event).__name__
            if out and isinstance(out[-1], list) and out[-1][0] == kind:
                out[-1][1] += event.text
            else:
                out.append([kind, event.text])
        elif not isinstance(event, Malformed):
            out.append(event)
    for item in out:
        if isinstance(item, list) and item[0] == "Text" and parsing.parse_json_output:
            item[1] = re.sub(" +", " ", item[1])
    return out + [event for event in events if isinstance(event, Malformed)]


def arguments(events: Iterable[Event], index: int) -> str:
    mine = [e.text for e in events if isinstance(e, ToolArguments) and e.index == index]
    return "".join(mine)


def ids_of(text: str, tokenizer: PromptTokenizer) -> list[int]:
    """The ids of a text in which marks are the real tokens."""
    ids: list[int] = []
    for part in re.split(f"(</think>|{MARK})", text):
        if part in ("</think>", MARK):
            ids.append(tokenizer.special_id(part))
        else:
            ids += tokenizer.encode_plain(part)
    return ids


@given(fragments, parsings, st.lists(st.integers(0, 200), max_size=8))
def test_every_cut_of_a_text_gives_the_same_events(
    parts: list[str], parsing: ParsingOptions, cuts: list[int]
) -> None:
    text = "".join(parts)
    whole = summary(read([text], parsing), parsing)
    assert summary(read(text, parsing), parsing) == whole
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert summary(read(pieces, parsing), parsing) == whole


@given(fragments, parsings, st.integers(1, 7))
def test_ids_in_any_grouping_give_the_same_events_as_the_text(
    v41_tokenizer: PromptTokenizer, parts: list[str], parsing: ParsingOptions, size: int
) -> None:
    content, mark, block = "".join(parts).partition(f"<{MARK}")
    # Inside a tag the end of reasoning is one thing as a token, and a text with a `>` as a text.
    text = content + mark + block.replace("</think>", "")
    ids = ids_of(text, v41_tokenizer)
    groups = [ids[at : at + size] for at in range(0, len(ids), size)]
    whole = summary(read([text], parsing, v41_tokenizer), parsing)
    assert summary(read(groups, parsing, v41_tokenizer), parsing) == whole


def test_golden_outputs_give_the_same_events_at_every_cut(
    golden_rows: Callable[[str], list[dict[str, Any]]],
) -> None:
    texts = set()
    for row in golden_rows("streams"):
        chunks = row["model_output_chunks"]
        texts.add("".join(chunk["text"] for chunk in chunks if chunk["kind"] == "text"))
    assert len(texts) > 50
    for stage, json_mode in ((None, False), ("reasoning_start", False), (None, True)):
        parsing = ParsingOptions(True, False, json_mode, stage, ("END", "zz"))
        for text in texts:
            whole = summary(read([text], parsing), parsing)
            assert summary(read(text, parsing), parsing) == whole
            for cut in range(1, len(text)):
                assert summary(read([text[:cut], text[cut:]], parsing), parsing) == whole


@given(st.lists(st.integers(0, 129_279), max_size=40), parsings)
def test_random_ids_never_raise(
    v41_tokenizer: PromptTokenizer, ids: list[int], parsing: ParsingOptions
) -> None:
    events = read([ids], parsing, v41_tokenizer)
    assert isinstance(events[-1], Finish)
    assert summary(read([[each] for each in ids], parsing, v41_tokenizer), parsing) == summary(
        events, parsing
    )


@given(st.text(), parsings)
def test_any_text_is_read(text: str, parsing: ParsingOptions) -> None:
    events = read([text], parsing)
    assert isinstance(events[-1], Finish)
    for event in events:
        if isinstance(event, (Reasoning, Text)):
            assert event.text
            event.text.encode()


@given(fragments, with_tools | in_block)
def test_arguments_of_ended_calls_are_json_objects(
    parts: list[str], parsing: ParsingOptions
) -> None:
    events = read(["".join(parts)], parsing)
    starts = [event.index for event in events if isinstance(event, ToolStart)]
    ends = [event.index for event in events if isinstance(event, ToolEnd)]
    finish = events[-1]
    assert isinstance(finish, Finish)
    assert starts == list(range(len(starts)))
    assert starts == ends + ([] if finish.open_tool is None else [finish.open_tool])
    for index in ends:
        text = arguments(events, index)
        assert isinstance(json.loads(text), dict)
        assert json.loads(text) == load(text)


@given(fragments, with_tools, st.lists(st.sampled_from([128822, 128825, 30, 1718, 32]), max_size=9))
def test_no_mark_gets_into_the_content_when_tools_are_read(
    v41_tokenizer: PromptTokenizer, parts: list[str], parsing: ParsingOptions, more: list[int]
) -> None:
    ids = ids_of("".join(parts), v41_tokenizer)
    for event in read([more, ids, more], parsing, v41_tokenizer):
        if isinstance(event, (Reasoning, Text)):
            assert MARK not in event.text
            assert "</think>" not in event.text
        elif isinstance(event, ToolStart):
            assert MARK not in event.name and "</think>" not in event.name


def letters_in(events: Iterable[Event]) -> list[str]:
    kept = ""
    for event in events:
        if isinstance(event, ToolStart):
            kept += event.name
        elif isinstance(event, (Reasoning, Text, ToolArguments, Malformed)):
            kept += event.text
    return sorted(set(kept))


@given(st.lists(st.sampled_from(FRAGMENTS) | st.none(), max_size=25), with_tools | in_block)
def test_no_text_is_lost(parts: list[str | None], parsing: ParsingOptions) -> None:
    parsing = replace(parsing, stop_sequences=())
    # a letter of its own at each place that is no fragment
    text = "".join(part or chr(0x4E00 + place) for place, part in enumerate(parts))
    letters = [char for char in text if "\u4e00" <= char <= "\u4eff"]
    found = letters_in(read([text], parsing))
    assert [char for char in found if "\u4e00" <= char <= "\u4eff"] == sorted(letters)


@given(fragments)
def test_no_text_is_told_twice_but_values_that_are_not_json(parts: list[str]) -> None:
    text = "".join(part for part in parts if "false" not in part and "k 2" not in part)
    text = "".join(chr(0x4E00 + at) if char == "a" else char for at, char in enumerate(text))
    events = read([text], ParsingOptions(parse_tool_calls=True))
    for char in set(text):
        if "\u4e00" <= char <= "\u4eff":
            kept = [e for e in events if char in getattr(e, "text", getattr(e, "name", ""))]
            assert len(kept) <= 1


@given(fragments, parsings.map(lambda each: replace(each, parse_tool_calls=False)))
def test_without_tools_the_text_is_what_the_rules_leave(
    parts: list[str], parsing: ParsingOptions
) -> None:
    parsing = replace(parsing, parse_json_output=False, stop_sequences=())
    text = "".join(parts)
    reasoning, content = "", text
    if parsing.thinking_initial_stage in ("reasoning_start", "reasoning_continuation"):
        reasoning, ended, content = text.partition("</think>")
        if parsing.thinking_initial_stage == "reasoning_start":
            reasoning = reasoning.lstrip("\n")
        if ended:
            reasoning = reasoning.rstrip("\n")
        content = content.lstrip("\n")
    elif parsing.thinking_initial_stage is None:
        content = content.lstrip("\n")
    events = read([text], parsing)
    assert "".join(e.text for e in events if isinstance(e, Reasoning)) == reasoning
    assert "".join(e.text for e in events if isinstance(e, Text)) == content.replace("</think>", "")


def shown_places(
    tokenizer: PromptTokenizer, ids: Sequence[int], parsing: ParsingOptions, size: int
) -> tuple[list[tuple[str, float]], list[Event]]:
    """Places of the ids that log-probabilities are told of, by the kind of text, and the events."""
    machine = ReplyMachine(parsing, V41, tokenizer)
    events: list[Event] = []
    for at in range(0, len(ids), size):
        if machine.finished:
            break
        group = ids[at : at + size]
        machine.feed_all(group, [TokenLogprob(each, float(at + n)) for n, each in enumerate(group)])
        events += machine.drain()
    events += machine.close()
    shown = [each for each in events if isinstance(each, (Reasoning, Text))]
    places = [(type(e).__name__, each.logprob) for e in shown for each in e.logprobs]
    return places, events


@given(fragments, parsings, st.integers(1, 5), st.lists(st.sampled_from([1, 28927, 225])))
def test_each_shown_token_has_its_logprob_once_whatever_the_cut(
    v41_tokenizer: PromptTokenizer,
    parts: list[str],
    parsing: ParsingOptions,
    size: int,
    more: list[int],
) -> None:
    middle = len(parts) // 2
    ids = ids_of("".join(parts[:middle]), v41_tokenizer) + more
    ids += ids_of("".join(parts[middle:]), v41_tokenizer)
    told, events = shown_places(v41_tokenizer, ids, parsing, size)
    assert told == shown_places(v41_tokenizer, ids, parsing, len(ids) or 1)[0]
    places = [place for _, place in told]
    assert places == sorted(set(places))
    assert summary(events, parsing) == summary(read([ids], parsing, v41_tokenizer), parsing)
    text = "".join(e.text for e in events if isinstance(e, (Reasoning, Text)))
    if not parsing.parse_json_output:
        # every character is of a token that is told of, in this order
        data = b"".join(v41_tokenizer.token_bytes(ids[int(place)]) for place in places)
        rest = iter(data.decode(errors="replace"))
        assert all(char in rest for char in text)


@pytest.mark.parametrize("text", ["<" * 500, "\n" * 500, f"<{MARK}" * 100, f"</{MARK}" * 100])
def test_runs_of_one_thing_are_read(text: str) -> None:
    for parsing in (
        ParsingOptions(True),
        ParsingOptions(True, True),
        ParsingOptions(True, False, True),
    ):
        assert summary(read([text], parsing), parsing) == summary(read(text, parsing), parsing)
