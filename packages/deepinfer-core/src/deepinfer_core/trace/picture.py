"""The timeline as a drawing: the host above, the device below, and what is in flight between.

    host       | wait |settle| build |launch| deferred | wait | ...
                                         \\
    forward    |======= step 41 =======|  |====== step 42 ======      red: nothing to run
    in flight  2 steps, 1 step, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

from deepinfer_core.engine.records import StepRecord, overlap_ratio
from deepinfer_core.errors import OutputError, Unsupported
from deepinfer_core.plans import StepKind
from deepinfer_core.trace.shapes import Drawing, Line, Rect, Shape, Text, to_svg, write_png
from deepinfer_core.trace.timeline import HOST_PARTS, gaps, host_slices, in_flight, shown_time

__all__ = ["NUM_STEPS", "check_picture", "draw", "layout"]

NUM_STEPS = 16  # more are hard to read at this width
WIDTH, HEIGHT = 1200.0, 376.0
LEFT, RIGHT = 88.0, 1180.0  # where time runs

# Lane -> its upper edge and height.
_LANES = {
    "host": (104.0, 44.0),
    "copy-in": (172.0, 14.0),
    "forward": (192.0, 52.0),
    "copy-out": (250.0, 14.0),
    "in flight": (284.0, 44.0),
}
_AXIS_Y = 340.0

_INK, _PALE, _GRID, _GAP, _FLIGHT = "#1f2933", "#616e7c", "#e4e7eb", "#d62839", "#c3d3e2"
_KIND_COLOURS = {StepKind.PREFILL: "#dd8b3a", StepKind.DECODE: "#3a76b5"}
_PART_COLOURS = {
    "grammar": "#c2506e",
    "drain": "#8fa3ad",
    "inbox": "#a9b8c0",
    "vote": "#6f8490",
    "build": "#3f9c6d",
    "launch": "#8a65b8",
    "wait": "#edf0f2",
    "settle": "#cfa52b",
    "deferred": "#6fb9c4",
}
assert set(_PART_COLOURS) == set(HOST_PARTS)


def check_picture(path: str | Path) -> None:
    """Check that a picture of this name can be drawn here, before a long run.

    Raises:
        Unsupported: the name ends neither in .svg nor in .png, or .png lacks matplotlib.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".svg", ".png"):
        raise Unsupported(
            f"The picture {str(path)!r} ends in {suffix!r}, but it can be .svg or .png. "
            "Choose a name that ends so."
        )
    if suffix == ".png":
        try:
            import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
        except ImportError:
            raise Unsupported(
                f"The picture {str(path)!r} needs matplotlib, which is not installed. Install "
                "`deepinfer-core[plot]`, or choose a name that ends in .svg."
            ) from None


def draw(path: str | Path, records: Iterable[StepRecord], *, num_steps: int = NUM_STEPS) -> None:
    """Draw the timeline of some steps.

    Args:
        path: where; .svg or .png. An existing file is replaced.
        records: in the order of their launches.
        num_steps: how many steps to show, at least 1; they are taken from the middle of the run.

    Raises:
        Unsupported: see `check_picture`.
        OutputError: there are no records, or the file cannot be written.
    """
    check_picture(path)
    found = list(records)
    if not found:
        raise OutputError("There is no step to draw. Run a prompt first.")
    drawing = layout(found, num_steps)
    try:
        if Path(path).suffix.lower() == ".png":
            write_png(Path(path), drawing)
        else:
            Path(path).write_text(to_svg(drawing), encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"The picture {str(path)!r} cannot be written: {error.strerror}. Choose another file."
        ) from error


