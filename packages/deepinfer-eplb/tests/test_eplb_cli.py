"""The command `deepinfer-eplb`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer_eplb import Planner, __version__, plan
from deepinfer_eplb.balance import lower_bound
from deepinfer_eplb.cli import main
from deepinfer_eplb.cli.common import in_words_of_options
from deepinfer_eplb.files import load_map
from deepinfer_eplb.maps import Layout
from deepinfer_eplb.report import in_order_imbalance
from deepinfer_eplb.simulate import REGIMES, STRATEGIES, Traffic, generate

RANDOM = np.random.default_rng(23)
POPULARITY = RANDOM.lognormal(0, 1, (3, 1, 16))
PIECES = RANDOM.poisson(500 * POPULARITY * RANDOM.lognormal(0, 0.4, (3, 20, 16))).swapaxes(0, 1)
LOADS = PIECES[-10:].sum(0)
SIZES = ("--ranks", "4", "--nodes", "2", "--slots-per-rank", "6")
SMALL = ("simulate", "--ranks", "4", "--nodes", "2", "--slots-per-rank", "6", "--layers", "2")
SMALL += ("--experts", "16", "--window", "40", "--interval", "80", "--first", "2")
SMALL += ("--intervals", "4", "--hits", "60", "--regimes", "drift,hot")
GROUPED = ("--nodes", "2", "--groups", "4")
PLOTS = "a plot needs the extra `plot`"


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]):
    """Run the command: (status, standard output, standard error)."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = main([str(each) for each in arguments])
        caught = capsys.readouterr()
        return status, caught.out, caught.err

    return call


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    np.savez(tmp_path / "loads.npz", loads=LOADS)
    return tmp_path / "loads.npz"


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    np.savez(tmp_path / "pieces.npz", loads=LOADS, history=PIECES)
    return tmp_path / "pieces.npz"


@pytest.fixture
def live(tmp_path: Path, verb) -> Path:
    """A map for other loads."""
    np.savez(tmp_path / "old.npz", loads=PIECES[0])
    assert verb("plan", tmp_path / "old.npz", *SIZES, "-o", tmp_path / "live.json")[0] == 0
    return tmp_path / "live.json"


