"""Constraints as values, vocabularies, and what is compiled once and kept."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from deepseek_recipe.encoding.tokenizer import PromptTokenizer, packaged_folder
from deepseek_recipe.errors import ConstraintError, TokenizerError
from deepseek_recipe.structured import Grammar, Spec, TokenVocabulary, compile
from deepseek_recipe.structured import grammar as grammar_module
from deepseek_recipe.structured.cache import BoundedCache
from deepseek_recipe.structured.grammar import build
from deepseek_recipe.structured.lowered import Lowered

TOY = Path(__file__).parents[3] / "tests/conformance/model/tiny_a/tokenizer.json"


@cache
def vocabulary() -> TokenVocabulary:
    return TokenVocabulary.of(TOY, eos_ids=(1,), num_threads=2)


@cache
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.from_path(TOY)


def allows(grammar: Grammar, text: str) -> bool:
    matcher, ids = grammar.matcher(), tokenizer().encode_plain(text)
    return matcher.accept(ids) == len(ids) and matcher.can_end


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Spec(cast(Any, "xml"), "a"), "`kind` is 'xml'; allowed: 'json_schema', "),
        (lambda: Spec("regex", cast(Any, 5)), "`content` is 5, which is no string"),
        (lambda: Spec.regex("a" * 300_000), "300000 characters; allowed: 262144"),
        (lambda: Spec.regex("a\ud800"), "lone surrogate at character 1"),
        (lambda: Spec("json_object", "{}"), "takes no content"),
        (lambda: Spec.ebnf(""), "kind `ebnf` needs a content"),
        (lambda: Spec.json_schema(cast(Any, 5)), "the schema is 5; allowed: an object, true"),
        (lambda: Spec.json_schema({"const": float("nan")}), "the schema is not JSON"),
        (lambda: Spec.json_schema(cast(Any, {"const": b""})), "the schema is not JSON"),
        (lambda: Spec.choice([]), "the choice is \\[\\]; allowed: a list"),
        (lambda: Spec.choice("yes"), "the choice is 'yes'; allowed: a list"),
        (lambda: Spec.choice(["a", cast(Any, 5)]), "/1: 5 is no string"),
    ],
)
def test_wrong_constraint_is_refused_by_name(make: Callable[[], Spec], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        make()


def test_deep_schema_is_refused_not_fatal() -> None:
    schema: Any = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(ConstraintError, match="the schema is not JSON"):
        Spec.json_schema(schema)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("json_schema", "{", "the schema is not JSON"),
        ("choice", "[1]", "/0: 1 is no string"),
        ("choice", "{}", "the choice is {}; allowed"),
        ("choice", "]", "the choice is not JSON"),
    ],
)
def test_content_that_cannot_be_read_is_refused(kind: Any, content: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        compile(Spec(kind, content), vocabulary())


def test_equal_schemas_are_equal_constraints() -> None:
    assert Spec.json_schema({"type": "null"}) == Spec.json_schema('{"type":"null"}')
    assert Spec.json_schema(True).content == "true"


def test_choice_allows_its_texts_and_no_others() -> None:
    rng = random.Random("choice")
    alphabet = 'ab"\\/\n\t\x00\x7f \u2028é你😀|.*[]{}()#%<>'
    texts = [
        "",
        "a",
        "ab",
        *("".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in "x" * 60),
    ]
    chosen = set(texts[::2])
    grammar = compile(Spec.choice(sorted(chosen) + sorted(chosen)), vocabulary())
    for text in texts:
        assert allows(grammar, text) == (text in chosen), text
        assert allows(grammar, text + "a") == (text + "a" in chosen), text


def test_long_choice_compiles() -> None:
    rng = random.Random("long")
    texts = ["".join(rng.choices("abcdefgh", k=8)) for _ in range(20_000)]
    grammar = compile(Spec.choice(texts), vocabulary())
    assert allows(grammar, texts[777]) and not allows(grammar, "ijk")


def test_equal_constraint_is_compiled_once() -> None:
    fresh = TokenVocabulary.of(TOY, eos_ids=(1,), num_threads=1)
    first = compile(Spec.choice(["a", "b"]), fresh)
    assert compile(Spec.choice(["a", "b"]), fresh) is first
    assert compile(Spec.choice(["b", "a"]), fresh) is not first
    assert compile(Spec.choice(["a", "b"]), vocabulary()) is not first
    assert len(fresh.grammars) == 2


def test_threads_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = TokenVocabulary.of(TOY, eos_ids=(1,), num_threads=1)
    calls: list[str] = []
    gate = threading.Barrier(8)

    def counted(lowered: Lowered, vocabulary: TokenVocabulary) -> Grammar:
        calls.append(lowered.grammar)
        return build(lowered, vocabulary)

    monkeypatch.setattr(grammar_module, "build", counted)

    def work(number: int) -> list[tuple[Grammar, bytes]]:
        rng = random.Random(number)
        gate.wait()
        made = []
        for place in rng.sample(range(12), 12):
            grammar = compile(Spec.choice([f"text {place}", "other"]), fresh)
            row = np.empty(fresh.num_words, np.int32)
            matcher = grammar.matcher()
            matcher.accept(tokenizer().encode_plain("text"))
            matcher.fill(row)
            made.append((place, grammar, row.tobytes()))
        return [(grammar, row) for _, grammar, row in sorted(made, key=lambda item: item[0])]

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(work, range(8))
    assert len(calls) == 12
    for other in others:
        for (grammar, row), (their_grammar, their_row) in zip(first, other, strict=True):
            assert their_grammar is grammar and their_row == row


def test_refused_constraint_is_not_kept() -> None:
    before = len(vocabulary().grammars)
    for _ in range(2):
        with pytest.raises(ConstraintError, match="/0: 1 is no string"):
            compile(Spec("choice", "[1, 2]"), vocabulary())
    assert len(vocabulary().grammars) == before


def test_cache_is_bounded_by_entries_and_weight_oldest_use_first() -> None:
    made: list[str] = []
    kept: BoundedCache[str, str] = BoundedCache(3, 10)

    def get(key: str, weight: int = 1) -> str:
        return kept.get(key, weight, lambda: made.append(key) or key.upper())

    assert [get(key) for key in "abcab"] == list("ABCAB")
    assert made == list("abc")
    get("d")  # c was used longest ago
    assert made == list("abcd") and len(kept) == 3
    get("c")
    assert made == list("abcdc")
    get("e", 9)
    assert kept.weight <= 10 and len(kept) == 2
    assert get("f", 11) == "F" and len(kept) == 0 and kept.weight == 0
    get("f", 11)
    assert made[-2:] == ["f", "f"]


def test_cache_raises_to_all_who_wait_and_forgets() -> None:
    kept: BoundedCache[str, int] = BoundedCache(4, 4)
    started, release = threading.Event(), threading.Event()

    def fail() -> int:
        started.set()
        release.wait(30)
        raise KeyError("no")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(kept.get, "a", 1, fail)
        started.wait(30)
        second = pool.submit(kept.get, "a", 1, lambda: 1)
        release.set()
        assert isinstance(first.exception(30), KeyError)
        assert second.exception(30) is None or isinstance(second.exception(30), KeyError)
    assert kept.get("a", 1, lambda: 2) in (1, 2)


@pytest.mark.parametrize("text", ["start: (", "start: nothing", "begin: /a/", 'start: "a"{'])
def test_what_the_engine_refuses_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(ConstraintError, match="the mask engine refuses the constraint: ") as raised:
        build(Lowered(text), vocabulary())
    assert "\n" not in raised.value.message


def test_engine_text_has_a_bound() -> None:
    with pytest.raises(ConstraintError, match="grammar of 2000009 characters; allowed: 2000000"):
        build(Lowered('start: ""' + " " * 2_000_000), vocabulary())


def test_warnings_of_front_end_are_kept() -> None:
    assert build(Lowered('start: "a"', ("no `x`",)), vocabulary()).warnings == ("no `x`",)


def test_vocabulary_names_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be read"):
        TokenVocabulary.of(tmp_path / "none.json")
    with pytest.raises(TokenizerError, match="end-of-sequence id 300 is no added token"):
        TokenVocabulary.of(TOY, eos_ids=(300,))
    with pytest.raises(TokenizerError, match="`eos_ids` is empty"):
        TokenVocabulary.of(TOY, eos_ids=())
    with pytest.raises(TokenizerError, match="`num_threads` is 0"):
        TokenVocabulary.of(TOY, num_threads=0)


def test_vocabulary_of_a_folder_is_that_of_its_file() -> None:
    folder = TokenVocabulary.of(TOY.parent, eos_ids=[1])
    assert folder.size == vocabulary().size == tokenizer().vocab_size
    assert folder.num_words == (folder.size + 31) // 32
    assert folder.special_ids == frozenset(tokenizer().special_tokens)


def test_engine_reads_the_bytes_of_every_token() -> None:
    special = vocabulary().special_ids
    engine = vocabulary().engine
    for token_id in range(vocabulary().size):
        assert engine.is_special_token(token_id) or token_id not in special
        data = tokenizer().token_bytes(token_id)
        if token_id not in special and data != b"\xff":  # the engine's own mark; never in UTF-8
            assert engine.decode_bytes([token_id]) == data


def test_importing_the_package_loads_no_engine() -> None:
    code = (
        "import sys, deepseek_recipe; heavy = {'llguidance', 'lark', 'regex', 'numpy'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


DEEP = """
import json, threading
from deepseek_recipe import PromptTokenizer
from deepseek_recipe.encoding.tokenizer import packaged_folder
from deepseek_recipe.structured import Spec, TokenVocabulary, compile

