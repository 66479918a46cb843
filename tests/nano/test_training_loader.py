"""Batches made by worker processes: the same whoever makes them, and no wait without end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from nano.training import loader
from nano.training.loader import LoaderError, batches

FAKE_ROWS = """
from dataclasses import dataclass
import numpy as np

@dataclass(frozen=True)
class Row:
    token_ids: np.ndarray
    documents: np.ndarray
    weights: np.ndarray

def rows(path, seed, stream, start):
    while True:
        ids = np.array([seed, stream, start, 65535], dtype=np.uint16)
        yield Row(ids, np.array([0, 0, 1, 1], np.uint8), np.array([0, 5, 100, 100], np.uint8))
        start += 1

def broken(path, seed, stream, start):
    yield from [next(rows(path, seed, stream, start))] * 4
    raise ValueError("no more rows")

def deadly(path, seed, stream, start):
    import os
    os._exit(7)

def large(path, seed, stream, start):
    # 320 KB a row, which no pipe holds; a byte in the file tells that a row was made.
    ids = np.zeros(2**16, np.uint16)
    while True:
        with open(path, "ab") as file:
            file.write(b".")
        yield Row(ids, ids, ids)
"""


@pytest.fixture
def fake_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # Worker processes import it by this name; they get the parent's import path.
    (tmp_path / "fake_rows_of_loader_test.py").write_text(FAKE_ROWS)
    monkeypatch.syspath_prepend(tmp_path)
    return "fake_rows_of_loader_test"


def take(
    name: str, count: int, workers: int, start: int = 0, source: str = "rows"
) -> list[list[list[float]]]:
    function = getattr(__import__(name), source)
    stream = batches("path", 9, 2, workers, start, source=function)
    try:
        found = [next(stream) for _ in range(count)]
    finally:
        stream.close()
    assert found[0].tokens.dtype == found[0].documents.dtype == torch.int32
    assert found[0].weights.tolist()[0] == pytest.approx([0.0, 0.05, 1.0, 1.0])
    return [batch.tokens.tolist() for batch in found]


def test_batches_do_not_depend_on_workers_or_start(fake_rows: str) -> None:
    one = take(fake_rows, 20, 1)
    assert one[0] == [[9, 0, 0, 65535], [9, 0, 1, 65535]]
    assert one[17] == [[9, 1, 2, 65535], [9, 1, 3, 65535]]
    assert take(fake_rows, 20, 3) == one
    assert take(fake_rows, 3, 2, start=17) == one[17:]


@pytest.mark.parametrize(("source", "told"), [("broken", "no more rows"), ("deadly", "code 7")])
def test_a_failed_worker_raises_in_the_parent(fake_rows: str, source: str, told: str) -> None:
    with pytest.raises(LoaderError, match=told):
        take(fake_rows, 40, 1, source=source)


@pytest.mark.timeout(60)  # what is tested against is a wait without end
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, "-9"), (signal.SIGINT, "0")])
def test_a_worker_that_dies_while_it_sends_raises_in_the_parent(
    fake_rows: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: str,
) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("a shell started the tests without Ctrl-C, and workers inherit that")
    made = tmp_path / "made"
    source = __import__(fake_rows).large
    stream = batches(str(made), 9, 2, 1, source=source)
    try:
        next(stream)
        # The parent took two batches of two rows; nobody takes the third.
        while made.stat().st_size < 6:
            time.sleep(0.01)
        time.sleep(0.3)
        (worker,) = (
            child for child in multiprocessing.active_children() if child.name == "row-worker-0"
        )
        assert worker.pid is not None
        assert made.stat().st_size == 6, "`send` bounds what is ready"
        os.kill(worker.pid, number)
        started = time.monotonic()
        with pytest.raises(LoaderError, match=f"row-worker-0 ended with exit code {code} "):
            next(stream)
        assert time.monotonic() - started < 5
    finally:
        stream.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_ends_quietly_when_nobody_reads(
    fake_rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as the worker sets it
    reader, writer = multiprocessing.Pipe(duplex=False)
    reader.close()
    source = __import__(fake_rows).large
    loader._work(source, str(tmp_path / "made"), 9, 2, 0, range(16), writer)
    writer.close()
