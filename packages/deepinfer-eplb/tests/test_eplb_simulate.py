"""Replay, strategies, sweeps, and what they print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer_eplb import Plan, PlanInputError, Planner, SettingError
from deepinfer_eplb.maps import Layout, num_arrivals
from deepinfer_eplb.report import in_order, in_order_imbalance
from deepinfer_eplb.simulate import (
    REGIMES,
    STRATEGIES,
    TRACE,
    Moment,
    Run,
    Schedule,
    Sweep,
    Traffic,
    conclusion,
    describe,
    generate,
    json_line,
    make_strategy,
    plot,
    ratios,
    replay,
    summarise,
    sweep,
    table,
    time_line,
    unbeatable,
)

LAYOUT = Layout(8, 2, 5)
SCHEDULE = Schedule(
    steps_per_piece=10, pieces_per_window=4, pieces_per_interval=12, num_windows=2, first_graded=2
)
TRAFFIC = Traffic(
    num_layers=2, num_experts=32, hits_per_step=8 * 60, steps_per_piece=10, pieces_per_interval=12
)
SMALL = Sweep(
    layout=LAYOUT,
    schedule=SCHEDULE,
    traffic=TRAFFIC,
    regimes=("drift", "hot"),
    seeds=(0, 1),
    intervals=5,
)


@pytest.fixture(scope="module")
def hits() -> np.ndarray:
    return generate("drift", 5, 3, TRAFFIC)


@pytest.fixture(scope="module")
def runs() -> tuple[Run, ...]:
    return sweep(SMALL)


def map_of(*ranks: tuple[int, ...]) -> np.ndarray:
    return np.array([sum(ranks, ())], np.int32)


def fixed(physical_to_logical: np.ndarray, num_experts: int, layout: Layout, split=None):
    """Return a strategy that always says the same, and what it was told."""
    told: list[Moment] = []

    def strategy(moment: Moment) -> Plan:
        told.append(moment)
        return Plan(physical_to_logical, num_experts, layout, split, None, moment.loads)

    return strategy, told


# replay

TWO = Layout(2, 1, 2)
BY_TWO = Schedule(
    steps_per_piece=1, pieces_per_window=1, pieces_per_interval=2, num_windows=2, first_graded=1
)
#                     interval 0                  interval 1                  interval 2
PIECES = np.array([[1, 1, 1], [6, 2, 4], [8, 0, 0], [0, 4, 4], [2, 2, 4], [4, 4, 8]])[:, None]


def test_figures_are_those_of_the_next_interval_worked_by_hand() -> None:
    # rank 0 holds 0 and 1, rank 1 holds 0 and 2
    strategy, _ = fixed(map_of((0, 1), (0, 2)), 3, TWO)
    first, second = replay(PIECES, TWO, strategy, BY_TWO)
    assert (first.index, second.index) == (1, 2)
    # window: loads 6 2 4, ranks 5 and 7
    assert first.planned == pytest.approx([7 / 6])
    # pieces: ranks 4 4 and 4 4; their sum: 8 8
    assert first.piece == pytest.approx([1]) and first.interval == pytest.approx([1])
    # pieces: ranks 3 5 and 6 10; the sum 9 15
    assert second.piece == pytest.approx([1.25]) and second.interval == pytest.approx([1.25])
    # with all of expert 0 on rank 0: ranks 4 4 and 8 8
    assert second.best_split == pytest.approx([1])


def test_pieces_are_rated_one_by_one_and_then_averaged() -> None:
    strategy, _ = fixed(map_of((0, 1), (0, 2)), 3, TWO)
    pieces = PIECES.copy()
    pieces[4:] = [[[0, 8, 0]], [[0, 0, 8]]]
    _, found = replay(pieces, TWO, strategy, BY_TWO)
    assert found.piece == pytest.approx([2]) and found.interval == pytest.approx([1])


def test_a_strategy_is_told_the_last_windows_and_its_own_plan() -> None:
    strategy, told = fixed(map_of((0, 1), (0, 2)), 3, TWO)
    replay(PIECES, TWO, strategy, BY_TWO)
    assert told[0].loads.tolist() == [[6, 2, 4]]
    assert told[0].history.tolist() == [[[6, 2, 4]]]
    assert told[0].live is None
    assert told[1].loads.tolist() == [[0, 4, 4]]
    assert told[1].history.tolist() == [[[6, 2, 4]], [[0, 4, 4]]]
    assert told[1].live is not None and told[1].pieces_per_window == 1


def test_no_strategy_sees_the_interval_it_is_graded_on(hits: np.ndarray) -> None:
    future = hits.copy()
    future[24:] = future[24:, :, ::-1]  # interval 2 and later
    plans: list[list[Plan]] = [[], []]
    for trace, made in zip((hits, future), plans, strict=True):
        planner = make_strategy("scenario-incremental")

        def spy(moment: Moment, planner=planner, made=made) -> Plan:
            made.append(planner(moment))
            return made[-1]

        replay(trace, LAYOUT, spy, SCHEDULE)
    before, after = ([plan.digest for plan in made] for made in plans)
    assert before[:2] == after[:2]
    assert before[2] != after[2]


def test_moves_are_counted_from_the_map_before_and_not_at_start(hits: np.ndarray) -> None:
    made: list[Plan] = []
    planner = make_strategy("window-full")

    def spy(moment: Moment) -> Plan:
        made.append(planner(moment))
        return made[-1]

    every = Schedule(**{**vars(SCHEDULE), "first_graded": 1})
    found = replay(hits, LAYOUT, spy, every)
    assert found[0].moves.tolist() == [0, 0]
    for interval, old, new in zip(found[1:], made, made[1:], strict=False):
        want = num_arrivals(new.physical_to_logical, old.physical_to_logical, 8)
        assert interval.moves.tolist() == want.tolist() and want.sum() > 0


def test_quota_uses_the_plans_split_and_step_the_best_of_each_piece() -> None:
    split = np.array([[1.0, 1.0, 0.0, 1.0]])  # all of expert 0 on rank 0
    strategy, _ = fixed(map_of((0, 1), (0, 2)), 3, TWO, split)
    pieces = PIECES.copy()
    pieces[4:] = [[[2, 2, 4]], [[2, 4, 2]]]
    by_quota = replay(pieces, TWO, strategy, BY_TWO, "quota")[1]
    assert by_quota.piece == pytest.approx([(1 + 1.5) / 2])
    by_step = replay(pieces, TWO, strategy, BY_TWO, "step")[1]
    assert by_step.piece == pytest.approx([1])
    evenly = replay(pieces, TWO, strategy, BY_TWO)[1]
    assert evenly.piece == pytest.approx([(1.25 + 1.25) / 2])


def test_quota_without_a_split_is_refused() -> None:
    strategy, _ = fixed(map_of((0, 1), (0, 2)), 3, TWO)
    with pytest.raises(SettingError, match="split='quota'"):
        replay(PIECES, TWO, strategy, BY_TWO, "quota")


def test_single_steps_are_worse_than_their_pieces_and_repeat(hits: np.ndarray) -> None:
    schedule = Schedule(**{**vars(SCHEDULE), "single_steps": 24})
    strategy = make_strategy("window-full")
    first, again = (replay(hits, LAYOUT, strategy, schedule) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one.step is not None and other.step is not None
        assert (one.step > one.piece).all()
        assert one.step.tolist() == other.step.tolist()
    assert replay(hits, LAYOUT, strategy, SCHEDULE)[0].step is None


def test_single_steps_have_the_tokens_of_a_step_and_a_seed(hits: np.ndarray) -> None:
    strategy = make_strategy("window-full")

    def mean_of(**change: int) -> float:
        schedule = Schedule(**{**vars(SCHEDULE), "single_steps": 24, **change})
        found = replay(hits, LAYOUT, strategy, schedule)
        return float(np.mean([interval.step for interval in found]))

    # the fewer tokens a step has, the more chance there is in it
    assert mean_of(steps_per_piece=1) < mean_of() < mean_of(steps_per_piece=50)
    assert mean_of() != mean_of(seed=1)


def test_a_map_that_holds_an_expert_twice_is_graded_without_its_best_split() -> None:
    strategy, _ = fixed(map_of((0, 0), (1, 2)), 3, TWO)
    found = replay(PIECES, TWO, strategy, BY_TWO)[1]
    assert found.best_split is None
    assert found.piece == pytest.approx([1.5])


def test_excluded_ranks_are_planned_around(hits: np.ndarray) -> None:
    layout = Layout(8, 2, 5, (3,))
    made: list[Plan] = []
    planner = make_strategy("scenario-full")

    def spy(moment: Moment) -> Plan:
        made.append(planner(moment))
        return made[-1]

    found = replay(hits, layout, spy, SCHEDULE)
    assert all((plan.physical_to_logical[:, 15:20] == -1).all() for plan in made)
    assert max(interval.piece.max() for interval in found) < 8 / 7 * 1.6


def test_no_figure_is_below_what_no_map_can_beat(runs: tuple[Run, ...]) -> None:
    for run in runs:
        for interval, bound in zip(run.intervals, run.unbeatable, strict=True):
            assert interval.best_split is not None
            assert (interval.piece >= interval.best_split - 1e-9).all()
            assert (interval.best_split >= bound - 1e-9).all()


def test_the_bound_is_above_1_where_one_expert_is_too_heavy() -> None:
    pieces = np.ones((6, 1, 3))
    pieces[:, :, 0] = 10
    layout = Layout(3, 1, 1)
    assert unbeatable(pieces, layout, BY_TWO)[0] == pytest.approx([10 / 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces_per_window": 13}, "at most as many"),
        ({"steps_per_piece": 0}, "`steps_per_piece` is 0; allowed: whole numbers from 1"),
        ({"first_graded": True}, "`first_graded` is True"),
        ({"single_steps": -1}, "whole numbers from 0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Schedule(**{**vars(SCHEDULE), **change})


def test_a_trace_that_is_too_short_says_how_much_is_needed() -> None:
    strategy, _ = fixed(map_of((0, 1), (0, 2)), 3, TWO)
    with pytest.raises(PlanInputError, match="3 pieces, which are 1 intervals of 2;"):
        replay(PIECES[:3], TWO, strategy, BY_TWO)


def test_an_unknown_dispatch_is_refused() -> None:
    strategy, _ = fixed(map_of((0, 1), (0, 2)), 3, TWO)
    with pytest.raises(SettingError, match="'best'; allowed: 'even', 'quota', 'step'"):
        replay(PIECES, TWO, strategy, BY_TWO, "best")


def test_ratios_are_those_of_the_plan(hits: np.ndarray) -> None:
    loads = hits[:12].sum(0).astype(float)
    plan = Planner(split="quota").plan(loads, ranks=8, nodes=2, slots_per_rank=5)
    assert ratios(plan, loads, "quota") == pytest.approx(plan.imbalance(loads))
    assert (ratios(plan, loads, "even") >= plan.imbalance(loads)).all()


# strategies


def test_each_strategy_plans_as_its_name_says(hits: np.ndarray) -> None:
    floats = hits.astype(float)
    window, history = floats[20:24].sum(0), floats[[*range(8, 12), *range(20, 24)]]
    sizes = {"ranks": 8, "nodes": 2, "slots_per_rank": 5}
    live = Planner().plan(floats[8:12].sum(0), **sizes)
    moment = Moment(window, history, 4, live, LAYOUT)
    again = {"prev": live.physical_to_logical}
    full, few = Planner(mode="full"), Planner(pieces_per_window=4)
    unbalanced = np.full((2, 8, 5), -1)
    unbalanced[:, :, :4] = np.arange(32).reshape(8, 4)
    want = {
        "window-full": full.plan(window, **sizes, **again),
        "window-incremental": few.plan(window, **sizes, **again),
        "scenario-full": Planner(mode="full", pieces_per_window=4).plan(
            window, **sizes, **again, history=history
        ),
        "scenario-incremental": few.plan(window, **sizes, **again, history=history),
        "static": live,
    }
    assert ["none", *want] == list(STRATEGIES)
    found = {name: make_strategy(name)(moment).digest for name in want}
    assert found == {name: plan.digest for name, plan in want.items()}
    assert len(set(found.values())) == 5
    first = replace(moment, live=None)
    none = make_strategy("none")(first)
    assert none.physical_to_logical.reshape(2, 8, 5).tolist() == unbalanced.tolist()


def test_without_balancing_ranks_have_experts_in_order_and_nothing_ever_moves() -> None:
    # three ranks, one of them excluded; 5 experts: 0 to 2 on the first, 3 and 4 on the last
    layout = Layout(3, 1, 4, (1,))
    hits = np.tile([[[4, 1, 1, 1, 1]]], (6, 1, 1))
    found = replay(hits, layout, make_strategy("none"), BY_TWO)
    for interval in found:
        assert interval.piece == pytest.approx([6 / 4]) and interval.moves.tolist() == [0]
        assert interval.best_split == pytest.approx([6 / 4])
    for dispatch in ("quota", "step"):
        again = replay(hits, layout, make_strategy("none"), BY_TWO, dispatch)
        assert [each.piece for each in again] == [each.piece for each in found]


def test_experts_in_order_are_spread_like_the_parts_of_an_array() -> None:
    layout = Layout(4, 1, 4)
    rows = in_order(10, layout).reshape(4, 4)
    want = [[0, 1, 2, -1], [3, 4, 5, -1], [6, 7, -1, -1], [8, 9, -1, -1]]
    assert rows.tolist() == want
    loads = np.arange(20).reshape(2, 10)
    sums = np.array([[3, 12, 13, 17], [33, 42, 33, 37]])
    assert in_order_imbalance(loads, layout) == pytest.approx(sums.max(1) / sums.mean(1))
    with pytest.raises(PlanInputError, match="17 experts do not fit"):
        in_order(17, layout)


def test_the_move_budget_holds(hits: np.ndarray) -> None:
    found = replay(hits, LAYOUT, make_strategy("scenario-incremental", move_budget=2), SCHEDULE)
    assert max(interval.moves.max() for interval in found) == 2


def test_an_unknown_strategy_names_those_there_are() -> None:
    with pytest.raises(SettingError, match="'best' is unknown; allowed: 'none', 'window-full', "):
        make_strategy("best")


# sweeps


def test_a_sweep_runs_each_strategy_in_each_regime_and_seed(runs: tuple[Run, ...]) -> None:
    found = [(run.regime, run.seed, run.strategy) for run in runs]
    want = [(r, s, n) for r in ("drift", "hot") for s in (0, 1) for n in STRATEGIES]
    assert found == want
    assert all([each.index for each in run.intervals] == [2, 3, 4] for run in runs)


def test_planning_again_is_better_than_never_and_pieces_better_than_sums(
    runs: tuple[Run, ...],
) -> None:
    lines = {(line.regime, line.strategy): line for line in summarise(runs)}
    assert lines["drift", "static"].piece < lines["drift", "none"].piece
    for name in STRATEGIES:
        if name not in ("static", "none"):
            assert lines["drift", name].piece < lines["drift", "static"].piece
            assert lines["all", name].moves > 0
        assert lines["drift", name].interval <= lines["drift", name].piece
    assert lines["drift", "static"].moves == lines["drift", "static"].most_moves == 0
    assert lines["drift", "window-full"].planned < lines["drift", "window-full"].piece


def test_a_summary_is_the_mean_of_its_runs(runs: tuple[Run, ...]) -> None:
    line = next(e for e in summarise(runs) if (e.regime, e.strategy) == ("hot", "scenario-full"))
    own = [run for run in runs if (run.regime, run.strategy) == ("hot", "scenario-full")]
    pieces = np.array([interval.piece for run in own for interval in run.intervals])
    assert line.piece == pytest.approx(pieces.mean())
    assert line.worst == pytest.approx(pieces.max(1).mean())
    assert line.most_moves == max(i.moves.max() for run in own for i in run.intervals)


def test_a_recorded_trace_takes_the_place_of_the_traffic(hits: np.ndarray) -> None:
    runs = sweep(SMALL, trace=hits)
    assert {(run.regime, run.seed) for run in runs} == {(TRACE, 0)}
    assert runs[1].strategy == "window-full"
    alone = replay(hits, LAYOUT, make_strategy("window-full"), SCHEDULE)
    assert [i.piece.tolist() for i in runs[1].intervals] == [i.piece.tolist() for i in alone]


def test_a_trace_needs_nothing_to_be_said_of_the_traffic(hits: np.ndarray) -> None:
    # The traffic that is made up by default has 384 experts, which do not fit, and more intervals.
    asked = Sweep(layout=LAYOUT, schedule=SCHEDULE, strategies=("none",))
    (run,) = sweep(asked, trace=hits)
    assert [each.index for each in run.intervals] == [2, 3, 4]
    with pytest.raises(PlanInputError, match="384 experts do not fit"):
        sweep(asked)
    with pytest.raises(PlanInputError, match="64 experts do not fit"):
        sweep(asked, trace=np.tile(hits, (1, 1, 2)))
    with pytest.raises(PlanInputError, match=r"`trace` has shape \[2, 32\]"):
        sweep(asked, trace=hits[0])


def test_pieces_of_the_traffic_are_those_of_the_schedule(runs: tuple[Run, ...]) -> None:
    other = replace(TRAFFIC, steps_per_piece=77, pieces_per_interval=5)
    again = sweep(replace(SMALL, traffic=other, regimes=("drift",), seeds=(0,)))
    for run, same in zip(runs, again, strict=False):
        assert [i.piece.tolist() for i in run.intervals] == [
            i.piece.tolist() for i in same.intervals
        ]


def test_other_strategies_can_be_put_in(hits: np.ndarray) -> None:
    mine = {"mine": make_strategy("window-full")}
    watched: list[tuple[str, int]] = []
    runs = sweep(SMALL, mine, hits, watch=lambda *case: watched.append(case))
    assert [run.strategy for run in runs] == ["mine"]
    assert watched == [(TRACE, 0)]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"regimes": ("calm",)}, SettingError, "Regime 'calm' is unknown; allowed: 'stationary'"),
        ({"regimes": ()}, SettingError, r"`regimes` is \(\); allowed: one or more"),
        ({"seeds": (1, 1)}, SettingError, "none twice"),
        ({"seeds": (-1,)}, SettingError, "A seed is -1"),
        ({"intervals": 2}, SettingError, "give 3 or more"),
        ({"layout": Layout(2, 1, 4)}, PlanInputError, "32 experts do not fit"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sweep(Sweep(**{**vars(SMALL), **change}))


# what is printed


def test_the_table_compares_with_the_first_strategy(runs: tuple[Run, ...]) -> None:
    lines = summarise(runs)
    rows = [row.split() for row in table(lines).splitlines()]
    heads = ["regime", "strategy", "window", "interval", "piece", "excess", "vs", "none"]
    heads += ["worst", "layer", "best", "split", "moves", "most", "moves", "plan", "ms"]
    assert rows[0] == heads
    assert "step" not in rows[0]
    assert rows[1][:2] == ["drift", "none"] and rows[1][6] == "-"
    gain = (lines[4].piece - 1) / (lines[0].piece - 1) - 1
    assert rows[5][:2] == ["drift", "scenario-incremental"]
    assert rows[5][5] == f"{100 * (lines[4].piece - 1):.1f}%"
    assert float(rows[5][6].rstrip("%")) == pytest.approx(100 * gain, abs=0.051)
    assert [row[6] for row in rows if row[1:2] == ["none"]] == ["-"] * 3
    of_regimes = [name for name in ("drift", "hot", "all") for _ in STRATEGIES]
    assert [row[0] for row in rows if row] == ["regime", *of_regimes]


def test_the_conclusion_says_what_the_default_gains(runs: tuple[Run, ...]) -> None:
    lines = summarise(runs)
    found = {line.strategy: line for line in lines if line.regime == "all"}
    own, full, none = (found[n] for n in ("scenario-incremental", "window-full", "none"))
    less = [1 - (own.piece - 1) / (other.piece - 1) for other in (full, none)]
    assert conclusion(lines) == (
        f"scenario-incremental has {100 * (own.piece - 1):.1f}% excess for {own.moves:.1f} moves "
        f"a layer and plan: {100 * less[0]:.0f}% less than window-full "
        f"({100 * (full.piece - 1):.1f}%, {full.moves:.1f} moves), {100 * less[1]:.0f}% less than "
        f"none ({100 * (none.piece - 1):.1f}%, 0.0 moves)."
    )
    worse = [replace(line, piece=2.0) if line.strategy == own.strategy else line for line in lines]
    assert "% more than window-full" in conclusion(worse)
    assert conclusion([line for line in lines if line.strategy != own.strategy]) == ""
    assert conclusion([own]) == ""
    assert "window-full" not in conclusion([own, none])


def test_the_time_line_has_the_mean_over_seeds_of_each_interval(runs: tuple[Run, ...]) -> None:
    rows = [row.split() for row in time_line(runs).splitlines()]
    assert rows[2] == ["drift", *STRATEGIES]
    own = [run for run in runs if (run.regime, run.strategy) == ("drift", "none")]
    ratio = np.mean([run.intervals[1].piece for run in own])
    moves = np.mean([run.intervals[1].moves for run in own])
    assert rows[4][:3] == ["3", f"{ratio:.3f}", f"{moves:.1f}"]


def test_the_description_says_what_each_figure_is_of() -> None:
    text = describe(SMALL)
    assert "8 ranks on 2 nodes x 5 slots; plans from 40 steps in every 120" in text
    assert "60 pieces of 10 steps, made-up traffic: 5 intervals of 12 pieces.\n" in text
    assert "Graded: 3 of them, 2 to 4;" in text and "never compare" in text
    text = describe(SMALL, 43)
    assert (
        "43 pieces of 10 steps, a recorded trace: 3 intervals of 12 pieces, 7 pieces left" in text
    )
    assert "Graded: 1 of them, 2 to 2;" in text


def test_the_json_line_has_what_is_needed_to_repeat_it(runs: tuple[Run, ...]) -> None:
    text = json_line(SMALL, summarise(runs), {"command": "deepinfer-eplb simulate"})
    assert "\n" not in text
    found = json.loads(text)
    assert found["asked"]["seeds"] == [0, 1]
    assert found["asked"]["traffic"]["num_experts"] == 32
    assert found["asked"]["layout"]["slots_per_rank"] == 5
    assert found["lines"][0]["strategy"] == "none"
    assert found["lines"][0]["unbeatable"] >= 1
    assert found["lines"][0]["step"] is None
    assert found["device"].startswith("cpu")
    assert set(found["versions"]) == {"python", "numpy", "scipy", "numba", "deepinfer-eplb"}


def test_a_json_line_of_a_trace_says_nothing_of_made_up_traffic(hits: np.ndarray) -> None:
    runs = sweep(SMALL, {"mine": make_strategy("static")}, hits)
    found = json.loads(json_line(SMALL, summarise(runs), {}))
    assert not {"traffic", "regimes", "seeds"} & found["asked"].keys()


def test_the_ratio_over_time_is_drawn(runs: tuple[Run, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a plot needs the extra `plot`")
    plot(tmp_path / "ratio.svg", runs)
    text = (tmp_path / "ratio.svg").read_text(encoding="utf-8")
    assert "<svg" in text and len(text) > 10_000


def test_a_plot_has_whole_intervals_and_a_hollow_mark_for_each_strategy(
    runs: tuple[Run, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="a plot needs the extra `plot`")
    drawn = []
    monkeypatch.setattr(
        "deepinfer_eplb.simulate.report.save_figure", lambda path, figure: drawn.append(figure)
    )
    plot(tmp_path / "ratio.svg", runs)
    for pane in drawn[0].axes:
        assert pane.get_xticks().tolist() == [2, 3, 4]
        curves = pane.get_lines()
        assert len({curve.get_marker() for curve in curves}) == len(STRATEGIES)
        assert {curve.get_markerfacecolor() for curve in curves} == {"none"}
    own = [run for run in runs if (run.regime, run.strategy) == ("drift", "none")]
    piece = np.mean([[each.piece for each in run.intervals] for run in own], (0, 2))
    assert drawn[0].axes[0].get_lines()[0].get_ydata() == pytest.approx(100 * (piece - 1))


def test_every_regime_is_simulated_by_default() -> None:
    assert Sweep().regimes == REGIMES and Sweep().strategies == tuple(STRATEGIES)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_layers": 0}, "`num_layers` is 0.*whole numbers from 1"),
        ({"hits_per_step": -5.0}, "`hits_per_step` is -5.0.*above 0"),
        ({"hits_per_step": 1e12}, "to 1e.09"),
        ({"shift_every": 0.0}, "`shift_every` is 0.0.*above 0"),
        ({"base_spread": float("nan")}, "`base_spread` is nan"),
        ({"num_topics": True}, "`num_topics` is True"),
    ],
)
def test_traffic_with_impossible_settings_is_refused(
    settings: dict[str, float], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        Traffic(**settings)
