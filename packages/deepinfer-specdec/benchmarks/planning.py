"""What choosing and accepting costs: on the host per step, and on the device there is.

    python packages/deepinfer-specdec/benchmarks/planning.py [--out FILE] [--vocab-size 129280]

Host: `budget()` of each planner, `gains` and `agree` of a group, `VerifyStats.observe_step`.
Device: survival and lengths, and acceptance by both rules; on CUDA each is captured in a graph and
replayed, as an engine does, and the eager time with its launches stands beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from deepinfer_specdec import (
    CostTable,
    DelayedPlanner,
    FixedPlanner,
    Rejection,
    TargetNoise,
    ThresholdPlanner,
    VerifyStats,
    agree,
    best_lengths,
    gains,
    survival,
    survival_of,
)

NUM_DRAFTS = 5
NUM_REQUESTS = (60, 256)
NUM_RANKS = 64
TIERS = tuple(range(8, 1601, 8))
# Full-length acceptance takes too long on a CPU core to be repeated often.
CPU_SECONDS, SHORTEST = 0.5, 5


@dataclass(frozen=True)
class Figure:
    """Median time of one call.

    Attributes:
        what: the function.
        where: `host`, `cpu`, `cuda graph` or `cuda eager`.
        requests: R.
        us: microseconds, the median.
        us_p90: microseconds, the 90th percentile.
    """

    what: str
    where: str
    requests: int
    us: float
    us_p90: float


def main() -> int:
    """Measure, print the table, and append JSON lines to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="append JSON lines here")
    parser.add_argument("--vocab-size", type=int, default=129280, help="V of rejection sampling")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = []
    for num_requests in NUM_REQUESTS:
        figures += _host(num_requests)
        figures += _device(num_requests, device, options.vocab_size)
    name = torch.cuda.get_device_name() if device.type == "cuda" else _processor()
    print(f"{name}, torch {torch.__version__}, g = {NUM_DRAFTS}, V = {options.vocab_size}\n")
    print(f"{'what':34} {'where':12} {'R':>4} {'us':>10} {'p90':>10}")
    for each in figures:
        print(
            f"{each.what:34} {each.where:12} {each.requests:4} {each.us:10.1f} {each.us_p90:10.1f}"
        )
    if options.out:
        more = {
            "device": name,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "vocab_size": options.vocab_size,
            "num_drafts": NUM_DRAFTS,
            "command": shlex.join(["python", *sys.argv]),
        }
        with options.out.open("a", encoding="utf-8") as stream:
            for each in figures:
                stream.write(json.dumps(asdict(each) | more) + "\n")
    return 0


def _costs() -> CostTable:
    return CostTable(TIERS, tuple(1e-2 * (1 + rows / 512) for rows in TIERS), TIERS)


def _host(num_requests: int) -> list[Figure]:
    rng = np.random.default_rng(0)
    values = survival(rng.random((num_requests, NUM_DRAFTS)) ** 0.3)
    known = rng.random(num_requests) < 0.95
    available = np.full(num_requests, NUM_DRAFTS)
    case = (values, known, available)
    costs, tiers = _costs(), np.array(TIERS)
    seconds = costs.seconds_at(num_requests)
    fixed, threshold = FixedPlanner(costs), ThresholdPlanner(0.15, costs)
    delayed, planner = DelayedPlanner(costs), DelayedPlanner(costs)
    gathered = np.tile(gains(*case, tiers), (NUM_RANKS, 1))
    rows, drafts = np.full(NUM_RANKS, num_requests), np.full(NUM_RANKS, available.sum())
    stats, accepted = VerifyStats(NUM_DRAFTS), np.minimum(available, 2)

    def observe() -> None:
        stats.observe_step(
            available=available,
            lengths=available,
            accepted=accepted,
            survival=values,
            rows=6 * num_requests,
            asked=5 * num_requests,
            known=known,
        )

    def step() -> None:
        planner.budget(*case)
        planner.observe(num_requests, seconds)

    calls: dict[str, Callable[[], object]] = {
        "FixedPlanner.budget": lambda: fixed.budget(*case),
        "ThresholdPlanner.budget": lambda: threshold.budget(*case),
        "DelayedPlanner.budget": lambda: delayed.budget(*case),
        "DelayedPlanner.budget and observe": step,
        "gains": lambda: gains(*case, tiers),
        f"agree, {NUM_RANKS} ranks": lambda: agree(gathered, rows, drafts, tiers, costs),
        "VerifyStats.observe_step": observe,
    }
    return [Figure(name, "host", num_requests, *_timed(call)) for name, call in calls.items()]


def _device(num_requests: int, device: torch.device, vocab_size: int) -> list[Figure]:
    generator = torch.Generator(device).manual_seed(0)

    def chances(rows: int) -> torch.Tensor:
        logits = torch.randn(num_requests, rows, vocab_size, generator=generator, device=device)
        return logits.mul_(4).softmax(dim=-1)

    confidence = torch.rand(num_requests, NUM_DRAFTS, generator=generator, device=device) ** 0.3
    available = torch.full((num_requests,), NUM_DRAFTS, device=device)
    total = torch.full((), 3 * num_requests, device=device)
    drafts = torch.randint(
        vocab_size, (num_requests, NUM_DRAFTS), generator=generator, device=device
    )
    target = torch.randint(
        vocab_size, (num_requests, NUM_DRAFTS + 1), generator=generator, device=device
    )
    lengths = best_lengths(survival_of(confidence), available, total)
    seeds = torch.randint(1 << 32, (num_requests, 2), generator=generator, device=device)
    positions = torch.arange(num_requests, device=device)
    both = (chances(NUM_DRAFTS), chances(NUM_DRAFTS + 1))
    calls: dict[str, Callable[[], object]] = {
        "survival_of": lambda: survival_of(confidence),
        "survival_of and best_lengths": lambda: best_lengths(
            survival_of(confidence), available, total
        ),
        "TargetNoise.accept": lambda: TargetNoise().accept(drafts, lengths, target),
        "Rejection.accept": lambda: Rejection().accept(
            drafts, lengths, target, seeds=seeds, positions=positions, probabilities=both
        ),
    }
    if device.type == "cpu":
        return [Figure(name, "cpu", num_requests, *_timed(call)) for name, call in calls.items()]
    figures = []
    for name, call in calls.items():
        figures.append(Figure(name, "cuda graph", num_requests, *_replayed(call)))
        figures.append(Figure(name, "cuda eager", num_requests, *_timed(_synchronised(call))))
    return figures


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return median and 90th percentile of repeated calls, in microseconds."""
    call()
    began = time.perf_counter()
    times: list[float] = []
    while time.perf_counter() - began < CPU_SECONDS or len(times) < SHORTEST:
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return float(np.median(times)), float(np.quantile(times, 0.9))


def _synchronised(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def _replayed(call: Callable[[], object], count: int = 200) -> tuple[float, float]:
    """Return median and 90th percentile of the device time of a captured call."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return float(np.median(times)), float(np.quantile(times, 0.9))


def _processor() -> str:
    names = Path("/proc/cpuinfo")
    if names.exists():
        for line in names.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
