"""The reply machine: what each kind of output becomes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest

from deepseek_recipe.conversation import ParsingOptions
from deepseek_recipe.decoding.actions import Actions
from deepseek_recipe.decoding.events import (
    NEED_MORE,
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
from deepseek_recipe.decoding.states import ROWS, State
from deepseek_recipe.encoding.profile import V4, V41
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.errors import OptionError, ReplyError

TOOLS = {"parse_tool_calls": True}
JSON = {"parse_json_output": True}
THINK = {"thinking_initial_stage": "reasoning_start"}
THINK_END, DSML, USER = 128822, 128825, 128803
BLOCK = "\n\n<｜DSML｜ calls>\n"
END = "</｜DSML｜ calls>"
CALL_END = "</｜DSML｜ invoke>\n"
VALUE_END = "</｜DSML｜ parameter>\n"


def call(name: str = "f", inside: str = "") -> str:
    return f'<｜DSML｜ invoke name="{name}">\n{inside}{CALL_END}'


def parameter(name: str, value: str, string: str = "true") -> str:
    return f'<｜DSML｜ parameter name="{name}" string="{string}">{value}{VALUE_END}'


def read(
    *pieces: str | int | list[int],
    tokenizer: PromptTokenizer | None = None,
    reason: str = "stop",
    continues: bool = False,
    **parsing: Any,
) -> list[Event]:
    machine = ReplyMachine(ParsingOptions(**parsing), V41, tokenizer, continues_content=continues)
    for piece in pieces:
        if machine.finished:
            break
        if isinstance(piece, str):
            machine.feed_text(piece)
        else:
            machine.feed_all([piece] if isinstance(piece, int) else piece)
    return machine.close(reason)


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbouring events of one kind as one; log-probabilities left out."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, (Reasoning, Text)) and type(last) is type(event):
            out[-1] = type(event)(last.text + event.text)
        elif isinstance(event, ToolArguments) and isinstance(last, ToolArguments):
            out[-1] = ToolArguments(event.index, last.text + event.text)
        else:
            out.append(type(event)(event.text) if isinstance(event, (Reasoning, Text)) else event)
    return out


def shown(events: Iterable[Event]) -> list[Event]:
    return joined(event for event in events if not isinstance(event, Malformed))


def misfits(events: Iterable[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Malformed)]


def arguments(events: Iterable[Event], index: int = 0) -> str:
    mine = [e.text for e in events if isinstance(e, ToolArguments) and e.index == index]
    return "".join(mine)


STOP = Finish("stop")


# ---- reasoning and content ----------------------------------------------------------------------


def test_reasoning_ends_at_its_mark_without_the_newlines_around_it() -> None:
    events = read("\n\nwhy\n\n", "</think>\n\nbecause\n", **THINK)
    assert joined(events) == [Reasoning("why"), Text("because\n"), STOP]


def test_newlines_inside_reasoning_stay() -> None:
    assert joined(read("a\n\nb</think>c", **THINK))[:1] == [Reasoning("a\n\nb")]


def test_reasoning_that_is_continued_keeps_its_first_newlines() -> None:
    events = read("\n\na</think>\nb", thinking_initial_stage="reasoning_continuation")
    assert joined(events) == [Reasoning("\n\na"), Text("b"), STOP]


def test_content_that_is_continued_keeps_its_first_newlines() -> None:
    assert joined(read("\n\na", thinking_initial_stage="content_continuation"))[0] == Text("\n\na")
    assert joined(read("\n\na", continues=True))[0] == Text("\n\na")
    assert joined(read("\n\na"))[0] == Text("a")


def test_a_second_end_of_reasoning_is_deleted_and_the_newlines_around_it_stay() -> None:
    assert joined(read("a\n</think>\nb")) == [Text("a\n\nb"), STOP]


def test_a_begin_of_reasoning_is_text() -> None:
    assert joined(read("a<think>b")) == [Text("a<think>b"), STOP]


def test_what_is_held_at_the_end_is_passed_on() -> None:
    assert joined(read("a\n\n<", **TOOLS)) == [Text("a\n\n<"), STOP]
    assert joined(read("a</thi", **THINK)) == [Reasoning("a</thi"), STOP]
    assert joined(read("ab", stop_sequences=("abc",))) == [Text("ab"), STOP]


def test_a_tool_block_ends_reasoning() -> None:
    events = read("mull", BLOCK + call() + END, **THINK, **TOOLS)
    assert shown(events) == [
        Reasoning("mull"),
        ToolStart(0, "f"),
        ToolArguments(0, "{}"),
        ToolEnd(0),
        Finish("tool_calls"),
    ]


def test_tool_markup_is_text_without_tools() -> None:
    assert joined(read("a" + BLOCK)) == [Text("a" + BLOCK), STOP]


# ---- ids ----------------------------------------------------------------------------------------


def test_marks_are_known_by_id_and_not_by_spelling(v41_tokenizer: PromptTokenizer) -> None:
    spelled = v41_tokenizer.encode_plain("a</think>b")
    events = read(spelled, THINK_END, v41_tokenizer.encode_plain("c"), tokenizer=v41_tokenizer,
                  **THINK)  # fmt: skip
    assert joined(events) == [Reasoning("a</think>b"), Text("c"), STOP]


def test_a_tool_block_spelled_in_ordinary_tokens_is_text(v41_tokenizer: PromptTokenizer) -> None:
    text = "a" + BLOCK + call() + END
    events = read(v41_tokenizer.encode_plain(text), tokenizer=v41_tokenizer, **TOOLS)
    assert joined(events) == [Text(text), STOP]


def test_look_alikes_of_marks_are_text() -> None:
    text = "a <|DSML|calls> <／think> ＜｜DSML｜ calls＞ <｜dsml｜ calls>"
    assert joined(read(text, **TOOLS)) == [Text(text), STOP]


def test_other_special_tokens_become_their_spelling(v41_tokenizer: PromptTokenizer) -> None:
    assert joined(read([USER, 1, 68], tokenizer=v41_tokenizer))[0] == Text(
        "<｜User｜><｜end▁of▁sentence｜>b"
    )


@pytest.mark.parametrize("before", [[], [68], [68, 1], [28927]])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_end_token_at_the_end_is_no_part_of_the_reply(
    before: list[int], reason: str, v41_tokenizer: PromptTokenizer
) -> None:
    def events(*chunks: list[int]) -> list[Event]:
        machine = ReplyMachine(ParsingOptions(), V41, v41_tokenizer)
        for chunk in chunks:
            machine.feed_all(chunk)
        return joined(machine.close(reason))

    without = events(before)
    assert events([*before, 1]) == events(*[[each] for each in [*before, 1]])
    if before[-1:] == [1]:
        assert "<｜end▁of▁sentence｜>" in str(events([*before, 1]))
    else:
        assert events([*before, 1]) == without


def test_an_end_token_before_text_is_text(v41_tokenizer: PromptTokenizer) -> None:
    machine = ReplyMachine(ParsingOptions(), V41, v41_tokenizer)
    machine.feed(1)
    machine.feed_text("")
    assert machine.drain() == []
    machine.feed_text("x")
    assert joined(machine.close()) == [Text("<｜end▁of▁sentence｜>x"), STOP]


def test_characters_are_put_together_from_several_tokens(v41_tokenizer: PromptTokenizer) -> None:
    # 28927 and 225 are the bytes f0 9f 98 and 80
    assert joined(read(28927, 225, tokenizer=v41_tokenizer)) == [Text("😀"), STOP]


@pytest.mark.parametrize("following", [[68], [THINK_END, 68], [USER]])
def test_bytes_that_are_no_character_are_replaced(
    following: list[int], v41_tokenizer: PromptTokenizer
) -> None:
    events = read([68, 28927, *following], tokenizer=v41_tokenizer)
    assert joined(events)[0].text.startswith("b\ufffd")


def test_a_character_that_stays_incomplete_is_not_lost(v41_tokenizer: PromptTokenizer) -> None:
    assert joined(read([68, 28927], tokenizer=v41_tokenizer)) == [Text("b\ufffd"), STOP]
    assert joined(read([28927], "x", tokenizer=v41_tokenizer)) == [Text("\ufffdx"), STOP]


def test_a_mark_may_follow_a_bracket_that_came_as_text(v41_tokenizer: PromptTokenizer) -> None:
    assert shown(read("a<", [DSML], tokenizer=v41_tokenizer, **TOOLS)) == [Text("a"), STOP]


def test_lone_surrogates_are_replaced() -> None:
    assert joined(read("a\ud800b\udc00c\udc01", **TOOLS))[0] == Text("a\ufffdb\ufffdc\ufffd")


@pytest.mark.parametrize("token_id", [-1, 129_280, 10**12])
def test_an_unknown_id_is_refused_and_nothing_of_its_chunk_is_taken_in(
    token_id: int, v41_tokenizer: PromptTokenizer
) -> None:
    machine = ReplyMachine(ParsingOptions(), V41, v41_tokenizer)
    machine.feed(68)
    with pytest.raises(ReplyError, match=rf"{token_id} .* {v41_tokenizer.vocab_size}"):
        machine.feed_all([69, token_id])
    machine.feed(70)
    assert joined(machine.close()) == [Text("bd"), STOP]


def test_ids_need_a_tokenizer() -> None:
    with pytest.raises(ReplyError, match="token chunk received without a tokenizer"):
        ReplyMachine(ParsingOptions(), V41).feed(5)


def test_the_marks_follow_the_profile(v4_tokenizer: PromptTokenizer) -> None:
    machine = ReplyMachine(ParsingOptions(**THINK), V4, v4_tokenizer)
    machine.feed_text("a</think>b")
    assert joined(machine.close()) == [Reasoning("a"), Text("b"), STOP]


# ---- stop texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "stop"),
    [
        (["END"], ["hello E", "N", "D more"], "hello ", "END"),
        (["long stop", "ng s"], ["a long", " stop"], "a lo", "ng s"),
        (["ab", "b"], ["xab"], "x", "ab"),
        (["b", "ab"], ["xab"], "xa", "b"),
        (["aab"], ["aaab"], "a", "aab"),
        (["abac"], ["ababac"], "ab", "abac"),
        (["\n\n"], ["\n\nHello\n\nWorld"], "Hello", "\n\n"),
        (["\nb"], ["\n", "\nb"], "b", None),
        (["a</think>"], ["xa</think> b"], "x", "a</think>"),
        (["ab"], ["xa</think>b"], "xab", None),
        (["😀"], ["a", "😀", "b"], "a", "😀"),
    ],
)
def test_the_stop_text_that_is_complete_first_ends_the_reply(
    stops: list[str], pieces: list[str], text: str, stop: str | None
) -> None:
    events = joined(read(*pieces, stop_sequences=tuple(stops)))
    assert events == [Text(text), Finish("stop", stop_sequence=stop)]


def test_a_stop_text_finishes_the_machine_at_once() -> None:
    machine = ReplyMachine(ParsingOptions(stop_sequences=("END",)), V41)
    machine.feed_text("aEND b")
    assert machine.finished
    with pytest.raises(ReplyError, match="stream processor has finished"):
        machine.feed_text("c")
    assert joined(machine.close("length")) == [Text("a"), Finish("stop", stop_sequence="END")]


def test_stop_texts_mean_nothing_in_reasoning_and_in_tool_blocks() -> None:
    text = "r END" + BLOCK + call(inside=parameter("a", "END"))
    events = read(text, **THINK, **TOOLS, stop_sequences=("END",))
    assert joined(events)[0] == Reasoning("r END")
    assert arguments(events) == '{"a": "END"}'


def test_a_stop_text_may_span_newlines_that_are_held() -> None:
    events = read("abc\n", "<b", **TOOLS, stop_sequences=("\n<",))
    assert joined(events) == [Text("abc"), Finish("stop", stop_sequence="\n<")]


def test_an_empty_stop_text_is_an_error() -> None:
    with pytest.raises(OptionError, match="stop_sequences"):
        ReplyMachine(ParsingOptions(stop_sequences=("a", "")), V41)


def test_special_tokens_that_are_no_marks_can_stop(v41_tokenizer: PromptTokenizer) -> None:
    events = read([68, USER, 69], tokenizer=v41_tokenizer, stop_sequences=("<｜User｜>",))
    assert joined(events) == [Text("b"), Finish("stop", stop_sequence="<｜User｜>")]


# ---- tool calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(" calls", " invoke", " parameter"),
                                   ("tool_calls", "invoke", "parameter"),
                                   (" calls", "invoke", " parameter"),
                                   ("function_calls", " invoke", "parameter")])  # fmt: skip
def test_tag_words_of_both_checkpoints_are_read_in_any_mix(words: tuple[str, str, str]) -> None:
    block, invoke, name = words
    text = (
        f'ok\n\n<｜DSML｜{block}>\n<｜DSML｜{invoke} name="f">\n'
        f'<｜DSML｜{name} name="a" string="true">x</｜DSML｜{name}>\n</｜DSML｜{invoke}>\n'
        f"</｜DSML｜{block}>"
    )
    events = read(text, **TOOLS)
    assert joined(events) == [
        Text("ok"),
        ToolStart(0, "f"),
        ToolArguments(0, '{"a": "x"}'),
        ToolEnd(0),
        Finish("tool_calls"),
    ]


def test_arguments_of_several_calls() -> None:
    inside = parameter("a", 'q"\\\n\t\x01é') + parameter("b", '{"x": [1,2]}', "false")
    events = read(BLOCK + call("f", inside) + call("g") + END, **TOOLS)
    assert arguments(events, 0) == '{"a": "q\\"\\\\\\n\\t\\u0001é", "b": {"x": [1,2]}}'
    assert arguments(events, 1) == "{}"
    assert not misfits(events)


def test_names_of_parameters_may_hold_blanks_and_quotes() -> None:
    inside = parameter("shipping address", "1") + parameter('a"b', "2") + parameter("", "3")
    events = read(BLOCK + call("f", inside) + END, **TOOLS)
    assert arguments(events) == '{"shipping address": "1", "a\\"b": "2", "": "3"}'


def test_markup_inside_a_text_value_is_text() -> None:
    events = read(BLOCK + call("f", parameter("a", "<｜DSML｜ x></think></b>")) + END, **TOOLS)
    assert arguments(events) == '{"a": "<｜DSML｜ x></think></b>"}'


def test_marks_by_id_inside_a_text_value_are_spelled_out(v41_tokenizer: PromptTokenizer) -> None:
    head = '<｜DSML｜ invoke name="f"><｜DSML｜ parameter name="a" string="true">'
    events = read(head, [THINK_END, DSML, 68], tokenizer=v41_tokenizer, starts_in_tool_calls=True,
                  **TOOLS)  # fmt: skip
    assert arguments(events) == '{"a": "</think>｜DSML｜b'


@pytest.mark.parametrize(
    "value",
    ["{", "[1,]", "[" * 300 + "]" * 300, "1], [2", "NaN", "1e999", '"\n"', "tru", "", "'a'", "1 2"],
)
def test_a_value_that_is_not_json_becomes_a_string_and_is_told(value: str) -> None:
    events = read(BLOCK + call("f", parameter("a", value, "false")) + END, **TOOLS)
    expected = value.replace('"', '\\"').replace("\n", "\\n")
    assert arguments(events) == f'{{"a": "{expected}"}}'
    assert misfits(events) == [value]


def test_blanks_around_a_json_value_stay() -> None:
    events = read(BLOCK + call("f", parameter("a", " 5 \n", "false")) + END, **TOOLS)
    assert arguments(events) == '{"a":  5 \n}'


def test_of_equal_parameters_the_first_counts_and_the_other_is_told() -> None:
    again = parameter("a", "2")
    events = read(BLOCK + call("f", parameter("a", "1") + again + parameter("b", "3")), **TOOLS)
    assert arguments(events) == '{"a": "1", "b": "3"}'
    assert [text.strip() for text in misfits(events)] == [again.strip()]


@pytest.mark.parametrize(
    "bad",
    [
        '<｜DSML｜ parameter name="a">1</｜DSML｜ parameter>',
        '<｜DSML｜ parameter string="true" name="a">1</｜DSML｜ parameter>',
        '<｜DSML｜ parameter name="a" string="maybe">1</｜DSML｜ parameter>',
        "<｜DSML｜ parameter>1</｜DSML｜ parameter>",
        "<｜DSML｜ foo>1</｜DSML｜ foo>",
        '<｜DSML｜ parameter name="a"',
        "<｜DSML｜ parameter",
        "loose text",
    ],
)
def test_a_bad_parameter_is_told_and_the_call_stays_whole(bad: str) -> None:
    inside = parameter("x", "1") + bad + "\n" + parameter("y", "2")
    events = read(BLOCK + call("f", inside) + call("g") + END, **TOOLS)
    assert arguments(events, 0) == '{"x": "1", "y": "2"}'
    assert arguments(events, 1) == "{}"
    assert [text.strip() for text in misfits(events)] == [bad]


def test_a_closing_mark_ends_the_innermost_thing_whatever_word_follows() -> None:
    text = '<｜DSML｜ invoke name="f">' + parameter("a", "1").replace("parameter>", "invoke>")
    events = read(BLOCK + text + END, **TOOLS)
    assert shown(events)[1:] == [
        ToolArguments(0, '{"a": "1"}'),
        ToolEnd(0),
        Finish("tool_calls"),
    ]


def test_a_call_that_is_not_closed_ends_where_the_next_begins() -> None:
    text = '<｜DSML｜ invoke name="f">\n' + call("g", parameter("a", "1"))
    events = read(BLOCK + text + END, **TOOLS)
    assert arguments(events, 0) == "{}"
    assert arguments(events, 1) == '{"a": "1"}'


def test_a_call_without_a_name_is_no_call() -> None:
    text = call("", parameter("a", "1"))
    events = read(BLOCK + text + call("g") + END, **TOOLS)
    assert shown(events)[0] == ToolStart(0, "g")
    assert [each.strip() for each in misfits(events)] == [text.strip()]


def test_text_in_the_block_outside_calls_is_told() -> None:
    events = read(BLOCK + "one" + call() + "two" + END + "three" + BLOCK + call(), **TOOLS)
    assert [each.strip() for each in misfits(events)] == [
        "one",
        "two",
        ("three" + BLOCK + call()).strip(),
    ]
    assert sum(isinstance(event, ToolStart) for event in events) == 1


def test_what_a_calls_tag_has_besides_the_name_is_told() -> None:
    events = read(BLOCK + '<｜DSML｜ invoke name="a>b" x="1">\n' + CALL_END + END, **TOOLS)
    assert shown(events)[0] == ToolStart(0, "a>b")
    assert [each.strip() for each in misfits(events)] == ['x="1"']


def test_a_block_of_an_unknown_word_is_told() -> None:
    events = read("abc <｜DSML｜ foo> bar", **TOOLS)
    assert shown(events) == [Text("abc "), STOP]
    assert misfits(events) == ["<｜DSML｜ foo> bar"]


@pytest.mark.parametrize("parsing", [TOOLS, {**TOOLS, **JSON}, {**TOOLS, **THINK}])
@pytest.mark.parametrize(
    "after",
    [" this is END", "this > END", "\nx > END", " callsEND", " call\n\nEND", "  calls> END",
     " calls </｜DSML｜END", "</｜DSML｜</think>", "", " ", " cal"],
)  # fmt: skip
def test_only_a_whole_closing_tag_is_kept_out_and_stop_texts_stay_alive(
    after: str, parsing: dict[str, Any]
) -> None:
    # in JSON mode and reasoning alike, but stop texts mean nothing in reasoning
    text = '{"a":"</｜DSML｜' + after
    events = read(text, **parsing, stop_sequences=("END",))
    assert joined(events) == joined(read(*text, **parsing, stop_sequences=("END",)))
    kind = Reasoning if "thinking_initial_stage" in parsing else Text
    content = "".join(e.text for e in events if isinstance(e, kind))
    rest = after.replace("</｜DSML｜", "").replace("</think>", "").rstrip("\n")
    if " cal".startswith(after):  # the tag is cut off
        assert misfits(events) == ["</｜DSML｜" + after] and content == '{"a":"'
    elif kind is Text:
        stopped = events[-1] == Finish("stop", stop_sequence="END")
        assert content == '{"a":"' + rest.removesuffix("END") and stopped == ("END" in after)
        assert set(misfits(events)) == {"</｜DSML｜"}
    else:
        assert content == '{"a":"' + rest


@pytest.mark.parametrize("word", ["calls", "tool_calls", "function_calls", "invoke", "parameter"])
@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize("by_letter", [True, False])
def test_a_closing_tag_of_every_word_is_kept_out(word: str, blank: str, by_letter: bool) -> None:
    tag = f"</｜DSML｜{blank}{word}>"
    text = f"a{tag}b{tag}{tag}"
    events = read(*(text if by_letter else [text]), **TOOLS)
    assert shown(events) == [Text("ab"), STOP] and misfits(events) == [tag] * 3


@pytest.mark.parametrize("after", ["", " b", "\nb", "<｜DSML｜ calls>"])
def test_a_closing_tag_in_the_content_is_kept_out_of_it(after: str) -> None:
    events = read(f"a </｜DSML｜ calls>{after}", **TOOLS)
    assert misfits(events) == ["</｜DSML｜ calls>"]
    text = "a " + ("" if after.startswith("<") else after)
    assert shown(events) == [Text(text), STOP]


def test_a_lone_mark_in_the_content_is_kept_out_of_it(v41_tokenizer: PromptTokenizer) -> None:
    events = read([68, DSML, 69], tokenizer=v41_tokenizer, **TOOLS)
    assert shown(events) == [Text("bc"), STOP]
    assert misfits(events) == ["｜DSML｜"]


@pytest.mark.parametrize("tag", [[DSML], [1718, DSML]])
def test_marks_in_the_reasoning_are_kept_out_of_it(
    tag: list[int], v41_tokenizer: PromptTokenizer
) -> None:
    assert v41_tokenizer.token_bytes(1718) == b"</"
    events = read([68, *tag, 69, THINK_END, 70], tokenizer=v41_tokenizer, **TOOLS, **THINK)
    assert shown(events) == [Reasoning("bc"), Text("d"), STOP]
    assert misfits(events) == ["｜DSML｜" if tag == [DSML] else "</｜DSML｜"]


@pytest.mark.parametrize("tools", [TOOLS, {}])
@pytest.mark.parametrize("json", ['{"a":', '```\n{"a":', "```\n{}\n```\nb\n"])
def test_a_second_end_of_reasoning_is_deleted_in_json_mode_too(
    json: str, tools: dict[str, bool], v41_tokenizer: PromptTokenizer
) -> None:
    ids = [*v41_tokenizer.encode_plain(json), THINK_END, *v41_tokenizer.encode_plain("1}\n")]
    events = read(ids, tokenizer=v41_tokenizer, **JSON, **tools)
    assert not any("think" in e.text for e in events if isinstance(e, Text))
    if "b" not in json:
        expected = json.removeprefix("```\n") + "1}\n"
        assert "".join(e.text for e in events if isinstance(e, Text)) == expected


@pytest.mark.parametrize("mark", [DSML, THINK_END])
def test_marks_in_names_are_kept_out_of_them(mark: int, v41_tokenizer: PromptTokenizer) -> None:
    def ids(text: str) -> list[int]:
        return v41_tokenizer.encode_plain(text)

    reply = [
        *ids("<"), DSML, *ids(' invoke name="f'), mark, *ids('g">\n<'), DSML,
        *ids(' parameter name="k'), mark, *ids(' 2" string="true">v</'), DSML,
        *ids(" parameter>\n</"), DSML, *ids(" invoke>"),
    ]  # fmt: skip
    events = read(reply, tokenizer=v41_tokenizer, starts_in_tool_calls=True, **TOOLS)
    assert shown(events)[0] == ToolStart(0, "fg")
    assert arguments(events) == '{"k 2": "v"}'
    spelling = "｜DSML｜" if mark == DSML else "</think>"
    assert [each.strip() for each in misfits(events)] == [spelling, spelling]


def test_the_words_of_a_lone_mark_are_text() -> None:
    assert joined(read("a ｜DSML｜ b", **TOOLS)) == [Text("a ｜DSML｜ b"), STOP]


def test_the_reply_may_begin_inside_the_block() -> None:
    events = read(call() + END, starts_in_tool_calls=True, **TOOLS)
    assert shown(events)[0] == ToolStart(0, "f")
    events = read("hello", starts_in_tool_calls=True, **TOOLS)
    assert joined(events)[1:] == [STOP]
    assert misfits(events) == ["hello"]


@pytest.mark.parametrize(
    ("rest", "written"),
    [
        ("", ""),
        ("<｜DSML｜ param", ""),
        ("<｜DSML｜ parameter name=", "{"),
        ('<｜DSML｜ parameter name="', '{"'),
        ('<｜DSML｜ parameter name="ci', '{"ci'),
        ('<｜DSML｜ parameter name="ci<', '{"ci<'),
        ('<｜DSML｜ parameter name="ci</', '{"ci</'),
        ('<｜DSML｜ parameter name="ci<｜DS', '{"ci<｜DS'),
        ('<｜DSML｜ parameter name="ci</｜DSML', '{"ci</｜DSML'),
        ('<｜DSML｜ parameter name="ci"x<', '{"ci\\"x<'),
        ('<｜DSML｜ parameter name="ci" str<', '{"ci\\" str<'),
        ('<｜DSML｜ parameter name="ci"', '{"ci"'),
        ('<｜DSML｜ parameter name="ci" ', '{"ci": '),
        ('<｜DSML｜ parameter name="ci" string="tr', '{"ci": '),
        ('<｜DSML｜ parameter name="ci" string="true">', '{"ci": "'),
        ('<｜DSML｜ parameter name="ci" string="true">a"<', '{"ci": "a\\"<'),
        ('<｜DSML｜ parameter name="ci" string="true">a</｜DSML｜ para', '{"ci": "a"'),
        ('<｜DSML｜ parameter name="ci" string="false">[1,</｜DS', '{"ci": [1,</｜DS'),
        (parameter("a", "1") + '<｜DSML｜ parameter name="b', '{"a": "1", "b'),
    ],
)
def test_a_call_that_is_cut_off_keeps_what_was_read(rest: str, written: str) -> None:
    events = read(BLOCK + '<｜DSML｜ invoke name="f">\n' + rest, reason="length", **TOOLS)
    assert arguments(events) == written
    assert events[-1] == Finish("length", open_tool=0)
    assert not any(isinstance(event, ToolEnd) for event in events)


@pytest.mark.parametrize("held", ["<", "</", "<｜DS", "</｜DSML"])
@pytest.mark.parametrize(
    "rest",
    ["", "x", "<｜DSML｜ inv", '<｜DSML｜ parameter name="ci" string="tr',
     '<｜DSML｜ parameter name="ci" string="no',
     '<｜DSML｜ parameter name="ci" string="true"', '<｜DSML｜ parameter name="ci" string="maybe">',
     '<｜DSML｜ parameter name="ci" string="false">[', "</｜DSML｜ x", "</｜DSML｜ invoke>\ny",
     '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="g'],
)  # fmt: skip
def test_what_is_held_when_a_call_is_cut_off_is_not_lost(rest: str, held: str) -> None:
    text = BLOCK + '<｜DSML｜ invoke name="f">\n' + rest
    events = read(text + held, reason="length", **TOOLS)
    told = "".join(misfits(events)) + "".join(arguments(events, index) for index in (0, 1))
    assert held in told.replace('\\"', '"')


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_a_backends_reason_wins_over_tool_calls(reason: str) -> None:
    assert read(BLOCK + call() + END, reason=reason, **TOOLS)[-1] == Finish(reason)


# ---- JSON mode ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('{"a":1}', '{"a":1}'),
        ('```json\n{"a":1}\n```', '{"a":1}'),
        ('```\n{"a":1}\n```', '{"a":1}'),
        ('Here:\n```json\n{"a":1}\n```\nDone', ' {"a":1} '),
        ('Sure {"a":1} ok', ' {"a":1} ok'),
        ('文字{"a":"```"}尾', ' {"a":"```"}尾'),
        ('```python\n{"a":1}\n```', ' {"a":1}'),
        ("\n\n[1]", "[1]"),
        ("5", " "),
        ("\n", ""),
        ("```\n[]", "[]"),
    ],
)
def test_text_around_the_json_value_becomes_a_blank(text: str, content: str) -> None:
    assert "".join(e.text for e in read(text, **JSON) if isinstance(e, Text)) == content


def test_replaced_text_is_told() -> None:
    events = read('Sure:\n```json\n{"a":1}\n```\nDone', **JSON)
    assert misfits(events) == ["Sure:\n", "\nDone"]


def test_each_piece_of_replaced_text_gives_a_blank() -> None:
    assert joined(read("x", "y {", '"a":1', "}", **JSON))[0] == Text("  ")
    texts = [e.text for e in read("x", "y {", '"a":1', "}", **JSON) if isinstance(e, Text)]
    assert "".join(texts) == '  {"a":1}'


def test_a_tool_block_is_read_after_json_too() -> None:
    for text in ('{"a":1}\n', '```\n{"a":1}\n```\n', "prose\n"):
        events = read(text + BLOCK + call() + END, **JSON, **TOOLS)
        assert ToolStart(0, "f") in events
        assert "DSML" not in "".join(e.text for e in events if isinstance(e, Text))


def test_stop_texts_count_inside_the_json_value_only() -> None:
    assert (
        "".join(
            e.text for e in read('b {"b":1}', **JSON, stop_sequences=("b",)) if isinstance(e, Text)
        )
        == ' {"'
    )


def test_json_may_follow_reasoning() -> None:
    events = read('r {"x":1}</think>\n{"a":1}', **JSON, **THINK)
    assert shown(events) == [Reasoning('r {"x":1}'), Text('{"a":1}'), STOP]


# ---- log-probabilities --------------------------------------------------------------------------


def logprobs_of(events: Iterable[Event]) -> list[tuple[str, list[float]]]:
    return [
        (event.text, [each.logprob for each in event.logprobs])
        for event in events
        if isinstance(event, (Reasoning, Text))
    ]


def feed_one_by_one(tokenizer: PromptTokenizer, ids: list[int], **parsing: Any) -> list[Event]:
    machine = ReplyMachine(ParsingOptions(**parsing), V41, tokenizer)
    for place, token_id in enumerate(ids, start=1):
        if not machine.finished:
            machine.feed(token_id, TokenLogprob(token_id, -float(place)))
    return machine.close()


def test_logprobs_go_with_the_text_of_their_tokens(v41_tokenizer: PromptTokenizer) -> None:
    # `b`, the end of reasoning, two newlines, `c`, two tokens of one character
    ids = [68, THINK_END, 271, 69, 28927, 225]
    events = feed_one_by_one(v41_tokenizer, ids, **THINK)
    assert logprobs_of(events) == [("b", [-1.0]), ("c", [-4.0]), ("😀", [-5.0, -6.0])]


def test_logprobs_wait_with_held_text_and_are_dropped_with_dropped_text(
    v41_tokenizer: PromptTokenizer,
) -> None:
    events = feed_one_by_one(v41_tokenizer, [68, 271, 30, 69], **TOOLS)
    assert [each for _, some in logprobs_of(events) for each in some] == [-1, -2, -3, -4]
    events = feed_one_by_one(v41_tokenizer, [68, 271, 30, DSML, 10699, 32], **TOOLS)
    assert logprobs_of(events) == [("b", [-1.0])]
    events = feed_one_by_one(v41_tokenizer, [68, 68, 69], stop_sequences=("bc",))
    assert logprobs_of(events) == [("b", [-1.0])]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_a_token_that_ends_a_tag_and_begins_the_text_has_its_logprob(
    size: int, v41_tokenizer: PromptTokenizer
) -> None:
    ids = [*v41_tokenizer.encode_plain("hi </"), DSML, *v41_tokenizer.encode_plain(" calls>\nok")]
    machine = ReplyMachine(ParsingOptions(**TOOLS), V41, v41_tokenizer)
    for at in range(0, len(ids), size):
        group = ids[at : at + size]
        machine.feed_all(group, [TokenLogprob(each, float(at + n)) for n, each in enumerate(group)])
    shown_ids = [ids[int(each)] for _, some in logprobs_of(machine.close()) for each in some]
    texts = [v41_tokenizer.token_bytes(each).decode() for each in shown_ids]
    assert "".join(texts) == "hi </>\nok"


def test_an_end_token_that_is_text_has_its_logprob(v41_tokenizer: PromptTokenizer) -> None:
    events = feed_one_by_one(v41_tokenizer, [68, 1, 69])
    assert [each for _, some in logprobs_of(events) for each in some] == [-1, -2, -3]


def test_blanks_for_replaced_text_have_no_logprobs(v41_tokenizer: PromptTokenizer) -> None:
    ids = v41_tokenizer.encode_plain('Sure: {"a":1}')
    events = feed_one_by_one(v41_tokenizer, ids, **JSON)
    assert all(some == [] for text, some in logprobs_of(events) if text.isspace())
    places = [int(-each) - 1 for _, some in logprobs_of(events) for each in some]
    texts = [v41_tokenizer.token_bytes(ids[place]).decode() for place in places]
    assert "".join(texts).strip() == '{"a":1}'


def test_there_must_be_one_logprob_for_each_id(v41_tokenizer: PromptTokenizer) -> None:
    machine = ReplyMachine(ParsingOptions(), V41, v41_tokenizer)
    with pytest.raises(ReplyError, match="1 log probabilities for 2 token IDs"):
        machine.feed_all([68, 69], [TokenLogprob(68, -1.0)])


# ---- the machine --------------------------------------------------------------------------------


def test_events_come_one_by_one_or_all_at_once() -> None:
    machine = ReplyMachine(ParsingOptions(), V41)
    assert machine.next_event() is NEED_MORE
    machine.feed_text("a")
    machine.feed_text("b")
    assert machine.next_event() == Text("a")
    assert machine.drain() == [Text("b")]
    assert machine.next_event() is NEED_MORE
    assert machine.drain() == []


def test_nothing_can_be_done_after_close() -> None:
    machine = ReplyMachine(ParsingOptions(), V41)
    assert machine.close() == [STOP]
    assert machine.finished
    with pytest.raises(ReplyError, match="finished"):
        machine.close()
    with pytest.raises(ReplyError, match="finished"):
        machine.feed_text("a")


def test_an_unknown_finish_reason_is_an_error() -> None:
    with pytest.raises(ReplyError, match=r"'weird'.*'content_filter'"):
        ReplyMachine(ParsingOptions(), V41).close("weird")


def test_the_table_has_a_row_for_every_state_and_every_way_leads_to_one() -> None:
    assert set(ROWS) == set(State)
    for row in ROWS.values():
        assert getattr(Actions, row.text.__name__) is row.text
        for _, then in row.on.values():
            targets = [then] if isinstance(then, State) else then.values()
            assert set(targets) <= set(State)


def test_every_state_can_be_reached() -> None:
    reached = {State.REASONING_START, State.REASONING, State.CONTENT_START, State.JSON_START,
               State.BLOCK}  # fmt: skip
    frontier = list(reached)
    while frontier:
        row = ROWS[frontier.pop()]
        ways = [] if row.behind_newlines is None else [row.behind_newlines]
        for _, then in row.on.values():
            ways += [then] if isinstance(then, State) else then.values()
        frontier += set(ways) - reached
        reached |= set(ways)
    assert reached == set(State)


@pytest.mark.parametrize(
    ("piece", "parsing"),
    [
        ("<", TOOLS),
        ("\n", TOOLS),
        ("</", THINK),
        ("</think>", {}),
        ("a", {"stop_sequences": ("a" * 500 + "b", "a" * 499 + "c")}),
        ("`", JSON),
        ('"', {**TOOLS, "starts_in_tool_calls": True}),
        ("<｜DSML｜ ", {**TOOLS, "starts_in_tool_calls": True}),
        ("</｜DSML｜ ", {**TOOLS, "starts_in_tool_calls": True}),
        ("</｜DSML｜ ", TOOLS),
        ("</｜DSML｜ x", TOOLS),
        ("</｜DSML｜ cal", {**TOOLS, **JSON}),
        ("</｜DSML｜ calls>", {**TOOLS, **THINK}),
    ],
)
def test_work_is_linear_in_the_length(piece: str, parsing: dict[str, Any]) -> None:
    def calls(count: int, whole: bool) -> int:
        """Count the calls of Python and C functions: the same on every machine."""
        machine = ReplyMachine(ParsingOptions(**parsing), V41)
        made = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            if whole:
                machine.feed_text(piece * count)
            else:
                for _ in range(count):
                    machine.feed_text(piece)
                    machine.drain()
            machine.close()
        finally:
            sys.setprofile(None)
        return made

    for whole in (True, False):
        assert calls(40_000, whole) < 7 * calls(8_000, whole) + 1000
