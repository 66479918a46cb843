"""A run's timeline: the trace file, the drawing, and the verb that makes them."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from deepinfer_core.bench.make_checkpoint import demo_config, write_checkpoint
from deepinfer_core.cli import main
from deepinfer_core.cli.trace import PROMPTS, summary
from deepinfer_core.engine.records import StepRecord, StepRecords
from deepinfer_core.engine.step_ring import DeviceTimes
from deepinfer_core.errors import OutputError, Unsupported
from deepinfer_core.plans import StepKind
from deepinfer_core.trace import check_picture, draw, write_trace
from deepinfer_core.trace.picture import NUM_STEPS, WIDTH, layout
from deepinfer_core.trace.shapes import Drawing, Rect, Text, to_svg

US = 1000
SVG = "{http://www.w3.org/2000/svg}"


def run_of(num_steps: int, *, slow: int | None = None, tells: bool = True) -> StepRecords:
    """Records of a run with two steps in flight: 1000 us on the device, 200 us on the host.

    The build of step `slow` takes 3000 us, so the device runs dry before it.
    """
    records, waiting = StepRecords(), []
    now, device_free = 5_000_000, 0
    for seq in range(num_steps):
        kind = StepKind.PREFILL if seq == 0 else StepKind.DECODE
        sizes = {"num_sequences": 2, "num_rows": 40 if seq == 0 else 2}
        record = StepRecord(seq, kind, begin_ns=now, uids=np.array([0, seq % 3]), **sizes)
        older = waiting.pop(0) if len(waiting) == 2 else None
        if older is not None:
            older.wait_begin_ns = now
            now = max(now, older.device.copy_out[1])
            older.wait_end_ns, older.settle_end_ns = now, now + 20 * US
            now += 20 * US
        record.settled_ns = now
        record.drained_ns = now + 5 * US
        record.built_ns = now + (3000 if seq == slow else 100) * US
        now = record.launched_ns = record.built_ns + 50 * US
        begin = max(now, device_free)
        device_free = begin + 1000 * US
        record.device = DeviceTimes(
            (now - 30 * US, now - 10 * US),
            (begin, device_free),
            (device_free, device_free + 9 * US),
        )
        if older is not None:
            older.deferred_begin_ns, older.deferred_end_ns = now, now + 25 * US
            now += 25 * US
        records.append(record)
        records.judge(record)
        waiting.append(record)
    if not tells:
        for record in records:
            record.device = None
    return records


def events_of(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def tracks(events: list[dict]) -> dict[tuple[int, int], str]:
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return {
        (e["pid"], e["tid"]): f"{processes[e['pid']]}/{e['args']['name']}"
        for e in events
        if e["name"] == "thread_name"
    }


def by_track(events: list[dict]) -> dict[str, list[dict]]:
    names, found = tracks(events), defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"], event["tid"]]].append(event)
    return found


# The file


def test_trace_has_a_track_for_the_host_and_each_queue_of_the_device(tmp_path: Path) -> None:
    num = write_trace(tmp_path / "trace.json", run_of(5))
    events = events_of(tmp_path / "trace.json")
    assert len(events) == num
    assert set(by_track(events)) == {
        *("host/loop", "device/copy-in", "device/forward", "device/copy-out"),
    }


def test_every_event_has_what_its_kind_needs(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", run_of(12, slow=6))
    needed = {
        "M": {"name", "pid", "args"},
        "X": {"name", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "pid", "ts", "args"},
        "i": {"name", "pid", "tid", "ts", "s"},
        "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "t": {"name", "cat", "id", "pid", "tid", "ts"},
        "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    }
    events = events_of(tmp_path / "trace.json")
    assert {event["ph"] for event in events} == set(needed)
    for event in events:
        assert needed[event["ph"]] <= set(event), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event


def test_slices_of_a_track_do_not_overlap(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", run_of(12, slow=6))
    for name, slices in by_track(events_of(tmp_path / "trace.json")).items():
        slices.sort(key=lambda each: each["ts"])
        for earlier, later in pairwise(slices):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-6, (name, earlier, later)


def test_times_are_us_since_the_first_iteration(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", run_of(3))
    slices = by_track(events_of(tmp_path / "trace.json"))
    build = next(each for each in slices["host/loop"] if each["name"] == "build")
    assert (build["ts"], build["dur"]) == (5.0, 95.0)
    forward = slices["device/forward"][0]
    assert (forward["name"], forward["ts"], forward["dur"]) == ("prefill 0", 150.0, 1000.0)
    assert forward["args"] == {"step": 0, "sequences": 2, "rows": 40, "drafts": 0}


def test_host_shows_the_parts_of_each_step(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", run_of(6))
    loop = by_track(events_of(tmp_path / "trace.json"))["host/loop"]
    of_step_2 = {each["name"]: each["dur"] for each in loop if each["args"]["step"] == 2}
    assert of_step_2.pop("wait") > 0
    assert of_step_2 == {"drain": 5, "build": 95, "launch": 50, "settle": 20, "deferred": 25}


def test_late_launch_is_marked_with_its_cause(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", run_of(12, slow=6))
    marks = [each for each in events_of(tmp_path / "trace.json") if each["ph"] == "i"]
    assert [(each["name"], each["args"]["step"]) for each in marks] == [("late: build", 6)]


def test_arrows_follow_a_request_through_its_steps(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", run_of(9))
    events = events_of(tmp_path / "trace.json")
    forwards = by_track(events)["device/forward"]
    chains = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            [around] = [
                each
                for each in forwards
                if each["ts"] <= event["ts"] <= each["ts"] + each["dur"]
                and each["tid"] == event["tid"]
            ]
            chains[event["id"]].append((event["ph"], around["args"]["step"]))
    assert chains[1] == [("s", 1), ("t", 4), ("f", 7)]
    assert set(chains) == {0, 1, 2}


def test_only_the_first_requests_get_arrows(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", run_of(9), max_flows=2)
    events = events_of(tmp_path / "trace.json")
    assert {event["id"] for event in events if event["ph"] in "stf"} == {0, 1}


def test_request_of_one_step_has_no_arrow(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", list(run_of(3)))  # 1 and 2 are in one step each
    events = events_of(tmp_path / "trace.json")
    assert {event["id"] for event in events if event["ph"] in "stf"} == {0}


def test_counters_show_rows_and_steps_in_flight(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", run_of(6))
    counters = [each for each in events_of(tmp_path / "trace.json") if each["ph"] == "C"]
    rows = [each["args"] for each in counters if each["name"] == "rows"]
    assert rows[:3] == [{"prefill": 40}, {"prefill": 0}, {"decode": 2}]
    levels = [each["args"]["steps"] for each in counters if each["name"] == "steps in flight"]
    assert max(levels) == 2
    assert min(levels) == 1  # while one is built, the one before runs


def test_device_that_does_not_tell_leaves_the_host_and_the_arrows(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", run_of(9, tells=False))
    events = events_of(tmp_path / "trace.json")
    assert set(by_track(events)) == {"host/loop"}
    loop = by_track(events)["host/loop"]
    starts = [event for event in events if event["ph"] == "s"]
    assert len(starts) == 3
    for start in starts:
        assert any(
            each["name"] == "launch" and each["ts"] <= start["ts"] <= each["ts"] + each["dur"]
            for each in loop
        )


@pytest.mark.parametrize("write", [write_trace, draw])
def test_run_without_a_step_is_an_error(tmp_path: Path, write) -> None:
    with pytest.raises(OutputError, match="no step"):
        write(tmp_path / "x.svg", [])


@pytest.mark.parametrize("write", [write_trace, draw])
def test_place_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path, write) -> None:
    with pytest.raises(OutputError, match=r"missing.*cannot be written"):
        write(tmp_path / "missing" / "x.svg", run_of(3))


# The drawing


def rects(drawing: Drawing, hint: str) -> list[Rect]:
    return [
        each for each in drawing.shapes if isinstance(each, Rect) and each.hint.startswith(hint)
    ]


def texts(drawing: Drawing) -> list[str]:
    return [each.text for each in drawing.shapes if isinstance(each, Text)]


def test_drawing_is_a_document_of_its_size(tmp_path: Path) -> None:
    draw(tmp_path / "steps.svg", run_of(12, slow=6))
    root = ElementTree.parse(tmp_path / "steps.svg").getroot()
    assert root.tag == f"{SVG}svg"
    assert root.get("width") == f"{WIDTH:g}"
    assert {"host", "copy-in", "forward", "copy-out", "in flight"} <= {
        each.text for each in root.iter(f"{SVG}text")
    }


def test_drawing_shows_the_middle_of_a_long_run() -> None:
    drawing = layout(list(run_of(100)))
    assert drawing.title == f"Steps 42 to {42 + NUM_STEPS - 1}"
    assert len(rects(drawing, "forward, decode step 50,")) == 1
    assert rects(drawing, "forward, decode step 20,") == []


def test_drawing_shows_all_of_a_short_run() -> None:
    drawing = layout(list(run_of(5)))
    assert drawing.title == "Steps 0 to 4"
    assert len(rects(drawing, "forward,")) == 5


def test_nothing_lies_outside_the_drawing() -> None:
    drawing = layout(list(run_of(60, slow=30)))
    for each in drawing.shapes:
        if isinstance(each, Rect):
            assert each.width > 0
            assert 0 <= each.x <= each.x + each.width <= drawing.width + 1
            assert 0 <= each.y <= each.y + each.height <= drawing.height


def test_width_of_a_slice_is_its_time() -> None:
    drawing = layout(list(run_of(5)))
    [build], [forward] = rects(drawing, "build, step 3"), rects(drawing, "forward, decode step 3")
    assert forward.width / build.width == pytest.approx(1000 / 95, rel=0.01)


def test_time_without_a_forward_is_red_and_says_how_long() -> None:
    drawing = layout(list(run_of(12, slow=6)))
    [gap] = rects(drawing, "no forward before step 6")
    [before] = rects(drawing, "forward, decode step 5")
    [after] = rects(drawing, "forward, decode step 6")
    assert (gap.x, gap.x + gap.width) == pytest.approx((before.x + before.width, after.x))
    assert "device has nothing to run" in texts(drawing)
    assert any("1 launched late (build 1)" in text for text in texts(drawing))
    assert gap.hint.rpartition(": ")[2] in texts(drawing)


def test_run_without_a_gap_has_no_red() -> None:
    drawing = layout(list(run_of(12)))
    assert rects(drawing, "no forward") == []
    assert "device has nothing to run" not in texts(drawing)


def test_drawing_says_when_the_device_does_not_tell() -> None:
    drawing = layout(list(run_of(8, tells=False)))
    assert rects(drawing, "forward") == []
    assert "The device does not tell its times." in texts(drawing)
    assert len(rects(drawing, "build")) == 8


def test_texts_of_a_drawing_are_escaped() -> None:
    drawing = Drawing(
        10,
        10,
        "a < b & c",
        [Text(1, 1, "<x> & y", 5, "#000000"), Rect(0, 0, 1, 1, "#fff000", 1, "<")],
    )
    root = ElementTree.fromstring(to_svg(drawing))
    assert root.findtext(f"{SVG}title") == "a < b & c"
    assert root.findtext(f"{SVG}text") == "<x> & y"
    assert root.findtext(f"{SVG}rect/{SVG}title") == "<"


def test_picture_of_another_format_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"'\.gif'.*\.svg or \.png"):
        check_picture("steps.gif")


def test_png_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match=r"deepinfer-core\[plot\]"):
        draw(tmp_path / "steps.png", run_of(3))
    assert not (tmp_path / "steps.png").exists()


def test_png_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="PNG needs the extra `plot`")
    draw(tmp_path / "steps.png", run_of(12, slow=6))
    head = (tmp_path / "steps.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert int.from_bytes(head[16:20], "big") == 2 * WIDTH


# The verb


@pytest.fixture
def verb(scripted, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Run `deepinfer trace` on the scripted engine: (status, standard output, standard error)."""
    scripted.records = run_of(12, slow=6)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["trace", "--model", str(tmp_path / "model"), *arguments])
        out, err = capfd.readouterr()
        return int(left.value.code or 0), out, err

    return call


