"""Exact text of the demo's answers: a change of numerics that nobody intended shows here.

`demo_text.json` is written by `python -m nano.demo_text`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nano.demo_text import DemoText, demo_texts

from deepinfer_core.cli.demo import PROMPTS
from deepinfer_core.errors import CheckpointError
from deepinfer_core.model import nano

# In logits. A CPU that sums in another order changes a logit by hundredths.
LEAST_MARGIN = 0.5
FILE = Path(__file__).with_name("demo_text.json")


@pytest.fixture(scope="module")
def texts() -> list[DemoText]:
    try:
        folder = nano.folder()
    except CheckpointError:
        pytest.skip("this checkout has no trained weights: nano_model/model.safetensors is absent")
    threads = torch.get_num_threads()
    found = list(demo_texts(folder))
    torch.set_num_threads(threads)
    return found


def test_answers_are_these_words(texts: list[DemoText]) -> None:
    wanted = json.loads(FILE.read_text(encoding="utf-8"))
    found = [
        {"question": each.question, "message": each.message, "finish_reason": each.finish_reason}
        for each in texts
    ]
    assert found == [{name: value for name, value in e.items() if name != "margin"} for e in wanted]


def test_no_token_is_near_a_tie(texts: list[DemoText]) -> None:
    assert [each.question for each in texts if each.margin < LEAST_MARGIN] == []


def test_prompts_show_thinking_a_call_and_json(texts: list[DemoText]) -> None:
    thinking, call, extracted = (each.message for each in texts)
    assert len(texts) == len(PROMPTS)
    assert thinking["reasoning_content"] and thinking["content"]
    assert [each["type"] for each in call["tool_calls"]] == ["function"]
    assert isinstance(json.loads(extracted["content"]), dict)
