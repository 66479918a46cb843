"""The command `deepinfer-specdec`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer_specdec import DrafterCalibration, __version__
from deepinfer_specdec.cli import main

SMALL = ("simulate", "--rows", "4,20", "--ranks", "2", "--steps", "12")


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]):
    """Run the command: (status, standard output, standard error)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        caught = capsys.readouterr()
        return status, caught.out, caught.err

    return call


def leaves(*arguments: str) -> int:
    """Run the command where argparse ends it."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert leaves("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_without_a_verb_help_names_the_verbs(verb) -> None:
    status, out, _ = verb()
    assert status == 0
    assert "simulate | calibrate" in out and "examples:" in out


def test_help_of_simulate_names_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert leaves("simulate", "--help") == 0
    out = capsys.readouterr().out
    for name in ("fixed-N", "threshold-X", "algorithm-1", "delayed", "own-k", "group-k", "--plot"):
        assert name in out


def test_the_module_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "deepinfer_specdec", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == __version__


# simulate


def test_simulate_prints_a_table_of_every_policy_and_load(verb) -> None:
    status, out, err = verb(*SMALL)
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    found = [(row[0], row[1]) for row in rows if row and row[0] in ("4", "20")]
    assert len(found) == len(set(found)) == 20
    assert ("20", "group-k") in found


def test_simulate_repeats_by_seed(verb) -> None:
    few = ("simulate", "--rows", "20", "--policies", "delayed,group-k", "--ranks", "2")
    first = verb(*few, "--steps", "12", "--seed", "3")
    assert first == verb(*few, "--steps", "12", "--seed", "3")
    assert first != verb(*few, "--steps", "12", "--seed", "4")


@pytest.mark.parametrize(
    "change",
    [
        ("--accepted-length", "4"),
        ("--noise", "3"),
        ("--drift-correlation", "0"),
        ("--num-drafts", "4", "--policies", "off,fixed-4"),
        ("--policies", "off"),
    ],
)
def test_every_option_of_the_traffic_has_an_effect(verb, change: tuple[str, ...]) -> None:
    few = ("simulate", "--rows", "20", "--ranks", "1", "--steps", "12")
    policies = () if "--policies" in change else ("--policies", "fixed-3,delayed")
    assert verb(*few, "--policies", "fixed-3,delayed")[1] != verb(*few, *policies, *change)[1]


def test_fixed_length_follows_the_number_of_drafts(verb) -> None:
    status, out, _ = verb(*SMALL, "--num-drafts", "4", "--accepted-length", "3")
    assert status == 0
    assert "fixed-4" in out and "fixed-5" not in out


def test_out_appends_one_json_line_a_run(verb, tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    for seed in ("0", "1"):
        assert verb(*SMALL, "--seed", seed, "--out", str(path))[0] == 0
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["asked"]["seed"] for line in lines] == [0, 1]
    assert lines[0]["command"].startswith("deepinfer-specdec simulate --rows 4,20")
    assert lines[0]["asked"]["loads"] == [4, 20]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--rows", "0"), "`loads`"),
        (("--ranks", "0"), "`ranks` is 0"),
        (("--policies", "best"), "'best' is unknown; allowed:"),
        (("--noise", "-1"), "`noise` is -1.0"),
        (("--num-drafts", "0"), "`num_drafts` is 0"),
        (("--accepted-length", "7"), "`accepted_len` is 7.0"),
        (("--plot", "speed.gif"), "allowed: .png"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_the_run(
    verb, change: tuple[str, ...], message: str
) -> None:
    status, out, err = verb(*SMALL, *change)
    assert (status, out) == (2, "")
    assert message in err


def test_rows_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert leaves("simulate", "--rows", "4,x") == 2
    assert "--rows" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named_before_the_run(verb, tmp_path: Path) -> None:
    status, out, err = verb(*SMALL, "--out", str(tmp_path / "none" / "figures.jsonl"))
    assert (status, out) == (1, "")
    assert "figures.jsonl" in err and "cannot be written" in err


def test_a_plot_without_matplotlib_names_the_extra(verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = verb(*SMALL, "--plot", "speed.png")
    assert (status, out) == (2, "")
    assert "deepinfer-specdec[plot]" in err


def test_a_plot_is_drawn(verb, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a plot needs the extra `plot`")
    assert verb(*SMALL, "--plot", str(tmp_path / "speed.png"))[0] == 0
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


# calibrate

TRUE = np.array([1.5, 2.0, 3.0])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks whose confidences are off by known temperatures."""
    random = np.random.default_rng(17)
    honest = random.normal(0.8, 1.2, (20_000, 3))
    passes = random.random(honest.shape) < 1 / (1 + np.exp(-honest))
    accepted = np.logical_and.accumulate(passes, axis=1).sum(1)
    path = tmp_path_factory.mktemp("blocks") / "blocks.jsonl"
    blocks = zip((honest * TRUE).tolist(), accepted.tolist(), strict=True)
    text = "".join(json.dumps({"logits": z, "accepted": n}) + "\n" for z, n in blocks)
    path.write_text(text + "\n", encoding="utf-8")
    return path


