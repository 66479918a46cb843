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
from deepinfer_eplb.files import load_map
from deepinfer_eplb.maps import Layout
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


# plan


def test_plan_writes_the_map_that_the_function_returns(verb, loads: Path, tmp_path: Path) -> None:
    status, out, err = verb("plan", loads, *SIZES, "-o", tmp_path / "map.npz")
    assert (status, err) == (0, "")
    found = load_map(tmp_path / "map.npz")
    assert np.array_equal(found.physical_to_logical, plan(LOADS, 4, 2, 6))
    assert found.layout == Layout(4, 2, 6) and found.num_experts == 16
    rows = rows_of(out)
    assert [row[0] for row in rows] == ["layer", "0", "1", "2", "all", "worst"]
    made = Planner().plan(LOADS, ranks=4, nodes=2, slots_per_rank=6)
    assert [row[2] for row in rows[1:4]] == [f"{each:.3f}" for each in made.imbalance(LOADS)]
    assert [row[1] for row in rows[1:5]] == ["-"] * 4
    assert [row[3] for row in rows[1:5]] == ["8", "8", "8", "24"]


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
    rows = rows_of(out)
    before = load_map(live).physical_to_logical
    want = Planner().plan(LOADS, ranks=4, nodes=2, slots_per_rank=6, prev=before)
    assert rows[4][:3] == ["all", f"{want.ratio_before:.3f}", f"{want.ratio_after:.3f}"]
    assert rows[4][-3:] == [str(want.moves), f"{want.moves}.0", "MiB"]
    assert want.ratio_before > want.ratio_after and want.moves > 0
    added = want.num_replicas - np.stack([np.bincount(layer) for layer in before])
    assert rows[4][3] == str(added.clip(0).sum()) != "0"
    found = load_map(tmp_path / "next.json")
    assert np.array_equal(found.physical_to_logical, want.physical_to_logical)
    assert (found.moves, found.ratio_before) == (want.moves, want.ratio_before)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((), ("--split", "quota")),
        ((), ("--exclude", "1,3")),
        (("--nodes", "2"), GROUPED),
        (GROUPED, (*GROUPED, "--policy", "global")),
        (("--prev", "live"), ("--prev", "live", "--mode", "full")),
        (("--prev", "live"), ("--prev", "live", "--move-budget", "1")),
        (
            ("--prev", "live", "--move-budget", "1"),
            ("--prev", "live", "--move-budget", "1", "--replan-slack", "0"),
        ),
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
    found = []
    for number, flags in enumerate((first, second)):
        source = tmp_path / "pieces.npz" if "pieces" in flags else loads
        words = [live if word == "live" else word for word in flags if word != "pieces"]
        sizes = ("--ranks", "4", "--slots-per-rank", "8")
        if "live" in flags:
            sizes = SIZES
        path = tmp_path / f"{number}.json"
        status, _, err = verb("plan", source, *sizes, *words, "-o", path)
        assert (status, err) == (0, "")
        found.append(path.read_bytes())
    assert found[0] != found[1]


