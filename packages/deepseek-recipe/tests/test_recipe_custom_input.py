"""The one text of a custom tool's call, out of the pieces of its JSON arguments."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.protocols.responses.custom_input import CustomInput


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{}", "{}"),
        ('{"input": ""}', ""),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"q": "x", "input": "y"}', '{"q": "x", "input": "y"}'),
        ('{"input": "y", "q": "x"}', "y"),
        ('{"input": "\\ud83d\\ude42\\u00e9\\/\\\\"}', "🙂é/\\"),
    ],
)
def test_custom_input_of_every_shape(arguments: str, text: str) -> None:
    for cut in range(len(arguments) + 1):
        custom = CustomInput()
        assert custom.feed(arguments[:cut]) + custom.feed(arguments[cut:]) == text
    custom = CustomInput()
    assert "".join(map(custom.feed, arguments)) == text


@given(st.text(), st.data())
def test_custom_input_is_the_value_whatever_the_cuts(text: str, data: st.DataObject) -> None:
    arguments = '{"input": ' + json.dumps(text, ensure_ascii=data.draw(st.booleans())) + "}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)), max_size=8)))
    custom = CustomInput()
    pieces = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    assert "".join(map(custom.feed, pieces)) == text


@pytest.mark.parametrize(
    ("value", "text", "left_out"),
    [
        ('abc\\udc00', "abc\ufffd", ""),
        ('abc\\ud800', "abc", "\\ud800"),
        ('abc\\ud800x', "abc\ufffdx", ""),
        ('abc\\ud800\\n', "abc\ufffd\n", ""),
        ('abc\\ud800\\ud83d\\ude42', "abc\ufffd🙂", ""),
        ('abc\\ud800\\u00e9', "abc\ufffdé", ""),
        ('abc\\ud800\\udc', "abc", "\\ud800\\udc"),
        ('abc\\ud83d\\ude42\\udc00d', "abc🙂\ufffdd", ""),
        ('abc\\ud800"', "abc\ufffd", ""),
        ("abc\\q", "abc", "\\q"),
    ],
)  # fmt: skip
def test_a_cut_off_input_has_no_half_characters(value: str, text: str, left_out: str) -> None:
    custom = CustomInput()
    shown = custom.feed('{"input": "') + custom.feed(value)
    shown.encode()
    assert shown == text and custom.left_out() == left_out


@given(st.text('\\udDcC80xX"e ', max_size=30), st.integers(0, 30))
def test_any_text_for_a_value_gives_text(value: str, cut: int) -> None:
    arguments = '{"input": "' + value
    custom = CustomInput()
    shown = custom.feed(arguments)
    shown.encode()
    again = CustomInput()
    assert again.feed(arguments[:cut]) + again.feed(arguments[cut:]) == shown


def test_what_follows_the_input_is_left_out_of_the_text_and_told() -> None:
    custom = CustomInput()
    assert custom.feed('{"input": "a"') + custom.feed(', "q": 1') + custom.feed("}") == "a"
    assert custom.left_out() == ', "q": 1}'
    custom = CustomInput()
    assert custom.feed('{"input": "a"') + custom.feed("}") == "a"
    assert custom.left_out() == ""