depth = 1000
definitions = {
    f"d{i}": {
        "type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]
    }
    for i in range(depth)
}
definitions[f"d{depth}"] = {"type": "integer"}
schema = {"$ref": "#/$defs/d0", "$defs": definitions}

def check():
    matcher = compile(Spec.json_schema(schema), TokenVocabulary.of(packaged_folder())).matcher()
    ids = PromptTokenizer.packaged().encode_plain('{"a":' * depth + "1" + "}" * depth)
    print(matcher.accept(ids) == len(ids), matcher.can_end)

threading.stack_size(2 << 20)
thread = threading.Thread(target=check)
thread.start()
thread.join()
"""


def test_schemas_inside_one_another_do_not_overflow_the_stack_of_a_server() -> None:
    # in a process of its own: an overflow cannot be caught
    command = [sys.executable, "-c", DEEP]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


def test_an_object_with_more_optional_members_than_the_engine_can_follow_is_refused() -> None:
    def schema(count: int) -> Spec:
        properties = {f"p{place}": {"type": "string"} for place in range(count)}
        return Spec.json_schema({"type": "object", "properties": properties})

    vocabulary = TokenVocabulary.of(packaged_folder())
    with pytest.raises(ConstraintError, match=r"too many ways to begin.*fewer optional members"):
        compile(schema(1000), vocabulary)
    matcher = compile(schema(900), vocabulary).matcher()
    ids = PromptTokenizer.packaged().encode_plain('{"p0": "a", "p899": "b"}')
    assert matcher.accept(ids) == len(ids)
