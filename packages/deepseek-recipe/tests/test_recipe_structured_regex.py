"""Patterns: what is accepted means what Python's `re` says, all else is refused with its place."""

from __future__ import annotations

import random
import re

import pytest

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.charset import CharSet
from deepseek_recipe.structured.regex import lower_regex, parse_regex
from deepseek_recipe.structured.tree import rust

llguidance = pytest.importorskip("llguidance", reason="the mask engine is not installed")


def _byte_tokenizer():
    """A vocabulary of the 256 bytes and an end."""
    return llguidance.LLTokenizer("byte")


def _accepts(tokenizer, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), (grammar, matcher.get_error())
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("^a|b$", ["a", "b"], ["ab", "", "a\n"]),
        ("^(?:^a|(^b))c(d$|e)$", ["acd", "bce"], ["ac", "acdd"]),
        (r"\Aab\Z", ["ab"], ["ab\n"]),
        ("a{2,3}?b+?", ["aab", "aaabb"], ["ab", "aaaab"]),
        (r"(?P<y>\d{4})-(?<m>\d\d)", ["2024-12"], ["2024-1", "２０２４-12"]),
        (r"\w+\s", ["a_9 ", "b\v"], ["é ", "a\u00a0", "a\u0085"]),
        (".", ["中", "\r", "😀"], ["\n", ""]),
        (r"[\]\-a^]+[^\d\n]", ["]-a^x"], ["]1", "b"]),
        (r"[]-]{2}".replace("[]", r"[\]"), ["]-"], ["]"]),
        (r"\x41\u4e2d\u{1F600}\U0001F601", ["A中😀😁"], ["A中"]),
        (r"\/\"\#\{x}{y", ['/"#{x}{y'], [""]),
        ("", [""], ["a"]),
        ("()|a*", ["", "aaa"], ["b"]),
        ("a{0}b", ["b"], ["ab"]),
        ("(|a)+", ["", "aa"], ["b"]),
        (r"[\b\0]", ["\b", "\0"], ["b"]),
        ("[^a]", ["\n", "中"], ["a"]),
        ("//a", ["//a"], ["/a"]),
    ],
)
def test_pattern_matches_the_whole_text(
    pattern: str, inside: list[str], outside: list[str]
) -> None:
    tokenizer, grammar = _byte_tokenizer(), lower_regex(pattern).grammar
    assert [text for text in inside if not _accepts(tokenizer, grammar, text)] == []
    assert [text for text in outside if _accepts(tokenizer, grammar, text)] == []