def layout(records: Sequence[StepRecord], num_steps: int = NUM_STEPS) -> Drawing:
    """Return the drawing of `num_steps` steps from the middle of the run, at least one."""
    first = max((len(records) - num_steps) // 2, 0)
    shown = records[first : first + num_steps]
    scale = _Scale(shown)
    title = f"Steps {shown[0].step_seq} to {shown[-1].step_seq}"
    shapes: list[Shape] = [
        Text(LEFT, 34, title, 19, _INK, bold=True),
        Text(LEFT, 55, _summary(shown, len(records)), 12.5, _PALE),
        *_legend(records),
        *_axis(scale),
        *_lane_names(shown),
        *_host(records, scale),
        *_device(records, scale),
        *_in_flight(records, scale),
    ]
    return Drawing(WIDTH, HEIGHT, title, shapes)


class _Scale:
    """Time to place: the shown steps, from the first one's iteration to the end of the last."""

    def __init__(self, shown: Sequence[StepRecord]) -> None:
        last = shown[-1]
        self.begin = shown[0].begin_ns
        end = max(last.launched_ns, last.wait_end_ns if last.device is None else 0)
        if last.device is not None:
            end = max(end, last.device.copy_out[1])
        self.length = max(end - self.begin, 1) * 1.01

    def x(self, instant: int) -> float:
        place = LEFT + (instant - self.begin) / self.length * (RIGHT - LEFT)
        return min(max(place, LEFT), RIGHT)

    def bar(
        self, lane: str, span: tuple[int, int], fill: str, hint: str, opacity: float = 1.0
    ) -> Rect | None:
        """Return a slice on a lane, or None when it lies outside."""
        x, end = self.x(span[0]), self.x(span[1])
        if end <= LEFT or x >= RIGHT:
            return None
        y, height = _LANES[lane]
        return Rect(x, y, max(end - x, 0.6), height, fill, opacity, hint)


def _host(records: Sequence[StepRecord], scale: _Scale) -> Iterator[Shape]:
    for record in records:
        for each in host_slices(record):
            hint = f"{each.name}, step {record.step_seq}: {shown_time(each.end_ns - each.begin_ns)}"
            span = (each.begin_ns, each.end_ns)
            if bar := scale.bar("host", span, _PART_COLOURS[each.name], hint):
                yield bar
                dark = each.name in ("wait", "deferred", "settle")
                yield from _label(bar, each.name, 10.5, _PALE if dark else "#ffffff")


def _device(records: Sequence[StepRecord], scale: _Scale) -> Iterator[Shape]:
    for record in records:
        if record.device is None:
            continue
        device, step = record.device, record.step_seq
        rows = f"{record.num_rows} rows"
        for lane, span in (
            ("copy-in", device.copy_in),
            ("forward", device.forward),
            ("copy-out", device.copy_out),
        ):
            hint = (
                f"{lane}, {record.kind.value} step {step}, {rows}: {shown_time(span[1] - span[0])}"
            )
            bar = scale.bar(lane, span, _KIND_COLOURS[record.kind], hint)
            if bar is None:
                continue
            yield bar
            if lane == "forward":
                yield Line(((bar.x, bar.y), (bar.x, bar.y + bar.height)), "#ffffff", 0.8)
                yield from _label(bar, str(step), 13, "#ffffff", up=6, bold=True)
                yield from _label(bar, rows, 10, "#ffffff", up=-10)
                yield from _launch_line(record, bar, scale)
    for gap in gaps(records):
        length = shown_time(gap.end_ns - gap.begin_ns)
        hint = f"no forward before step {gap.record.step_seq}: {length}"
        if bar := scale.bar("forward", (gap.begin_ns, gap.end_ns), _GAP, hint, 0.9):
            yield bar
            yield from _label(bar, length, 10, "#ffffff")


def _launch_line(record: StepRecord, bar: Rect, scale: _Scale) -> Iterator[Shape]:
    """Join the end of a launch with the forward it made."""
    x = scale.x(record.launched_ns)
    if LEFT < x < RIGHT:
        y, height = _LANES["host"]
        if record.bubble is None:
            yield Line(((x, y + height), (bar.x, bar.y)), _PALE, 0.8, 0.55)
        else:
            yield Line(((x, y + height), (bar.x, bar.y)), _GAP, 1.4)


def _in_flight(records: Sequence[StepRecord], scale: _Scale) -> Iterator[Shape]:
    levels = in_flight(records)
    most = max((level for _, level in levels), default=0)
    if not most:
        return
    y, height = _LANES["in flight"]
    floor = height / most
    for level in range(1, most + 1):
        top = y + height - level * floor
        for begin, end in _runs(levels, level, scale.begin + int(scale.length)):
            x, right = scale.x(begin), scale.x(end)
            if right > x:
                yield Rect(x, top + 1, right - x, floor - 1, _FLIGHT)
        yield Text(LEFT - 8, top + floor / 2 + 4, str(level), 10, _PALE, "end")


def _runs(levels: Sequence[tuple[int, int]], least: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the spans in which the level is at least `least`; it stays as it is until `end`."""
    begin = None
    for instant, level in levels:
        if level >= least and begin is None:
            begin = instant
        elif level < least and begin is not None:
            yield begin, instant
            begin = None
    if begin is not None:
        yield begin, end


def _lane_names(shown: Sequence[StepRecord]) -> Iterator[Shape]:
    for lane, (y, height) in _LANES.items():
        yield Text(16, y + height / 2 + 4, lane, 10.5 if height < 20 else 12.5, _INK)
    if all(record.device is None for record in shown):
        y, height = _LANES["forward"]
        yield Text(LEFT + 8, y + height / 2 + 4, "The device does not tell its times.", 12, _PALE)


def _legend(records: Sequence[StepRecord]) -> Iterator[Shape]:
    kinds = {record.kind for record in records if record.device is not None}
    parts = {each.name for record in records for each in host_slices(record)}
    entries = [(f"{kind.value} step", _KIND_COLOURS[kind]) for kind in StepKind if kind in kinds]
    if gaps(records):
        entries += [("device has nothing to run", _GAP)]
    entries += [(part, _PART_COLOURS[part]) for part in HOST_PARTS if part in parts]
    x = LEFT
    for name, colour in entries:
        yield Rect(x, 73, 11, 11, colour)
        yield Text(x + 16, 82.5, name, 11.5, _INK)
        x += 36 + 5.9 * len(name)


def _axis(scale: _Scale) -> Iterator[Shape]:
    top = _LANES["host"][0] - 6
    step = _round_up(scale.length / 10)
    for place in range(int(scale.length // step) + 1):
        x = scale.x(scale.begin + int(place * step))
        yield Line(((x, top), (x, _AXIS_Y)), _GRID)
        yield Text(x, _AXIS_Y + 16, shown_time(place * step) if place else "0", 11, _PALE, "middle")


def _label(
    bar: Rect, text: str, size: float, colour: str, *, up: float = 0.0, bold: bool = False
) -> Iterator[Shape]:
    """Yield the text in the middle of a bar that has room for it."""
    if bar.width > len(text) * size * 0.6 + 3:
        x, y = bar.x + bar.width / 2, bar.y + bar.height / 2 + size * 0.36 - up
        yield Text(x, y, text, size, colour, "middle", bold)


def _summary(shown: Sequence[StepRecord], num_records: int) -> str:
    parts = [f"{len(shown)} of {num_records} steps"]
    times = [each.device.forward for each in shown if each.device is not None]
    if (ratio := overlap_ratio(shown)) is not None:
        parts += [f"device busy {ratio:.1%}"]
        parts += [f"median forward {shown_time(median(end - begin for begin, end in times))}"]
    late = [record.bubble for record in shown if record.bubble is not None]
    causes = ", ".join(f"{cause} {late.count(cause)}" for cause in sorted(set(late)))
    parts += [f"{len(late)} launched late" + (f" ({causes})" if late else "")]
    return "   ·   ".join(parts)


def _round_up(value: float) -> float:
    """Return the next number of the row 1, 2, 5, 10, 20, ... that is at least `value`."""
    power = 1.0
    while True:
        for digit in (1, 2, 5):
            if digit * power >= value:
                return digit * power
        power *= 10
