"""The CPU as a device: order, events, errors that surface at a wait, and the size of memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deepinfer_core.cpu import runtime as module
from deepinfer_core.cpu.runtime import CpuRuntime, read_memory
from deepinfer_core.errors import DeepInferError, KernelInputError, Unsupported
from deepinfer_core.interfaces import DeviceRuntime

LONG = 60.0  # seconds no wait here takes unless something is wrong


class Broken(Exception):
    """What a piece of work raises here."""


def fail() -> None:
    raise Broken("work failed")


@pytest.fixture(params=[False, True], ids=["inline", "threads"])
def runtime(request: pytest.FixtureRequest) -> Iterator[CpuRuntime]:
    found = CpuRuntime(threads=request.param)
    yield found
    found.close()


@pytest.fixture
def background() -> Iterator[CpuRuntime]:
    found = CpuRuntime(threads=True)
    yield found
    found.close()


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
    copy_out.record().wait(LONG)
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
    assert event.reach(LONG) and event.done() and not ran
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


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_leaves_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        CpuRuntime().queue("forward").submit(interrupt)


def test_an_interrupt_of_work_in_a_thread_surfaces_at_the_wait(background: CpuRuntime) -> None:
    background.queue("forward").submit(interrupt)
    with pytest.raises(KeyboardInterrupt):
        background.synchronize()
    background.queue("forward").record().wait(LONG)


def test_a_foreign_event_is_refused(runtime: CpuRuntime) -> None:
    class Foreign:
        time_ns = None

        def done(self) -> bool:
            return True

        def wait(self, timeout_s: float | None = None) -> None:
            return

    with pytest.raises(KernelInputError, match="Foreign"):
        runtime.queue("forward").wait_for(Foreign())


# What only threads can show


def test_submit_returns_while_work_runs(background: CpuRuntime) -> None:
    gate, ran = threading.Event(), []
    forward = background.queue("forward")
    forward.submit(lambda: gate.wait() and ran.append(threading.current_thread()))
    event = forward.record()
    assert not event.done() and event.time_ns is None
    for timeout_s in (0.0, 1e-3):
        with pytest.raises(TimeoutError, match=f"within {timeout_s:g} s"):
            event.wait(timeout_s)
    gate.set()
    event.wait(LONG)
    assert ran and ran[0] is not threading.current_thread()


def test_queues_work_at_the_same_time(background: CpuRuntime) -> None:
    """Each waits for the others inside its work: no order would do but all at once."""
    meeting = threading.Barrier(3)
    for name in ("forward", "copy_in", "copy_out"):
        background.queue(name).submit(lambda: meeting.wait(LONG) and None)
    background.synchronize()


def test_a_queue_waits_for_an_event_of_another(background: CpuRuntime) -> None:
    gate, ran = threading.Event(), []
    forward, copy_out = background.queue("forward"), background.queue("copy_out")
    forward.submit(lambda: gate.wait() and ran.append("forward"))
    copy_out.wait_for(forward.record())
    copy_out.submit(lambda: ran.append("copy_out"))
    done = copy_out.record()
    assert not done.done()
    gate.set()
    done.wait(LONG)
    assert ran == ["forward", "copy_out"]


def test_work_submitted_before_the_error_was_taken_is_dropped(background: CpuRuntime) -> None:
    """Even if the queue comes to it afterwards: inline it would have been dropped as well."""
    gate, ran = threading.Event(), []
    forward, copy_out = background.queue("forward"), background.queue("copy_out")
    forward.submit(fail)
    failed = forward.record()
    copy_out.submit(gate.wait)
    copy_out.wait_for(failed)
    copy_out.submit(lambda: ran.append("copied garbage"))
    late = copy_out.record()
    with pytest.raises(Broken):
        failed.wait(LONG)
    copy_out.submit(lambda: ran.append("next step"))
    gate.set()
    with pytest.raises(Broken):
        late.wait(LONG)
    copy_out.record().wait(LONG)
    assert ran == ["next step"]


def test_events_tell_when_they_happened(runtime: CpuRuntime) -> None:
    forward, copy_out = runtime.queue("forward"), runtime.queue("copy_out")
    begin = forward.record()
    inside: list[int] = []
    forward.submit(lambda: inside.append(time.perf_counter_ns()))
    end = forward.record()
    copy_out.wait_for(end)
    after = copy_out.record()
    runtime.synchronize()
    assert begin.time_ns is not None and end.time_ns is not None and after.time_ns is not None
    assert begin.time_ns <= inside[0] <= end.time_ns <= after.time_ns <= time.perf_counter_ns()


def test_threads_of_work_follow_the_number_that_is_set(background: CpuRuntime) -> None:
    seen: list[int] = []
    forward, before = background.queue("forward"), torch.get_num_threads()
    try:
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            forward.submit(lambda: seen.append(torch.get_num_threads()))
            forward.record().wait(LONG)
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 3, 2]


@pytest.fixture
def names() -> Callable[[], list[str]]:
    """Names of the queues' threads that started in this test and run."""
    before = threading.enumerate()

    def started() -> list[str]:
        return [t.name for t in threading.enumerate() if t not in before and "deepinfer-" in t.name]

    return started


