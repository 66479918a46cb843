"""Golden rows, the tokenizers they were made with, and how their events are compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from deepseek_recipe.encoding.tokenizer import PromptTokenizer

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

GOLDEN = Path(__file__).resolve().parents[3] / "tests" / "conformance" / "prompts"
V41_NAMES = {"<｜System｜>": 128799, "<｜image｜>": 129264, "<｜image2｜>": 129279}

Event = dict[str, Any]


@pytest.fixture(scope="session")
def golden_rows() -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that reads `requests` or `streams`."""

    def read(name: str) -> list[dict[str, Any]]:
        text = (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.split("\n") if line]

    return read


@pytest.fixture(scope="session")
def v4_tokenizer() -> PromptTokenizer:
    """The packaged vocabulary, which is V4's."""
    return PromptTokenizer.packaged()


@pytest.fixture(scope="session")
def v41_tokenizer() -> PromptTokenizer:
    """The packaged vocabulary with the names that V4.1 gives to three tokens."""
    return PromptTokenizer.packaged(V41_NAMES)
