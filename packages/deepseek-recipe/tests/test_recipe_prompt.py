"""Conversation to prompt: the golden prompts, the template's rules one by one, and injection."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.conversation import (
    Conversation,
    ImageSource,
    Message,
    ResponseFormat,
    Tool,
    ToolCall,
)
from deepseek_recipe.encoding.profile import PROFILES, TOOLS_TAIL, V4, V41, Profile
from deepseek_recipe.encoding.prompt import Prompt, Special, render
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_text import dump_compact
from deepseek_recipe.options import MODELS, ConversionOptions
from deepseek_recipe.protocols.dispatch import convert, parse

# Rows whose prompt is the peer's mistake: a reminder is lost; `any` does not force a call.
OURS_DIFFERS = {"chat/reminder-consecutive/v41", "messages/choice-any/v4"}

PROFILE_LIST = list(PROFILES.values())
both = pytest.mark.parametrize("profile", PROFILE_LIST, ids=lambda profile: profile.name)
SHORT = {
    "<｜begin▁of▁sentence｜>": "[bos]",
    "<｜end▁of▁sentence｜>": "[eos]",
    "<｜User｜>": "[user]",
    "<｜Assistant｜>": "[asst]",
    "<｜System｜>": "[sys]",
    "<｜latest_reminder｜>": "[rem]",
    "<｜image｜>": "[img]",
    "<think>": "[think]",
    "</think>": "[/think]",
    "｜DSML｜": "[dsml]",
}
TOOL = Tool("f", None, {"type": "object"})


def expanded(value: Any) -> Any:
    """Replace {"$repeat": [s, n]} by n times s."""
    if isinstance(value, dict):
        if set(value) == {"$repeat"}:
            return value["$repeat"][0] * value["$repeat"][1]
        return {key: expanded(item) for key, item in value.items()}
    return [expanded(item) for item in value] if isinstance(value, list) else value


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def shortened(prompt: Prompt) -> str:
    return "".join(
        piece if isinstance(piece, str) else SHORT.get(piece.spelling, piece.spelling)
        for piece in prompt.pieces
    )


def shown(profile: Profile, *messages: Message, thinking: bool = False, **fields: Any) -> str:
    """Return the prompt between its first token and the opening of the reply."""
    effort = fields.pop("reasoning_effort", "low" if thinking else None)
    text = shortened(render(Conversation(messages, thinking, effort, **fields), profile))
    opening = "[asst][think]" if thinking else "[asst][/think]"
    assert text.startswith("[bos]")
    return text.removeprefix("[bos]").removesuffix(opening)


def user(text: str) -> Message:
    return Message("user", (text,))


def system(text: str, *tools: Tool) -> Message:
    return Message("system", (text,) if text else (), tools=tools)


def assistant(text: str, *calls: ToolCall, **fields: Any) -> Message:
    return Message("assistant", (text,) if text else (), tool_calls=calls, **fields)


def result(call_id: str, text: str) -> Message:
    return Message("tool", (text,), tool_call_id=call_id)


def test_golden_prompts_ids_and_special_ranges(
    golden_rows: Callable[[str], list[dict[str, Any]]],
    v4_tokenizer: PromptTokenizer,
    v41_tokenizer: PromptTokenizer,
) -> None:
    different = set()
    for row in golden_rows("requests"):
        if row["error"]:
            continue
        options = dict(row.get("options") or {})
        models = {**MODELS, **options.pop("aliases", {})}
        converted = convert(
            parse(row["protocol"], expanded(row["request"])),
            ConversionOptions(models=models, unsupported="ignore", **options),
        )
        prompt = render(converted.conversation, converted.profile)
        ids = (v4_tokenizer if row["version"] == "v4" else v41_tokenizer).encode(prompt)
        ours: dict[str, object] = {
            "prompt": prompt.text,
            "prompt_sha256": sha256(prompt.text),
            "prompt_chars": len(prompt.text),
            "token_ids": ids,
            "token_ids_sha256": sha256(",".join(map(str, ids))),
            "n_tokens": len(ids),
            "special_tokens": [spelling for _, _, spelling in prompt.special_ranges],
        }
        if any(row[key] != value for key, value in ours.items() if key in row):
            different.add(row["id"])
        assert len(prompt.images) == len(row.get("images") or ())
    assert different == OURS_DIFFERS


# ---- systems ------------------------------------------------------------------------------------


def test_v4_collects_systems_in_front_and_v41_leaves_them() -> None:
    messages = (user("a"), system("s"), system(""), user("b"), system("t"))
    assert shown(V4, *messages) == "s\n\nt[user]a\n\nb"
    assert shown(V41, *messages) == "[user]a[sys]s[sys][user]b[sys]t"


def test_first_system_of_v41_hosts_effort_tools_and_format() -> None:
    fields: dict[str, Any] = {
        "tools": (TOOL,),
        "response_format": ResponseFormat("json_object"),
        "thinking": True,
        "reasoning_effort": "max",
    }
    for messages in ((system("s"), user("a")), (user("a"),), ()):
        text = shown(V41, *messages, **fields)
        assert text.startswith("[sys]Reasoning Effort: 100 (range")
        places = [
            text.index(part) for part in ("\n\n## Tools", TOOLS_TAIL, '{"type": "json_object"}')
        ]
        assert places == sorted(places)
        assert text.count("[sys]") == 1
        assert (")\n\ns\n\n## Tools" in text) == (len(messages) == 2)


def test_effort_goes_before_everything_in_v4() -> None:
    prompt = shown(V4, system("s"), user("a"), thinking=True, reasoning_effort="high")
    assert prompt == V4.effort_text["high"] + "s[user]a"
    assert shown(V4, user("a"), thinking=True) == "[user]a"


@both
def test_conversation_of_nothing_is_an_opening(profile: Profile) -> None:
    assert shown(profile) == ""
    assert shown(profile, thinking=True) == ""


@both
def test_response_formats(profile: Profile) -> None:
    schema = {"type": "object", "x": [1e-7, True]}
    head = "" if profile is V4 else "[sys]"
    number = "1e-7" if profile is V4 else "1e-07"
    asked = ResponseFormat("json_schema", schema)
    assert shown(profile, user("a"), response_format=asked) == (
        f'{head}{profile.json_schema_head}{{"type": "object", "x": [{number}, true]}}[user]a'
    )
    asked = ResponseFormat("json_object")
    assert shown(profile, user("a"), response_format=asked) == (
        f"{head}{profile.json_object_text}[user]a"
    )
    asked = ResponseFormat("regex", regex="a+")
    assert shown(profile, user("a"), response_format=asked) == "[user]a"


def test_late_tools_are_shown_where_they_come_and_only_in_v41() -> None:
    late = Tool("g", "d", {"a": 1}, deferred=True)
    updated = (
        '\n\n### Updated Tool Schemas\n\n{"name": "g", "description": "d", "parameters": {"a": 1}}'
    )
    assert shown(V41, user("a"), system("", late)) == f"[user]a[sys]{updated}"
    assert shown(V41, system("s", late), user("a")) == f"[sys]s{updated}[user]a"
    assert shown(V4, user("a"), system("", late)) == "[user]a"


def test_head_without_a_tool_stands_when_all_tools_come_later() -> None:
    text = shown(V41, user("a"), tools=(replace(TOOL, deferred=True),))
    assert text.endswith(f"### Available Tool Schemas\n\n{TOOLS_TAIL}[user]a")


# ---- users, results, reminders ------------------------------------------------------------------


def test_neighbouring_user_texts_merge() -> None:
    messages = (user(""), user("a"), user(""), user("b"))
    assert shown(V4, *messages) == "[user]a\n\nb"
    assert shown(V41, *messages) == "[user]\n\na\n\n\n\nb"
    assert shown(V4, user(""), user("")) == "[user]"


CALLS = (ToolCall("c1", "f", "{}"), ToolCall("c2", "g", "{}"))


def after_calls(profile: Profile, *messages: Message) -> str:
    return shown(profile, assistant("", *CALLS), *messages).rpartition("[eos]")[2]


@both
def test_results_stand_in_the_order_of_the_calls(profile: Profile) -> None:
    assert after_calls(profile, result("c2", "2"), result("c1", "1"), user("u")) == (
        "[user]<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>\n\nu"
    )


def test_empty_user_text_after_results() -> None:
    one = "[user]<tool_result>1</tool_result>"
    assert after_calls(V4, result("c1", "1"), user("")) == f"{one}\n\n"
    assert after_calls(V4, result("c1", "1"), user(""), user("x")) == f"{one}\n\nx"
    assert after_calls(V41, result("c1", "1"), user(""), user("x")) == f"{one}\n\n\n\nx"


def test_user_text_before_results_merges_in_v41_only() -> None:
    messages = (user("u"), result("c2", "2"), user("v"), result("c1", "1"))
    one, two = "<tool_result>1</tool_result>", "<tool_result>2</tool_result>"
    assert after_calls(V41, *messages) == f"[user]u\n\n{one}\n\nv\n\n{two}"
    assert after_calls(V4, *messages) == f"[user]u[user]{one}\n\nv[user]{two}"


@both
def test_every_reminder_is_rendered(profile: Profile) -> None:
    first, second = Message("latest_reminder", ("x",)), Message("latest_reminder", ("y",))
    assert shown(profile, user("a"), first, second, user("b")) == "[user]a[rem]x[rem]y[user]b"


@both
def test_images_are_listed_in_the_order_of_their_placeholders(profile: Profile) -> None:
    images = [ImageSource("url", f"http://x/{n}", "high", "") for n in range(3)]
    conversation = Conversation(
        (
            assistant("", *CALLS),
            Message("tool", (images[1], "<｜image｜>"), tool_call_id="c2"),
            Message("tool", ("a", images[0]), tool_call_id="c1"),
            Message("user", (images[2],)),
        ),
        thinking=False,
    )
    prompt = render(conversation, profile)
    placeholders = [piece for piece in prompt.pieces if piece == Special("<｜image｜>")]
    if profile.vision:
        assert (len(placeholders), prompt.images) == (3, tuple(images))
        assert "a[img]</tool_result>\n\n<tool_result>[img]<｜image｜></tool" in shortened(prompt)
    else:
        assert (placeholders, prompt.images) == ([], ())
        assert prompt.text.count("[Unsupported Image]") == 3


# ---- assistants ---------------------------------------------------------------------------------


@both
def test_reasoning_stays_only_where_there_are_tools(profile: Profile) -> None:
    said = assistant("b", reasoning="r")
    kept = "[asst][think]r[/think]b[eos]"
    dropped = "[asst][/think]b[eos]"
    assert kept in shown(profile, user("a"), said, user("c"), thinking=True, tools=(TOOL,))
    assert dropped in shown(profile, user("a"), said, user("c"), thinking=True)
    assert dropped in shown(profile, user("a"), said, user("c"), tools=(TOOL,))
    silent = assistant("b")
    text = shown(profile, silent, thinking=True, tools=(TOOL,))
    assert "[asst][think][/think]b[eos]" in text


@both
def test_reply_continues_a_prefix(profile: Profile) -> None:
    def end(thinking: bool, text: str, reasoning: str | None) -> str:
        prefix = assistant(text, reasoning=reasoning, prefix=True)
        effort = "low" if thinking else None
        prompt = render(Conversation((user("a"), prefix), thinking, effort), profile)
        return shortened(prompt).rpartition("[user]a")[2]

    assert end(True, "c", "r") == "[asst][think]r[/think]c"
    assert end(True, "c", "") == "[asst][think][/think]c"
    assert end(True, "", "r") == "[asst][think]r"
    assert end(True, "", None) == "[asst][think]"
    assert end(False, "c", "r") == "[asst][/think]c"
    assert end(False, "", None) == "[asst][/think]"


@both
def test_required_call_is_opened_for_the_reply(profile: Profile) -> None:
    word = profile.block_word
    conversation = Conversation((user("a"),), False, None, (TOOL,), "required")
    assert shortened(render(conversation, profile)).endswith(f"[asst][/think]\n\n<[dsml]{word}>\n")
    assert render(replace(conversation, tools=()), profile).text.endswith("</think>")


def test_calls_in_the_markup_of_each_checkpoint() -> None:
    calls = (ToolCall("1", "f", '{"s": "a\\n", "n": [1e-7, {"k": "é"}]}'), ToolCall("2", "g", "{}"))
    assert shown(V4, assistant("", *calls)) == (
        "[asst][/think]\n\n<[dsml]tool_calls>\n"
        '<[dsml]invoke name="f">\n'
        '<[dsml]parameter name="s" string="true">a\n</[dsml]parameter>\n'
        '<[dsml]parameter name="n" string="false">[1e-7, {"k": "é"}]</[dsml]parameter>\n'
        '</[dsml]invoke>\n<[dsml]invoke name="g">\n</[dsml]invoke>\n</[dsml]tool_calls>[eos]'
    )
    assert shown(V41, assistant("x", *calls[1:])) == (
        '[asst][/think]x\n\n<[dsml] calls>\n<[dsml] invoke name="g">\n\n</[dsml] invoke>\n'
        "</[dsml] calls>[eos]"
    )


NO_OBJECT = ("", " ", "no", "[1]", '"x"', "null", '{"a": 1} x', '{"a": 1e999}', '{"a": "\\ud800"}')


@pytest.mark.parametrize("arguments", [*NO_OBJECT, "[" * 10_000, '{"a":' * 10_000])
def test_arguments_that_are_no_object_stand_raw(arguments: str) -> None:
    text = shown(V4, assistant("", ToolCall("1", "f", arguments)))
    assert f'<[dsml]parameter name="arguments" string="true">{arguments}</[dsml]parameter>' in text


@both
def test_grounding_is_tokens_in_what_an_assistant_said_and_nowhere_else(profile: Profile) -> None:
    spelled = "a<｜ref｜>b<｜/ref｜><｜box｜><｜box<｜/polygon｜>"
    expected = [
        Special(name, optional=True)
        for name in ("<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/polygon｜>")
    ]

    def found(*messages: Message, **fields: Any) -> list[Special]:
        pieces = render(Conversation(messages, **fields), profile).pieces
        grounding = profile.tokens.grounding
        return [p for p in pieces if isinstance(p, Special) and p.spelling in grounding]

    assert found(assistant(spelled), thinking=False) == expected
    thought = assistant(spelled, reasoning=spelled)
    assert found(thought, thinking=True, reasoning_effort="low", tools=(TOOL,)) == expected * 2
    call = ToolCall("c1", spelled, f'{{"{spelled}": "{spelled}"}}')
    others = (user(spelled), assistant("", call), result("c1", spelled), system(spelled))
    assert found(*others, Message("latest_reminder", (spelled,)), thinking=False) == []


# ---- injection, size ----------------------------------------------------------------------------

_MARKS = st.sampled_from(
    [
        *V41.tokens.spellings,
        *(
            "<｜DSML｜tool_calls>",
            "</｜DSML｜ calls>",
            "<|User|>",
            "<｜place▁holder▁no▁0｜>",
            "\n\n",
        ),
    ]
)
HOSTILE = st.lists(_MARKS | st.text(max_size=3), max_size=4).map("".join)


def hostile_conversation(text: str, thinking: bool) -> Conversation:
    raw = ToolCall("c1", text, f"{text}]")
    parsed = ToolCall("c2", "f", dump_compact({text: text, f"{text}2": [text]}))
    return Conversation(
        (
            system(text, Tool(text, text, {text: text}, deferred=True)),
            user(text),
            assistant(text, raw, parsed, reasoning=text),
            result("c2", text),
            result("c1", text),
            Message("latest_reminder", (text,)),
            user(text),
        ),
        thinking,
        "high" if thinking else None,
        tools=(Tool(text, text, {text: [text]}),),
        response_format=ResponseFormat("json_schema", {text: text}),
    )


@given(HOSTILE, st.booleans(), st.sampled_from(PROFILE_LIST))
def test_no_text_becomes_a_special_token(text: str, thinking: bool, profile: Profile) -> None:
    tame = render(hostile_conversation("x", thinking), profile)
    hostile = render(hostile_conversation(text, thinking), profile)
    assert [s for _, _, s in hostile.special_ranges] == [s for _, _, s in tame.special_ranges]


@given(HOSTILE, st.booleans(), st.sampled_from(PROFILE_LIST))
def test_pieces_are_whole_and_ranges_say_where_tokens_stand(
    text: str, thinking: bool, profile: Profile
) -> None:
    prompt = render(hostile_conversation(text, thinking), profile)
    texts = [isinstance(piece, str) for piece in prompt.pieces]
    assert not any(left and right for left, right in pairwise(texts))
    assert all(prompt.pieces)
    ranges = prompt.special_ranges
    assert all(prompt.text[start:end] == spelling for start, end, spelling in ranges)
    assert [spelling for _, _, spelling in ranges] == [
        piece.spelling for piece in prompt.pieces if isinstance(piece, Special)
    ]


@both
def test_hundred_thousand_messages(profile: Profile) -> None:
    one = (user("a"), assistant("", CALLS[0]), result("c1", "r"), system("s"))
    text = shown(profile, *one * 25_000)
    assert text.count("<tool_result>r</tool_result>") == 25_000


@both
def test_deep_schemas_render(profile: Profile) -> None:
    schema: object = 1e-7
    for _ in range(200):
        schema = [schema]
    tool = Tool("f", None, {"x": schema})
    call = ToolCall("c", "f", '{"x": ' + "[" * 199 + "1e-7" + "]" * 199 + "}")
    text = shown(profile, assistant("", call), tools=(tool,))
    number = "1e-7" if profile is V4 else "1e-07"
    assert "[" * 200 + number + "]" * 200 in text
    assert f'string="false">{"[" * 199}{number}' in text


def test_another_spelling_is_a_change_of_the_profile() -> None:
    tokens = replace(V4.tokens, user="<U>", dsml="@@", grounding=())
    profile = replace(V4, tokens=tokens)
    call = ToolCall("1", "f", "{}")
    text = render(Conversation((user("a"), assistant("<｜ref｜>", call)), False), profile).text
    assert "<U>a<｜Assistant｜></think><｜ref｜>\n\n<@@tool_calls>\n<@@invoke" in text


def test_tools_that_come_in_again_and_again_cannot_blow_up_a_prompt() -> None:
    tool = Tool("f", "d" * 100_000, {"type": "object"}, deferred=True)

    def conversation(times: int) -> Conversation:
        late = Message("system", tools=(tool,))
        return Conversation((Message("user", ("x",)), *[late] * times), thinking=False)

    assert len(render(conversation(40), V41).text) > 4_000_000
    with pytest.raises(ConversionError, match="Bring each of them in once"):
        render(conversation(1000), V41)
    assert len(render(conversation(1000), V4).text) < 1000
