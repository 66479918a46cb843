"""The scanner: what it holds, finds and gives back, and what the patterns of a client may cost."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.conversation import ParsingOptions
from deepseek_recipe.decoding import scan
from deepseek_recipe.decoding.events import Finish
from deepseek_recipe.decoding.machine import ReplyMachine
from deepseek_recipe.decoding.scan import Pattern, Patterns, Scanner
from deepseek_recipe.decoding.signals import Signal
from deepseek_recipe.encoding.profile import V41


def compiled(texts: Sequence[str]) -> Patterns:
    return Patterns(tuple(Pattern(text, Signal.STOP) for text in texts))


def test_the_scanner_holds_what_may_become_a_pattern() -> None:
    scanner = Scanner(Patterns((Pattern("abac", Signal.STOP), Pattern("<", Signal.OPEN))))
    assert scanner.scan("xaba", 0) == ("x", None, 4)
    assert scanner.held == "aba"
    assert scanner.scan("bac<", 0) == ("ab", Pattern("abac", Signal.STOP), 3)
    assert scanner.scan("bac<", 3) == ("", Pattern("<", Signal.OPEN), 4)


short = st.text("ab", max_size=40)


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5), st.lists(short))
def test_the_first_complete_pattern_is_found_and_nothing_is_lost(
    texts: list[str], pieces: list[str]
) -> None:
    scanner = Scanner(compiled(texts))
    whole = "".join(pieces)
    ends = [(whole.find(text) + len(text), place) for place, text in enumerate(texts)
            if text in whole]  # fmt: skip
    plain = ""
    for piece in pieces:
        more, found, at = scanner.scan(piece, 0)
        plain += more
        if found is not None:
            end, place = min(ends)
            assert found.text == texts[place] and plain + found.text == whole[:end]
            return
        assert at == len(piece)
    assert not ends and plain + scanner.held == whole
    held = [n for n in range(len(whole) + 1) if any(each.startswith(whole[n:]) for each in texts)]
    assert len(scanner.held) == len(whole) - min(held)


tags = st.lists(st.text("ab", max_size=4).map(lambda word: word + ">"), min_size=1, max_size=5)


@given(tags, st.text("ab>", max_size=6), st.text("ab>", max_size=6))
def test_what_is_followed_becomes_a_pattern_as_a_whole_or_not_at_all(
    texts: list[str], one: str, other: str
) -> None:
    texts.sort(key=len, reverse=True)
    scanner = Scanner(compiled(texts))
    whole = one + other
    found, waits, end = scanner.follow(one, 0)
    if waits:
        assert scanner.held == one
        found, waits, end = scanner.follow(other, 0)
        end += len(one)
    begun = [text for text in texts if whole.startswith(text)]
    assert (found is None) == (not begun)
    if found is not None:
        assert found.text == min(begun, key=len) == whole[:end]
    else:
        assert waits == any(text.startswith(whole) for text in texts)
        assert whole.startswith(scanner.held)


LONG = 100_000


@pytest.mark.parametrize(
    "stops",
    [
        ("a" * LONG,),
        tuple(f"{chr(97 + place)}{'a' * LONG}" for place in range(16)),
        tuple(f"{'a' * LONG}{place}" for place in range(16)),
    ],
)
@pytest.mark.parametrize("text", ["a", "a" * (LONG // 10), "xyz" * 1000])
def test_stop_texts_take_memory_and_work_of_their_length_at_most(
    stops: tuple[str, ...], text: str
) -> None:
    parsing = ParsingOptions(stop_sequences=stops)
    calls = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    gc.collect()
    tracemalloc.start()
    sys.setprofile(profile)
    try:
        machine = ReplyMachine(parsing, V41)
        machine.feed_text(text)
    finally:
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1_000_000 + 40 * sum(map(len, stops))
    # each step of the text may add a node for each stop text
    assert calls < 1000 + 8 * len(stops) * len(text)
    assert machine.close()[-1] == Finish("stop")


def test_a_stop_text_is_found_at_its_full_length() -> None:
    stop = "ab" * 5_000
    machine = ReplyMachine(ParsingOptions(stop_sequences=(stop + "c", stop + "d")), V41)
    for piece in ("ab" * 3_000, "ab" * 3_000, "d"):
        machine.feed_text(piece)
    *texts, finish = machine.close()
    assert "".join(each.text for each in texts) == "ab" * 1_000
    assert finish == Finish("stop", stop_sequence=stop + "d")


def test_nothing_of_a_reply_outlives_it_in_the_module() -> None:
    before = {name: repr(value) for name, value in vars(scan).items() if name[:2] != "__"}
    for place in range(50):
        machine = ReplyMachine(ParsingOptions(stop_sequences=(f"stop {place}",)), V41)
        machine.feed_text("a stop")
        machine.close()
    assert not any(hasattr(value, "cache_info") for value in vars(scan).values())
    assert before == {name: repr(value) for name, value in vars(scan).items() if name[:2] != "__"}
