"""The GPU as a device: streams, events with host times, pinned memory, captured graphs.

Work that raises when it is issued, such as an op that refuses its arguments, stops its queue: what
follows is dropped, and so is what other queues have behind an event of it. The first wait on an
event behind the failure, or `synchronize`, raises the error, and the queues accept work again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_kernels_cuda.errors import Unsupported

__all__ = ["CudaEvent", "CudaGraph", "CudaMemory", "CudaQueue", "CudaRuntime"]

_QUEUE_NAMES = ("forward", "copy_in", "copy_out")
# A waiting host looks without pause for so long, then sleeps between looks: a decode step is over
# within the first, and a long prefill leaves the core to others.
_SPIN_NS = 2_000_000
_NAP_S = 50e-6
# Times are differences to an event whose host time is known, in float32 milliseconds: after this
# long they would be less exact than a microsecond.
_ANCHOR_NS = 5_000_000_000


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Bytes of the device, and bytes of it that nobody uses."""

    total: int
    free: int


class _Clock:
    """Host times of events: one event's is known, others are told by their distance to it."""

    def __init__(self, stream: torch.cuda.Stream):
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor.record(stream)
        self._anchor.synchronize()
        self._time_ns: int = time.perf_counter_ns()

    def time_ns(self, event: torch.cuda.Event) -> int:
        """Return the host time of an event that has happened."""
        distance_ns = round(float(self._anchor.elapsed_time(event)) * 1e6)
        found = self._time_ns + distance_ns
        if distance_ns > _ANCHOR_NS:
            self._anchor, self._time_ns = event, found
        return found


@dataclass(slots=True)
class _Failure:
    """An error of submitted work; `taken` once somebody has been told."""

    error: BaseException
    taken: bool = False

    def take(self) -> BaseException:
        self.taken = True
        return self.error


class CudaEvent:
    """A point in a queue; satisfies core's `Event`."""

    __slots__ = ("_clock", "_event", "_name", "_time_ns", "failure")

    def __init__(
        self, event: torch.cuda.Event, clock: _Clock, name: str, failure: _Failure | None
    ) -> None:
        """Wrap a recorded event of the queue `name`."""
        self._event, self._clock, self._name = event, clock, name
        self._time_ns: int | None = None
        self.failure = failure

    @property
    def raw(self) -> torch.cuda.Event:
        """What streams wait for."""
        return self._event

    @property
    def time_ns(self) -> int | None:
        """`time.perf_counter_ns()` when the queue passed the point; None before that."""
        if self._time_ns is None and self.done():
            self._time_ns = self._clock.time_ns(self._event)
        return self._time_ns

    def done(self) -> bool:
        """Whether the queue has passed the point. Never waits."""
        return bool(self._event.query())

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until the queue has passed the point; raise the error of work before it.

        Raises:
            TimeoutError: it was not passed after `timeout_s` seconds.
        """
        started = time.perf_counter_ns()
        while not self._event.query():
            waited = time.perf_counter_ns() - started
            if timeout_s is not None and waited > timeout_s * 1e9:
                raise TimeoutError(
                    f"The queue `{self._name}` did not get to an event within {timeout_s:g} s."
                )
            if waited > _SPIN_NS:
                time.sleep(_NAP_S)
        if self.failure is not None:
            raise self.failure.take()


class CudaQueue:
    """Device work in order, on a stream of its own; satisfies core's `Queue`."""

    def __init__(self, name: str, device: torch.device):
        """Make the stream."""
        self.name = name
        self.stream = torch.cuda.Stream(device)
        self._clock = _Clock(self.stream)
        self._failure: _Failure | None = None

    @property
    def failure(self) -> _Failure | None:
        """The error that stops this queue, until somebody has taken it."""
        if self._failure is not None and self._failure.taken:
            self._failure = None
        return self._failure

    def submit(self, work: Callable[[], None]) -> None:
        """Issue device work on the stream; an error of it surfaces at the next wait."""
        if self.failure is not None:
            return
        try:
            with torch.cuda.stream(self.stream):
                work()
        except Exception as error:
            self._failure = _Failure(error)

    def record(self) -> CudaEvent:
        """Return an event behind everything submitted so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return CudaEvent(event, self._clock, self.name, self.failure)

    def wait_for(self, event: CudaEvent) -> None:
        """Make later work of this queue wait for `event`; the host does not wait."""
        self.stream.wait_event(event.raw)
        if event.failure is not None and not event.failure.taken and self.failure is None:
            self._failure = event.failure


class CudaGraph:
    """Captured work of a queue with fixed addresses and shapes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, queue: CudaQueue):
        """Hold a captured graph."""
        self._graph, self._queue = graph, queue

    def replay(self) -> None:
        """Submit the captured work once more, to the queue it was captured on."""
        self._queue.submit(self._graph.replay)