def leaves(*arguments: str) -> int:
    """Run the command where argparse ends it."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def table_of(text: str) -> list[list[str]]:
    """The rows of the last table."""
    return rows_of(text.strip().rpartition("\n\n")[2])


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert leaves("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_without_a_verb_help_names_the_verbs(verb) -> None:
    status, out, _ = verb()
    assert status == 0
    assert "plan | score | simulate | report" in out and "examples:" in out


def test_the_module_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "deepinfer_eplb", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == __version__


def test_a_reader_that_has_enough_ends_the_command_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "deepinfer_eplb"]
    found = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (found.returncode, found.stderr) == (1, b"")


@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_files_are_written_though_nobody_reads_the_table(
    name: str, loads: Path, tmp_path: Path
) -> None:
    file = tmp_path / {"plan": "map.json", "simulate": "figures.jsonl"}[name]
    arguments = {
        "plan": ("plan", loads, *SIZES, "-o", file),
        "simulate": (*SMALL, "--regimes", "hot", "--strategies", "none", "--out", file),
    }[name]
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "deepinfer_eplb", *map(str, arguments)]
    found = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (found.returncode, found.stderr) == (1, b"")
    assert file.stat().st_size > 0


FULL = Path("/dev/full")  # a disk without room


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("name", ["help", "version", "plan", "score", "simulate", "report"])
def test_output_that_finds_no_room_is_one_line_and_status_1(
    name: str, loads: Path, live: Path
) -> None:
    arguments = {
        "help": (),
        "version": ("--version",),
        "plan": ("plan", loads, *SIZES),
        "score": ("score", live, loads),
        "simulate": (*SMALL, "--regimes", "hot", "--strategies", "none"),
        "report": ("report", live),
    }[name]
    command = [sys.executable, "-m", "deepinfer_eplb", *map(str, arguments)]
    with FULL.open("w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert found.returncode == 1
    assert found.stderr.decode().splitlines() == [
        "deepinfer-eplb: The output cannot be written: No space left on device. Send it elsewhere."
    ]


def test_messages_name_options_where_the_library_names_arguments() -> None:
    said = in_words_of_options("`slots_per_rank` 3, `first_graded`, `loads`, `split='quota'`")
    assert said == "--slots-per-rank 3, --first, `loads`, `split='quota'`"


@pytest.mark.parametrize("verb_name", ["plan", "simulate"])
def test_a_dash_is_no_file_to_write(verb, loads: Path, tmp_path: Path, verb_name: str) -> None:
    arguments = SMALL if verb_name == "simulate" else ("plan", loads, *SIZES)
    status, out, err = verb(*arguments, "--out", "-")
    assert (status, out) == (2, "")
    assert "--out is '-'" in err and "name of a file" in err


# plan


def test_plan_writes_the_map_that_the_function_returns(verb, loads: Path, tmp_path: Path) -> None:
    status, out, err = verb("plan", loads, *SIZES, "-o", tmp_path / "map.npz")
    assert (status, err) == (0, "")
    found = load_map(tmp_path / "map.npz")
    assert np.array_equal(found.physical_to_logical, plan(LOADS, 4, 2, 6))
    assert found.layout == Layout(4, 2, 6) and found.num_experts == 16
    assert out.splitlines()[0] == "Planned in full, on the window alone."
    rows = table_of(out)
    assert [row[0] for row in rows] == ["layer", "0", "1", "2", "mean", "worst", "all"]
    made = Planner().plan(LOADS, ranks=4, nodes=2, slots_per_rank=6)
    assert [row[2] for row in rows[1:4]] == [f"{each:.3f}" for each in made.imbalance(LOADS)]
    assert rows[5][2] == f"{made.imbalance(LOADS).max():.3f}"
    assert [row[3] for row in rows[1:4]] == ["8", "8", "8"] and rows[6][1] == "24"


def test_plan_without_a_live_map_compares_with_experts_in_order(verb, loads: Path) -> None:
    rows = table_of(verb("plan", loads, *SIZES)[1])
    assert rows[0][:4] == ["layer", "slowest/mean", "in", "order"]
    ranks = LOADS.reshape(3, 4, 4).sum(2)
    ratios = ranks.max(1) / ranks.mean(1)
    assert [row[1] for row in rows[1:4]] == [f"{each:.3f}" for each in ratios]
    assert [row[1] for row in rows[4:6]] == [f"{ratios.mean():.3f}", f"{ratios.max():.3f}"]


def test_plan_without_out_prints_the_same_and_writes_nothing(
    verb, loads: Path, tmp_path: Path
) -> None:
    names = sorted(each.name for each in tmp_path.iterdir())
    alone = verb("plan", loads, *SIZES)
    assert sorted(each.name for each in tmp_path.iterdir()) == names
    assert alone == verb("plan", loads, *SIZES, "-o", tmp_path / "map.json")


def test_plan_from_a_live_map_says_what_it_gains_and_costs(
    verb, loads: Path, live: Path, tmp_path: Path
) -> None:
    flags = ("--prev", live, "-o", tmp_path / "next.json", "--expert-bytes", 1 << 20)
    status, out, _ = verb("plan", loads, *SIZES, *flags)
    assert status == 0
    expected = "Improved the live map by at most 40 moves a layer, on the window alone."
    assert out.splitlines()[0] == expected
    rows = table_of(out)
    before = load_map(live).physical_to_logical
    want = Planner().plan(LOADS, ranks=4, nodes=2, slots_per_rank=6, prev=before)
    assert rows[0][:3] == ["layer", "slowest/mean", "before"]
    assert rows[4] == ["mean", f"{want.ratio_before:.3f}", f"{want.ratio_after:.3f}"]
    assert rows[6][-3:] == [str(want.moves), f"{want.moves}.0", "MiB"]
    assert want.ratio_before > want.ratio_after and want.moves > 0
    added = want.num_replicas - np.stack([np.bincount(layer) for layer in before])
    assert rows[6][1] == str(added.clip(0).sum()) != "0"
    found = load_map(tmp_path / "next.json")
    assert np.array_equal(found.physical_to_logical, want.physical_to_logical)
    assert (found.moves, found.ratio_before) == (want.moves, want.ratio_before)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((), ("--split", "quota")),
        ((), ("--exclude", "1,3")),
        (("--nodes", "2"), GROUPED),
        (("--prev", "live"), ("--prev", "live", "--mode", "full")),
        (("--prev", "live"), ("--prev", "live", "--move-budget", "1")),
        (
            ("--prev", "live", "--move-budget", "1"),
            ("--prev", "live", "--move-budget", "1", "--replan-slack", "0"),
        ),
        (("trace",), ("trace", "--windows", "1")),
        (("trace",), ("trace", "--pieces-per-window", "5")),
        (("pieces",), ()),
        (("pieces",), ("pieces", "--pieces-per-window", "3")),
    ],
)
def test_every_option_of_plan_has_an_effect(
    verb,
    loads: Path,
    live: Path,
    tmp_path: Path,
    first: tuple[str, ...],
    second: tuple[str, ...],
) -> None:
    jumping = PIECES.copy()
    jumping[-10:, :, 3] += 5000  # for good, so that the length of a window matters
    np.savez(tmp_path / "pieces.npz", loads=LOADS, history=jumping)
    np.savez(tmp_path / "trace.npz", hits=PIECES)
    found = []
    for number, flags in enumerate((first, second)):
        source = [tmp_path / "pieces.npz"] if "pieces" in flags else [loads]
        if "trace" in flags:
            source = ["--trace", tmp_path / "trace.npz"]
        words = [live if word == "live" else word for word in flags]
        words = [word for word in words if word not in ("pieces", "trace")]
        sizes = ("--ranks", "4", "--slots-per-rank", "8")
        if "live" in flags:
            sizes = SIZES
        path = tmp_path / f"{number}.json"
        status, _, err = verb("plan", *source, *sizes, *words, "-o", path)
        assert (status, err) == (0, "")
        found.append(path.read_bytes())
    assert found[0] != found[1]


def test_an_excluded_rank_holds_nothing(verb, loads: Path, tmp_path: Path) -> None:
    flags = ("--exclude", "3", "-o", tmp_path / "map.json")
    assert verb("plan", loads, *SIZES, *flags)[0] == 0
    found = load_map(tmp_path / "map.json")
    assert found.layout.excluded == (3,)
    assert (found.physical_to_logical[:, 18:] == -1).all()


def test_ranks_that_the_live_map_excludes_stay_so_unless_all_are_asked_for(
    verb, loads: Path, tmp_path: Path
) -> None:
    live, path = tmp_path / "live.json", tmp_path / "next.json"
    assert verb("plan", loads, *SIZES, "--exclude", "3", "-o", live)[0] == 0
    status, out, _ = verb("plan", loads, *SIZES, "--prev", live, "-o", path)
    assert status == 0 and load_map(path).layout.excluded == (3,)
    assert "Excluded ranks: 3, as in --prev; `--exclude none` uses them." in out
    status, out, _ = verb("plan", loads, *SIZES, "--prev", live, "--exclude", "none", "-o", path)
    assert status == 0 and load_map(path).layout.excluded == ()
    assert "Excluded" not in out and (load_map(path).physical_to_logical >= 0).all()
    status, out, _ = verb("plan", loads, *SIZES, "--prev", live, "--exclude", "2", "-o", path)
    assert status == 0 and load_map(path).layout.excluded == (2,)
    assert "Excluded ranks: 2." in out


def test_the_end_of_a_trace_is_planned_on_as_loads_and_history(
    verb, pieces: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "trace.npz", hits=np.concatenate([PIECES[:7] * 3, PIECES]))
    by_trace, by_loads = tmp_path / "trace.json", tmp_path / "loads.json"
    flags = ("--windows", "2", "-o", by_trace)
    status, out, _ = verb("plan", "--trace", tmp_path / "trace.npz", *SIZES, *flags)
    assert status == 0 and out.startswith("Planned in full, on 20 pieces of history.\n")
    assert verb("plan", pieces, *SIZES, "-o", by_loads)[1] == out
    assert by_trace.read_bytes() == by_loads.read_bytes()


def test_groups_that_cannot_be_kept_on_nodes_are_said_to_be_split(verb, loads: Path) -> None:
    status, out, _ = verb("plan", loads, *SIZES, "--groups", "5")
    assert status == 0
    line = out.splitlines()[1]
    assert line.startswith("Planned globally, for --groups is 5: ") and "give --groups 2" in line
    assert "globally" not in verb("plan", loads, *SIZES, "--groups", "4")[1]


def test_a_layer_that_may_be_planned_anew_is_told_of(verb, loads: Path, live: Path) -> None:
    out = verb("plan", loads, *SIZES, "--prev", live, "--replan-slack", "0.01")[1]
    assert "Layers that a full plan makes better by over 0.01 were planned so." in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--move-budget", "3"), "--move-budget has no effect without --prev"),
        (("--replan-slack", "0.1"), "--replan-slack has no effect without --prev"),
        (("--expert-bytes", "9"), "--expert-bytes has no effect without --prev"),
        (("live", "--mode", "full", "--move-budget", "3"), "no effect with --mode full"),
        (("live", "--mode", "full", "--replan-slack", "1"), "no effect with --mode full"),
        (("--pieces-per-window", "3"), "no effect: `"),
        (("--windows", "2"), "--windows has no effect without --trace"),
        (("--groups", "4", "--policy", "global"), "--groups has no effect with --policy global"),
        (("--trace", "trace.npz"), "Give either LOADS or --trace"),
    ],
)
def test_options_of_plan_without_effect_are_refused(
    verb, loads: Path, live: Path, flags: tuple[str, ...], message: str
) -> None:
    words = [each for flag in flags for each in (("--prev", live) if flag == "live" else (flag,))]
    status, out, err = verb("plan", loads, *SIZES, *words)
    assert (status, out) == (2, "")
    assert message in err


def test_a_live_map_of_other_ranks_is_refused(verb, loads: Path, live: Path) -> None:
    # as many slots in all
    sizes = ("--ranks", "6", "--slots-per-rank", "4")
    status, out, err = verb("plan", loads, *sizes, "--prev", live)
    assert (status, out) == (2, "")
    assert "--prev is a map of 4 ranks x 6 slots, but --ranks is 6" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--slots-per-rank", "3"), "give --slots-per-rank 4 or more"),
        (("--nodes", "3"), "give a number of nodes that divides 4"),
        (("--exclude", "4"), "Excluded rank 4 is none of the 4 ranks"),
        (("--policy", "hierarchical"), "groups"),
        (("--policy", "hierarchical", "--groups", "5"), "5"),
        (("--mode", "incremental"), "there is no live map"),
        (("--prev", "live", "--move-budget", "-1"), "--move-budget is -1"),
        (("--prev", "live", "--replan-slack", "-1"), "--replan-slack is -1.0"),
        (("pieces", "--pieces-per-window", "0"), "--pieces-per-window is 0"),
        (("trace", "--pieces-per-window", "30"), "give --pieces-per-window 20 or less"),
        (("trace", "--windows", "0"), "--windows is 0"),
        (("--expert-bytes", "0"), "--expert-bytes is 0; allowed"),
        (("--prev", "none.json"), "none.json` cannot be read"),
        (("-o", "map.txt"), "allowed: .json and .npz"),
        (("--plot", "ranks.gif"), "allowed: .png"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    verb, loads: Path, pieces: Path, live: Path, change: tuple[str, ...], message: str
) -> None:
    np.savez(live.with_name("trace.npz"), hits=PIECES)
    source: list[object] = [pieces if "pieces" in change else loads]
    if "trace" in change:
        source = ["--trace", live.with_name("trace.npz")]
    words = [live if word == "live" else word for word in change]
    words = [word for word in words if word not in ("pieces", "trace")]
    status, out, err = verb("plan", *source, *SIZES, *words)
    assert (status, out) == (2, "")
    assert message in err and err.startswith("deepinfer-eplb: ")


def test_choices_and_numbers_are_checked_by_the_parser(
    loads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (("--policy", "best"), ("--split", "odd"), ("--exclude", "1,x"), ("--mode", "x")):
        assert leaves("plan", str(loads), *SIZES, *flags) == 2
        assert flags[0] in capsys.readouterr().err
    assert leaves("plan", str(loads), "--ranks", "4") == 2
    assert "--slots-per-rank" in capsys.readouterr().err


def test_a_map_that_cannot_be_written_is_status_1(verb, loads: Path, tmp_path: Path) -> None:
    status, _, err = verb("plan", loads, *SIZES, "-o", tmp_path / "none" / "map.json")
    assert status == 1
    assert "map.json` cannot be written" in err


@pytest.mark.parametrize("name", ["ranks.png", "ranks.svg"])
def test_plan_draws_ranks_before_and_after(
    verb, loads: Path, live: Path, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("matplotlib", reason=PLOTS)
    assert verb("plan", loads, *SIZES, "--prev", live, "--plot", tmp_path / name)[0] == 0
    content = (tmp_path / name).read_bytes()
    assert content.startswith(b"\x89PNG") or b"<svg" in content
    assert verb("plan", loads, *SIZES, "--plot", tmp_path / f"first-{name}")[0] == 0
    assert (tmp_path / f"first-{name}").read_bytes() != content


def test_a_plot_that_cannot_be_written_is_status_1(verb, loads: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason=PLOTS)
    status, _, err = verb("plan", loads, *SIZES, "--plot", tmp_path / "none" / "ranks.png")
    assert status == 1
    assert "ranks.png' cannot be written" in err


def test_a_plot_without_matplotlib_names_the_extra(
    verb, loads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments in (("plan", loads, *SIZES), SMALL):
        status, out, err = verb(*arguments, "--plot", "ranks.png")
        assert (status, out) == (2, "")
        assert "deepinfer-eplb[plot]" in err


# score


def test_score_rates_each_layer_and_says_what_could_be_had(verb, live: Path, loads: Path) -> None:
    status, out, err = verb("score", live, loads)
    assert (status, err) == (0, "")
    rows = rows_of(out)
    slots = load_map(live).physical_to_logical
    ratio = Planner().plan(LOADS, ranks=4, nodes=2, slots_per_rank=6, prev=slots).ratio_before
    bound = lower_bound(LOADS, Layout(4, 2, 6))
    assert rows[0][2:4] == ["in", "order"]
    in_order = in_order_imbalance(LOADS, Layout(4, 2, 6))
    assert [row[2] for row in rows[1:4]] == [f"{each:.3f}" for each in in_order]
    assert [row[0] for row in rows[1:]] == ["0", "1", "2", "mean", "worst"]
    assert rows[4][1] == f"{ratio:.3f}"
    assert [row[4] for row in rows[1:4]] == [f"{each:.3f}" for each in bound]
    for _, mine, _, split, least in rows[1:]:
        assert float(mine) >= float(split) >= float(least) >= 1
    assert rows[5][1] == max(row[1] for row in rows[1:4])
    assert float(rows[4][3]) < float(rows[4][1])


def test_score_by_the_split_of_the_map(verb, pieces: Path, loads: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    assert verb("plan", loads, *SIZES, "--split", "quota", "-o", path)[0] == 0
    by_quota = rows_of(verb("score", path, loads)[1])
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(fields | {"split": None}), encoding="utf-8")
    evenly = rows_of(verb("score", path, loads)[1])
    assert float(by_quota[4][1]) < float(evenly[4][1])
    assert by_quota[4][3] == evenly[4][3]


def test_score_rates_pieces_where_the_file_has_them(verb, live: Path, pieces: Path) -> None:
    rows = rows_of(verb("score", live, pieces)[1])
    assert rows[0][-2:] == ["of", "pieces"]
    assert float(rows[4][5]) > float(rows[4][1])


def test_loads_of_another_model_are_refused(verb, live: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", loads=LOADS[:2])
    for name in ("score", "report"):
        status, out, err = verb(name, live, tmp_path / "other.npz")
        assert (status, out) == (2, "")
        assert "`loads` has shape [2, 16], but the map is for [3, 16]" in err


# report


def test_report_says_what_a_map_holds(verb, live: Path) -> None:
    status, out, err = verb("report", live)
    assert (status, err) == (0, "")
    assert "3 layers of 16 experts, 4 ranks on 2 nodes x 6 slots, 8 of them spare" in out
    assert "When it was planned, slowest/mean of the window was 1." in out
    counts = load_map(live).num_replicas
    row = next(row for row in rows_of(out) if row[:1] == ["0"])
    assert row[1:3] == [str((counts[0] > 1).sum()), str(counts[0].max())]
    assert row[3] == str(np.argmax(counts[0]))


def test_report_under_loads_names_the_slowest_rank(verb, live: Path, loads: Path) -> None:
    out = verb("report", live, loads)[1]
    found = load_map(live)
    shares = LOADS[0] / found.num_replicas[0]
    ranks = shares[found.physical_to_logical[0]].reshape(4, 6).sum(1)
    row = next(row for row in rows_of(out) if row[:1] == ["0"])
    ratio = f"{ranks.max() / ranks.mean():.3f}"
    assert row[-3:] == [ratio, str(ranks.argmax()), str(ranks.argmin())]


def test_totals_have_the_same_names_in_every_table(
    verb, live: Path, loads: Path, tmp_path: Path
) -> None:
    path = tmp_path / "next.json"
    planned = table_of(verb("plan", loads, *SIZES, "--prev", live, "-o", path)[1])
    reported = table_of(verb("report", path, loads, "--prev", live)[1])
    scored = table_of(verb("score", path, loads)[1])
    assert [row[0] for row in planned[4:]] == ["mean", "worst", "all"]
    assert [row[0] for row in reported[4:]] == ["mean", "worst", "all"]
    assert [row[0] for row in scored[4:]] == ["mean", "worst"]
    for place in (4, 5):
        assert planned[place][2] == reported[place][1] == scored[place][1]
    assert planned[6][-1] == reported[6][-1]
    replicated = [int(row[1]) for row in reported[1:4]]
    assert reported[6][1:3] == [str(sum(replicated)), max(row[2] for row in reported[1:4])]


def test_report_counts_moves_from_another_map(
    verb, live: Path, loads: Path, tmp_path: Path
) -> None:
    path = tmp_path / "next.json"
    assert verb("plan", loads, *SIZES, "--prev", live, "-o", path)[0] == 0
    rows = rows_of(verb("report", path, "--prev", live)[1])
    moves = [int(row[-1]) for row in rows if row[:1] in (["0"], ["1"], ["2"])]
    assert sum(moves) == load_map(path).moves > 0


def test_report_names_excluded_ranks_and_the_split(verb, loads: Path, tmp_path: Path) -> None:
    flags = ("--exclude", "0,2", "--split", "quota", "-o", tmp_path / "map.json")
    assert verb("plan", loads, "--ranks", "4", "--slots-per-rank", "9", *flags)[0] == 0
    out = verb("report", tmp_path / "map.json", loads)[1]
    assert "Excluded ranks: 0, 2." in out and "by quota" in out
    assert "2 of them spare" in out
    assert {row[-2] for row in rows_of(out) if row[:1] in (["0"], ["1"], ["2"])} <= {"1", "3"}


def test_maps_of_other_sizes_cannot_be_compared(
    verb, live: Path, loads: Path, tmp_path: Path
) -> None:
    path = tmp_path / "map.json"
    assert verb("plan", loads, "--ranks", "2", "--slots-per-rank", "12", "-o", path)[0] == 0
    status, out, err = verb("report", live, "--prev", path)
    assert (status, out) == (2, "")
    assert "2 ranks, and 3 layers, 24 slots, 16 experts, 4 ranks" in err


def test_report_draws_with_loads_alone(verb, live: Path, loads: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason=PLOTS)
    status, _, err = verb("report", live, "--plot", tmp_path / "ranks.png")
    assert status == 2
    assert "--plot needs LOADS" in err
    assert verb("report", live, loads, "--plot", tmp_path / "ranks.png")[0] == 0
    first = (tmp_path / "ranks.png").read_bytes()
    more = ("--prev", live, "--plot", tmp_path / "ranks.png")
    assert verb("report", live, loads, *more)[0] == 0
    assert (tmp_path / "ranks.png").read_bytes() != first


# simulate


def without_times(out: str) -> list[list[str]]:
    """Return rows without the last column, of the summary milliseconds."""
    return [row[:-1] for row in rows_of(out)]


def test_simulate_prints_the_time_line_and_the_summary(verb) -> None:
    status, out, err = verb(*SMALL, "--timeline")
    assert (status, err) == (0, "")
    assert "4 ranks on 2 nodes x 6 slots; plans from 40 steps in every 80" in out
    assert "4 intervals of 20 pieces.\nGraded: 2 of them, 2 to 3" in out
    rows = rows_of(out)
    found = [tuple(row[:2]) for row in rows if len(row) > 1 and row[1] in STRATEGIES]
    lines = [pair for pair in found if pair[0] in ("drift", "hot", "all")]
    # each regime also heads its time line
    assert len(lines) == 2 + 3 * len(STRATEGIES)
    assert [row[0] for row in rows if row[:1] in (["2"], ["3"])] == ["2", "3"] * 2


def test_simulate_ends_with_the_summary_and_what_follows_from_it(verb) -> None:
    out = verb(*SMALL)[1]
    assert "by interval" not in out
    *_, summary, end = out.rstrip("\n").split("\n\n")
    rows = rows_of(summary)
    assert [row[:2] for row in rows] == [["all", name] for name in STRATEGIES]
    assert "\n" not in end and end.startswith("scenario-incremental has ")
    assert f"than window-full ({rows[1][5]}, {rows[1][9]} moves)" in end
    assert f"than none ({rows[0][5]}, 0.0 moves)" in end


def test_progress_is_shown_on_a_terminal_alone(
    verb, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = (*SMALL, "--strategies", "none", "--seeds", "0,1")
    assert verb(*quick)[2] == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    cases = [(regime, seed) for regime in ("drift", "hot") for seed in (0, 1)]
    assert verb(*quick)[2].splitlines() == [f"simulating {r}, seed {s}" for r, s in cases]


def test_simulate_repeats_by_seed(verb) -> None:
    first = without_times(verb(*SMALL, "--seeds", "3")[1])
    assert first == without_times(verb(*SMALL, "--seeds", "3")[1])
    assert first != without_times(verb(*SMALL, "--seeds", "4")[1])


@pytest.mark.parametrize(
    "change",
    [
        ("--regimes", "drift"),
        ("--seeds", "0,1"),
        ("--intervals", "5"),
        ("--layers", "3"),
        ("--experts", "17"),
        ("--hits", "90"),
        ("--phase", "prefill", "--hits", "60"),
        ("--ranks", "6"),
        ("--groups", "4"),
        ("--slots-per-rank", "7"),
        ("--window", "80"),
        ("--interval", "120"),
        ("--windows", "1"),
        ("--first", "3"),
        ("--strategies", "static,scenario-full"),
        ("--dispatch", "quota"),
        ("--dispatch", "step"),
        ("--move-budget", "1"),
        ("--single-steps", "5"),
        ("--timeline",),
    ],
)
def test_every_option_of_simulate_has_an_effect(verb, change: tuple[str, ...]) -> None:
    base = SMALL
    if change[0] == "--phase":  # which sets what is left out
        base = tuple(e for e in SMALL if e not in ("--slots-per-rank", "6"))
    status, out, err = verb(*base, *change)
    assert (status, err) == (0, "")
    assert without_times(out) != without_times(verb(*base)[1])


def test_nodes_matter_where_groups_stay_on_them(verb) -> None:
    found = [verb(*SMALL, "--groups", "4", "--nodes", nodes)[1] for nodes in ("1", "2")]
    rows = [without_times(out)[-3] for out in found]  # the summary's last
    assert rows[0][:2] == rows[1][:2] and rows[0] != rows[1]


def test_a_phase_sets_what_is_usual_in_it(verb) -> None:
    few = ("--layers", "1", "--experts", "128", "--intervals", "2", "--first", "1")
    few += ("--regimes", "stationary", "--strategies", "static")
    out = verb("simulate", *few)[1]
    assert "64 ranks on 8 nodes x 3 slots; plans from 1000 steps in every 10000" in out
    out = verb("simulate", "--phase", "prefill", *few)[1]
    assert "4 ranks on 1 node x 36 slots; plans from 100 steps in every 1000" in out


def test_out_appends_one_json_line_a_run(verb, tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    for seed in ("0", "1"):
        assert verb(*SMALL, "--seeds", seed, "--out", path)[0] == 0
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["asked"]["seeds"] for line in lines] == [[0], [1]]
    assert lines[0]["command"].startswith("deepinfer-eplb simulate --ranks 4 --nodes 2")
    assert lines[0]["asked"]["regimes"] == ["drift", "hot"]


def test_the_ratio_over_time_is_drawn(verb, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason=PLOTS)
    assert verb(*SMALL, "--plot", tmp_path / "ratio.png")[0] == 0
    assert (tmp_path / "ratio.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = verb(*SMALL, "--plot", tmp_path / "none" / "ratio.png")
    assert status == 1
    assert "cannot be written" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--regimes", "calm"), "Regime 'calm' is unknown"),
        (("--strategies", "best"), "Strategy 'best' is unknown; allowed: 'none', 'window-full'"),
        (("--seeds", "-1"), "A seed is -1"),
        (("--ranks", "0"), "--ranks is 0"),
        (("--layers", "0"), "--layers is 0"),
        (("--slots-per-rank", "3"), "give --slots-per-rank 4 or more"),
        (("--window", "45"), "--window is 45 steps; allowed: multiples of 10"),
        (("--window", "0"), "--window is 0 steps"),
        (("--interval", "81"), "--interval is 81 steps; allowed: multiples of 4"),
        (("--interval", "20"), "--window is 40 steps, more than --interval, 20"),
        (("--intervals", "2"), "give 3 or more"),
        (("--groups", "3"), "3"),
        (("--first", "0"), "--first is 0"),
        (("--windows", "0"), "--windows is 0"),
        (("--single-steps", "-1"), "--single-steps is -1"),
        (("--move-budget", "-1"), "--move-budget is -1"),
        (("--plot", "ratio.gif"), "allowed: .png"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_the_run(
    verb, change: tuple[str, ...], message: str
) -> None:
    status, out, err = verb(*SMALL, *change)
    assert (status, out) == (2, "")
    assert message in err


def test_a_file_that_cannot_be_written_is_named_before_the_run(verb, tmp_path: Path) -> None:
    status, out, err = verb(*SMALL, "--out", tmp_path / "none" / "figures.jsonl")
    assert (status, out) == (1, "")
    assert "figures.jsonl" in err and "cannot be written" in err


OF_TRACE = ("simulate", "--ranks", "4", "--slots-per-rank", "5", "--window", "40")
OF_TRACE += ("--interval", "80")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    traffic = Traffic(
        num_layers=2, num_experts=16, hits_per_step=240, steps_per_piece=8, pieces_per_interval=10
    )
    hits = generate(REGIMES[1], 5, 1, traffic)[:-3]
    np.savez(tmp_path / "trace.npz", hits=hits, steps_per_piece=8)
    np.savez(tmp_path / "bare.npz", hits=hits)
    return tmp_path / "trace.npz"


def test_a_recorded_trace_is_replayed(verb, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    status, out, err = verb(*OF_TRACE, "--trace", trace, "--out", path)
    assert (status, err) == (0, "")
    assert "47 pieces of 8 steps, a recorded trace: 4 intervals of 10 pieces, 7 pieces left" in out
    assert "Graded: 2 of them, 2 to 3" in out
    assert {row[0] for row in rows_of(out) if row[1:2] == ["static"]} == {"trace"}
    line = json.loads(path.read_text(encoding="utf-8"))
    assert line["asked"]["schedule"]["pieces_per_window"] == 5
    assert line["asked"]["schedule"]["first_graded"] == 2  # the last two of 4
    assert "traffic" not in line["asked"]


def test_pieces_of_unknown_length_are_a_tenth_of_a_window(verb, trace: Path) -> None:
    bare = trace.with_name("bare.npz")
    status, out, _ = verb(*OF_TRACE, "--interval", "40", "--trace", bare)
    assert status == 0
    assert "47 pieces of 4 steps" in out


@pytest.mark.parametrize(
    "flags",
    [
        ("--seeds", "0"),
        ("--regimes", "hot"),
        ("--layers", "2"),
        ("--experts", "16"),
        ("--hits", "9"),
        ("--intervals", "4"),
    ],
)
def test_options_of_the_traffic_say_nothing_with_a_trace(
    verb, trace: Path, flags: tuple[str, str]
) -> None:
    status, out, err = verb(*OF_TRACE, "--trace", trace, *flags)
    assert (status, out) == (2, "")
    assert f"{flags[0]} is of made-up traffic" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--window", "20"), "--window is 20 steps; allowed: multiples of 8"),
        (("--first", "9"), "--trace has 47 pieces; 110 are needed to grade 2 intervals"),
        (("--first", "9"), "with --interval 80 (10 pieces) and --first 9"),
        (("--interval", "200"), "--trace has 47 pieces; 75 are needed to grade 2 intervals"),
        (("--slots-per-rank", "3"), "give --slots-per-rank 4"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(
    verb, trace: Path, flags: tuple[str, str], message: str
) -> None:
    status, out, err = verb(*OF_TRACE, "--trace", trace, *flags)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("missing", ["--ranks", "--slots-per-rank"])
def test_a_trace_does_not_tell_where_experts_live(verb, trace: Path, missing: str) -> None:
    place = OF_TRACE.index(missing)
    status, out, err = verb(*OF_TRACE[:place], *OF_TRACE[place + 2 :], "--trace", trace)
    assert (status, out) == (2, "")
    assert "--trace needs --ranks and --slots-per-rank" in err