def test_threads_start_with_work_and_end_with_the_runtime(
    names: Callable[[], list[str]],
) -> None:
    runtime = CpuRuntime(threads=True)
    assert not names()
    runtime.queue("forward").submit(lambda: None)
    assert names() == ["deepinfer-forward"]
    runtime.synchronize()
    del runtime
    gc.collect()
    assert not names()


def test_threads_end_though_work_holds_the_last_reference() -> None:
    before = set(threading.enumerate())
    gate, runtime = threading.Event(), CpuRuntime(threads=True)
    forward = runtime.queue("forward")
    forward.submit(lambda kept=(runtime, forward): gate.wait() and None)
    threads = set(threading.enumerate()) - before
    del runtime, forward
    gate.set()
    for each in threads:
        each.join(LONG)
    assert threads and not any(each.is_alive() for each in threads)


def test_closing_drops_what_is_queued_and_fails_its_events(
    background: CpuRuntime, names: Callable[[], list[str]]
) -> None:
    ran: list[str] = []
    forward, copy_out = background.queue("forward"), background.queue("copy_out")
    closing = background._threads.get("forward", background.device, forward._takes).closing
    forward.submit(lambda: closing.wait(LONG) and None)
    forward.submit(lambda: ran.append("dropped"))
    event = forward.record()
    copy_out.wait_for(event)
    behind = copy_out.record()
    background.close()
    assert not names() and not ran
    for each in (event, behind):
        with pytest.raises(DeepInferError, match="closed"):
            each.wait(LONG)
    forward.submit(lambda: ran.append("anew"))
    forward.record().wait(LONG)
    assert ran == ["anew"]


def test_background_is_chosen_and_unchosen(names: Callable[[], list[str]]) -> None:
    runtime, ran = CpuRuntime(), []
    forward = runtime.queue("forward")
    for background in (True, False, True):
        runtime.set_background(background)
        forward.submit(lambda: ran.append(threading.current_thread().name))
    runtime.synchronize()
    runtime.set_background(False)
    here = threading.current_thread().name
    assert ran == ["deepinfer-forward", here, "deepinfer-forward"] and not names()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_starts_threads_of_its_own(background: CpuRuntime) -> None:
    forward = background.queue("forward")
    forward.submit(lambda: None)
    background.synchronize()
    child = os.fork()
    if child == 0:
        ran: list[int] = []
        forward.submit(lambda: ran.append(os.getpid()))
        forward.record().reach(LONG)
        os._exit(0 if ran == [os.getpid()] else 1)
    assert os.waitpid(child, 0)[1] == 0
    forward.record().wait(LONG)


EXIT = """
import threading, torch
from deepinfer_core.cpu.runtime import CpuRuntime
runtime = CpuRuntime(threads=True)
for _ in range(200):
    runtime.queue("forward").submit(lambda: torch.ones(50, 50) @ torch.ones(50, 50))
print("left")
"""


def test_the_interpreter_exits_with_work_in_its_queues() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


# Memory


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
