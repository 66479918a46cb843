"""What a simulation prints and writes: time lines, a summary table, a JSON line, a plot."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numba
import numpy as np
import scipy

from deepinfer_eplb import __version__
from deepinfer_eplb.drawing import new_figure, save_figure
from deepinfer_eplb.maps import Floats
from deepinfer_eplb.simulate.strategies import DEFAULT_STRATEGY
from deepinfer_eplb.simulate.sweep import TRACE, Line, Run, Sweep
from deepinfer_eplb.tables import aligned, words_of

__all__ = ["conclusion", "describe", "json_line", "plot", "table", "time_line"]

_COMPARED = ("window-full", "none")  # what the conclusion compares with
_MARKERS = "osD^v*"
_LEAST_DRAWN = 1e-2  # percent


def describe(asked: Sweep, num_pieces: int | None = None) -> str:
    """Return what is simulated, and what the figures are.

    Args:
        asked: the sweep.
        num_pieces: of a recorded trace; None: the traffic is made up.
    """
    layout, schedule = asked.layout, asked.schedule
    window = schedule.pieces_per_window * schedule.steps_per_piece
    length = schedule.pieces_per_interval
    interval = length * schedule.steps_per_piece
    total = asked.intervals * length if num_pieces is None else num_pieces
    last = total // length - 1
    source = "made-up traffic" if num_pieces is None else "a recorded trace"
    rest = "" if num_pieces is None else f", {total % length} pieces left over"
    return (
        f"{words_of(layout)}; "
        f"plans from {window} steps in every {interval}; dispatch {asked.dispatch!r}.\n"
        f"{total} pieces of {schedule.steps_per_piece} steps, {source}: {last + 1} intervals of "
        f"{length} pieces{rest}.\n"
        f"Graded: {last + 1 - schedule.first_graded} of them, {schedule.first_graded} to {last}; "
        "those before fill the windows.\n"
        "\n"
        "Figures are slowest rank over mean, 1 is perfect, mean over layers; of\n"
        "  window       the loads that were planned on\n"
        "  interval     the sum of the next interval\n"
        "  piece        each piece of it, mean: nearest to the time paid\n"
        "  excess       what `piece` has over 1; `vs` is how far it is from the first strategy's\n"
        "  worst layer  `piece` of the worst layer\n"
        "  step         single steps of the next interval, drawn from its pieces\n"
        "  best split   `piece`, were each piece shared among the map's replicas the best way\n"
        "Window, interval, piece and step are of different times: never compare one with another."
        "\n"
        "Moves are experts copied between ranks in one layer for one plan, mean and most; "
        "`plan ms` is of a layer."
    )


def time_line(runs: Sequence[Run]) -> str:
    """Return a table for each regime: `piece` ratio and moves of each interval and strategy.

    Args:
        runs: of a sweep; the mean over seeds is shown.
    """
    names = list(dict.fromkeys(run.strategy for run in runs))
    blocks = []
    for regime in dict.fromkeys(run.regime for run in runs):
        rows: list[Sequence[str]] = [(regime, *names)]
        ratios, moves = _over_time(runs, regime, "piece"), _over_time(runs, regime, "moves")
        for number, index in enumerate(_indices(runs)):
            cells = [f"{ratios[n][number]:.3f} {moves[n][number]:5.1f}" for n in names]
            rows.append((str(index), *cells))
        blocks.append(aligned(rows))
    return "Ratio of pieces, and moves, by interval.\n\n" + "\n\n".join(blocks)


def table(lines: Sequence[Line]) -> str:
    """Return a table for a terminal, one row for each regime and strategy.

    Args:
        lines: see `summarise`; of each regime, the first is what the others are compared with.
    """
    shows_steps = any(line.step is not None for line in lines)
    base = lines[0]
    header = ["regime", "strategy", "window", "interval", "piece", "excess", f"vs {base.strategy}"]
    header += ["worst layer", *["step"] * shows_steps]
    header += ["best split", "moves", "most moves", "plan ms"]
    rows: list[Sequence[str]] = [header]
    for line in lines:
        if line.regime != base.regime:
            base = line
            rows.append([])
        cells = [line.regime, line.strategy, f"{line.planned:.3f}", f"{line.interval:.3f}"]
        cells += [f"{line.piece:.4f}", _excess(line), _against(line, base), f"{line.worst:.3f}"]
        cells += [_ratio(line.step)] * shows_steps
        cells += [_ratio(line.best_split), f"{line.moves:.1f}"]
        rows.append([*cells, str(line.most_moves), f"{line.plan_ms:.2f}"])
    return aligned(rows, left=2)


def conclusion(lines: Sequence[Line]) -> str:
    """Return one sentence: what the default strategy gains, over all regimes.

    Args:
        lines: see `summarise`. Empty without the default strategy, or alone with it.
    """
    # The last regime is the mean over all, or the only one.
    found = {line.strategy: line for line in lines if line.regime == lines[-1].regime}
    own = found.get(DEFAULT_STRATEGY)
    if own is None:
        return ""
    parts = [
        f"{_less(own, line)} than {name} ({_excess(line)}, {line.moves:.1f} moves)"
        for name in _COMPARED
        if (line := found.get(name)) is not None
    ]
    if not parts:
        return ""
    return (
        f"{DEFAULT_STRATEGY} has {_excess(own)} excess for {own.moves:.1f} moves a layer and plan: "
        f"{', '.join(parts)}."
    )


def json_line(asked: Sweep, lines: Sequence[Line], extra: Mapping[str, object]) -> str:
    """Return one line of JSON: what was asked, figures, device and versions.

    Args:
        asked, lines: a sweep and what it gave.
        extra: more fields, for example the command.
    """
    settings = asdict(asked)
    if any(line.regime == TRACE for line in lines):
        for name in ("traffic", "regimes", "seeds", "intervals"):
            del settings[name]  # of made-up traffic
    versions = {"python": platform.python_version(), "deepinfer-eplb": __version__}
    versions |= {each.__name__: each.__version__ for each in (np, scipy, numba)}
    return json.dumps(
        {
            "benchmark": "eplb_simulate",
            "asked": settings,
            "lines": [_rounded(line) for line in lines],
            "device": f"cpu {platform.machine()}, {os.cpu_count()} cores",
            "versions": versions,
            **extra,
        }
    )


def plot(path: Path, runs: Sequence[Run]) -> None:
    """Draw the excess of pieces over time, a pane for each regime, a curve for each strategy.

    The scale is logarithmic: without balancing the excess is ten times that of a good plan.

    Args:
        path: where; .png, .svg or .pdf. An existing file is replaced.
        runs: of a sweep.
    Raises:
        SettingError: see `check_plot`.
        FileError: the file cannot be written.
    """
    regimes = list(dict.fromkeys(run.regime for run in runs))
    names = list(dict.fromkeys(run.strategy for run in runs))
    figure = new_figure(path, (max(4 * len(regimes), 7), 4.8))
    panes = figure.subplots(1, len(regimes), squeeze=False, sharey=True)[0]
    for pane, regime in zip(panes, regimes, strict=True):
        curves = _over_time(runs, regime, "piece")
        for number, name in enumerate(names):
            # A perfect balance has no place on the scale.
            excess = np.maximum(100 * (curves[name] - 1), _LEAST_DRAWN)
            # Hollow, and each of its own shape, so that one shows behind another.
            marker = _MARKERS[number % len(_MARKERS)]
            style = {"marker": marker, "markerfacecolor": "none", "color": f"C{number}"}
            pane.plot(_indices(runs), excess, label=name, linewidth=1.2, **style)
        pane.set_yscale("log")
        pane.yaxis.set_major_formatter("{x:g}")
        pane.set_title(regime)
        pane.set_xlabel("interval")
        pane.set_xticks(_whole_ticks(_indices(runs)))
        pane.grid(alpha=0.3, which="both")
    panes[0].set_ylabel("excess of pieces, %")
    handles, labels = panes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(names), 6))
    save_figure(path, figure)


def _whole_ticks(indices: Sequence[int]) -> list[int]:
    """Return intervals to name on an axis, ten at most."""
    return list(indices)[:: -(-len(indices) // 10)]


def _of_regime(runs: Sequence[Run], regime: str) -> list[Run]:
    return [run for run in runs if run.regime == regime]


def _indices(runs: Sequence[Run]) -> list[int]:
    return [interval.index for interval in runs[0].intervals]


def _over_time(runs: Sequence[Run], regime: str, field: str) -> dict[str, Floats]:
    """Return a field by strategy, [intervals], mean over layers and seeds."""
    found: dict[str, list[list[float]]] = {}
    for run in _of_regime(runs, regime):
        values = [float(np.mean(getattr(interval, field))) for interval in run.intervals]
        found.setdefault(run.strategy, []).append(values)
    return {name: np.mean(values, axis=0) for name, values in found.items()}


def _excess(line: Line) -> str:
    return f"{100 * (line.piece - 1):.1f}%"


def _less(own: Line, other: Line) -> str:
    if other.piece <= 1:
        return "not less"
    change = 100 * ((own.piece - 1) / (other.piece - 1) - 1)
    return f"{abs(change):.0f}% {'less' if change < 0 else 'more'}"


def _against(line: Line, base: Line) -> str:
    if line is base or base.piece <= 1:
        return "-"
    # No "-0.0 %" for what is equal but for rounding.
    return f"{round(100 * ((line.piece - 1) / (base.piece - 1) - 1), 1) + 0.0:+.1f}%"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _rounded(line: Line) -> dict[str, object]:
    return {
        name: round(value, 5) if isinstance(value, float) else value
        for name, value in asdict(line).items()
    }
