"""Peak memory and time of loading a checkpoint, against the bytes of the tensors kept.

    python packages/deepinfer-core/benchmarks/loading.py [--megabytes 512] [--model FOLDER]

Without `--model` a random checkpoint is made in a temporary folder first. A fresh process loads it
as the engine does, drafter included; the vision tower and Engram tables stay in their files. Its
peak is the growth of resident memory over its size just before loading. Prints a table, then one
JSON line; `--out` also appends that line to a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from deepinfer_core.bench.make_checkpoint import loading_config, write_checkpoint
from deepinfer_core.bench.report import report
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.model.checkpoint import Checkpoint
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.weights import load_weights

_MIB = 2**20


def _resident(field: str) -> int:
    """Return `VmRSS` or the peak `VmHWM` of this process in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    assert match is not None, f"no {field} in /proc/self/status"
    return int(match[1]) * 1024


def _measure(folder: Path) -> None:
    """Load a folder in this process and print the figures as JSON."""
    # the first tensor brings in torch's own memory; that is not loading
    torch.ones(1).sum()
    # peak := size now; where that is not allowed the figure includes the start of the process
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _resident("VmRSS")
    start = time.perf_counter()
    config = ModelConfig.from_folder(folder)
    checkpoint = Checkpoint.open(folder, config)
    opened = time.perf_counter()
    weights = load_weights(checkpoint, config, CpuBackend("release"), drafter=True)
    seconds = time.perf_counter() - opened
    growth = _resident("VmHWM") - before
    # Engram tables stay in their files
    kept = [name for name in checkpoint.names() if ".engram.embed." not in name]
    num_bytes = sum(map(checkpoint.num_bytes, kept))
    figures = {
        "tensors": len(kept),
        "kept_bytes": num_bytes,
        "skipped_bytes": sum(map(checkpoint.num_bytes, checkpoint.names(vision=True))) - num_bytes,
        "peak_growth_bytes": growth,
        "peak_ratio": round(growth / num_bytes, 4),
        "open_s": round(opened - start, 4),
        "load_s": round(seconds, 3),
    }
    assert weights.layers, "nothing was loaded"
    print(json.dumps(figures))


def main() -> None:
    """Make or take a checkpoint, load it in a fresh process, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512, help="size of the random model")
    parser.add_argument("--model", type=Path, help="load this folder instead")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        _measure(options.measure)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model
        if folder is None:
            folder = Path(scratch) / "model"
            write_checkpoint(folder, loading_config(options.megabytes), num_shards=4)
        command = [sys.executable, __file__, "--measure", str(folder)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures = json.loads(output)
    print(f"{'tensors kept':<28}{figures['tensors']:>12}")
    for key, label in (
        ("kept_bytes", "bytes kept"),
        ("skipped_bytes", "bytes left in the file"),
        ("peak_growth_bytes", "peak growth of the process"),
    ):
        print(f"{label:<28}{figures[key] / _MIB:>8.1f} MiB")
    print(f"{'peak / kept':<28}{figures['peak_ratio']:>12.3f}")
    print(f"{'open (headers, checks)':<28}{figures['open_s']:>10.3f} s")
    rate = figures["kept_bytes"] / 1e9 / figures["load_s"]
    print(f"{'load':<28}{figures['load_s']:>10.3f} s  ({rate:.2f} GB/s)")
    report("loading", figures, options.out)


if __name__ == "__main__":
    main()
