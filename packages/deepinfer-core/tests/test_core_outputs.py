"""Text of requests: detokenisation, stop strings, and that ids, text and logprobs agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from deepinfer_core.bench.demo_tokenizer import build_tokenizer
from deepinfer_core.engine.outputs import OutputBuilder, StopMatcher
from deepinfer_core.engine.tokenizer import TextDecoder
from deepinfer_core.types import (
    FinishReason,
    PromptLogprob,
    Request,
    RequestOutput,
    SamplingParams,
    SequenceUpdate,
    TokenLogprob,
)

TOKENIZER = build_tokenizer(512, {0: "<bos>", 1: "<eos>", 2: "<pad>"})
SPECIAL = frozenset(
    token_id for token_id, token in TOKENIZER.get_added_tokens_decoder().items() if token.special
)
TEXT = "naïve café 港の町は朝が早い 🚢🚢 done — Žluťoučký\n"


def ids_of_bytes(text: str) -> list[int]:
    """One token a byte, so that every character of more than a byte is cut everywhere."""
    ids = []
    for character in text:
        marks = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)
        ids += [TOKENIZER.token_to_id(mark) for piece, _ in marks for mark in piece]
    return ids


def run(
    ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    sizes: Sequence[int] = (),
    with_text: bool = True,
    reason: FinishReason = FinishReason.LENGTH,
) -> list[RequestOutput]:
    """Feed ids, some at a time, and return every output."""
    request = Request(0, "r", (5, 6), params or SamplingParams(), seed=0)
    decoder = TextDecoder(TOKENIZER, SPECIAL) if with_text else None
    builder = OutputBuilder(request, 0, decoder)
    outputs = []
    rest, cuts = list(ids), list(sizes)
    while rest:
        count = max(1, cuts.pop(0)) if cuts else 1
        step, rest = rest[:count], rest[count:]
        logprobs = tuple(TokenLogprob(token_id, -float(token_id)) for token_id in step)
        update = SequenceUpdate(0, tuple(step), logprobs, finish_reason=None if rest else reason)
        stopped = builder.feed(update)
        output = builder.next_output()
        if output is not None:
            outputs.append(output)
        if stopped:
            break
    return outputs


def test_characters_are_never_cut() -> None:
    ids = ids_of_bytes(TEXT)
    assert TOKENIZER.decode(ids) == TEXT
    outputs = run(ids)
    assert "".join(output.delta for output in outputs) == TEXT
    assert not any("\ufffd" in output.text for output in outputs)
    assert len(outputs) == len(TEXT)


@given(st.lists(st.integers(0, 600), max_size=60))
def test_flush_equals_decoding_everything_at_once(ids: list[int]) -> None:
    decoder = TextDecoder(TOKENIZER, SPECIAL)
    pieces = [decoder.feed(token_id)[0] for token_id in ids]
    assert "".join(pieces) + decoder.flush() == TOKENIZER.decode(ids, skip_special_tokens=True)


CUT_OFF = [ids_of_bytes("é")[1], *ids_of_bytes("港")[:2], *ids_of_bytes("🚢")[:3]]


@given(st.lists(st.sampled_from(CUT_OFF), min_size=40, max_size=120), st.text("é🚢a", max_size=3))
def test_bytes_that_are_no_characters_do_not_pile_up(ids: list[int], end: str) -> None:
    decoder = TextDecoder(TOKENIZER, SPECIAL)
    pieces = [decoder.feed(token_id)[0] for token_id in (*ids, *ids_of_bytes(end))]
    assert len("".join(pieces[: len(ids)])) > 0
    whole = TOKENIZER.decode([*ids, *ids_of_bytes(end)], skip_special_tokens=True)
    assert "".join(pieces) + decoder.flush() == whole


def test_half_a_character_at_the_end_is_shown_as_decoding_shows_it() -> None:
    ids = ids_of_bytes("é")[:1]
    assert run(ids)[-1].text == TOKENIZER.decode(ids)


def test_special_tokens_have_no_text() -> None:
    ids = [0, *ids_of_bytes("ab"), 1]
    final = run(ids)[-1]
    assert (final.text, final.token_ids) == ("ab", tuple(ids))


def test_every_output_covers_whole_tokens_with_their_logprobs() -> None:
    params = SamplingParams(logprobs=0, stop=("町は夜",))
    for output in run(ids_of_bytes(TEXT), params):
        assert output.logprobs is not None
        assert [value.token_id for value in output.logprobs] == list(output.token_ids)
        assert TOKENIZER.decode(list(output.token_ids)) == output.text


def test_without_a_tokenizer_ids_come_at_once_and_text_is_empty() -> None:
    outputs = run([7, 8, 9], with_text=False)
    assert [output.token_ids for output in outputs] == [(7,), (7, 8), (7, 8, 9)]
    assert {output.text for output in outputs} == {""}


LETTERS = st.text("ab", min_size=1, max_size=4)


@given(
    st.text("ab", min_size=1, max_size=14),
    st.lists(LETTERS, min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=14),
)
def test_stop_matcher_agrees_with_a_search_for_every_way_of_cutting(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    matcher, fed, rest = StopMatcher(stops), "", text
    while rest:
        size = sizes.pop(0) if sizes else 1
        piece, rest = rest[:size], rest[size:]
        fed += piece
        if matcher.feed(piece):
            break
        # what is decided can be in no stop string, and what is held could begin one
        held = fed[matcher.decided_len :]
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(
            stop.startswith(fed[start:]) for stop in stops for start in range(matcher.decided_len)
        )
    if ends:
        first = min(ends)
        longest = max(len(stop) for stop in stops if text[:first].endswith(stop))
        assert matcher.start == first - longest
    else:
        assert matcher.start is None


@given(st.text("ab", min_size=1, max_size=12), st.lists(LETTERS, max_size=3), st.data())
def test_streamed_text_is_a_prefix_of_the_final_text(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=12))
    outputs = run(ids_of_bytes(text), SamplingParams(stop=tuple(stops)), sizes=sizes)
    final = outputs[-1]
    assert "".join(output.delta for output in outputs) == final.text
    for before, after in pairwise(outputs):
        assert after.text.startswith(before.text)
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert not any(stop in final.text for stop in stops)
    assert final.finish_reason is not None


@pytest.mark.parametrize("size", range(1, 12))
def test_stop_string_ends_the_text_before_it_and_the_ids_with_it(size: int) -> None:
    ids = ids_of_bytes("one two three")
    final = run(ids, SamplingParams(stop=("two",), logprobs=0), sizes=[size] * 20)[-1]
    assert final.finish_reason is FinishReason.STOP
    assert final.text == "one "
    assert final.token_ids == tuple(ids[:7])
    assert final.logprobs is not None and len(final.logprobs) == 7


def test_stop_string_inside_one_token_is_cut_out() -> None:
    ids = TOKENIZER.encode(" harbour").ids
    longest = max(ids, key=lambda token_id: len(TOKENIZER.decode([token_id])))
    word = TOKENIZER.decode([longest])
    assert len(word) > 2
    final = run([longest, longest], SamplingParams(stop=(word[1],)))[-1]
    assert (final.text, final.token_ids) == (word[0], (longest,))


def test_the_stop_string_that_is_complete_first_wins() -> None:
    params = SamplingParams(stop=("three", "two", "e two t"))
    assert run(ids_of_bytes("one two three"), params)[-1].text == "one "


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    outputs = run(ids_of_bytes("say wor"), SamplingParams(stop=("world",)))
    assert [output.text for output in outputs[-2:]] == ["say ", "say wor"]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_stop_string_in_the_last_tokens_wins_over_the_length() -> None:
    final = run(ids_of_bytes("ab"), SamplingParams(stop=("b",)), sizes=[2])[-1]
    assert (final.text, final.finish_reason) == ("a", FinishReason.STOP)


def test_abort_keeps_what_was_produced() -> None:
    builder = OutputBuilder(
        Request(0, "r", (5,), SamplingParams(), seed=0),
        3,
        TextDecoder(TOKENIZER, SPECIAL),
        skips_rows=True,
    )
    builder.feed(SequenceUpdate(0, tuple(ids_of_bytes("ab"))))
    builder.abort()
    final = builder.next_output()
    assert final is not None
    assert (final.index, final.text, final.finish_reason) == (3, "ab", FinishReason.ABORT)
    assert final.bounded_replay == "decoder"


def test_error_is_an_output_with_its_sentence() -> None:
    builder = OutputBuilder(Request(0, "r", (5,), SamplingParams(), seed=0), 0, None)
    builder.feed(SequenceUpdate(0, (7,)))
    sentence, code = "No finite logit.", "non_finite"
    reason = FinishReason.ERROR
    builder.feed(SequenceUpdate(0, finish_reason=reason, error=sentence, error_code=code))
    final = builder.next_output()
    assert final is not None
    assert (final.error, final.error_param, final.error_code) == (sentence, None, code)
    assert final.token_ids == (7,)


class HoldsBack:
    """A decoder with bytes that are no character yet; the end shows them as they are."""

    def feed(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def flush(self) -> str:
        return "\ufffd"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (FinishReason.ERROR, FinishReason.ERROR),
        (FinishReason.ABORT, FinishReason.ABORT),
        (FinishReason.LENGTH, FinishReason.STOP),
    ],
)
def test_stop_string_in_the_text_shown_at_the_end_hides_no_error(
    reason: FinishReason, shown: FinishReason
) -> None:
    request = Request(0, "r", (5,), SamplingParams(stop=("\ufffd",)), seed=0)
    decoder = HoldsBack()
    builder = OutputBuilder(request, 0, decoder)  # type: ignore[arg-type]
    builder.feed(SequenceUpdate(0, (7,)))
    builder.feed(SequenceUpdate(0, finish_reason=reason, error="The device failed."))
    final = builder.next_output()
    assert final is not None
    assert (final.finish_reason, final.error, final.text) == (shown, "The device failed.", "")


def test_prompt_logprobs_come_in_the_order_of_positions() -> None:
    params = SamplingParams(prompt_logprobs=0)
    builder = OutputBuilder(Request(0, "r", (5, 6, 7), params, seed=0), 0, None)
    values = [PromptLogprob(position, TokenLogprob(position, -1.0)) for position in (1, 2)]
    builder.feed(SequenceUpdate(0, prompt_logprobs=(values[1],)))
    builder.feed(SequenceUpdate(0, (8,), prompt_logprobs=tuple(values)))
    output = builder.next_output()
    assert output is not None and output.prompt_logprobs is not None
    assert [value.token_id for value in output.prompt_logprobs] == [1, 2]


def test_prompt_logprobs_are_put_in_order_once() -> None:
    params = SamplingParams(prompt_logprobs=0)
    request = Request(0, "r", (5, 6), params, seed=0)
    builder = OutputBuilder(request, 0, None)
    builder.feed(SequenceUpdate(0, (8,), prompt_logprobs=(PromptLogprob(1, TokenLogprob(6, -1)),)))
    first = builder.next_output()
    builder.feed(SequenceUpdate(0, (9,)))
    second = builder.next_output()
    assert first is not None and second is not None and first.prompt_logprobs
    assert first.prompt_logprobs is second.prompt_logprobs
