"""Draw the loss curve of a training log: `python -m nano.training.curve LOG.jsonl OUT.svg`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["draw", "main"]

_WIDTH, _HEIGHT = 800, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 88, 52
# Both read well on a white and on a black page; no style sheet, which some viewers ignore.
_NEUTRAL, _ACCENT = "#808893", "#3b82f6"
_FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
_LABEL_STEP = 18
# Averaged records are this share of all.
_SMOOTH_SHARE = 1 / 40


@dataclass(frozen=True)
class _Scale:
    """Linear in tokens, logarithmic in the loss; both to pixels."""

    tokens: float
    low: float
    high: float

    def x(self, tokens: float) -> float:
        return _LEFT + tokens / self.tokens * (_WIDTH - _LEFT - _RIGHT)

    def y(self, loss: float) -> float:
        share = math.log(loss / self.low) / math.log(self.high / self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def draw(
    records: Sequence[dict[str, Any]],
    key: str = "loss",
    title: str = "Training loss",
    labels: Mapping[str, str] | None = None,
) -> str:
    """Return an SVG picture of `records`, lines of the log of `nano.training.loop`.

    Vertical marks show where an input of the phase first differs from zero and where the learning
    rate begins to fall.

    Args:
        records: at least two, in order.
        key: which entry is drawn; it must be positive.
        title: stands above the curve.
        labels: what stands at the mark of an input, if not its name.
    """
    known = [record for record in records if record.get(key) is not None]
    if len(known) < 2:
        raise ValueError(f"{len(known)} lines of the log have {key!r}; a curve needs 2.")
    tokens = [float(record["tokens"]) for record in known]
    losses = [max(float(record[key]), 1e-6) for record in known]
    scale = _Scale(tokens[-1], min(losses) / 1.08, max(losses) * 1.08)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' "
        f"width='{_WIDTH}' height='{_HEIGHT}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<g {_FONT} font-size='13' fill='{_NEUTRAL}'>",
        _text(_LEFT, 20, title, "start", "font-size='15' font-weight='600'"),
        *_axes(scale),
        *_marks(known, scale, labels or {}),
        "</g>",
        _line(tokens, losses, scale, "stroke-width='1' stroke-opacity='0.45'"),
        _line(tokens, _smooth(losses), scale, "stroke-width='2.2'"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m nano.training.curve", description=__doc__)
    parser.add_argument("log", type=Path, help="JSON lines of `nano.training.loop`")
    parser.add_argument("out", type=Path, help="SVG file to write")
    parser.add_argument("--key", default="loss", help="entry of the log to draw (default: loss)")
    parser.add_argument("--title", default="Training loss")
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="INPUT=TEXT",
        type=lambda text: tuple(text.split("=", 1)),
        help="what stands at the mark of an input; may be repeated",
    )
    chosen = parser.parse_args(arguments)
    lines = chosen.log.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    picture = draw(records, chosen.key, chosen.title, dict(chosen.label))
    chosen.out.write_text(picture, encoding="utf-8")


def _axes(scale: _Scale) -> list[str]:
    parts = []
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for value in _log_ticks(scale.low, scale.high):
        y = scale.y(value)
        parts.append(_rule(_LEFT, y, right, y, "stroke-opacity='0.22'"))
        parts.append(_text(_LEFT - 8, y + 4.5, f"{value:g}", "end"))
    size = _nice(scale.tokens / 9)
    # Whole millions, or thousands in a short run, as the axis says once.
    unit, name = (1e6, "million tokens") if scale.tokens >= 2e6 else (1e3, "thousand tokens")
    for number in range(int(scale.tokens / size + 1e-9) + 1):
        x = scale.x(number * size)
        parts.append(_rule(x, floor, x, floor + 5, "stroke-opacity='0.7'"))
        parts.append(_text(x, floor + 20, f"{number * size / unit:g}", "middle"))
    parts.append(_rule(_LEFT, floor, right, floor, "stroke-opacity='0.7'"))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 10, name, "middle"))
    return parts


def _marks(
    records: Sequence[dict[str, Any]], scale: _Scale, labels: Mapping[str, str]
) -> list[str]:
    """Dashed lines with labels; a label that would run into one before it goes one row down."""
    places: list[tuple[float, str]] = []
    for name in records[0].get("inputs", {}):
        active = [bool(record["inputs"].get(name)) for record in records]
        if True in active and not active[0]:
            label = labels.get(name, name.replace("_", " "))
            places.append((_before(records, active.index(True)), label))
    rates = [float(record["lr"]) for record in records]
    last_peak = len(rates) - 1 - rates[::-1].index(max(rates))
    if last_peak < len(rates) - 1:
        places.append((float(records[last_peak]["tokens"]), "learning rate falls"))
    parts = []
    end, row = -math.inf, 0
    for tokens, label in sorted(places):
        x = scale.x(tokens)
        width = 6.8 * len(label)
        leftward = x + 6 + width > _WIDTH
        # A rule begins at its own label, so those before it, further up, are not crossed.
        row = 0 if (x - 6 - width if leftward else x) > end else (row + 1) % 3
        end = max(end, x + 6 + width)
        y = 46 + row * _LABEL_STEP
        dashes = "stroke-opacity='0.8' stroke-dasharray='4 4'"
        parts.append(_rule(x, y - 11, x, _HEIGHT - _BOTTOM, dashes))
        if leftward:
            parts.append(_text(x - 6, y, label, "end"))
        else:
            parts.append(_text(x + 6, y, label, "start"))
    return parts


def _before(records: Sequence[dict[str, Any]], index: int) -> float:
    """Tokens at the start of a record's steps."""
    return float(records[index - 1]["tokens"]) if index else 0.0


def _smooth(losses: Sequence[float]) -> list[float]:
    """Geometric mean over a window around each value, smaller at both ends."""
    logs = [math.log(loss) for loss in losses]
    reach = round(len(logs) * _SMOOTH_SHARE / 2)
    result = []
    for index in range(len(logs)):
        near = min(reach, index, len(logs) - 1 - index)
        window = logs[index - near : index + near + 1]
        result.append(math.exp(sum(window) / len(window)))
    return result


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low > 4 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    values = [float(f"{step}e{decade}") for decade in decades for step in steps]
    return [value for value in values if low <= value <= high]


def _nice(size: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... that is at least `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= size * (1 - 1e-9))


def _line(tokens: Sequence[float], losses: Sequence[float], scale: _Scale, style: str) -> str:
    places = zip(tokens, losses, strict=True)
    points = " ".join(f"{scale.x(t):.1f},{scale.y(loss):.1f}" for t, loss in places)
    return (
        f"<polyline points='{points}' fill='none' stroke='{_ACCENT}' stroke-linejoin='round' "
        f"{style}/>"
    )


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{_NEUTRAL}' "
        f"{style}/>"
    )


def _text(x: float, y: float, content: str, anchor: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {style}>{escape(content)}</text>"


if __name__ == "__main__":
    main()