class CudaRuntime:
    """Queues, events, buffers and graphs of one GPU; satisfies core's `DeviceRuntime`.

    Args:
        device: the current one by default.
    Raises:
        Unsupported: there is no such device.
    """

    def __init__(self, device: torch.device | str | None = None):
        """Make the three queues."""
        if not torch.cuda.is_available():
            raise Unsupported(
                "PyTorch finds no CUDA device here; install a CUDA build of PyTorch on a machine "
                "with an NVIDIA GPU and its driver, or choose the accelerator `cpu`."
            )
        chosen = torch.device("cuda" if device is None else device)
        if chosen.type != "cuda":
            raise Unsupported(f"`device` is {str(device)!r}; give a CUDA device such as 'cuda:0'.")
        index = torch.cuda.current_device() if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise Unsupported(
                f"CUDA device {index} does not exist; this machine has "
                f"{torch.cuda.device_count()}, counted from 0."
            )
        self._device = torch.device("cuda", index)
        self._queues = {name: CudaQueue(name, self._device) for name in _QUEUE_NAMES}
        self._side = torch.cuda.Stream(self._device)

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return self._device

    def set_background(self, background: bool) -> None:
        """Change nothing: the device always works beside the host."""

    def queue(self, name: str) -> CudaQueue:
        """Return the queue of that name, the same object every time.

        Raises:
            Unsupported: there is no such queue.
        """
        if name not in self._queues:
            raise Unsupported(
                f"queue {name!r} does not exist on cuda; use one of {', '.join(_QUEUE_NAMES)}."
            )
        return self._queues[name]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a zeroed page-locked host tensor."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def capture(self, queue: CudaQueue, work: Callable[[], None]) -> CudaGraph:
        """Capture `work`, which has run before: compilation and first allocations cannot be."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # Other threads may allocate meanwhile.
        with torch.cuda.graph(graph, stream=queue.stream, capture_error_mode="thread_local"):
            work()
        return CudaGraph(graph, queue)

    def beside(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Issue work on a stream beside the current one; return what waits for it and its result.

        Both ends belong to the same stream, so a capture of that stream holds all of it.
        """
        stream = torch.cuda.current_stream(self._device)
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            result = work()

        def join(_inputs: object = work) -> Tensor:
            # What `work` reads is kept until here: its memory could be used anew meanwhile.
            stream.wait_stream(self._side)
            result.record_stream(stream)  # it was made for the other one
            return result

        return join

    def memory(self) -> CudaMemory:
        """Return what the device has and what is free; unused cache of PyTorch counts as free."""
        free, total = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return CudaMemory(total, free + cached)

    def synchronize(self) -> None:
        """Wait for the whole device; raise the error of a queue that has one."""
        torch.cuda.synchronize(self._device)
        for queue in self._queues.values():
            if queue.failure is not None:
                raise queue.failure.take()

    def close(self) -> None:
        """End nothing: streams go with the process."""
