"""The CPU as a device: order, events, errors that surface at a wait, and the size of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_core.cpu import runtime as module
from deepinfer_core.cpu.runtime import CpuRuntime, read_memory
from deepinfer_core.errors import KernelInputError, Unsupported
from deepinfer_core.interfaces import DeviceRuntime


class Broken(Exception):
    """What a piece of work raises here."""


def fail() -> None:
    raise Broken("work failed")


@pytest.fixture
def runtime() -> CpuRuntime:
    return CpuRuntime()


def test_it_is_a_device_runtime(runtime: CpuRuntime) -> None:
    device: DeviceRuntime = runtime
    assert device.device == torch.device("cpu")
    assert device.capture(device.queue("forward"), fail) is None


def test_queues_keep_their_identity_and_others_do_not_exist(runtime: CpuRuntime) -> None:
    queues = [runtime.queue(name) for name in ("forward", "copy_in", "copy_out")]
    assert len({id(queue) for queue in queues}) == 3
    assert runtime.queue("copy_in") is queues[1]
    with pytest.raises(Unsupported, match="'backward'"):
        runtime.queue("backward")


def test_work_runs_in_order_and_events_are_done(runtime: CpuRuntime) -> None:
    ran: list[int] = []
    forward, copy_out = runtime.queue("forward"), runtime.queue("copy_out")
    forward.submit(lambda: ran.append(1))
    event = forward.record()
    copy_out.wait_for(event)
    copy_out.submit(lambda: ran.append(2))
    assert ran == [1, 2]
    assert event.done()
    event.wait()
    event.wait(timeout_s=0.0)
    runtime.synchronize()


def test_an_error_surfaces_at_the_wait_and_the_queue_goes_on(runtime: CpuRuntime) -> None:
    ran: list[int] = []
    forward = runtime.queue("forward")
    before = forward.record()
    forward.submit(fail)
    forward.submit(lambda: ran.append(1))
    event = forward.record()
    before.wait()
    assert event.done() and not ran
    with pytest.raises(Broken, match="work failed"):
        event.wait()
    forward.submit(lambda: ran.append(2))
    forward.record().wait()
    runtime.synchronize()
    assert ran == [2]


def test_an_error_reaches_the_queue_that_waits_for_it_once(runtime: CpuRuntime) -> None:
    ran: list[str] = []
    forward, copy_out = runtime.queue("forward"), runtime.queue("copy_out")
    forward.submit(fail)
    copy_out.wait_for(forward.record())
    copy_out.submit(lambda: ran.append("copied garbage"))
    with pytest.raises(Broken):
        copy_out.record().wait()
    forward.submit(lambda: ran.append("next step"))
    copy_out.wait_for(forward.record())
    copy_out.submit(lambda: ran.append("its copy"))
    copy_out.record().wait()
    runtime.synchronize()
    assert ran == ["next step", "its copy"]


def test_a_step_launched_behind_a_failed_one_fails_too(runtime: CpuRuntime) -> None:
    ran: list[int] = []
    forward, copy_out = runtime.queue("forward"), runtime.queue("copy_out")
    forward.submit(fail)
    first = forward.record()
    forward.submit(lambda: ran.append(1))  # dropped: it would read what the first did not write
    second = forward.record()
    with pytest.raises(Broken):
        first.wait()
    with pytest.raises(Broken):
        second.wait()
    copy_out.wait_for(second)
    copy_out.submit(lambda: ran.append(2))
    with pytest.raises(Broken):
        copy_out.record().wait()
    forward.submit(lambda: ran.append(3))
    forward.record().wait()
    runtime.synchronize()
    assert ran == [3]


def test_an_error_leaves_other_queues_alone(runtime: CpuRuntime) -> None:
    ran: list[int] = []
    copy_in = runtime.queue("copy_in")
    runtime.queue("forward").submit(fail)
    copy_in.submit(lambda: ran.append(1))
    copy_in.record().wait()
    assert ran == [1]


def test_synchronize_raises_each_error_once(runtime: CpuRuntime) -> None:
    runtime.queue("forward").submit(fail)
    runtime.queue("copy_in").submit(lambda: {}["no key"])
    with pytest.raises(Broken):
        runtime.synchronize()
    with pytest.raises(KeyError, match="no key"):
        runtime.synchronize()
    runtime.synchronize()


def test_an_interrupt_leaves_at_once(runtime: CpuRuntime) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime.queue("forward").submit(interrupt)


def test_a_foreign_event_is_refused(runtime: CpuRuntime) -> None:
    class Foreign:
        def done(self) -> bool:
            return True

        def wait(self, timeout_s: float | None = None) -> None:
            return

    with pytest.raises(KernelInputError, match="Foreign"):
        runtime.queue("forward").wait_for(Foreign())


def test_pinned_buffers_have_shape_and_dtype(runtime: CpuRuntime) -> None:
    buffer = runtime.pinned((2, 3), torch.int32)
    assert buffer.shape == (2, 3) and buffer.dtype == torch.int32
    assert buffer.device == runtime.device and buffer.is_contiguous()


def test_memory_of_this_machine_is_plausible(runtime: CpuRuntime) -> None:
    memory = runtime.memory()
    assert memory.total > 2**20
    assert 0 <= memory.free <= memory.total


MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GROUP = "sys/fs/cgroup"
TREES = {
    "no group": ({}, 1000, 600),
    "group without limit": (
        {"proc/self/cgroup": "0::/a\n", f"{GROUP}/a/memory.max": "max\n"},
        1000,
        600,
    ),
    "limit of a parent": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{GROUP}/a/b/memory.max": "max\n",
            f"{GROUP}/a/memory.max": str(500 * 1024),
            f"{GROUP}/a/memory.current": str(300 * 1024),
            f"{GROUP}/a/memory.stat": f"anon 7\ninactive_file {50 * 1024}\n",
        },
        500,
        250,
    ),
    "limit seen from inside a container": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x/y\n",
            f"{GROUP}/memory/memory.limit_in_bytes": str(400 * 1024),
            f"{GROUP}/memory/memory.usage_in_bytes": str(450 * 1024),
        },
        400,
        0,
    ),
    "limit above the machine": (
        {
            "proc/self/cgroup": "4:memory:/\n",
            f"{GROUP}/memory/memory.limit_in_bytes": "9223372036854771712",
            f"{GROUP}/memory/memory.usage_in_bytes": "5000",
        },
        1000,
        600,
    ),
}


@pytest.mark.parametrize("case", TREES)
def test_memory_is_the_least_of_machine_and_groups(case: str, tmp_path: Path) -> None:
    files, total, free = TREES[case]
    memory = read_memory(tree(tmp_path, files))
    assert (memory.total, memory.free) == (total * 1024, free * 1024)


def test_memory_without_proc_asks_the_c_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(module.os, "sysconf", lambda name: known.get(name, -1))
    memory = read_memory(tmp_path)
    assert (memory.total, memory.free) == (40960, 40960)
    known["SC_AVPHYS_PAGES"] = 4
    assert read_memory(tmp_path).free == 16384
    known.clear()
    with pytest.raises(Unsupported, match="memory size"):
        read_memory(tmp_path)
