"""JSON text: which numbers and texts are accepted, and how values look in prompts."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.json_text import dump_compact, dump_prompt, load

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    # A subnormal's shortest digits are the same everywhere, so all finite floats are welcome.
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(left: object, right: object) -> bool:
    # `==` alone takes 1 for 1.0 and True, and -0.0 for 0.0
    return repr(left) == repr(right)


@given(JSON_VALUES)
def test_dumped_values_load_as_they_were(value: object) -> None:
    assert same(load(dump_prompt(value, "python")), value)
    assert same(load(dump_prompt(value, "shortest")), value)
    assert same(load(dump_compact(value)), value)


@given(JSON_VALUES)
def test_python_style_is_the_standard_library_s(value: object) -> None:
    assert dump_prompt(value, "python") == json.dumps(value, ensure_ascii=False)


@given(st.text())
def test_only_quotes_backslashes_and_controls_are_escaped(text: str) -> None:
    plain = [char for char in text if char not in '"\\' and char >= " "]
    dumped = dump_prompt(text, "shortest")
    assert [char for char in load(dumped) if char not in '"\\' and char >= " "] == plain  # type: ignore[union-attr]
    assert all(char in dumped for char in plain)
    assert dump_prompt("\b\f\n\r\t\x00\x1f\x7f\u2028é", "python") == (
        '"\\b\\f\\n\\r\\t\\u0000\\u001f\x7f\u2028é"'
    )


@pytest.mark.parametrize(
    ("value", "shortest", "python"),
    [
        (1.0, "1.0", "1.0"),
        (-0.0, "-0.0", "-0.0"),
        (0.0001, "0.0001", "0.0001"),
        (1e-5, "0.00001", "1e-05"),
        (-1.25e-5, "-0.0000125", "-1.25e-05"),
        (9.999e-5, "0.00009999", "9.999e-05"),
        (1e-6, "1e-6", "1e-06"),
        (1e-7, "1e-7", "1e-07"),
        (1.23e-8, "1.23e-8", "1.23e-08"),
        (1e-10, "1e-10", "1e-10"),
        (5e-324, "5e-324", "5e-324"),
        (1e15, "1000000000000000.0", "1000000000000000.0"),
        (1e16, "1e+16", "1e+16"),
        (1.5e300, "1.5e+300", "1.5e+300"),
        (2**64 - 1, "18446744073709551615", "18446744073709551615"),
        (-(2**63), "-9223372036854775808", "-9223372036854775808"),
    ],
)
def test_numbers_are_written_as_each_checkpoint_learned_them(
    value: float, shortest: str, python: str
) -> None:
    assert dump_prompt([value], "shortest") == f"[{shortest}]"
    assert dump_prompt({"k": value}, "python") == f'{{"k": {python}}}'
    assert dump_compact({"k": [value, 1e-7]}) == f'{{"k":[{shortest},1e-7]}}'


def test_a_text_that_looks_like_a_small_float_stays() -> None:
    assert dump_prompt({"a": "1e-05", "b": [1e-05, "e-0"]}, "shortest") == (
        '{"a": "1e-05", "b": [0.00001, "e-0"]}'
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-0", -0.0),
        ("[0, -0, -0.0, -0e1]", [0, -0.0, -0.0, -0.0]),
        ("18446744073709551615", 2**64 - 1),
        ("18446744073709551616", 2.0**64),
        ("-9223372036854775808", -(2**63)),
        ("-9223372036854775809", -(2.0**63)),
        ("9" * 308, 1e308),
        ("1e-400", 0.0),
        (' {"k": 1, "z": "-0 1e999", "k": 20000000000000000000}\n', {"k": 2e19, "z": "-0 1e999"}),
    ],
)
def test_numbers_are_read_exactly_or_as_doubles(text: str, value: object) -> None:
    assert same(load(text), value)
    assert same(load(text.encode()), value)


@pytest.mark.parametrize("text", ["1e999", "-1E+400", "9" * 309, "1" + "0" * 400, "7" * 5000])
def test_a_number_beyond_doubles_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number out of range"):
        load(f'{{"k": [{text}]}}')


NO_JSON = (
    *("", " ", "{", "-", "01", "1.", "+1", "NaN", "Infinity", "//c\n{}", "{'a':1}", '{"a":1,}'),
    *('{"a":1}{"b":2}', '{"a":1}\x00', '"\t"', '"\\ud800"', '"\\udc00x"', "\ufeff{}", "\xa0{}"),
)


@pytest.mark.parametrize("text", NO_JSON)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        load(text)


@pytest.mark.parametrize("data", [b'"\xff"', b'"\xed\xa0\x80"', b"\xff\xfe1\x00"])
def test_what_is_no_utf8_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        load(data)


def test_of_equal_keys_the_last_value_stands_at_the_first_place() -> None:
    assert list(load('{"k": 1, "z": 2, "k": 3}').items()) == [("k", 3), ("z", 2)]  # type: ignore[attr-defined]
    assert list(load('{"k": 1, "z": -0, "k": 3}').items()) == [("k", 3), ("z", -0.0)]  # type: ignore[attr-defined]


def test_depth_is_bounded_on_both_ways() -> None:
    deepest = load("[" * 200 + "1e-7" + "]" * 200)
    assert dump_prompt(deepest, "shortest") == "[" * 200 + "1e-7" + "]" * 200
    for number in ("1", "-0"):
        with pytest.raises(ValueError, match="recursion"):
            load("[" * 100_000 + number + "]" * 100_000)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, {1, 2}, [b"x"]])
def test_what_json_has_no_form_for_is_not_written(value: object) -> None:
    for style in ("python", "shortest"):
        with pytest.raises(ValueError):
            dump_prompt(value, style)
    with pytest.raises(ValueError):
        dump_compact([value, 1e-7])