SAVE = ("--traffic", "sampled", "--checkpoint", "sha256:0", "--data-set", "made up")


def test_calibrate_finds_the_temperatures_and_says_what_they_gain(verb, measured: Path) -> None:
    status, out, err = verb("calibrate", str(measured))
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [float(row[1]) for row in rows] == pytest.approx(TRUE, rel=0.1)
    for row in rows:
        before, after = (float(row[place].rstrip("%")) for place in (2, 3))
        assert after < 1.5 < before
        assert 0.6 < float(row[4]) < 1


def test_what_calibrate_saves_is_what_an_engine_loads(verb, measured: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert verb("calibrate", str(measured), "--save", str(path), *SAVE)[0] == 0
    found = DrafterCalibration.load(path, block_size=3, checkpoint="sha256:0")
    (one,) = found.classes
    assert (one.traffic, one.acceptance) == ("sampled", "target_noise")
    assert (one.data_set, one.num_blocks) == ("made up", 20_000)
    assert one.temperatures == pytest.approx(TRUE, rel=0.1)
    assert max(one.ece_after) < 0.015 < min(one.ece_before)


def test_saving_replaces_the_same_class_of_traffic_and_keeps_others(
    verb, measured: Path, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(measured.read_text(encoding="utf-8").splitlines()[:500]))
    for file, traffic in ((few, "sampled"), (few, "greedy"), (measured, "sampled")):
        flags = (*SAVE, "--traffic", traffic)
        assert verb("calibrate", str(file), "--save", str(path), *flags)[0] == 0
    found = DrafterCalibration.load(path, block_size=3, checkpoint="sha256:0")
    assert {each.traffic: each.num_blocks for each in found.classes} == {
        "greedy": 500,
        "sampled": 20_000,
    }


def test_a_calibration_of_other_weights_is_not_overwritten(
    verb, measured: Path, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    DrafterCalibration(3, "sha256:1", ()).save(path)
    before = path.read_bytes()
    status, _, err = verb("calibrate", str(measured), "--save", str(path), *SAVE)
    assert status == 2
    assert "sha256:1" in err and "sha256:0" in err
    assert path.read_bytes() == before


def test_few_blocks_are_said_to_be_few(verb, tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"logits": [1.0, 0.5], "accepted": 1}\n' * 3)
    status, out, _ = verb("calibrate", str(path))
    assert status == 0
    assert "Only 3 blocks" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is not JSON"),
        ("[1]", "`logits` and `accepted`"),
        ('{"logits": [1.0, 2.0]}', "`logits` and `accepted`"),
        ('{"logits": [1.0, 2.0], "accepted": 1, "more": 0}', "nothing else"),
        ('{"logits": [], "accepted": 0}', "list of finite numbers"),
        ('{"logits": [1.0, NaN], "accepted": 0}', "list of finite numbers"),
        ('{"logits": [1.0, "2"], "accepted": 0}', "list of finite numbers"),
        ('{"logits": [1.0, 2.0], "accepted": 3}', "allowed: 0 .. 2"),
        ('{"logits": [1.0, 2.0], "accepted": true}', "allowed: 0 .. 2"),
        ('{"logits": [1.0], "accepted": 1}', "there are 1 logits"),
    ],
)
def test_a_line_that_is_no_block_is_named(verb, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "blocks.jsonl"
    path.write_text('{"logits": [1.0, 0.5], "accepted": 1}\n' + line + "\n")
    status, out, err = verb("calibrate", str(path))
    assert (status, out) == (2, "")
    assert "line 2" in err and message in err


def test_files_without_blocks_are_refused(verb, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "has no blocks" in verb("calibrate", str(tmp_path / "empty.jsonl"))[2]
    status, _, err = verb("calibrate", str(tmp_path / "none.jsonl"))
    assert status == 2
    assert "cannot be read" in err


def test_save_without_what_the_file_must_say_is_refused(
    verb, measured: Path, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    status, _, err = verb("calibrate", str(measured), "--save", str(path), "--traffic", "greedy")
    assert status == 2
    assert "--checkpoint and --data-set" in err and not path.exists()
    status, _, err = verb("calibrate", str(measured), "--data-set", "x")
    assert status == 2
    assert "--data-set says nothing without --save" in err
