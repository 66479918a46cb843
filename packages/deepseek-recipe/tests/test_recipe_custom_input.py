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