def test_verb_writes_both_files_and_says_where_the_time_went(verb, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "steps.svg"
    status, out, err = verb("--output", str(trace), "--picture", str(picture))
    assert (status, err) == (0, "")
    assert events_of(trace)
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"
    for words in ("decode step", "1 ms", "device busy", "host: build", "launched late"):
        assert words in out


def test_verb_runs_its_own_prompts_or_the_given_ones(verb, scripted, tmp_path: Path) -> None:
    assert verb("--output", str(tmp_path / "trace.json"))[0] == 0
    assert len(scripted.requests) == len(PROMPTS)
    scripted.requests.clear()
    given = ("--prompt", "boat", "--prompt", "ship", "--max-tokens", "5")
    assert verb("--output", str(tmp_path / "trace.json"), *given)[0] == 0
    assert [request.params.max_tokens for request in scripted.requests] == [5, 5]
    assert all(request.params.ignore_eos for request in scripted.requests)
    assert all(request.params.temperature == 0 for request in scripted.requests)


def test_verb_draws_as_many_steps_as_asked_for(verb, tmp_path: Path) -> None:
    picture = tmp_path / "steps.svg"
    files = ("--output", str(tmp_path / "trace.json"), "--picture", str(picture))
    assert verb(*files, "--picture-steps", "4")[0] == 0
    assert ElementTree.parse(picture).getroot().findtext(f"{SVG}title") == "Steps 4 to 7"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", "missing/trace.json"], "no folder 'missing'"),
        (["--output", "t.json", "--picture", "missing/x.svg"], "`--picture`"),
        (["--output", "t.json", "--picture", "x.gif"], "'.gif'"),
        (["--output", "t.svg", "--picture", "t.svg"], "change one"),
        (["--output", "t.json", "--picture-steps", "3"], "give `--picture`"),
    ],
)
def test_wrong_options_are_found_before_anything_runs(
    verb,
    scripted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = verb(*arguments)
    assert status == 2
    assert words in err
    assert scripted.requests == []
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_summary_names_causes_and_what_it_cannot_know() -> None:
    lines = {what: (much, note) for what, much, note in summary(list(run_of(12, slow=6)))}
    assert lines["launched late"] == ("1 of 12", "build 1")
    assert lines["host: settle"] == ("20 us", "median of 10")
    assert lines["prefill step"] == ("1 ms", "median of 1 steps, 40 rows")
    silent = {what: much for what, much, _ in summary(list(run_of(12, tells=False)))}
    assert silent["device busy"] == "unknown"


def test_run_of_a_model_has_every_step_on_host_and_device(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "model", demo_config())
    trace, picture = tmp_path / "trace.json", tmp_path / "steps.svg"
    files = ("--output", str(trace), "--picture", str(picture))
    with pytest.raises(SystemExit) as left:
        arguments = ["--max-tokens", "4", "--prompt", "a boat", "--prompt", "ship"]
        main(["trace", "--model", str(tmp_path / "model"), *files, *arguments])
    out, err = capfd.readouterr()
    assert (left.value.code or 0, err) == (0, "")
    slices = by_track(events_of(trace))
    steps = [each["args"]["step"] for each in slices["device/forward"]]
    assert len(steps) >= 4  # a prompt step, and a step for each token after the first
    for part in ("build", "launch", "wait", "settle", "deferred"):
        of_part = [each["args"]["step"] for each in slices["host/loop"] if each["name"] == part]
        assert sorted(of_part) == steps, part
    begins = {(each["name"], each["args"]["step"]): each["ts"] for each in slices["host/loop"]}
    assert any(begins["launch", step] < begins["settle", step - 1] for step in steps[1:])
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"
    assert "launched late" in out
