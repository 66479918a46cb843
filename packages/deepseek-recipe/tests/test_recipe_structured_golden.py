"""Constraints allow and refuse the golden texts, token by token in the real vocabulary."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.structured import Grammar, Spec, TokenVocabulary, compile

CASES = Path(__file__).parents[3] / "tests/conformance/grammars/cases.jsonl"


@cache
def cases() -> dict[str, dict[str, Any]]:
    rows = map(json.loads, CASES.read_text(encoding="utf-8").strip("\n").split("\n"))
    return {row["id"]: row for row in rows}


@cache
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.packaged()


@cache
def vocabulary() -> TokenVocabulary:
    return TokenVocabulary.of(tokenizer()._path, num_threads=1)


def texts(case: dict[str, Any], which: str) -> list[str]:
    if case["kind"] != "json_schema":
        return list(case[which])
    blanks = ((", ", ": "), (",", ":"))
    return [
        json.dumps(value, ensure_ascii=False, separators=pair)
        for value in case[which]
        for pair in blanks
    ]


def allows(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    row = np.empty(vocabulary().num_words, np.int32)
    for token_id in tokenizer().encode_plain(text):
        matcher.fill(row)
        allowed = bool(int(row[token_id // 32]) >> token_id % 32 & 1)
        assert matcher.accept([token_id]) == allowed, (text, token_id)
        if not allowed:
            return False
    return matcher.can_end


def test_all_cases_are_there() -> None:
    assert len(cases()) == 60


@pytest.mark.parametrize("name", cases())
def test_golden_texts_are_allowed_and_refused(name: str) -> None:
    case = cases()[name]
    spec = getattr(Spec, case["kind"])(case["grammar"])
    grammar = compile(spec, vocabulary())
    assert [text for text in texts(case, "valid") if not allows(grammar, text)] == []
    assert [text for text in texts(case, "invalid") if allows(grammar, text)] == []
