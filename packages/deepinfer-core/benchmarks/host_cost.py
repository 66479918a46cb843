"""CPU time of the host in a steady decode iteration, part by part, against the batch size.

    python packages/deepinfer-core/benchmarks/host_cost.py [--drafts 0 5] [--profile 256]

Two tables. In the first the scheduler and its loop drive the fake device, whose own work costs
nothing: every part from settling (S) to launching (L) and the deferred part, as `engine/loop.py`
names them; `all` is the whole iteration. A line is fitted through the medians by least squares: us
a row, and us at no row. `worker_launch` is another run: what `launch` of the real worker costs the
host for such plans, on queues that do nothing; `launch` has the call of the fake device alone.

Sequences decode without ends, log-probabilities or grammars; nothing waits. The clock counts this
thread's CPU time. Looking at it, and the fake device's events, are part of the figures: `face` says
about how much of S to L. `--profile` prints where the time goes for one batch size instead.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
from fake_load import Bench, limits_for, quiet

from deepinfer_core.bench.report import print_table, report
from deepinfer_core.cpu.queues import CpuEvent, CpuQueue
from deepinfer_core.cpu.runtime import CpuRuntime
from deepinfer_core.engine.records import StepRecord
from deepinfer_core.engine.worker import Worker
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.model.state import POOLS, ModelState, StateSizes
from deepinfer_core.plans import (
    PHASES,
    Phase,
    SchedulerOutput,
    StepKind,
    StepPlan,
    StepRows,
    TableDelta,
)

PROMPT_LEN = 100
MAX_US_PER_ROW, MAX_US_FIXED = 1.0, 150.0
BLOCK_SIZE = 64
_LOOKS, _CATCHES = 12, 3  # of an iteration, from S to L


def decoding(num_rows: int, drafts: int, steps: int) -> Bench:
    """Return a rank that decodes `num_rows` sequences for so many steps without an end."""
    output_len = (steps + 64) * (1 + drafts)
    max_len = PROMPT_LEN + output_len + 8
    blocks = num_rows * (-(-(max_len + drafts) // BLOCK_SIZE) + 1)
    limits = limits_for(num_rows, blocks, drafts, max_len)
    bench = Bench(limits, accepts=0.7)
    bench.fill(num_rows, PROMPT_LEN, output_len)
    return bench


def measure(num_rows: int, drafts: int, steps: int) -> dict[str, object]:
    """Return the figures of a batch size."""
    bench = decoding(num_rows, drafts, steps)
    clock, loop = bench.clock, bench.loop
    spent = []
    for _ in range(steps):
        began, waited = clock.now_ns(), clock.waited_ns
        loop.iterate()
        spent.append(clock.now_ns() - began - (clock.waited_ns - waited))
    records = [each for each in loop.records.last(steps) if each.deferred_end_ns]
    assert all(each.num_sequences == num_rows for each in records), "the batch changed"
    us = np.array(spent) / 1e3
    return {
        "drafts": drafts,
        "rows": num_rows,
        **{part: _median_us(ns) for part, ns in part_times(bench, records).items()},
        "all": round(float(np.median(us)), 1),
        "face": face_us(bench),
        "p99": round(float(np.quantile(us, 0.99)), 1),
        "max": round(float(us.max()), 1),
    }


def face_us(bench: Bench) -> float:
    """Return about what S to L spend in the clock and in the fake device's events."""
    count, began = 200, bench.clock.now_ns()
    for _ in range(count):
        for _ in range(_LOOKS):
            bench.clock.now_ns()
        for _ in range(_CATCHES):
            bench.device.catch_up()
    return round((bench.clock.now_ns() - began) / count / 1e3, 1)


def part_times(bench: Bench, records: Sequence[StepRecord]) -> dict[str, list[int]]:
    """Return part -> ns in each iteration."""
    found: dict[str, list[int]] = {}
    for record in records:
        lengths = record.parts_ns()
        del lengths["grammar"]
        lengths["settle"] -= bench.loop.records.waited_ns(record)
        lengths["S to L"] = sum(lengths.values())
        lengths["deferred"] = record.deferred_end_ns - record.deferred_begin_ns
        for part, ns in lengths.items():
            found.setdefault(part, []).append(ns)
    return found


def _median_us(ns: Sequence[int]) -> float:
    return round(float(np.median(ns)) / 1e3, 1)


def fit(results: Sequence[dict[str, object]], column: str) -> tuple[float, float]:
    """Return slope (us a row) and intercept (us) of a column over the rows."""
    rows = np.array([each["rows"] for each in results], dtype=float)
    us = np.array([each[column] for each in results], dtype=float)
    slope, intercept = np.polyfit(rows, us, 1)
    return round(float(slope), 3), round(float(intercept), 1)


