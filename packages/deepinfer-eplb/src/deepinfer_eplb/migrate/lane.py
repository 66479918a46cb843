"""Where transfers run beside the steps: a stream, or on a CPU a thread that waits for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Lane"]


class Lane:
    """Transfers and copies in the background, in order among themselves."""

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        """Make a stream on CUDA.

        Args:
            device: of the experts.
            timeout_seconds: for each `start`, on a CPU.
        """
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None
        self._timeout = timeout_seconds
        self._thread = ThreadPoolExecutor(1, "expert-migration")
        self._waits: list[Future[None]] = []

    def beside(self) -> AbstractContextManager[object]:
        """Return a context whose work runs here."""
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def follow_steps(self) -> None:
        """Let what is launched here from now on come after the steps launched so far."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))

    def lead_steps(self) -> None:
        """Let steps launched from now on come after what was launched here so far."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def upload(self, array: NDArray[np.generic]) -> Tensor:
        """Return a copy on the device, of use to what runs here."""
        tensor = torch.from_numpy(array.copy())
        if self._side is None:
            return tensor
        with self.beside():
            # From pinned memory: otherwise the host would wait until it is this copy's turn.
            return tensor.pin_memory().to(self._side.device, non_blocking=True)

    def start(self, operations: Sequence[dist.P2POp]) -> None:
        """Start sends and receives."""
        with self.beside():
            works = dist.batch_isend_irecv(list(operations))
            if self._side is None:
                # gloo tells that an operation is done only to the one who waits for it.
                self._waits.append(self._thread.submit(_wait, works, self._timeout))
            else:
                for work in works:
                    work.wait()  # makes the stream wait, not the host
        self.mark()

    def mark(self) -> None:
        """Let `done` be about all that was launched here so far."""
        if self._side is not None:
            self._event = self._side.record_event()

    def done(self) -> bool:
        """Return whether all up to the last `mark` has ended; raise what a transfer failed with."""
        for each in self._waits:
            if each.done():
                each.result()
        self._waits = [each for each in self._waits if not each.done()]
        return not self._waits and (self._event is None or self._event.query())


def _wait(works: Sequence[dist.Work], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    for work in works:
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
