"""Timing of ops on a GPU: a table and JSON lines, each figure against a measured ceiling.

A case is timed as a captured graph of several calls, so that launches cost what they cost in an
engine; its bytes and operations are counted by whoever states the case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

__all__ = ["CEILINGS", "Case", "main", "time_us"]

# Measured on one H200: a large copy (bytes read and written), and large products on random data.
CEILINGS = {"copy": 4.2e12, "bf16": 780e12, "fp8": 1330e12, "fp8_block": 1258e12}


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        op, shape: what is timed.
        run: calls the op once. It may go through several input sets, so that caches stay cold.
        bytes, flops: that one call has to move and to do.
        compute: which product ceiling applies, a key of `CEILINGS`.
        plain: the plain PyTorch form of the same, or None where it needs too much memory or time.
        captured: False for what cannot be captured, or is too long to matter.
        note: printed behind the line.
    """

    op: str
    shape: str
    run: Callable[[], object]
    bytes: float
    flops: float = 0.0
    compute: str = "bf16"
    plain: Callable[[], object] | None = None
    captured: bool = True
    note: str = ""

    @property
    def bound_us(self) -> float:
        """Microseconds below which no version can be: the larger of moving and computing."""
        moved, computed = self.bytes / CEILINGS["copy"], self.flops / CEILINGS[self.compute]
        return max(moved, computed) * 1e6


def time_us(run: Callable[[], object], captured: bool = True, budget_ms: float = 40.0) -> float:
    """Return the median time of one call in microseconds, on the device.

    Args:
        captured: replay a graph of several calls; otherwise calls are launched one by one.
        budget_ms: time to spend on repetitions.
    """
    run()
    torch.cuda.synchronize()
    once = _elapsed_us(run)
    calls = max(1, min(20, int(2000 / max(once, 1.0)))) if captured else 1

    def several() -> None:
        for _ in range(calls):
            run()

    work: Callable[[], object] = several
    if captured:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            several()
        work = graph.replay
    work()
    repeats = max(5, min(50, int(budget_ms * 1000 / max(once * calls, 1.0))))
    times = sorted(_elapsed_us(work) for _ in range(repeats))
    return times[len(times) // 2] / calls


def _elapsed_us(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


def main(cases: Callable[[], Iterator[Case]]) -> None:
    """Time the cases of a family, print a table, write JSON lines to `--out`."""
    parser = argparse.ArgumentParser(description="Time ops on the GPU at V4.1-Flash shapes.")
    parser.add_argument("--out", type=Path, help="file for JSON lines, appended to")
    parser.add_argument("--only", default="", help="time the ops whose name contains this")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain forms out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No CUDA device is here; this benchmark times kernels on a GPU.")
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'op':26} {'shape':34} {'us':>9} {'GB/s':>6} {'TFLOP/s':>7} {'bound':>6} {'plain':>7}")
    for case in cases():
        if options.only not in case.op:
            continue
        took = time_us(case.run, case.captured)
        plain = None if case.plain is None or options.no_plain else time_us(case.plain, False)
        line = {
            "op": case.op,
            "shape": case.shape,
            "us": round(took, 3),
            "bytes": case.bytes,
            "flops": case.flops,
            "of_bound": round(case.bound_us / took, 4),
            "compute": case.compute,
            "plain_us": None if plain is None else round(plain, 3),
            "note": case.note,
            "device": device,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "command": " ".join(["python", *sys.argv]),
        }
        speedup = "" if plain is None else f"{plain / took:6.1f}x"
        print(
            f"{case.op:26} {case.shape:34} {took:9.1f} {case.bytes / took / 1e3:6.0f} "
            f"{case.flops / took / 1e6:7.1f} {case.bound_us / took:6.1%} {speedup:>7} {case.note}",
            flush=True,
        )
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
