"""The CPU as a device: its queues, its memory, and what stands for pinned buffers and graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_core.cpu.queues import CpuQueue, Takes, Threads
from deepinfer_core.errors import Unsupported
from deepinfer_core.interfaces import Queue

__all__ = ["CpuMemory", "CpuRuntime", "read_memory"]

_QUEUE_NAMES = ("forward", "copy_in", "copy_out")


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """Bytes of memory this process may have, and bytes of it that are free."""

    total: int
    free: int


class CpuRuntime:
    """Queues, events and memory of the CPU. Used by one thread.

    Args:
        device: where tensors live. The reference ops run wherever torch does: on a GPU they check
            its kernels, or train a small model; work is still done when it has returned.
        threads: run each queue's work in a thread of its own, so that `submit` returns at once.
            They start with the first work and end with the runtime.
    """

    def __init__(self, device: torch.device | str = "cpu", *, threads: bool = False) -> None:
        """Make the three queues."""
        self._device, self._threads, takes = torch.device(device), Threads(), Takes()
        self._queues = {
            name: CpuQueue(name, self._device, takes, self._threads) for name in _QUEUE_NAMES
        }
        self.set_background(threads)

    def set_background(self, background: bool) -> None:
        """Choose whether each queue's work runs in a thread, or in `submit`.

        What is queued is waited for first.
        """
        for queue in self._queues.values():
            if queue.background and not background:
                queue.record().reach()
            queue.background = background
        if not background:
            self._threads.close()

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
        """Wait for every queue.

        Raise the error of one that has one; if others differ, the next call raises those.
        """
        events = [queue.record() for queue in self._queues.values()]
        for event in events:
            event.reach()
        for event in events:
            if event.failure is not None and event.failure.taken_at is None:
                raise event.failure.take()

    def close(self) -> None:
        """End the threads: what is queued is dropped, its events fail; later work starts anew."""
        self._threads.close()


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
