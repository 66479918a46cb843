"""The CPU as a device: work runs inside `submit`, so every event has happened when it is made.

Errors behave as on a device that works later. `submit` never raises; a queue whose work failed
drops what follows, and so does a queue that waits for an event behind the failure. A wait on any
event behind it raises the error. The first such wait, or `synchronize`, takes the error: from then
on the queues accept work again. Events recorded in between stay failed, as the work before them
never ran.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_core.errors import KernelInputError, Unsupported
from deepinfer_core.interfaces import Event, Queue

__all__ = ["CpuEvent", "CpuMemory", "CpuQueue", "CpuRuntime", "Failure", "read_memory"]

_QUEUE_NAMES = ("forward", "copy_in", "copy_out")


@dataclass(slots=True)
class Failure:
    """An error of submitted work; it stops the queues that share it until a wait has taken it."""

    error: Exception
    taken: bool = False

    def take(self) -> Exception:
        """Let the queues go on, and return the error to raise."""
        self.taken = True
        return self.error


@dataclass(frozen=True, slots=True)
class CpuEvent:
    """A point in a queue, passed already; `failure` is set if work before it failed."""

    failure: Failure | None = None

    def done(self) -> bool:
        """Return True: work ran, or was dropped, when it was submitted."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once, or raise the error of work before the point."""
        if self.failure is not None:
            raise self.failure.take()


class CpuQueue:
    """Work in order, each piece done when `submit` returns."""

    def __init__(self, device: torch.device) -> None:
        """Make a queue without work for tensors on `device`."""
        self._device = device
        self._failure: Failure | None = None

    @property
    def failure(self) -> Failure | None:
        """What stops this queue now."""
        if self._failure is not None and self._failure.taken:
            self._failure = None
        return self._failure

    def submit(self, work: Callable[[], None]) -> None:
        """Run the work, or drop it while an error has not been taken.

        An error of the work surfaces at a wait; KeyboardInterrupt and its like leave at once.
        """
        if self.failure is not None:
            return
        try:
            work()
            if self._device.type == "cuda":  # whose kernels return before they are done
                torch.cuda.synchronize(self._device)
        except Exception as error:
            self._failure = Failure(error)

    def record(self) -> CpuEvent:
        """Return an event behind everything submitted so far."""
        return CpuEvent(self.failure)

    def wait_for(self, event: Event) -> None:
        """Drop later work if work before the event failed, until the error is taken."""
        if not isinstance(event, CpuEvent):
            raise KernelInputError(
                f"`event` is a {type(event).__name__}; queues of cpu wait for events of cpu only."
            )
        failure = event.failure
        if failure is None or self.failure is not None:
            return
        # Even if a wait has taken the error: what this queue's work would read was never made.
        self._failure = Failure(failure.error) if failure.taken else failure


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """Bytes of memory this process may have, and bytes of it that are free."""

    total: int
    free: int


class CpuRuntime:
    """Queues, events and memory of the CPU. Used by one thread.

    Args:
        device: where tensors live. The reference ops run wherever torch does: on a GPU they check
            its kernels, or train a small model; work is still done when `submit` returns.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Make the three queues."""
        self._device = torch.device(device)
        self._queues = {name: CpuQueue(self._device) for name in _QUEUE_NAMES}

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return self._device

    def queue(self, name: str) -> CpuQueue:
        """Return the queue of that name, the same object every time.

        Raises:
            Unsupported: there is no such queue.
        """
        if name not in self._queues:
            names = ", ".join(_QUEUE_NAMES)
            raise Unsupported(f"queue {name!r} does not exist on cpu; use one of {names}.")
        return self._queues[name]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a zeroed tensor; on a CPU every copy is one within memory."""
        return torch.zeros(tuple(shape), dtype=dtype)

    def capture(self, queue: Queue, work: Callable[[], None]) -> None:
        """Return None, without running the work: there are no graphs."""

    def memory(self) -> CpuMemory:
        """Return what this process may use: the machine's, or its control group's if less."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return CpuMemory(total, free)
        return read_memory()

    def synchronize(self) -> None:
        """Raise the error of a queue that has one; if others differ, the next call raises those."""
        for queue in self._queues.values():
            if queue.failure is not None:
                raise queue.failure.take()


def read_memory(root: Path = Path("/")) -> CpuMemory:
    """Return the memory of the machine under `root`, limited by the control group of this process.

    Args:
        root: folder that holds `proc` and `sys`; another one in tests. Without `proc` (other
            systems) the C library is asked, which may know no more than the total.
    Raises:
        Unsupported: nothing tells the size.
    """
    meminfo = _fields(root / "proc/meminfo", unit=1024)
    if "MemTotal:" in meminfo:
        total = meminfo["MemTotal:"]
        free = meminfo.get("MemAvailable:", meminfo.get("MemFree:", total))
    else:
        total = _pages("SC_PHYS_PAGES")
        free = _pages("SC_AVPHYS_PAGES") or total
    if not total:
        raise Unsupported("memory size cannot be read on this system; Linux and macOS tell it.")
    for limit, used in _control_groups(root):
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return CpuMemory(total, free)


def _control_groups(root: Path) -> list[tuple[int, int]]:
    """Return (limit, bytes in use less reclaimable cache) of each memory group of this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit_name, used_name = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.strip("/")
        # Inside a container the path may be the host's, where nothing is mounted but the base.
        for folder in (group, *group.parents):
            limit = _number(folder / limit_name)
            if limit is not None:
                cached = _fields(folder / "memory.stat").get("inactive_file", 0)
                found.append((limit, (_number(folder / used_name) or 0) - cached))
            if folder == base:
                break
    return found


def _fields(path: Path, unit: int = 1) -> dict[str, int]:
    """Return `name number` lines of a file; nothing if it cannot be read."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _pages(name: str) -> int:
    try:
        return max(0, os.sysconf(name)) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
