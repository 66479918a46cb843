"""Plots. matplotlib is an extra of the package, and is imported when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_eplb.errors import FileError, SettingError
from deepinfer_eplb.maps import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

__all__ = ["check_plot", "new_figure", "plot_rank_loads", "save_figure"]

_FORMATS = (".png", ".svg", ".pdf")
_MOST_PANES = 6


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
            "`deepinfer-eplb[plot]`, or leave --plot out."
        ) from None


def new_figure(path: Path, size: tuple[float, float]) -> Figure:
    """Return an empty figure of so many inches.

    Raises:
        SettingError: see `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def save_figure(path: Path, figure: Figure) -> None:
    """Write a figure; an existing file is replaced.

    Raises:
        FileError: it cannot be written.
    """
    try:
        figure.savefig(path)
    except OSError as error:
        raise FileError(
            f"The plot {str(path)!r} cannot be written: {error.strerror}. Choose another file."
        ) from error


def plot_rank_loads(
    path: Path, after: Floats, before: Floats | None, names: tuple[str, str] = ("before", "after")
) -> None:
    """Draw what ranks compute, over the mean, heaviest first: the worst layers, a pane each.

    Args:
        path: where; .png, .svg or .pdf.
        after: [L, R], under the plan.
        before: [L, R], under the map before it; None where there is none.
        names: of before and after.
    Raises:
        SettingError: see `check_plot`.
        FileError: the file cannot be written.
    """
    curves = [(_over_mean(after), names[1], "C0")]
    if before is not None:
        curves.insert(0, (_over_mean(before), names[0], "C1"))
    heaviest = [ranks.max(1) for ranks, _, _ in curves]
    worst = np.argsort(-heaviest[0], kind="stable")[:_MOST_PANES]
    columns = min(3, len(worst))
    rows = -(-len(worst) // columns)
    figure = new_figure(path, (4.5 * columns, 3.2 * rows + 0.9))
    panes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for pane, layer in zip(panes, sorted(worst.tolist()), strict=False):
        for ranks, name, colour in curves:
            values = np.sort(ranks[layer])[::-1]
            pane.step(range(len(values)), values, where="mid", label=name, color=colour)
        pane.axhline(1.0, color="0.5", linewidth=0.8, linestyle=":")
        pane.set_title(f"layer {layer}: {' to '.join(f'{each[layer]:.3f}' for each in heaviest)}")
        pane.set_xlabel("rank, heaviest first")
        pane.xaxis.get_major_locator().set_params(integer=True)
        pane.grid(alpha=0.3)
    for pane in panes[len(worst) :]:
        pane.set_axis_off()
    panes[0].set_ylim(bottom=0)
    for row in range(rows):
        panes[row * columns].set_ylabel("load / mean of ranks")
    panes[0].legend()
    shown = f"the worst {len(worst)} of {len(after)}" if len(worst) < len(after) else "all"
    said = " to ".join(f"'{name}'" for _, name, _ in curves)
    figure.suptitle(f"Load of ranks in {shown} layers; slowest/mean, {said}")
    save_figure(path, figure)


def _over_mean(loads: Floats) -> Floats:
    mean = loads.mean(1, keepdims=True)
    found: Floats = loads / np.where(mean > 0, mean, 1.0)
    return found
