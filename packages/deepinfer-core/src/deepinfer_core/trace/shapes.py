"""Shapes of a drawing and the two ways to write them: SVG by hand, PNG through matplotlib.

Places and sizes are in px, y downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

__all__ = ["Drawing", "Line", "Rect", "Shape", "Text", "to_svg", "write_png"]

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_SIDES = {"start": "left", "middle": "center", "end": "right"}
_PNG_SCALE = 2  # pixels of the file per px, for screens that have them


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; `hint` is shown when the pointer rests on it, in an SVG."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    opacity: float = 1.0
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; (x, y) is on its base line, at its start, middle or end."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Rect | Line | Text


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes on white; later ones lie on top."""

    width: float
    height: float
    title: str
    shapes: Sequence[Shape]


def to_svg(drawing: Drawing) -> str:
    """Return the drawing as an SVG document."""
    size = f"{drawing.width:g} {drawing.height:g}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        f'width="{drawing.width:g}" height="{drawing.height:g}" font-family="{_FONT}">',
        f"<title>{escape(drawing.title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *(_element(shape) for shape in drawing.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def write_png(path: Path, drawing: Drawing) -> None:
    """Write the drawing as a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.lines import Line2D  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.patches import Rectangle  # type: ignore[import-not-found,unused-ignore]

    size = (drawing.width / 72, drawing.height / 72)  # at 72 dpi a point is a px
    figure = Figure(figsize=size, dpi=72 * _PNG_SCALE, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for order, shape in enumerate(drawing.shapes):
        if isinstance(shape, Rect):
            patch = Rectangle((shape.x, shape.y), shape.width, shape.height, linewidth=0)
            patch.set(facecolor=shape.fill, alpha=shape.opacity, zorder=order)
            axes.add_patch(patch)
        elif isinstance(shape, Line):
            xs, ys = zip(*shape.points, strict=True)
            line = Line2D(xs, ys, color=shape.colour, linewidth=shape.width)
            line.set(alpha=shape.opacity, zorder=order)
            axes.add_line(line)
        else:
            # A dollar sign would begin a formula.
            text = axes.text(shape.x, shape.y, shape.text.replace("$", r"\$"), fontsize=shape.size)
            text.set(color=shape.colour, horizontalalignment=_SIDES[shape.anchor], zorder=order)
            text.set_fontweight("bold" if shape.bold else "normal")
    figure.savefig(path, format="png")


def _element(shape: Shape) -> str:
    if isinstance(shape, Rect):
        place = f'x="{shape.x:.2f}" y="{shape.y:.2f}"'
        size = f'width="{shape.width:.2f}" height="{shape.height:.2f}"'
        faint = "" if shape.opacity == 1 else f' fill-opacity="{shape.opacity:g}"'
        start = f'<rect {place} {size} fill="{shape.fill}"{faint}'
        return f"{start}><title>{escape(shape.hint)}</title></rect>" if shape.hint else start + "/>"
    if isinstance(shape, Line):
        points = quoteattr(" ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points))
        look = f'stroke="{shape.colour}" stroke-width="{shape.width:g}"'
        return f'<polyline points={points} fill="none" {look} stroke-opacity="{shape.opacity:g}"/>'
    look = f'font-size="{shape.size:g}" fill="{shape.colour}" text-anchor="{shape.anchor}"'
    bold = ' font-weight="600"' if shape.bold else ""
    return f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" {look}{bold}>{escape(shape.text)}</text>'
