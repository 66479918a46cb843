"""Matchers: masks agree with `accept`, roll-back, windows, the end, forks, batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured import (
    Grammar,
    Matcher,
    Spec,
    TokenVocabulary,
    compile,
    fill_batch,
    fill_windows,
)
from deepseek_recipe.structured.grammar import build
from deepseek_recipe.structured.lowered import Lowered

TOY = Path(__file__).parents[3] / "tests/conformance/model/tiny_a/tokenizer.json"
EOS = 1
GRAMMARS = {
    "one text": 'start: "abcdef"',
    "spelling of a control token": 'start: "</think>x" | "<｜User｜>"',
    "middle": 'start: "a" /[bc]*/ "def"',
    "any text": r"start: /(.|\n)*/",
    "counted": r"start: /[0-9a-f]{8}-[0-9]{4}/",
    "not ASCII": 'start: "né 你好"+',
    "prefixes": 'start: TEXT\nTEXT: "yes" | "no" | "yesterday" | ""',
    "recursive": 'start: "(" start ")" | "x"',
    "ambiguous": 'start: a b\na: "x" | "x" a\nb: "x"? "y"?',
    "object": 'start: %json {"type":"object","properties":{"name":{"const":"hello world"},'
    '"n":{"type":"integer","minimum":3,"maximum":70}},"required":["name"],'
    '"additionalProperties":false}',
    "array": 'start: %json {"type":"array","items":{"enum":["a","b",1,null]},"maxItems":3}',
    "counted characters": r'start: /[^"]{3,5}/',
    "integer": 'start: "[" %json {"type":"integer","minimum":3,"maximum":70} F? "]"\nF: ".0"',
    "different values": 'start: "[" %lark {\nstart: A later::0x1 | B later::0x2\nlater::_: "]" '
    '| "," A later::set_bit(0) %if bit_clear(0) | "," B later::set_bit(1) %if bit_clear(1)\n'
    'A: /1(?:\\.0)?/\nB: "12"\n}',
}
parametrize = pytest.mark.parametrize("name", GRAMMARS)


@cache
def vocabulary(kind: str) -> TokenVocabulary:
    if kind == "toy":
        return TokenVocabulary.of(TOY, eos_ids=(EOS,), num_threads=2)
    return TokenVocabulary.of(PromptTokenizer.packaged()._path, num_threads=2)


@cache
def grammar(name: str, kind: str = "toy") -> Grammar:
    return build(Lowered(GRAMMARS[name]), vocabulary(kind))


def mask(matcher: Matcher) -> np.ndarray:
    row = np.full(matcher.vocabulary.num_words, -1, np.int32)
    matcher.fill(row)
    return row


def tokens_of(row: np.ndarray) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.nonzero(bits)[0]]


def walk(matcher: Matcher, rng: random.Random, steps: int) -> list[int]:
    """Advance by random allowed tokens, the end only where nothing else is left."""
    taken: list[int] = []
    for _ in range(steps):
        allowed = tokens_of(mask(matcher))
        allowed = [token_id for token_id in allowed if token_id != EOS] or allowed
        if not allowed:
            break
        taken.append(rng.choice(allowed))
        assert matcher.accept(taken[-1:]) == 1
    return taken


def check_agreement(matcher: Matcher, candidates: list[int]) -> None:
    row = mask(matcher)
    allowed = set(tokens_of(row))
    for token_id in candidates:
        took = matcher.accept([token_id])
        matcher.rollback(took)
        assert took == (token_id in allowed), token_id
    assert (mask(matcher) == row).all()
    assert not allowed & matcher.vocabulary.special_ids - {EOS}
    assert matcher.can_end == (EOS in allowed)
    assert matcher.done == (allowed <= {EOS})
    forced = matcher.forced()
    assert not forced or allowed == {forced[0]}


@parametrize
def test_mask_agrees_with_accept_for_every_token(name: str) -> None:
    rng = random.Random(f"agree {name}")
    for _ in range(4):
        matcher = grammar(name).matcher()
        for _ in range(6):
            check_agreement(matcher, list(range(matcher.vocabulary.size)))
            if not walk(matcher, rng, 1):
                break


@parametrize
def test_mask_agrees_with_accept_in_the_real_vocabulary(name: str) -> None:
    rng = random.Random(f"real {name}")
    matcher = grammar(name, "real").matcher()
    special = sorted(matcher.vocabulary.special_ids)
    for _ in range(5):
        allowed = tokens_of(mask(matcher))
        candidates = [
            *rng.sample(range(matcher.vocabulary.size), 400),
            *rng.sample(allowed, min(len(allowed), 300)),
            *rng.sample(special, 50),
        ]
        check_agreement(matcher, candidates)
        if not walk(matcher, rng, 1):
            break


@parametrize
def test_rollback_restores_the_exact_masks(name: str) -> None:
    rng = random.Random(f"back {name}")
    for _ in range(6):
        matcher = grammar(name).matcher()
        rows = [mask(matcher)]
        taken: list[int] = []
        for _ in range(10):
            taken += (step := walk(matcher, rng, 1))
            if not step:
                break
            rows.append(mask(matcher))
        while taken:
            back = rng.randint(1, len(taken))
            matcher.rollback(back)
            again = rng.randint(0, back)
            kept = len(taken) - back
            assert (mask(matcher) == rows[kept]).all()
            assert matcher.accept(taken[kept : kept + again]) == again
            assert (mask(matcher) == rows[kept + again]).all()
            taken = taken[: kept + again]
            fresh = grammar(name).matcher()
            assert fresh.accept(taken) == len(taken)
            assert (mask(fresh) == rows[len(taken)]).all()
            assert fresh.forced() == matcher.forced()
            if rng.random() < 0.3:
                break


@parametrize
def test_window_equals_step_by_step_and_changes_nothing(name: str) -> None:
    rng = random.Random(f"window {name}")
    for trial in range(8):
        matcher = grammar(name).matcher()
        walk(matcher, rng, rng.randint(0, 4))
        drafts = walk(matcher.fork(), rng, 5)
        if trial % 2 and drafts:
            drafts[rng.randrange(len(drafts))] = rng.randrange(matcher.vocabulary.size)
        before, num_accepted = mask(matcher), matcher.num_accepted
        rows = np.full((len(drafts) + 1, matcher.vocabulary.num_words), -1, np.int32)
        count = matcher.fill_window(rows, drafts)
        assert (mask(matcher) == before).all()
        assert matcher.num_accepted == num_accepted
        steps = matcher.fork()
        for place, row in enumerate(rows):
            if place > count:
                assert not row.any()
                continue
            assert (mask(steps) == row).all()
            if place < len(drafts):
                assert steps.accept([drafts[place]]) == (place < count)


def test_window_ends_with_the_text() -> None:
    matcher = grammar("prefixes").matcher()
    no = PromptTokenizer.from_path(TOY).encode_plain("no")
    drafts = [*no, EOS, *no]
    rows = np.full((len(drafts) + 1, matcher.vocabulary.num_words), -1, np.int32)
    assert matcher.fill_window(rows, drafts) == len(no) + 1
    assert tokens_of(rows[len(no)]) == [EOS]
    assert not rows[len(no) + 1 :].any()
    assert matcher.num_accepted == 0 and not matcher.ended
    assert matcher.fill_window(rows[:1], []) == 0
    with pytest.raises(ConstraintError, match=r"allowed: int32 \[3, "):
        matcher.fill_window(rows, no)


def test_refused_token_leaves_the_state() -> None:
    matcher = grammar("counted").matcher()
    tokenizer = PromptTokenizer.from_path(TOY)
    digits, wrong = tokenizer.encode_plain("12ab"), tokenizer.encode_plain("z")
    assert matcher.accept([*digits, *wrong, *digits]) == len(digits)
    before = mask(matcher)
    for token_id in (*wrong, EOS, 0, -1, matcher.vocabulary.size, 2**40):
        assert matcher.accept([token_id]) == 0
    assert (mask(matcher) == before).all()
    assert matcher.num_accepted == len(digits)


def test_end_counts_in_rollback_and_nothing_follows_it() -> None:
    matcher = grammar("prefixes").matcher()
    yes = PromptTokenizer.from_path(TOY).encode_plain("yes")
    assert EOS in tokens_of(mask(matcher))  # the empty text is one of them
    assert matcher.accept([*yes, EOS, EOS, yes[0]]) == len(yes) + 1
    assert matcher.ended and matcher.done and not matcher.can_end
    assert not mask(matcher).any()
    assert matcher.forced() == []
    matcher.rollback(1)
    assert not matcher.ended and not matcher.done and matcher.can_end
    assert EOS in tokens_of(mask(matcher))
    assert matcher.accept([EOS]) == 1
    matcher.rollback(2)
    assert EOS not in tokens_of(mask(matcher))
    assert matcher.accept([yes[-1]]) == 1
    with pytest.raises(ConstraintError, match=f"roll-back of 9 tokens; allowed: 0 to {len(yes)}"):
        matcher.rollback(9)


def test_only_the_end_is_left_after_a_whole_text() -> None:
    matcher = grammar("recursive").matcher()
    assert matcher.accept(PromptTokenizer.from_path(TOY).encode_plain("((x))")) == 5
    assert matcher.done and not matcher.ended
    assert tokens_of(mask(matcher)) == [EOS]
    assert matcher.forced() == []


def test_several_ids_may_end_a_text() -> None:
    both = TokenVocabulary.of(TOY, eos_ids=(1, 2), num_threads=1)
    for end in both.eos_ids:
        matcher = compile(Spec.choice(["", "a"]), both).matcher()
        assert {1, 2} <= set(tokens_of(mask(matcher)))
        assert matcher.accept([end]) == 1 and matcher.ended


def test_fork_is_independent() -> None:
    rng = random.Random("fork")
    matcher = grammar("object").matcher()
    walk(matcher, rng, 3)
    before, twin = mask(matcher), matcher.fork()
    walk(twin, rng, 4)
    assert (mask(matcher) == before).all()
    twin.rollback(twin.num_accepted - matcher.num_accepted)
    assert (mask(twin) == before).all()
    twin.rollback(3)
    assert matcher.num_accepted == 3
    assert (mask(twin) == mask(grammar("object").matcher())).all()


def test_forced_tokens_are_accepted_one_by_one() -> None:
    for kind in ("toy", "real"):
        matcher = grammar("one text", kind).matcher()
        forced = matcher.forced()
        tokenizer = PromptTokenizer.from_path(TOY) if kind == "toy" else PromptTokenizer.packaged()
        assert forced == tokenizer.encode_plain("abcdef")
        rows = np.empty((len(forced) + 1, matcher.vocabulary.num_words), np.int32)
        assert matcher.fill_window(rows, forced) == len(forced)
        assert [tokens_of(row) for row in rows] == [*([t] for t in forced), [EOS]]


def test_spelling_of_a_control_token_is_written_in_plain_tokens() -> None:
    tokenizer = PromptTokenizer.packaged()
    for text in ("</think>x", "<｜User｜>"):
        matcher = grammar("spelling of a control token", "real").matcher()
        ids = tokenizer.encode_plain(text)
        assert matcher.accept([*ids, EOS]) == len(ids) + 1
        assert not matcher.vocabulary.special_ids & set(ids)


def test_batch_equals_one_by_one() -> None:
    rng = random.Random("batch")
    matchers = [grammar(name).matcher() for name in GRAMMARS for _ in range(3)]
    for matcher in matchers:
        walk(matcher, rng, rng.randint(0, 6))
    num_words = vocabulary("toy").num_words
    for extra in (0, 3):
        rows = np.full((len(matchers), num_words + extra), -1, np.int32)
        assert fill_batch(matchers, rows) == {}
        for matcher, row in zip(matchers, rows, strict=True):
            assert (mask(matcher) == row[:num_words]).all()
            assert not row[num_words:].any()
    assert fill_batch([], rows[:0]) == {}


def test_windows_of_a_batch_equal_one_by_one() -> None:
    rng = random.Random("windows")
    num_words = vocabulary("toy").num_words
    for extra in (0, 2):
        matchers = [grammar(name).matcher() for name in GRAMMARS for _ in range(4)]
        drafts = []
        for matcher in matchers:
            walk(matcher, rng, rng.randint(0, 4))
            ahead = matcher.fork()
            window = walk(ahead, rng, rng.randint(0, 5))
            if window and rng.random() < 0.5:
                window[rng.randrange(len(window))] = rng.choice([EOS, 7, vocabulary("toy").size])
            drafts.append(window)
        rows = np.full((len(drafts) + sum(map(len, drafts)), num_words + extra), -1, np.int32)
        taken = fill_windows(matchers, drafts, rows)
        first = 0
        for matcher, window, count in zip(matchers, drafts, taken, strict=True):
            wanted = np.full((len(window) + 1, num_words + extra), -1, np.int32)
            assert matcher.fill_window(wanted, window) == count
            assert (rows[first : first + len(window) + 1] == wanted).all()
            first += len(window) + 1
    assert fill_windows([], [], rows[:0]) == []
    with pytest.raises(ConstraintError, match="1 lists of drafts for 2 matchers"):
        fill_windows(matchers[:2], [[]], rows[:2])


TWO_WAYS = {
    "type": "object",
    "properties": {
        "job": {"type": "string"},
        "home": {"type": "object", "properties": {}, "additionalProperties": False},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize("how", ["window", "batch", "rollback", "fork"])
def test_a_way_that_was_not_taken_leaves_nothing_behind(how: str) -> None:
    """Masks are made along one way; then the text goes another one of the same length."""
    found = compile(Spec.json_schema(TWO_WAYS), vocabulary("real"))
    tokenizer = PromptTokenizer.packaged()
    one, two = (tokenizer.encode_plain(text) for text in ('{"home":', '{"job":'))
    assert len(one) == len(two)
    matcher = found.matcher()
    words = vocabulary("real").num_words
    rows = np.empty((len(one) + 1, words), np.int32)
    if how == "window":
        assert matcher.fill_window(rows, one) == len(one)
    elif how == "batch":
        assert fill_windows([matcher], [one], rows) == [len(one)]
    else:
        ahead = matcher.fork() if how == "fork" else matcher
        for token in one:
            mask(ahead)
            assert ahead.accept([token]) == 1
        mask(ahead)
        if how == "rollback":
            matcher.rollback(len(one))
    fresh = found.matcher()
    assert matcher.accept(two) == fresh.accept(two) == len(two)
    assert (mask(matcher) == mask(fresh)).all()


def test_batch_refuses_what_does_not_go_together() -> None:
    matcher = grammar("array").matcher()
    rows = np.empty((2, vocabulary("toy").num_words), np.int32)
    with pytest.raises(ConstraintError, match="twice"):
        fill_batch([matcher, matcher], rows)
    with pytest.raises(ConstraintError, match="several vocabularies"):
        fill_batch([matcher, grammar("array", "real").matcher()], rows)


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.astype(np.int64),
        lambda row: row[:-1],
        lambda row: row[None],
        lambda row: np.repeat(row, 2)[::2],
        lambda row: np.array(0, np.int32),
    ],
)
def test_mask_that_does_not_fit_is_refused(change: Callable[[np.ndarray], np.ndarray]) -> None:
    row = np.zeros(vocabulary("toy").num_words, np.int32)
    with pytest.raises(ConstraintError, match=r"the mask is .* allowed: int32"):
        grammar("array").matcher().fill(change(row))


def test_grammar_that_becomes_too_complex_fails_its_own_text_alone() -> None:
    tight = LLParserLimits(step_max_items=2, verbose_errors=False)
    text = 'start: s\ns: "(" s ")" | s s | /[a-z]{3,9}/ | /[a-z]{3,9}[0-9]*/'
    engine = LLMatcher(vocabulary("toy").engine, text, log_level=0, limits=tight)
    broken, sound = Matcher(engine, vocabulary("toy")), grammar("array").matcher()
    rows = np.full((3, vocabulary("toy").num_words), -1, np.int32)
    failures = fill_batch([sound, broken, sound.fork()], rows)
    assert list(failures) == [1] and "Too many items" in failures[1].message
    assert not rows[1].any() and (rows[0] == rows[2]).all() and rows[0].any()
    for call in (lambda: broken.fill(rows[1]), lambda: broken.accept([70]), broken.forced):
        with pytest.raises(ConstraintError, match="after 0 tokens the constraint cannot"):
            call()


def test_text_without_a_choice_has_a_bound() -> None:
    constant = "xyz " * 20_000
    with pytest.raises(ConstraintError, match="leaves no choice for 80000 bytes; allowed: 32768"):
        build(Lowered(f'start: "{constant}"'), vocabulary("toy"))
    matcher = build(Lowered(f'start: "a" | "b{constant}"'), vocabulary("toy")).matcher()
    begin = PromptTokenizer.from_path(TOY).encode_plain("b")
    assert matcher.accept(begin) == 1
    for _ in range(2):
        with pytest.raises(ConstraintError, match="after 1 tokens the constraint leaves no"):
            matcher.accept(begin)


@pytest.mark.parametrize("wrong", [1.0, "1", None, True])
def test_what_is_no_whole_number_leaves_the_state_as_it_is(wrong: object) -> None:
    matcher = compile(Spec.choice(["abc"]), vocabulary("real")).matcher()
    [first, *_] = matcher.forced()
    assert matcher.accept([first]) == 1
    rows = np.zeros((3, vocabulary("real").num_words), np.int32)
    for call in (
        lambda: matcher.accept([first, wrong]),
        lambda: matcher.rollback(wrong),
        lambda: matcher.fill_window(rows, [first, wrong]),
    ):
        with pytest.raises(ConstraintError, match="whole number"):
            call()
        assert matcher.num_accepted == 1
    matcher.rollback(np.int64(1))
    assert type(matcher.num_accepted) is int and matcher.num_accepted == 0
