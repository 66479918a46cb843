"""The examples of the README run, one after the other, and print what they say."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 8
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert "tensor([2, 1], dtype=torch.int32)" in printed
    assert "16 0.01035 0.014775" in printed
    assert "tensor([[ 5,  9, -1, -1]])" in printed
