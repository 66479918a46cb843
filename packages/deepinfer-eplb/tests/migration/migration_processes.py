"""Starts ranks as processes that meet over gloo, and collects what they return."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_SECONDS = 60.0
DIED = "died"

Function = Callable[..., Any]


def launcher() -> Callable[..., list[Any]]:
    """Return a function that runs another one on ranks 0 to n - 1 and returns their answers.

    A rank that ended without an answer has the answer `DIED`; one that raised fails the test.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch.distributed", "deepinfer_eplb.migrate"])

    def launch(function: Function, num_ranks: int, folder: Path, *arguments: Any) -> list[Any]:
        # A test file has no name to import it by, so it goes by its path.
        where = (inspect.getfile(function), function.__name__)
        ends, started = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, *where, rank, num_ranks, folder, arguments)
            )
            process.start()
            theirs.close()
            ends.append(ours)
            started.append(process)
        try:
            deadline = time.monotonic() + DEADLINE_SECONDS
            answers = [_answer(end, deadline) for end in ends]
        finally:
            for process in started:
                process.join(0 if process.exitcode is not None else 5)
                if process.is_alive():
                    process.kill()
                    process.join()
        failures = [text for kind, text in answers if kind == "raised"]
        assert not failures, "\n".join(failures)
        return [answer for _, answer in answers]

    return launch


def _answer(end: Connection, deadline: float) -> tuple[str, Any]:
    if not end.poll(max(deadline - time.monotonic(), 0)):
        return "raised", f"a rank gave no answer within {DEADLINE_SECONDS} s"
    try:
        found: tuple[str, Any] = end.recv()
        return found
    except EOFError:
        return DIED, DIED


def _rank(
    end: Connection,
    file: str,
    name: str,
    rank: int,
    num_ranks: int,
    folder: Path,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        function = _function(file, name)
        meet(folder / "first", rank, num_ranks)
        end.send(("returned", function(rank, num_ranks, folder, *arguments)))
    except BaseException:
        end.send(("raised", f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _function(file: str, name: str) -> Function:
    spec = importlib.util.spec_from_file_location("ranks", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["ranks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Function = getattr(module, name)
    return found


def meet(file: Path, rank: int, num_ranks: int, timeout_seconds: float = 20.0) -> dist.ProcessGroup:
    """Make the group of all processes, or make it anew with the ones that are left."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_seconds),
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def die() -> None:
    """End this process at once, as a failed machine would."""
    os._exit(9)
