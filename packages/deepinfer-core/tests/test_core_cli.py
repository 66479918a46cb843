"""The command `deepinfer`: lines in and out, exit statuses, and what goes wrong on the way."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console

from deepinfer_core import __version__, loader
from deepinfer_core.bench.make_checkpoint import (
    demo_config,
    second_geometry_config,
    write_checkpoint,
)
from deepinfer_core.cli import main, options
from deepinfer_core.cli.doctor import below
from deepinfer_core.cli.jsonl import LineWriter, OrderedLines
from deepinfer_core.cli.progress import RunProgress, rates
from deepinfer_core.cli.reply_view import JsonStyles, ReplyView
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import OutputError
from deepinfer_core.model import nano


@pytest.fixture
def run(scripted, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch):
    """Run `deepinfer generate` on the scripted engine: (status, lines, text of standard error)."""

    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, list[dict], str]:
        (tmp_path / "stdin").write_bytes(stdin)
        with (tmp_path / "stdin").open() as file, pytest.raises(SystemExit) as left:
            monkeypatch.setattr(sys, "stdin", file)
            main(["generate", "--model", str(tmp_path / "model"), *arguments])
        out, err = capfd.readouterr()
        return int(left.value.code or 0), [json.loads(line) for line in out.splitlines()], err

    return call


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


# generate: lines


def test_lines_have_the_promised_keys_in_the_order_of_the_prompts(run) -> None:
    status, lines, err = run("--prompt", "boat", "--prompt", "ship", "--max-tokens", "3")
    assert (status, err) == (0, "")
    assert [line["index"] for line in lines] == [0, 1]
    for line in lines:
        assert list(line) == ["index", "prompt_token_ids", "token_ids", "text", "finish_reason"]
        assert len(line["token_ids"]) == 3
        assert line["finish_reason"] == "length"
    assert lines[0]["text"].startswith("boat")


def test_logprobs_have_the_token_and_the_most_likely_ones(run) -> None:
    _, lines, _ = run("--prompt", "boat", "--max-tokens", "2", "--logprobs", "2")
    assert len(lines[0]["logprobs"]) == 2
    chosen = lines[0]["token_ids"][0]
    assert lines[0]["logprobs"][0] == {
        "token_id": chosen,
        "logprob": -0.5,
        "top": [
            {"token_id": chosen, "logprob": -0.5},
            {"token_id": chosen + 1, "logprob": -1.5},
        ],
    }


def test_lines_of_standard_input_override_the_flags(run) -> None:
    stdin = jsonl({"prompt": "boat"}, {"prompt_token_ids": [10, 11], "max_tokens": 5})
    _, lines, _ = run("-", "--max-tokens", "2", stdin=stdin + b"\n  \n")
    assert [len(line["token_ids"]) for line in lines] == [2, 5]
    assert lines[1]["prompt_token_ids"] == [10, 11]


def test_flags_reach_the_requests(run, scripted) -> None:
    run(
        "--prompt", "boat", "--max-tokens", "2", "--temperature", "0", "--seed", "9",
        "--bounded-replay", "off", "--ignore-eos", "--determinism", "strict",
    )  # fmt: skip
    request = scripted.requests[0]
    assert (request.params.max_tokens, request.params.temperature) == (2, 0.0)
    assert (request.seed, request.strict, request.replay_decoder) == (9, True, False)
    assert request.stop_ids == frozenset()


def test_file_goes_in_and_file_comes_out(run, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl({"prompt": "boat", "stop": "t"}, {"prompt": "ship", "stop": ["i"]}))
    target.write_text("older and much longer content\n" * 50)
    status, lines, err = run("--input", str(source), "--out", str(target))
    assert (status, lines, err) == (0, [], "")
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["text"] for line in written] == ["boa", "sh"]
    assert {line["finish_reason"] for line in written} == {"stop"}


@pytest.mark.parametrize(
    ("line", "param", "code", "message"),
    [
        (b"{", None, "invalid_json", "not JSON"),
        (b"[" * 100_000, None, "invalid_json", "not JSON"),
        (b"\xff\xfe{}", None, "invalid_json", "not JSON"),
        (b"7", None, "invalid_json", "not a JSON object"),
        (jsonl({"prompt": "a", "tempersture": 1}), "tempersture", "unknown_field", "temperature"),
        (jsonl({"prompt": "a", "temperature": "hot"}), "temperature", "invalid_request", "'hot'"),
        (jsonl({"prompt": "a", "max_tokens": 0}), "max_tokens", "invalid_request", "from 1 to"),
        (jsonl({"prompt": "a", "stop": 5}), "stop", "invalid_request", "a list of texts"),
        (jsonl({"prompt": "a", "stop_token_ids": 5}), "stop_token_ids", "invalid_request", "list"),
        (jsonl({"prompt": 5}), "prompt", "invalid_request", "a text"),
        (jsonl({"prompt_token_ids": "a"}), "prompt_token_ids", "invalid_request", "token ids"),
        (jsonl({"max_tokens": 3}), "prompt", "invalid_request", "neither"),
        (jsonl({"prompt": ""}), "prompt", "invalid_request", "is empty"),
        (jsonl({"prompt_token_ids": [600]}), "prompt_token_ids", "token_id_out_of_range", "600"),
        (jsonl({"prompt_token_ids": [5] * 200}), "prompt", "context_length_exceeded", "200"),
    ],
)
def test_bad_line_is_an_error_in_its_place_and_the_others_complete(
    run, line: bytes, param: str | None, code: str, message: str
) -> None:
    stdin = jsonl({"prompt": "boat"}) + line.rstrip(b"\n") + b"\n" + jsonl({"prompt": "ship"})
    status, lines, err = run("-", "--max-tokens", "2", stdin=stdin)
    assert (status, err) == (1, 'error: 1 of 3 prompts failed; see the lines with "error"\n')
    assert [each["index"] for each in lines] == [0, 1, 2]
    assert list(lines[1]) == ["index", "error"]
    assert message in lines[1]["error"].pop("message")
    assert lines[1]["error"] == {"param": param, "code": code}
    assert [len(each["token_ids"]) for each in (lines[0], lines[2])] == [2, 2]


def test_failed_prompts_are_counted_with_the_file_they_are_in(run, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    status, _, err = run("-", "--out", str(out), stdin=jsonl({"prompt": "a"}, {"prompt": ""}, {}))
    assert (status, err) == (1, f"error: 2 of 3 prompts failed; see {out}\n")


def test_bad_line_names_its_number_in_the_file(run) -> None:
    bad = jsonl({"prompt": ""}, {"prompt_token_ids": [600]}, {"prompt_token_ids": [-2]})
    _, lines, _ = run("-", stdin=b"\n\n{\n" + bad)
    for number, line in enumerate(lines, start=3):
        assert line["error"]["message"].startswith(f"Line {number}: ")


def test_prompt_of_the_command_line_has_no_line(run) -> None:
    _, lines, _ = run("--prompt", "")
    assert lines[0]["error"]["message"].startswith("The prompt is empty")


def test_bad_line_does_not_change_the_seeds_of_the_others(run, scripted) -> None:
    run("-", stdin=jsonl({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}))
    whole = [request.seed for request in scripted.requests]
    scripted.requests.clear()
    run("-", stdin=jsonl({"prompt": "d"}))
    assert scripted.requests[0].seed == whole[0]
    scripted.requests.clear()
    run("-", stdin=jsonl({"prompt": "a"}) + b"{\n" + jsonl({"prompt": "c"}))
    assert [request.seed for request in scripted.requests] == [whole[0], whole[2]]


def test_request_that_fails_while_it_runs_keeps_what_it_produced(run, scripted) -> None:
    scripted.script = lambda request: [10, -1 if request.uid == 0 else 11]
    prompts = ("--prompt", "a", "--prompt", "b")
    status, lines, _ = run(*prompts, "--max-tokens", "2", "--logprobs", "0")
    assert status == 1
    assert lines[0] == {
        "index": 0,
        "prompt_token_ids": lines[0]["prompt_token_ids"],
        "token_ids": [10],
        "text": lines[1]["text"][0],
        "finish_reason": "error",
        "logprobs": [{"token_id": 10, "logprob": -0.5, "top": []}],
        "error": {"message": "No finite logit.", "param": None, "code": "non_finite"},
    }
    assert len(lines[0]["prompt_token_ids"]) == 1
    assert lines[1]["token_ids"] == [10, 11]


def test_no_lines_is_no_output(run) -> None:
    assert run("-", stdin=b"") == (0, [], "")


# generate: options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one way"),
        (["--prompt", "a", "-"], "one way"),
        (["prompts.txt"], "'prompts.txt'"),
        (["--input", "/no/such/file"], "cannot be read"),
        (["--prompt", "a", "--temperature", "-1"], "`temperature` is -1.0"),
        (["--prompt", "a", "--bounded-replay", "all"], "'off' or 'encoder' or 'decoder'"),
        (
            ["--prompt", "a", "--determinism", "strict", "--bounded-replay", "both"],
            "`--bounded-replay` is 'both', but `determinism` is 'strict'",
        ),
        (["--prompt", "a", "--numerics", "exact"], "'ideal', 'cache' or 'release'"),
        (["--prompt", "a", "--block-size", "63"], "`block_size` is 63"),
        (["--prompt", "a", "--block-size", "many"], "--block-size"),
        (["--prompt", "a", "--no-such-flag"], "No such option"),
        (["--prompt", "a", "--config", "/no/such/file"], "cannot be read"),
    ],
)
def test_wrong_option_ends_with_status_2(run, arguments: list[str], message: str) -> None:
    status, lines, err = run(*arguments)
    assert (status, lines) == (2, [])
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", [["generate", "--prompt", "a"], ["demo"], ["plan-memory"]])
def test_without_weights_a_model_must_be_named(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    verb: list[str],
) -> None:
    monkeypatch.setattr(nano, "files", lambda package: tmp_path)
    with pytest.raises(SystemExit) as left:
        main(verb)
    assert left.value.code == 1
    err = capfd.readouterr().err
    assert "`deepinfer-nano`" in err and "Name a model folder or a hub id" in err
    assert "Traceback" not in err


def test_model_that_comes_with_the_package_is_the_default(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "nano_model", second_geometry_config(), seed=0)
    monkeypatch.setattr(nano, "files", lambda package: tmp_path)
    threads = torch.get_num_threads()
    for verb in (["generate", "--prompt", "a", "--max-tokens", "2"], ["plan-memory"], ["doctor"]):
        with pytest.raises(SystemExit) as left:
            main(verb)
        assert not left.value.code
    torch.set_num_threads(threads)
    out = capfd.readouterr().out
    assert len(json.loads(out.splitlines()[0])["token_ids"]) == 2
    assert "deepinfer-nano on `cpu`" in out
    assert "the model of verbs without `--model`" in out
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "deepinfer-nano" in capfd.readouterr().out


def test_unknown_variable_ends_with_status_2(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_NUMERIC", "ideal")
    status, _, err = run("--prompt", "a")
    assert status == 2
    assert "mean `DEEPINFER_NUMERICS`" in err


@pytest.mark.parametrize("way", ["same name", "other name", "standard input"])
def test_input_is_not_overwritten_with_results(run, tmp_path: Path, way: str) -> None:
    file = tmp_path / "lines.jsonl"
    content = jsonl({"prompt": "a"})
    file.write_bytes(content)
    source = ["--input", str(file)]
    if way == "other name":
        (tmp_path / "link").hardlink_to(file)
        source = ["--input", str(tmp_path / "link")]
    elif way == "standard input":
        source, file = ["-"], tmp_path / "stdin"
    status, _, err = run(*source, "--out", str(file), stdin=content)
    assert (status, err) == (
        2,
        "error: Results would go into the file of the prompts; change one.\n",
    )
    assert file.read_bytes() == content


def test_absent_input_is_an_error_and_leaves_old_results(run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    status, _, err = run("--input", str(tmp_path / "absent"), "--out", str(out))
    assert status == 2
    assert "cannot be read: No such file" in err and "Traceback" not in err
    assert out.read_text() == "old\n"


def test_input_may_be_standard_input_by_its_usual_name(run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    status, _, err = run("--input", "-", "--out", str(out), stdin=jsonl({"prompt": "a"}))
    assert (status, err) == (0, "")
    assert json.loads(out.read_text())["index"] == 0


def test_old_results_stay_until_the_model_is_loaded(run, tmp_path: Path) -> None:
    (tmp_path / "model/tokenizer.json").write_text("{")
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    status, _, err = run("--prompt", "a", "--out", str(out))
    assert status == 1
    assert err.startswith("error: ") and "Traceback" not in err
    assert out.read_text() == "old\n"


# generate: writing


class Recorder:
    def __init__(self) -> None:
        self.lines: list[object] = []

    def write(self, line: object) -> None:
        self.lines.append(line)


def test_a_line_waits_for_those_before_it() -> None:
    recorder = Recorder()
    lines = OrderedLines(recorder)  # type: ignore[arg-type]
    after = []
    for index in (2, 0, 1, 4):
        lines.put(index, {"index": index})
        after.append([line["index"] for line in recorder.lines])  # type: ignore[index]
    assert after == [[], [0], [0, 1, 2], [0, 1, 2]]
    lines.put_rest()
    assert recorder.lines[-1] == {"index": 4}


def test_interrupt_behind_a_write_does_not_write_the_line_again() -> None:
    class Interrupted(Recorder):
        def write(self, line: object) -> None:
            super().write(line)
            if len(self.lines) == 1:
                raise KeyboardInterrupt

    recorder = Interrupted()
    lines = OrderedLines(recorder)  # type: ignore[arg-type]
    lines.put(1, {"index": 1})
    with pytest.raises(KeyboardInterrupt):
        lines.put(0, {"index": 0})
    lines.put_rest()
    assert recorder.lines == [{"index": 0}, {"index": 1}]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("stdin", ["generate", "-"], "Standard input is closed; give `--prompt` or `--input`."),
        ("stdout", ["generate", "--prompt", "a"], "Standard output is closed; choose a file"),
        ("stdout", ["doctor"], "Standard output is closed"),
    ],
)
def test_closed_stream_is_one_error(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("DEEPINFER_MODEL", "/no/such/model")
    monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as left:
        main(arguments)
    err = capfd.readouterr().err
    assert left.value.code in (1, 2)
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_errors_do_not_go_among_the_results(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    options.fail("nobody reads this")
    assert capfd.readouterr().out == ""


def test_lines_are_in_the_file_while_others_still_run(run, scripted, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    sizes: list[int] = []
    scripted.before_step = lambda: sizes.append(out.read_bytes().count(b"\n"))
    stdin = jsonl(*({"prompt_token_ids": [9], "max_tokens": count} for count in (1, 4, 2)))
    run("-", "--out", str(out), stdin=stdin)
    assert sizes == [0, 1, 1, 1]


def test_output_that_cannot_be_written_is_one_error(capfd: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(typer.Exit) as left:
        options.reports_errors(full)()
    assert left.value.exit_code == 1
    assert "the output cannot be written: No space left on device" in capfd.readouterr().err


def test_fault_of_a_file_is_not_taken_for_one_of_the_output() -> None:
    def absent() -> None:
        Path("/no such file").read_text(encoding="utf-8")

    with pytest.raises(FileNotFoundError):
        options.reports_errors(absent)()


def test_full_disk_is_one_error_that_says_what_is_safe(run) -> None:
    status, lines, err = run("--prompt", "a", "--out", "/dev/full")
    assert (status, lines) == (1, [])
    assert err.count("\n") == 1
    assert "`/dev/full` cannot be written: No space left on device. Lines that are safe: 0" in err


def test_disk_that_fills_up_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 50

    def write(file: int, data: memoryview) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        count = min(room, len(data), 7)
        room -= count
        return real(file, data[:count])

    real = os.write
    monkeypatch.setattr(os, "write", write)
    writer = LineWriter(tmp_path / "out.jsonl")
    writer.begin()
    with pytest.raises(OutputError, match="Lines that are safe: 3"):
        for index in range(9):
            writer.write({"index": index})
    monkeypatch.undo()
    assert (tmp_path / "out.jsonl").read_bytes() == jsonl({"index": 0}, {"index": 1}, {"index": 2})


def test_place_that_cannot_be_opened_is_an_error(run) -> None:
    status, _, err = run("--prompt", "a", "--out", "/no/such/folder/out.jsonl")
    assert status == 1
    assert "cannot be opened for results: No such file or directory" in err


def test_closed_pipe_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    stdout = SimpleNamespace(flush=lambda: None, fileno=lambda: writing)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        writer = LineWriter(None)
    writer.write({"index": 0})
    os.close(reading)
    message = "standard output cannot be written: Broken pipe. Lines that are safe: 1"
    with pytest.raises(OutputError, match=message):
        writer.write({"index": 1})
    os.close(writing)


# processes of their own

INTERRUPTED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import ScriptedEngine
import deepinfer_core.llm as module
from deepinfer_core.cli import demo, main

steps = []
def press():
    steps.append(1)
    if len(steps) == 5:
        os.kill(os.getpid(), signal.SIGINT)

engine = ScriptedEngine()
engine.before_step = press
module.build_engine = lambda config, backend, folder, tokenizer, verifier: engine
module.resolve_model = Path
main()
"""


