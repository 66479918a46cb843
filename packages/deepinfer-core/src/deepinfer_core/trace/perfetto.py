"""The timeline as a file in the Chrome trace event format, which Perfetto opens.

    process  track      slices
    host     loop       build, launch, wait, settle, ... of each step; a mark for a late launch
    device   copy-in, forward, copy-out
    arrows   from step to step, one chain for each of the first requests
    counters rows of the step on the device, steps in flight

Source: "Trace Event Format", the public document of the Chromium project.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from deepinfer_core.engine.records import StepRecord
from deepinfer_core.errors import OutputError
from deepinfer_core.trace.timeline import host_slices, in_flight, span_ns

__all__ = ["MAX_FLOWS", "events", "write_trace"]

MAX_FLOWS = 16  # requests that get arrows; with more of them nothing can be seen

_HOST, _DEVICE = 1, 2
_TRACKS = {"loop": (_HOST, 1), "copy-in": (_DEVICE, 1), "forward": (_DEVICE, 2)} | {
    "copy-out": (_DEVICE, 3)
}

Event = dict[str, object]


def write_trace(
    path: str | Path, records: Iterable[StepRecord], *, max_flows: int = MAX_FLOWS
) -> int:
    """Write the timeline of steps.

    Args:
        path: where; an existing file is replaced.
        records: in the order of their launches.
        max_flows: how many requests get arrows through their steps; the first ones do.

    Returns:
        How many events it wrote.

    Raises:
        OutputError: there are no records, or the file cannot be written.
    """
    found = list(records)
    if not found:
        raise OutputError("There is no step to write a trace of. Run a prompt first.")
    lines = [json.dumps(event) for event in events(found, max_flows)]
    text = '{"displayTimeUnit":"ns","traceEvents":[\n' + ",\n".join(lines) + "\n]}\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"The trace {str(path)!r} cannot be written: {error.strerror}. Choose another file."
        ) from error
    return len(lines)


def events(records: Sequence[StepRecord], max_flows: int = MAX_FLOWS) -> Iterator[Event]:
    """Yield the events of the file; times in us since the first iteration began."""
    yield from _names()
    origin = span_ns(records)[0]
    for record in records:
        yield from _slices(record, origin)
    yield from _counters(records, origin)
    yield from _flows(records, origin, max_flows)


def _names() -> Iterator[Event]:
    for pid, name in ((_HOST, "host"), (_DEVICE, "device")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for name, (pid, tid) in _TRACKS.items():
        place = {"pid": pid, "tid": tid}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}}


def _slices(record: StepRecord, origin: int) -> Iterator[Event]:
    step = record.step_seq
    for each in host_slices(record):
        yield _slice("loop", each.name, each.begin_ns, each.end_ns, origin, {"step": step})
    if record.bubble is not None:
        yield {
            **_at("loop", record.launched_ns, origin),
            **{"ph": "i", "s": "t", "name": f"late: {record.bubble}", "args": {"step": step}},
        }
    if record.device is not None:
        device = record.device
        sizes = {
            "step": step,
            "sequences": record.num_sequences,
            "rows": record.num_rows,
            "drafts": record.num_drafts,
        }
        name = f"{record.kind.value} {step}"
        yield _slice("copy-in", name, *device.copy_in, origin, {"step": step})
        yield _slice("forward", name, *device.forward, origin, sizes)
        yield _slice("copy-out", name, *device.copy_out, origin, {"step": step})


def _counters(records: Sequence[StepRecord], origin: int) -> Iterator[Event]:
    for record in records:
        if record.device is not None:
            begin, end = record.device.forward
            for instant, rows in ((begin, record.num_rows), (end, 0)):
                yield _counter(_DEVICE, "rows", instant - origin, {record.kind.value: rows})
    for instant, level in in_flight(records):
        yield _counter(_HOST, "steps in flight", instant - origin, {"steps": level})


def _flows(records: Sequence[StepRecord], origin: int, max_flows: int) -> Iterator[Event]:
    """Yield a chain of arrows for each of the first requests: start, steps, finish."""
    steps: dict[int, list[StepRecord]] = {}
    for record in records:
        for uid in record.uids.tolist():
            if uid in steps or len(steps) < max_flows:
                steps.setdefault(uid, []).append(record)
    for uid, chain in steps.items():
        if len(chain) == 1:
            continue  # nothing to connect
        for place, record in enumerate(chain):
            phase = "s" if place == 0 else "f" if place == len(chain) - 1 else "t"
            yield {
                **_anchor(record, origin),
                **{"ph": phase, "cat": "request", "name": f"request {uid}", "id": uid},
                **({"bp": "e"} if phase == "f" else {}),  # ends at the slice around it
            }


def _anchor(record: StepRecord, origin: int) -> Event:
    """Return a place inside the step's forward, or inside its launch where that is not known."""
    if record.device is None:
        begin = record.built_ns or record.begin_ns
        return _at("loop", (begin + record.launched_ns) // 2, origin)
    return _at("forward", sum(record.device.forward) // 2, origin)


def _at(track: str, instant: int, origin: int) -> Event:
    pid, tid = _TRACKS[track]
    return {"pid": pid, "tid": tid, "ts": (instant - origin) / 1e3}


def _slice(track: str, name: str, begin: int, end: int, origin: int, args: dict[str, int]) -> Event:
    length = (end - begin) / 1e3
    return {**_at(track, begin, origin), "ph": "X", "name": name, "dur": length, "args": args}


def _counter(pid: int, name: str, since_ns: int, values: dict[str, int]) -> Event:
    return {"ph": "C", "pid": pid, "name": name, "ts": since_ns / 1e3, "args": values}
