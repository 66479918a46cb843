"""What planning costs: plans, splits and their compiled code, on one core.

    python packages/deepinfer-eplb/benchmarks/planning.py [--out FILE] [--repeats 5]

Loads come from the simulator's traffic, regime `drift`; an incremental plan starts from the map of
the interval before. Compiling is measured in processes of their own, first with an empty cache of
compiled code, then with the one that the first has filled; no other figure has it in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numba
import numpy as np
import scipy

from deepinfer_eplb import Layout, Planner, warm_up
from deepinfer_eplb.balance import water_fill
from deepinfer_eplb.lp import lp_split, scenario_split
from deepinfer_eplb.simulate import Schedule, Traffic, generate

NUM_EXPERTS = 384
# layers, layout; the first is more than V4.1-Flash has.
SIZES = (
    (58, Layout(64, 8, 7)),
    (40, Layout(64, 8, 7)),
    (40, Layout(4, 1, 100)),
    (40, Layout(2, 1, 196)),
)
GROUPS = 8
LP_LAYERS = 3  # enough to see what one costs
_WARM_UP = "from deepinfer_eplb import warm_up; print(warm_up())"


@dataclass(frozen=True)
class Figure:
    """Time of one call.

    Attributes:
        what: the function and its mode.
        layers: planned by the call.
        layout: of the plan, `EP` x slots of a rank.
        ms, most_ms: milliseconds of the call, median and the longest.
        us_per_layer: microseconds, of the median.
    """

    what: str
    layers: int
    layout: str
    ms: float
    most_ms: float
    us_per_layer: float


def main() -> int:
    """Measure, print the table, and append JSON lines to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="append JSON lines here")
    parser.add_argument("--repeats", type=int, default=5, help="of each call (default: 5)")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}; allowed: whole numbers from 1")
    empty, filled = compile_seconds()
    warm_up()
    print(f"{processor()}, {os.cpu_count()} cores, one used; numba {numba.__version__}\n")
    print(f"compiled in {empty:.1f} s with an empty cache, loaded in {filled:.2f} s from it\n")
    print(f"{'what':32} {'layers':>6} {'layout':>8} {'ms':>9} {'most':>9} {'us/layer':>9}")
    figures = []
    for layers, layout in SIZES:
        for each in measure(layers, layout, options.repeats):
            figures.append(each)
            print(
                f"{each.what:32} {each.layers:6} {each.layout:>8} {each.ms:9.1f} "
                f"{each.most_ms:9.1f} {each.us_per_layer:9.1f}",
                flush=True,
            )
    if options.out:
        more = {
            "device": processor(),
            "num_experts": NUM_EXPERTS,
            "compile_seconds": {"empty cache": empty, "filled cache": filled},
            "versions": {each.__name__: each.__version__ for each in (np, scipy, numba)}
            | {"python": platform.python_version()},
            "command": shlex.join(["python", *sys.argv]),
        }
        with options.out.open("a", encoding="utf-8") as stream:
            for each in figures:
                stream.write(json.dumps(asdict(each) | more) + "\n")
    return 0


def measure(layers: int, layout: Layout, repeats: int) -> list[Figure]:
    """Measure all calls for one size."""
    schedule = Schedule()
    pieces, window = schedule.pieces_per_interval, schedule.pieces_per_window
    hits = generate("drift", 3, 0, Traffic(num_layers=layers, num_experts=NUM_EXPERTS))
    windows = [hits[end - window : end] for end in (pieces, 2 * pieces, 3 * pieces)]
    loads, history = windows[2].sum(0), np.concatenate(windows)
    sizes = {
        "ranks": layout.num_ranks,
        "nodes": layout.num_nodes,
        "slots_per_rank": layout.slots_per_rank,
    }
    planner, full = Planner(), Planner(mode="full")
    live = planner.plan(windows[1].sum(0), **sizes).physical_to_logical
    live_pieces = planner.plan(
        windows[1].sum(0), history=np.concatenate(windows[:2]), **sizes
    ).physical_to_logical
    calls: dict[str, Callable[[], object]] = {
        "full": lambda: planner.plan(loads, **sizes),
        "full, ranks named by live map": lambda: full.plan(loads, prev=live, **sizes),
        "incremental": lambda: planner.plan(loads, prev=live, **sizes),
        "scenario full": lambda: planner.plan(loads, history=history, **sizes),
        "scenario incremental": lambda: planner.plan(
            loads, prev=live_pieces, history=history, **sizes
        ),
    }
    if layout.num_nodes > 1:
        calls["hierarchical full"] = lambda: planner.plan(loads, groups=GROUPS, **sizes)
    calls["water_fill"] = lambda: water_fill(live, loads, layout)
    found = [_timed(what, layers, layout, repeats, call) for what, call in calls.items()]
    few, weights = slice(LP_LAYERS), np.ones(len(history))
    programmes: dict[str, Callable[[], object]] = {
        "lp_split": lambda: lp_split(live[few], loads[few], layout),
        "scenario_split, 30 pieces": lambda: scenario_split(
            live[few], history[:, few], weights, layout
        ),
    }
    for what, call in programmes.items():
        found.append(_timed(what, LP_LAYERS, layout, min(repeats, 2), call))
    return found


def compile_seconds() -> tuple[float, float]:
    """Return seconds to warm up with an empty cache of compiled code, and with a filled one."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        command = [sys.executable, "-c", _WARM_UP]
        seconds = [
            float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
            for _ in range(2)
        ]
    return seconds[0], seconds[1]


def processor() -> str:
    """Return the name of the processor."""
    names = Path("/proc/cpuinfo")
    if names.exists():
        for line in names.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _timed(
    what: str, layers: int, layout: Layout, repeats: int, call: Callable[[], object]
) -> Figure:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    median = float(np.median(times))
    name = f"EP{layout.num_ranks}x{layout.slots_per_rank}"
    return Figure(what, layers, name, median, max(times), 1e3 * median / layers)


if __name__ == "__main__":
    sys.exit(main())