@pytest.mark.parametrize(
    ("pattern", "path", "word"),
    [
        ("a(?=b)", "1:2", "look-ahead"),
        ("a(?!b)", "1:2", "negative look-ahead"),
        ("(?<=a)b", "1:1", "look-behind"),
        ("(?<!a)b", "1:1", "negative look-behind"),
        (r"(a)\1", "1:4", "back-reference"),
        ("(?P<x>a)(?P=x)", "1:9", "back-reference"),
        (r"(?<x>a)\k<x>", "1:8", "back-reference"),
        ("(?i)a", "1:1", "inline flags"),
        ("(?i:a)", "1:1", "inline flags"),
        ("(?>a)", "1:1", "atomic"),
        ("(?(1)a|b)", "1:1", "conditional"),
        ("(?#x)a", "1:1", "comment"),
        ("a*+", "1:2", "possessive"),
        ("a**", "1:3", "quantifier follows"),
        ("a{2}{3}", "1:5", "quantifier follows"),
        ("*a", "1:1", "repeats nothing"),
        ("{2}", "1:1", "repeats nothing"),
        ("a{,3}", "1:2", "Write"),
        ("a{3,2}", "1:2", "wrong order"),
        ("a{1,100000}", "1:2", "too large"),
        ("a{99999999999999999999}", "1:2", "too large"),
        ("((a{1,500}){1,500})", "1:1", "written out"),
        ("a^b", "1:2", "at the start only"),
        ("a$b", "1:2", "at the end only"),
        ("(a$|c)b", "1:3", "at the end only"),
        ("(^a)+", "1:5", "anchor is repeated"),
        ("a$*", "1:3", "anchor is repeated"),
        (r"\bfoo", "1:1", "word boundary"),
        (r"\p{L}", "1:1", "property"),
        (r"\012", "1:1", "octal"),
        (r"\q", "1:1", "not supported"),
        (r"\ud800", "1:1", "no character"),
        (r"\u{110000}", "1:1", "no character"),
        (r"\x4", "1:1", "hexadecimal"),
        ("a\n(b", "2:1", "not closed"),
        ("a)b", "1:2", "closes no group"),
        ("[a", "1:1", "not closed"),
        ("[]a]", "1:1", "empty class"),
        ("[^]", "1:1", "empty class"),
        (r"[^\s\S]", "1:1", "no character"),
        ("[z-a]", "1:2", "wrong order"),
        (r"[\d-z]", "1:2", "between classes"),
        ("[a&&b]", "1:3", "operator"),
        ("[[:alpha:]]", "1:2", "POSIX"),
        ("a\\", "1:2", "backslash"),
        ("(" * 500 + ")" * 500, "1:102", "nested"),
        ("(a|b" * 60 + "c" + ")" * 60, "1:1", "nested"),
        ("a" * 1_000_000, "1:1", "characters"),
        ("\ud800", "1:1", "surrogate"),
    ],
)
def test_refused_pattern_names_its_place(pattern: str, path: str, word: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        lower_regex(pattern)
    assert (caught.value.path, word in caught.value.message) == (path, True), caught.value


_ATOMS = ["a", "b", ".", r"\d", r"\W", "[ab1]", "[^a]", r"[\s-]", "中", r"\.", "(?:a|b1)", "[0-b]"]
_QUANTIFIERS = ["", "", "", "*", "+?", "?", "{2}", "{1,2}", "{0,3}?", "{2,}"]


def _random_pattern(source: random.Random, depth: int) -> str:
    def part() -> str:
        inner = source.choice(_ATOMS)
        if depth and source.random() < 0.4:
            inner = f"({_random_pattern(source, depth - 1)})"
        return inner + source.choice(_QUANTIFIERS)

    branches = (
        "".join(part() for _ in range(source.randint(0, 3))) for _ in range(source.randint(1, 2))
    )
    return "|".join(branches)


def test_random_patterns_agree_with_python() -> None:
    source, tokenizer = random.Random("regex"), _byte_tokenizer()
    for _ in range(150):
        pattern = _random_pattern(source, 2)
        expected, grammar = re.compile(pattern, re.ASCII), lower_regex(pattern).grammar
        for _ in range(12):
            text = "".join(source.choice("aab1. \n中-") for _ in range(source.randint(0, 6)))
            assert _accepts(tokenizer, grammar, text) == bool(expected.fullmatch(text)), (
                pattern,
                text,
            )


def test_random_patterns_print_back_to_the_same_tree() -> None:
    source = random.Random("print")
    for _ in range(300):
        tree = parse_regex(_random_pattern(source, 3))
        assert rust(parse_regex(rust(tree))) == rust(tree)


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_mutated_patterns_mean_what_python_says_or_are_refused() -> None:
    source, tokenizer, num_accepted = random.Random("mutate"), _byte_tokenizer(), 0
    for _ in range(1000):
        characters = list(_random_pattern(source, 2) or "a")
        for _ in range(source.randint(1, 3)):
            at = source.randint(0, len(characters))
            characters.insert(at, source.choice("()[]{}|*+?^$\\-,:=!P1dbx&"))
        pattern = "".join(characters)
        try:
            grammar = lower_regex(pattern).grammar
        except ConstraintError:
            continue
        num_accepted += 1
        expected = re.compile(pattern, re.ASCII)
        for _ in range(4):
            text = "".join(source.choice("aab1. \n-{[") for _ in range(source.randint(0, 5)))
            accepted = _accepts(tokenizer, grammar, text)
            assert accepted == bool(expected.fullmatch(text)), (pattern, text)
    assert num_accepted > 200


def test_char_sets_are_sorted_apart_and_without_surrogates() -> None:
    source = random.Random("sets")
    for _ in range(200):
        pairs = [(low, low + source.randint(0, 9)) for low in source.sample(range(60), 5)]
        chars = CharSet.of(pairs)
        members = {code for low, high in pairs for code in range(low, high + 1)}
        assert {code for low, high in chars.ranges for code in range(low, high + 1)} == members
        assert all(a[1] + 1 < b[0] for a, b in zip(chars.ranges, chars.ranges[1:], strict=False))
        assert chars.negate().negate() == chars
        assert not chars.intersects(chars.negate())
    assert CharSet.of([(0xD000, 0xE000)]).ranges == ((0xD000, 0xD7FF), (0xE000, 0xE000))
    assert CharSet.of([(0xD900, 0xD901)]).ranges == ()
