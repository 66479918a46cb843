"""Rules that the three protocols share: thinking, ranges, images."""

from __future__ import annotations

import base64
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.conversation import ImageSource
from deepseek_recipe.encoding.profile import V4, V41
from deepseek_recipe.errors import BodyError, ConversionError
from deepseek_recipe.protocols import limits
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.chat.models import ChatRequest
from deepseek_recipe.protocols.images import check_base64, image_piece
from deepseek_recipe.protocols.thinking import EFFORTS, resolve_thinking

PNG = "data:image/png;base64,"


def refusal(check: object, *arguments: object, **named: object) -> str:
    assert callable(check)
    with pytest.raises(ConversionError) as caught:
        check(*arguments, **named)
    return caught.value.message


# ---- thinking -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "effort", "default", "expected"),
    [
        (None, None, True, (True, "high")),
        (None, None, False, (False, None)),
        (None, "none", True, (False, None)),
        (None, "minimal", False, (True, "low")),
        (None, "medium", False, (True, "high")),
        (None, "xhigh", True, (True, "xhigh")),
        (None, "ultra", True, (True, "max")),
        ("disabled", "max", True, (False, None)),
        ("enabled", "none", False, (True, "high")),
        ("enabled", "low", False, (True, "low")),
        ("adaptive", None, False, (True, "high")),
    ],
)
def test_kind_comes_before_effort_and_effort_before_default(
    kind: str | None, effort: str | None, default: bool, expected: tuple[bool, str | None]
) -> None:
    assert resolve_thinking(kind, effort, default) == expected


@given(
    st.sampled_from([None, "enabled", "adaptive", "disabled"]),
    st.sampled_from([None, *EFFORTS]),
    st.booleans(),
)
def test_effort_is_missing_exactly_without_thinking(
    kind: str | None, effort: str | None, default: bool
) -> None:
    thinking, resolved = resolve_thinking(kind, effort, default)
    assert (resolved is None) is not thinking


# ---- ranges -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "inside", "outside"),
    [
        (limits.check_temperature, (None, 0, 2, 2.00000001), (-0.1, 2.01, 1e300)),
        (limits.check_top_p, (None, 1, 1e-9), (0, -0.0, 1e-60, 1.01, -1e300)),
        (limits.check_seed, (None, 0, 2**63 - 1), (-1, 2**63)),
        (limits.check_top_logprobs, (None, 0, 20), (-1, 21)),
    ],
)
def test_range_includes_its_ends_as_stated(
    check: object, inside: tuple[float | None, ...], outside: tuple[float, ...]
) -> None:
    assert callable(check)
    for value in inside:
        check(value)
    for value in outside:
        assert "the valid range of" in refusal(check, value)


def test_max_tokens_bound_is_in_the_message() -> None:
    limits.check_max_tokens(10, 10)
    assert refusal(limits.check_max_tokens, 11, 10).endswith("max_tokens is [1, 10]")


def test_penalty_is_named() -> None:
    limits.check_penalty("presence_penalty", -2)
    assert "presence_penalty" in refusal(limits.check_penalty, "presence_penalty", 2.5)


@pytest.mark.parametrize(
    ("stops", "bare", "reason"),
    [
        ([""] + ["a"] * 16, False, "Stop string array too long: 17"),
        (["a", ""], False, "Invalid 'stop[1]': empty string."),
        ([""], True, "Invalid 'stop': empty string."),
    ],
)
def test_stop_that_cannot_match_is_refused(stops: list[str], bare: bool, reason: str) -> None:
    assert refusal(limits.check_stop, stops, bare=bare).startswith(reason)


def test_sixteen_stops_are_accepted() -> None:
    limits.check_stop(["a"] * 16)


# ---- images -------------------------------------------------------------------------------------


def piece(url: str, detail: str | None = None) -> object:
    return image_piece(url, detail, profile=V41, prefix="here: ", path="there")


@pytest.mark.parametrize(
    "url",
    [
        *(PNG, PNG + "AA", PNG + "AAA", PNG + "AAA=", PNG + "AB==", PNG + "AA\n AA"),
        *(PNG + "%41AAA", PNG + "AA%3D%3D", "DATA:image/JPEG;base64,AAAA"),
        *("data:image/webp;charset=utf-8;base64,AAAA", " data:image/gif;base64,AAAA"),
        "data:image/jpg;;base64,AAAA",
    ],
)
def test_data_url_with_a_picture_is_accepted(url: str) -> None:
    assert piece(url) == ImageSource("data_url", url, "high", "there")


@pytest.mark.parametrize("url", ["http://x/a.png", "HTTPS://x"])
def test_web_url_is_kept_as_sent(url: str) -> None:
    assert piece(url, "low") == ImageSource("url", url, "low", "there")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        *((url, "Unsupported image_url format") for url in ("", "ftp://x", "data:image/png,abc")),
        ("httpx://x", "Unsupported image_url format"),
        ("data:image/png;base64", "Unsupported image_url format"),
        *(
            (f"data:{kind};base64,AAAA", "You have uploaded an unsupported image.")
            for kind in ("image/bmp", "text/plain", "image/svg+xml", "")
        ),
        *(
            (PNG + digits, "Invalid base64 data")
            for digits in ("A", "AA=", "AAA==", "AA=A", "====", "AAAA=", "-_-_", "ÄÄÄÄ", "!!!")
        ),
    ],
)
def test_url_without_a_picture_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ConversionError) as caught:
        piece(url)
    assert caught.value.message.startswith(f"here: {reason}")


@given(st.binary())
def test_every_picture_passes(data: bytes) -> None:
    assert piece(PNG + base64.b64encode(data).decode())


@given(st.text())
def test_without_vision_any_url_is_a_note(url: str) -> None:
    assert (
        image_piece(url, None, profile=V4, prefix="here: ", path="there") == "[Unsupported Image]"
    )


@given(st.text())
def test_any_text_is_a_picture_or_refused(text: str) -> None:
    for url in (text, f"data:{text}", PNG + text):
        try:
            piece(url)
        except ConversionError as error:
            assert error.message.startswith("here: ")


def test_messages_that_quote_a_long_value_are_short() -> None:
    error = ConversionError("begin " + "x" * 10**6 + " end")
    assert len(error.message) < 2100
    assert error.message.startswith("begin ") and error.message.endswith(" end")


def test_percent_signs_do_not_make_base64_slow_to_read() -> None:
    check_base64("AAAAAAAAAAAAA%2BA=", "")
    with pytest.raises(ConversionError, match="Invalid base64 data"):
        check_base64("%" * 10**6, "")


def test_mappings_of_other_kinds_are_bodies_too() -> None:
    message = MappingProxyType({"role": "user", "content": "Hi"})
    body = MappingProxyType({"model": "m", "messages": [message]})
    assert parse_body(ChatRequest, body).messages[0].content == "Hi"
    with pytest.raises(BodyError, match="set"):
        parse_body(ChatRequest, {"model": {1}})
