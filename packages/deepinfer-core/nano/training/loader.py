"""Batches of packed rows, made by worker processes and copied to the device one batch ahead."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    # Imported where it is used: a worker starts seconds sooner without it.
    import torch
    from torch import Tensor

__all__ = ["NUM_STREAMS", "Batch", "LoaderError", "RowLike", "batches", "stream_rows"]

# Streams that the steps of a run take in turn.
NUM_STREAMS = 16
# Seconds that a worker whose pipe has ended may take to be gone.
_END_TIMEOUT = 5.0


class RowLike(Protocol):
    """What a row has: three arrays of one length, see `nano.data.stream.Row`."""

    @property
    def token_ids(self) -> np.ndarray[Any, Any]: ...  # noqa: D102
    @property
    def documents(self) -> np.ndarray[Any, Any]: ...  # noqa: D102
    @property
    def weights(self) -> np.ndarray[Any, Any]: ...  # noqa: D102


# (tokenizer's path, seed, stream, number of the first row) to the stream's rows from there on.
RowSource = Callable[[str, int, int, int], Iterator[RowLike]]


class LoaderError(RuntimeError):
    """A worker failed or died; the message names it, with its traceback or its exit code."""


@dataclass(frozen=True)
class Batch:
    """Rows of one step.

    Attributes:
        tokens: [rows, T] int32.
        documents: [rows, T] int32, number of the token's document in its row.
        weights: [rows, T] float32, weight of the token as a target; 1 on replies.
    """

    tokens: Tensor
    documents: Tensor
    weights: Tensor


def stream_rows(tokenizer_path: str, seed: int, stream: int, start: int) -> Iterator[RowLike]:
    """Return the rows of one of `nano.data.stream`'s streams, from row `start` on."""
    from tokenizers import Tokenizer

    from nano.data.stream import rows

    return rows(Tokenizer.from_file(tokenizer_path), seed, stream, start)


def batches(
    tokenizer_path: str,
    seed: int,
    batch_rows: int,
    workers: int,
    start_step: int = 0,
    *,
    device: str | torch.device = "cpu",
    source: RowSource = stream_rows,
) -> Generator[Batch, None, None]:
    """Yield the batches of steps `start_step`, `start_step + 1`, ... without end.

    Step `s` holds the next rows of stream `s % NUM_STREAMS`. A stream belongs to one worker, so
    neither the number of workers nor `start_step` changes a batch. Close the iterator to end the
    workers.

    Args:
        tokenizer_path: handed to `source`.
        seed: handed to `source`.
        batch_rows: rows of a batch.
        workers: processes, 1 to `NUM_STREAMS`, best a divisor of it; they start with the first
            batch asked for.
        start_step: step of the first batch.
        device: where the batches are put, by pinned and asynchronous copies if CUDA.
        source: importable function, see `RowSource`.

    Raises:
        ValueError: `workers` is out of range.
        LoaderError: a worker raised or died.
    """
    if not 1 <= workers <= NUM_STREAMS:
        raise ValueError(f"`workers` is {workers}; allowed are 1 to {NUM_STREAMS}.")
    # A forked child must not inherit a CUDA context, so each one starts afresh.
    context = multiprocessing.get_context("spawn")
    workplaces: list[tuple[SpawnProcess, Connection]] = []
    try:
        for number in range(workers):
            # The pipe bounds what a worker has ready: `send` waits for room in its 64 KiB.
            reader, writer = context.Pipe(duplex=False)
            streams = range(number, NUM_STREAMS, workers)
            process = context.Process(
                target=_work,
                args=(source, tokenizer_path, seed, batch_rows, start_step, streams, writer),
                daemon=True,
                name=f"row-worker-{number}",
            )
            workplaces.append((process, reader))
            # Only the worker may hold the end that writes: its death then ends the pipe.
            with writer:
                process.start()
        ahead = None
        for step in itertools.count(start_step):
            arrays = _receive(*workplaces[step % NUM_STREAMS % workers])
            current, ahead = ahead, _on_device(arrays, str(device))
            if current is not None:
                yield current
    finally:
        for process, reader in workplaces:
            if process.pid is not None:
                process.terminate()
                process.join()
            reader.close()


def _work(
    source: RowSource,
    tokenizer_path: str,
    seed: int,
    batch_rows: int,
    start_step: int,
    streams: range,
    writer: Connection,
) -> None:
    """Send the batches of `streams` in the order of their steps, until the parent ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    try:
        for message in _messages(source, tokenizer_path, seed, batch_rows, start_step, streams):
            writer.send(message)
    except (KeyboardInterrupt, BrokenPipeError):
        return  # the run ends, and it is the parent's to say why


def _messages(
    source: RowSource,
    tokenizer_path: str,
    seed: int,
    batch_rows: int,
    start_step: int,
    streams: range,
) -> Iterator[tuple[np.ndarray[Any, Any], ...] | str]:
    """Yield the arrays of each batch; if the source fails, its traceback as the last one."""
    open_streams: dict[int, Iterator[RowLike]] = {}
    try:
        for step in itertools.count(start_step):
            turn, stream = divmod(step, NUM_STREAMS)
            if stream not in streams:
                continue
            if stream not in open_streams:
                start = turn * batch_rows
                open_streams[stream] = source(tokenizer_path, seed, stream, start)
            yield _arrays(list(itertools.islice(open_streams[stream], batch_rows)))
    except Exception:
        yield traceback.format_exc()


def _arrays(rows: list[RowLike]) -> tuple[np.ndarray[Any, Any], ...]:
    return (
        np.stack([row.token_ids for row in rows]).astype(np.uint16),
        np.stack([row.documents for row in rows]).astype(np.uint16),
        np.stack([row.weights for row in rows]).astype(np.uint8),
    )


def _receive(process: SpawnProcess, reader: Connection) -> tuple[np.ndarray[Any, Any], ...]:
    try:
        message = reader.recv()
    except (EOFError, OSError) as error:  # OSError: in the midst of a message
        process.join(_END_TIMEOUT)
        killed = process.exitcode == -signal.SIGKILL
        raise LoaderError(
            f"{process.name} ended with exit code {process.exitcode} before its batch was whole."
            + (" It was killed: is the memory too small for so many workers?" if killed else "")
        ) from error
    if isinstance(message, str):
        raise LoaderError(f"{process.name} failed:\n{message}")
    assert isinstance(message, tuple), "a worker sends its arrays or its traceback"
    return message


def _on_device(arrays: tuple[np.ndarray[Any, Any], ...], device: str) -> Batch:
    import torch

    tokens, documents, weights = arrays
    hosts = [
        torch.from_numpy(tokens.astype(np.int32)),
        torch.from_numpy(documents.astype(np.int32)),
        torch.from_numpy(weights.astype(np.float32) / np.float32(100)),
    ]
    if device.startswith("cuda"):
        # The pinned allocator reuses a block only after the copy from it has ended.
        hosts = [host.pin_memory().to(device, non_blocking=True) for host in hosts]
    return Batch(*hosts)
