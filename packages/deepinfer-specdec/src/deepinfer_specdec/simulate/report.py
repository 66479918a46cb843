"""What a simulation prints and writes: a table, a JSON line, a plot."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from deepinfer_specdec import __version__
from deepinfer_specdec.calibrate import auc, ece
from deepinfer_specdec.errors import SettingError
from deepinfer_specdec.simulate.acceptance import RECORD_AGE, draw
from deepinfer_specdec.simulate.sweep import Line, Sweep

__all__ = ["check_plot", "describe", "json_line", "plot", "table"]

_FORMATS = (".png", ".svg", ".pdf")


def describe(asked: Sweep) -> str:
    """Return what the traffic and the steps of a sweep are like, measured on a draw of their own.

    Args:
        asked: the sweep.
    """
    trace = draw(asked.traffic, [60] * 8, 150, asked.seed)
    drafts = trace.survival.shape[2]
    survival, passed = trace.survival.reshape(-1, drafts), trace.passed.reshape(-1)
    areas = [auc(survival[:, k], passed > k) for k in range(drafts)]
    errors = [ece(survival[:, k], passed > k) for k in range(drafts)]
    return (
        f"Traffic: {drafts} drafts a block, mean length {asked.traffic.accepted_len:g} at full "
        f"length with the token after them (drawn: {1 + passed.mean():.2f}).\n"
        f"Survival: AUC {min(areas):.2f} .. {max(areas):.2f}, ECE up to {max(errors):.1%}; a "
        f"request's sum of survivals correlates by {trace.autocorrelation(RECORD_AGE):.2f} with "
        f"its record two steps old.\n"
        f"{asked.point.describe()}\n"
        f"Speeds are tokens per second against {drafts} drafts, then against none; `length` "
        f"counts the token after the drafts."
    )


def table(lines: Sequence[Line], ranks: int) -> str:
    """Return a table for a terminal, one row for each load and policy.

    Args:
        lines: of a sweep.
        ranks: of its group.
    """
    header = (
        *("rows", "policy", "verified", "length", "1 rank", "vs off"),
        *(f"{ranks} ranks", "vs off", "full", "padding"),
    )
    cells = [header]
    for line in lines:
        cells.append(
            (
                *(str(line.requests), line.policy),
                *(f"{line.verified:.2f}", f"{line.accepted_len:.3f}"),
                *(_percent(line.alone_to_fixed), _percent(line.alone_to_off)),
                *(_percent(line.group_to_fixed), _percent(line.group_to_off)),
                *(f"{line.full:.0%}", f"{line.padding:.1%}"),
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = []
    for number, row in enumerate(cells):
        if number > 1 and row[0] != cells[number - 1][0]:
            text.append("")
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        padded[1] = row[1].ljust(widths[1])
        text.append("  ".join(padded).rstrip())
    return "\n".join(text)


def json_line(asked: Sweep, lines: Sequence[Line], extra: Mapping[str, object]) -> str:
    """Return one line of JSON: what was asked, figures, device and versions.

    Args:
        asked, lines: a sweep and what it gave.
        extra: more fields, for example the command.
    """
    return json.dumps(
        {
            "benchmark": "specdec_simulate",
            "asked": asdict(asked),
            "lines": [_rounded(line) for line in lines],
            "device": f"cpu {platform.machine()}, {os.cpu_count()} cores",
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "torch": torch.__version__,
                "deepinfer-specdec": __version__,
            },
            **extra,
        }
    )


def check_plot(path: Path) -> None:
    """Check that a plot of this name can be drawn here, before a long run.

    Raises:
        SettingError: the format is unknown, or matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMATS:
        raise SettingError(
            f"The plot {str(path)!r} ends in {path.suffix!r}; allowed: {', '.join(_FORMATS)}. "
            "Choose a name that ends so."
        )
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        raise SettingError(
            f"The plot {str(path)!r} needs matplotlib, which is not installed. Install "
            "`deepinfer-specdec[plot]`, or leave --plot out."
        ) from None


def plot(path: Path, lines: Sequence[Line], ranks: int) -> None:
    """Draw tokens per second against full length over load: one rank left, the group right.

    Args:
        path: where; .png, .svg or .pdf. An existing file is replaced.
        lines: of a sweep.
        ranks: of its group.

    Raises:
        SettingError: see `check_plot`; or the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(12, 5), layout="constrained")
    panes = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(line.policy for line in lines))
    for pane, title, field in zip(
        panes,
        ("one rank", f"group of {ranks} ranks"),
        ("alone_to_fixed", "group_to_fixed"),
        strict=True,
    ):
        for number, name in enumerate(names):
            points = [
                (line.requests, 100 * (getattr(line, field) - 1))
                for line in sorted(lines, key=lambda line: line.requests)
                if line.policy == name and getattr(line, field) is not None
            ]
            if points:
                pane.plot(*zip(*points, strict=True), marker="o", label=name, color=f"C{number}")
        pane.set_xscale("log", base=2)
        pane.set_xticks(sorted({line.requests for line in lines}))
        pane.xaxis.set_major_formatter("{x:.0f}")
        pane.set_xlabel("requests of a rank")
        pane.set_title(title)
        pane.grid(alpha=0.3)
    shown = {
        label: handle
        for pane in panes
        for handle, label in zip(*pane.get_legend_handles_labels(), strict=True)
    }
    figure.legend([shown[name] for name in names], names, loc="outside lower center", ncols=5)
    panes[0].set_ylabel("tokens per second against full length, %")
    try:
        figure.savefig(path)
    except OSError as error:
        raise SettingError(
            f"The plot {str(path)!r} cannot be written: {error.strerror}. Choose another file."
        ) from error


def _percent(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    # No "-0.0 %" for what is equal but for rounding.
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f}%"


def _rounded(line: Line) -> dict[str, object]:
    values = asdict(line)
    return {
        name: round(value, 5) if isinstance(value, float) else value
        for name, value in values.items()
    }