def test_an_excluded_rank_holds_nothing(verb, loads: Path, tmp_path: Path) -> None:
    flags = ("--exclude", "3", "-o", tmp_path / "map.json")
    assert verb("plan", loads, *SIZES, *flags)[0] == 0
    found = load_map(tmp_path / "map.json")
    assert found.layout.excluded == (3,)
    assert (found.physical_to_logical[:, 18:] == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--slots-per-rank", "3"), "give `slots_per_rank` 4 or more"),
        (("--nodes", "3"), "give a number of nodes that divides 4"),
        (("--exclude", "4"), "Excluded rank 4 is none of the 4 ranks"),
        (("--policy", "hierarchical"), "groups"),
        (("--policy", "hierarchical", "--groups", "5"), "5"),
        (("--mode", "incremental"), "there is no live map"),
        (("--move-budget", "-1"), "`move_budget` is -1"),
        (("--replan-slack", "-1"), "`replan_slack` is -1.0"),
        (("--pieces-per-window", "0"), "`pieces_per_window` is 0"),
        (("--expert-bytes", "0"), "--expert-bytes is 0; allowed"),
        (("--prev", "none.json"), "none.json` cannot be read"),
        (("-o", "map.txt"), "allowed: .json and .npz"),
        (("--plot", "ranks.gif"), "allowed: .png"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    verb, loads: Path, change: tuple[str, ...], message: str
) -> None:
    status, out, err = verb("plan", loads, *SIZES, *change)
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
    assert [row[0] for row in rows[1:]] == ["0", "1", "2", "mean", "worst"]
    assert rows[4][1] == f"{ratio:.3f}"
    assert [row[3] for row in rows[1:4]] == [f"{each:.3f}" for each in bound]
    for _, mine, split, least in rows[1:]:
        assert float(mine) >= float(split) >= float(least) >= 1
    assert rows[5][1] == max(row[1] for row in rows[1:4])
    assert float(rows[4][2]) < float(rows[4][1])


def test_score_by_the_split_of_the_map(verb, pieces: Path, loads: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    assert verb("plan", loads, *SIZES, "--split", "quota", "-o", path)[0] == 0
    by_quota = rows_of(verb("score", path, loads)[1])
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(fields | {"split": None}), encoding="utf-8")
    evenly = rows_of(verb("score", path, loads)[1])
    assert float(by_quota[4][1]) < float(evenly[4][1])
    assert by_quota[4][2] == evenly[4][2]


def test_score_rates_pieces_where_the_file_has_them(verb, live: Path, pieces: Path) -> None:
    rows = rows_of(verb("score", live, pieces)[1])
    assert rows[0][-2:] == ["of", "pieces"]
    assert float(rows[4][4]) > float(rows[4][1])


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
    """Return the summary's rows without the last column, milliseconds."""
    return [row[:-1] for row in rows_of(out)]


def test_simulate_prints_the_time_line_and_the_summary(verb) -> None:
    status, out, err = verb(*SMALL)
    assert (status, err) == (0, "")
    assert "4 ranks on 2 nodes x 6 slots; plans from 40 steps in every 80" in out
    rows = rows_of(out)
    found = [tuple(row[:2]) for row in rows if len(row) > 1 and row[1] in STRATEGIES]
    lines = [pair for pair in found if pair[0] in ("drift", "hot", "all")]
    # each regime also heads its time line
    assert len(lines) == 2 + 3 * 5
    assert [row[0] for row in rows if row[:1] in (["2"], ["3"])] == ["2", "3"] * 2


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
    rows = [without_times(out)[-1] for out in found]  # the summary's last
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
        (("--strategies", "best"), "Strategy 'best' is unknown; allowed: 'window-full'"),
        (("--seeds", "-1"), "A seed is -1"),
        (("--ranks", "0"), "`num_ranks` is 0"),
        (("--layers", "0"), "`num_layers` is 0"),
        (("--slots-per-rank", "3"), "give `slots_per_rank` 4 or more"),
        (("--window", "45"), "--window is 45 steps; allowed: multiples of 10"),
        (("--window", "0"), "--window is 0 steps"),
        (("--interval", "81"), "--interval is 81 steps; allowed: multiples of 4"),
        (("--interval", "20"), "`pieces_per_window` is 10"),
        (("--intervals", "2"), "give 3 or more"),
        (("--groups", "3"), "3"),
        (("--first", "0"), "`first_graded` is 0"),
        (("--windows", "0"), "`num_windows` is 0"),
        (("--single-steps", "-1"), "`single_steps` is -1"),
        (("--move-budget", "-1"), "`move_budget` is -1"),
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


OF_TRACE = ("simulate", "--ranks", "4", "--window", "40", "--interval", "80")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    traffic = Traffic(
        num_layers=2, num_experts=16, hits_per_step=240, steps_per_piece=8, pieces_per_interval=10
    )
    hits = generate(REGIMES[1], 4, 1, traffic)
    np.savez(tmp_path / "trace.npz", hits=hits, steps_per_piece=8)
    np.savez(tmp_path / "bare.npz", hits=hits)
    return tmp_path / "trace.npz"


def test_a_recorded_trace_is_replayed(verb, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    status, out, err = verb(*OF_TRACE, "--trace", trace, "--out", path)
    assert (status, err) == (0, "")
    assert "each 8 steps" in out
    assert {row[0] for row in rows_of(out) if row[1:2] == ["static"]} == {"trace"}
    line = json.loads(path.read_text(encoding="utf-8"))
    assert line["asked"]["schedule"]["pieces_per_window"] == 5
    assert line["asked"]["schedule"]["first_graded"] == 3  # the last of 4
    assert "traffic" not in line["asked"]


def test_pieces_of_unknown_length_are_a_tenth_of_a_window(verb, trace: Path) -> None:
    status, out, _ = verb(*OF_TRACE, "--trace", trace.with_name("bare.npz"))
    assert status == 0
    assert "each 4 steps" in out


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
        (("--first", "9"), "There are 4 `intervals`, but interval 9 is the first graded"),
        (("--slots-per-rank", "3"), "give `slots_per_rank` 4"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(
    verb, trace: Path, flags: tuple[str, str], message: str
) -> None:
    status, out, err = verb(*OF_TRACE, "--trace", trace, *flags)
    assert (status, out) == (2, "")
    assert message in err