class _NoQueue:
    """Takes work and drops it."""

    def __init__(self) -> None:
        self._done = CpuEvent()
        self._done.happen(None)

    def submit(self, work: object) -> None:
        """Drop it."""

    def record(self) -> CpuEvent:
        """Return an event that has happened."""
        return self._done

    def wait_for(self, event: object) -> None:
        """Do not."""


class _NoDevice(CpuRuntime):
    """Host buffers as everywhere, queues that drop their work."""

    def queue(self, name: str) -> CpuQueue:
        """Return the queue that drops all."""
        return cast(CpuQueue, _NoQueue())


def launch_us(num_rows: int, drafts: int, steps: int) -> float:
    """Return the median CPU time of `Worker.launch` for decode steps."""
    sizes = StateSizes(num_rows, dict.fromkeys(POOLS, 10), BLOCK_SIZE, 4096, drafts)
    config = SimpleNamespace(vocab_size=1000, sliding_window=128, last_kv_source=3)
    # A launch looks at sizes alone; what it queues is dropped, so no weights are needed.
    backend = SimpleNamespace(runtime=_NoDevice(), with_strict=lambda strict: None)
    model, state = SimpleNamespace(config=config, engram=None), SimpleNamespace(sizes=sizes)
    worker = Worker(
        cast(KernelBackend, backend),
        cast(DeepseekV41, model),
        cast(ModelState, state),
        max_rows=num_rows * (1 + drafts) + 64,
        depth=2,
    )
    spent = []
    for step in range(steps):
        plan = _decode_plan(step, num_rows, drafts)
        began = time.thread_time_ns()
        worker.launch(plan)
        spent.append(time.thread_time_ns() - began)
    return _median_us(spent)


def _decode_plan(step: int, num_rows: int, drafts: int) -> StepPlan:
    """Return a steady step, in which one row in 64 takes a block."""
    every = np.arange(num_rows)
    rows = StepRows.of(
        num_rows,
        uid=every,
        slot=every,
        phase=PHASES.index(Phase.VERIFY),
        num_rows=1 + drafts,
        num_drafts=drafts,
        start=500 + step % 1000,
        source=every,
        remaining=50,
        tail_start=300,
    )
    grown = every[step % BLOCK_SIZE :: BLOCK_SIZE]
    delta = TableDelta(grown, np.full(len(grown), 8), grown)
    total = num_rows * (1 + drafts)
    return StepPlan(
        SchedulerOutput(step, StepKind.DECODE, total, False),
        rows,
        np.full(total, -1),
        tables=dict.fromkeys(POOLS, delta) if len(grown) else {},
    )


def profile(num_rows: int, drafts: int, steps: int, lines: int) -> None:
    """Print the functions that a steady iteration spends its time in."""
    bench = decoding(num_rows, drafts, steps)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        bench.loop.iterate()
    profiler.disable()
    print(f"{steps} iterations of {num_rows} rows, {drafts} drafts; times in s")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(
        "deepinfer_core|built-in|method", lines
    )


def main() -> None:
    """Measure all batch sizes, fit, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [2**power for power in range(10)]
    parser.add_argument("--rows", type=int, nargs="+", default=sizes, help="batch sizes")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--steps", type=int, default=1000, help="iterations of each")
    parser.add_argument(
        "--gc",
        choices=("on", "frozen", "off"),
        default="on",
        help="garbage collection: as the engine has it; without what was there at the start; off",
    )
    parser.add_argument("--profile", type=int, metavar="ROWS", help="profile this batch size")
    parser.add_argument("--lines", type=int, default=40, help="of the profile")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    options = parser.parse_args()
    where = quiet()
    if options.gc == "off":
        gc.disable()
    elif options.gc == "frozen":
        gc.collect()
        gc.freeze()
    if options.profile is not None:
        for drafts in options.drafts:
            profile(options.profile, drafts, options.steps, options.lines)
        return
    figures = {}
    for drafts in options.drafts:
        results = [measure(rows, drafts, options.steps) for rows in options.rows]
        for result in results:
            result["worker_launch"] = launch_us(cast(int, result["rows"]), drafts, options.steps)
        columns = list(results[0])
        print_table(columns, [[each[name] for name in columns] for each in results])
        measured = [name for name in columns if name not in ("drafts", "rows", "face")]
        lines = {name: fit(results, name) for name in measured}
        print_table(
            ["line", *lines],
            [
                ["us a row", *(slope for slope, _ in lines.values())],
                ["us at no row", *(intercept for _, intercept in lines.values())],
            ],
        )
        slope, intercept = lines["S to L"]
        print(
            f"S to L: {slope} us a row (at most {MAX_US_PER_ROW}), {intercept} us (at most "
            f"{MAX_US_FIXED}); {where}; garbage collection {options.gc}\n"
        )
        figures[f"drafts_{drafts}"] = {"results": results, "lines": lines}
    report("host_cost", figures, options.out)


if __name__ == "__main__":
    main()
