"""The examples of the README run, one after the other, and print what it says they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
# A block of code, and what it prints where that is shown right after it.
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def test_examples_print_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = EXAMPLE.findall(README.read_text(encoding="utf-8"))
    assert len(examples) >= 6
    names: dict[str, object] = {}
    for code, shown in examples:
        exec(compile(code, str(README), "exec"), names)
        assert capsys.readouterr().out == shown


def test_examples_that_need_more_are_sound_python() -> None:
    blocks = re.findall(r"```py\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1  # migration, which takes several processes and torch
    compile(blocks[0], str(README), "exec")


def test_every_strategy_and_regime_has_a_row() -> None:
    from deepinfer_eplb.simulate import REGIMES, STRATEGIES

    text = README.read_text(encoding="utf-8")
    for name in (*STRATEGIES, *REGIMES):
        assert f"\n| `{name}` |" in text