def test_ctrl_c_keeps_finished_lines_and_ends_with_130(scripted, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(INTERRUPTED.format(tests=str(Path(__file__).parent)))
    counts = (1, 1000, 2)
    lines = ({"prompt_token_ids": [9], "max_tokens": count} for count in counts)
    command = [sys.executable, str(driver), "generate", "-", "--model", str(tmp_path / "model")]
    done = subprocess.run(command, input=jsonl(*lines), capture_output=True, timeout=120)
    assert done.returncode == 130
    assert done.stderr == b"error: interrupted; 2 of 3 lines are written\n"
    assert [json.loads(line)["index"] for line in done.stdout.splitlines()] == [0, 2]


def test_ctrl_c_while_writing_writes_every_finished_line_once(scripted, tmp_path: Path) -> None:
    press = (
        "from deepinfer_core.cli.jsonl import LineWriter\n"
        "write = LineWriter.write\n"
        "def pressing(self, line):\n"
        "    write(self, line)\n"
        "    if self.num_lines == 1:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "LineWriter.write = pressing\n"
        "engine.before_step = lambda: None\n"
        "module.build_engine ="
    )
    code = INTERRUPTED.format(tests=str(Path(__file__).parent))
    driver = tmp_path / "driver.py"
    driver.write_text(code.replace("module.build_engine =", press))
    lines = ({"prompt_token_ids": [9], "max_tokens": count} for count in (3, 3, 1000, 3))
    command = [sys.executable, str(driver), "generate", "-", "--model", str(tmp_path / "model")]
    done = subprocess.run(command, input=jsonl(*lines), capture_output=True, timeout=120)
    assert done.returncode == 130
    assert done.stderr == b"error: interrupted; 3 of 4 lines are written\n"
    assert [json.loads(line)["index"] for line in done.stdout.splitlines()] == [0, 1, 3]


def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys\nfrom deepinfer_core.cli import main\n"
        "try:\n    main(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'tokenizers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# progress


def test_speeds_are_shown_on_a_terminal() -> None:
    text = io.StringIO()
    stats = SimpleNamespace(
        prefill_tokens=300, prefill_seconds=2.0, decode_tokens=90, decode_seconds=3.0
    )
    console = Console(file=text, force_terminal=True, width=120)
    with RunProgress(4, console) as progress:
        progress.update(1, stats)
        with progress.away():
            text.write("<line>")
        progress.summary("all done")
    assert "1/4" in text.getvalue()
    assert "prefill 150 tok/s, decode 30 tok/s" in text.getvalue()
    assert "all done" in text.getvalue()


def test_nothing_is_shown_in_a_pipe() -> None:
    text = io.StringIO()
    stats = SimpleNamespace(prefill_tokens=0, prefill_seconds=0, decode_tokens=0, decode_seconds=0)
    with RunProgress(4, Console(file=text, force_terminal=False)) as progress:
        progress.update(1, stats)
        with progress.away():
            pass
        progress.summary("all done")
    assert text.getvalue() == ""


def test_speed_without_a_step_is_zero() -> None:
    stats = SimpleNamespace(prefill_tokens=0, prefill_seconds=0, decode_tokens=0, decode_seconds=0)
    assert rates(stats) == "prefill 0 tok/s, decode 0 tok/s"


# other verbs


def test_version_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert not left.value.code
    assert capfd.readouterr().out == f"deepinfer {__version__}\n"


def test_help_has_a_flag_with_text_for_every_option(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = " ".join(capfd.readouterr().out.split())
    for name, field in EngineConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        if name != "seed":
            assert str(field.description) in shown
    for group in ("Model", "Memory", "Scheduling", "Sampling"):
        assert f"─ {group} ─" in shown


def test_doctor_says_what_runs_and_what_the_rest_lacks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    out = capfd.readouterr().out
    assert not left.value.code
    assert "numerics ideal, cache, release; determinism strict and normal" in out
    assert "torch" in out and "Chosen without" in out
    assert "nvidia" in out and "ascend" in out and "pip install" not in out


@pytest.mark.parametrize("width", [80, 60])
def test_tables_lose_no_text_on_a_narrow_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(options, "_PIPE_WIDTH", width)
    note = "/a/path/without/a/space/to/break/it/at/" * 3
    options.print_table("Title", [("slots: compressor carry", "not in this build", note)])
    out = capfd.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    cells = [line.strip("│").split("│") for line in out.splitlines() if "│" in line]
    first, second, third = (
        [cell.strip() for cell in column] for column in zip(*cells, strict=True)
    )
    assert first[0] == "slots: compressor carry"
    assert " ".join(second).strip() == "not in this build"
    assert "".join(third) == note


def test_switches_take_no_value_in_the_help(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    flags = {"--version": [], "--ignore-eos": ["generate"], "--plain": ["bench", "make-checkpoint"]}
    for flag, verb in flags.items():
        with pytest.raises(SystemExit):
            main([*verb, "--help"])
        [line] = [line for line in capfd.readouterr().out.splitlines() if flag in line]
        assert "bool" not in line.lower()


def test_memory_plan_shows_what_fits_from_the_configuration_alone(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(demo_config()))
    with pytest.raises(SystemExit) as left:
        main(["plan-memory", "--model", str(tmp_path), "--max-model-len", "1000"])
    out = capfd.readouterr().out
    assert not left.value.code
    for what in ("weights", "blocks: index", "longest context", "1000 tokens", "16 sequences"):
        assert what in out


def test_memory_plan_that_cannot_be_is_an_error(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(demo_config()))
    with pytest.raises(SystemExit) as left:
        main(["plan-memory", "--model", str(tmp_path), "--max-model-len", "5000"])
    assert left.value.code == 1
    assert "the model's context is 4096 tokens" in capfd.readouterr().err


def test_demo_without_a_recipe_says_what_to_install(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "nano_model", second_geometry_config(), seed=0)
    monkeypatch.setattr(nano, "files", lambda package: tmp_path)
    monkeypatch.setattr(loader, "targets", lambda group: {})
    with pytest.raises(SystemExit) as left:
        main(["demo"])
    out, err = capfd.readouterr()
    assert (left.value.code, out) == (1, "")
    assert "install the package `deepseek-recipe`" in err


class Delta:
    """A chunk of Chat Completions."""

    name = None

    def __init__(self, **delta: object) -> None:
        self.data = json.dumps({"choices": [{"index": 0, "delta": delta}]})


def call_delta(index: int, **function: str) -> Delta:
    return Delta(tool_calls=[{"index": index, "function": function}])


def shown(deltas: list[Delta], *, colours: bool, is_json: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=colours,
        color_system="standard" if colours else None,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
    )
    view = ReplyView(console, is_json=is_json)
    view.take([Delta(role="assistant", content=None)])
    for each in deltas:
        view.take([each])
    view.close()
    return file.getvalue()


REPLY = [
    Delta(reasoning_content="7 + 8"),
    Delta(reasoning_content=" = 15."),
    Delta(content="It is"),
    Delta(content=" [bold]85[/bold] :smile:."),
    call_delta(0, name="weather", arguments=""),
    call_delta(0, arguments='{"city": "Rio'),
    call_delta(0, arguments=' de", "days": 2}'),
    call_delta(1, name="now", arguments="{}"),
]


def test_reply_is_plain_text_where_no_terminal_is() -> None:
    assert shown(REPLY, colours=False) == (
        '7 + 8 = 15.\nIt is [bold]85[/bold] :smile:.\nweather(city="Rio de", days=2)\nnow()\n'
    )


def test_reply_has_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown(REPLY[:1], colours=True) == "\x1b[2;3m7 + 8\x1b[0m\n"
    text = shown([Delta(content='{"a": ["b", -1'), Delta(content="]}")], colours=True, is_json=True)
    for part in ('\x1b[36m"a"\x1b[0m', '\x1b[32m"b"\x1b[0m', "\x1b[35m -1\x1b[0m"):
        assert part in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in shown(REPLY[2:], colours=True, is_json=True)


def test_text_of_a_model_cannot_steer_the_terminal() -> None:
    assert shown([Delta(content="a\x1b[2Jb\rc\n")], colours=False) == "a\\x1b[2Jb\\rc\n\n"


def test_call_that_was_cut_off_is_shown_as_far_as_it_came() -> None:
    deltas = [call_delta(0, name="weather", arguments='{"city": "Ri')]
    assert shown(deltas, colours=False) == 'weather({"city": "Ri)\n'


@pytest.mark.parametrize("size", [1, 2, 100])
def test_json_has_the_same_styles_however_it_is_cut(size: int) -> None:
    text = '{"a\\"b": [1, "x:{", true], "c": {"d": null, "e": "f,"}}'
    styles = JsonStyles()
    pieces = [styles.feed(text[i : i + size]) for i in range(0, len(text), size)]
    marked = [(c, style) for piece in pieces for run, style in piece for c in run]
    assert "".join(c for c, _ in marked) == text
    keys = "".join(c for c, style in marked if style == "cyan")
    strings = "".join(c for c, style in marked if style == "green")
    assert keys == '"a\\"b""c""d""e"'
    assert strings == '"x:{""f,"'


def test_checkpoint_is_made_in_a_new_folder_only(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text("")
    with pytest.raises(SystemExit) as left:
        main(["bench", "make-checkpoint", str(tmp_path)])
    assert left.value.code == 1
    assert "is not empty" in capfd.readouterr().err


def test_doctor_tells_what_the_environment_asks_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nvidia")
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert "`DEEPINFER_ACCELERATOR` asks for 'nvidia'" in capfd.readouterr().out
    monkeypatch.setenv("DEEPINFER_FOO", "1")
    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    assert left.value.code == 1
    assert "DEEPINFER_FOO" in capfd.readouterr().err


def test_the_prefix_cache_can_be_turned_off_by_a_flag(run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    load = EngineConfig.load

    def kept(*arguments: object) -> EngineConfig:
        given.append(load(*arguments))
        return given[-1]

    monkeypatch.setattr(EngineConfig, "load", kept)
    run("--prompt", "hi", "--max-tokens", "1", "--no-prefix-cache")
    run("--prompt", "hi", "--max-tokens", "1", "--prefix-cache")
    run("--prompt", "hi", "--max-tokens", "1")
    assert [config.prefix_cache for config in given] == [False, True, True]


def test_doctor_warns_of_versions_that_are_too_old(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "version.cfg").write_text("# versions\nruntime_running_version=[8.2.RC1]\n")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["doctor"])
    out = capfd.readouterr().out
    assert "12.8 " in out and "older than 13.0, which is asked for" in out
    assert "8.2.RC1 " in out and "older than 9.2, which is asked for" in out


@pytest.mark.parametrize(
    ("found", "floor", "old"),
    [
        ("12.8", (13, 0), True),
        ("13.0", (13, 0), False),
        ("13.1", (13, 0), False),
        ("8.2.RC1", (9, 2), True),
        ("9.2.0", (9, 2), False),
        ("10.0", (9, 2), False),
    ],
)
def test_versions_are_compared_by_number(found: str, floor: tuple[int, ...], old: bool) -> None:
    assert below(found, floor) is old


def test_half_a_surrogate_in_a_field_name_fails_its_line_alone(run) -> None:
    stdin = jsonl({"prompt": "boat"}) + b'{"prompt": "a", "\\ud800": 1}\n'
    status, lines, _ = run("-", "--max-tokens", "2", stdin=stdin)
    assert status == 1
    assert len(lines[0]["token_ids"]) == 2
    assert lines[1]["error"]["code"] == "unknown_field"
