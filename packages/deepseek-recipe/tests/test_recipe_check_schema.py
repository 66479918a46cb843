"""The verb `check-schema`: accepted, or refused with the place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepseek_recipe.cli import main
from deepseek_recipe.structured.schema import KEYWORDS


@pytest.fixture
def check(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path):
    """Run the verb on a text: (status, answer)."""

    def call(text: str, *flags: str) -> tuple[int, dict[str, object]]:
        (tmp_path / "constraint").write_text(text, encoding="utf-8")
        status = main(["check-schema", str(tmp_path / "constraint"), *flags])
        return status, json.loads(capsysbinary.readouterr().out)

    return call


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ('{"type": "object", "properties": {"a": {"type": "integer"}}}', ()),
        ("[a-z]{2,4}\n", ("--kind", "regex")),
        ('root ::= "yes" | "no"', ("--kind", "ebnf")),
    ],
)
def test_what_can_be_enforced_is_accepted(check, text: str, flags: tuple[str, ...]) -> None:
    assert check(text, *flags) == (0, {"accepted": True, "warnings": []})


def test_what_does_not_constrain_is_a_warning(check) -> None:
    status, answer = check('{"type": "string", "format": "colour"}')
    assert status == 0
    [warning] = answer["warnings"]
    assert "colour" in warning


@pytest.mark.parametrize(
    ("text", "flags", "path"),
    [
        ('{"properties": {"a": {"$ref": "https://example.com/x"}}}', (), "/properties/a/$ref"),
        ('{"properties": {"a": {"type": "colour"}}}', (), "/properties/a/type"),
        ("{", (), ""),
        ("(?=a)b", ("--kind", "regex"), "1:1"),
        ("root ::= missing", ("--kind", "ebnf"), "1:10"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(
    check, text: str, flags: tuple[str, ...], path: str
) -> None:
    status, answer = check(text, *flags)
    assert status == 2
    assert answer["error"]["path"] == path
    assert answer["error"]["message"]


def test_a_file_that_cannot_be_read_is_one_error(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["check-schema", str(tmp_path / "missing")]) == 2
    assert "missing" in json.loads(capsysbinary.readouterr().out)["error"]["message"]
    (tmp_path / "model").mkdir()
    (tmp_path / "schema").write_text("{}")
    flags = ["--tokenizer", str(tmp_path / "model")]
    assert main(["check-schema", str(tmp_path / "schema"), *flags]) == 2
    assert "tokenizer.json" in json.loads(capsysbinary.readouterr().out)["error"]["message"]


def test_keywords_are_listed(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["check-schema", "--keywords"]) == 0
    lines = capsysbinary.readouterr().out.decode()
    assert all(keyword in lines for keyword in KEYWORDS)


@pytest.mark.parametrize("flags", [(), ("--keywords", "--kind", "regex")])
def test_flags_that_contradict_one_another_end_the_command(flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check-schema", *flags])
    assert left.value.code == 2
