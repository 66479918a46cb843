"""Serve one trace in every way there is, and say where a request got other bits than alone.

    PYTHONPATH=packages/deepinfer-core/src python packages/deepinfer-core/benchmarks/differential.py
        [--seconds 600] [--skip 0] [--part 1/1]

The ways are the cross product of `testing/differential_variants.py`, 266,760 of them, in an order
of its own that is the same in every run; the test suite takes those that cover each pair of values.
It prints what ran, one JSON line a difference, and ends with 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from deepinfer_core.bench.make_checkpoint import write_checkpoint
from deepinfer_core.bench.whole_texts import open_model
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.testing.differential import Bench
from deepinfer_core.testing.differential_variants import VALUES, Variant, all_variants
from deepinfer_core.testing.tiny_model import tiny_config

REPORT_EVERY_S = 30.0


def main() -> int:
    """Run as long as was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after so long")
    parser.add_argument("--skip", type=int, default=0, help="ways to leave out, as they ran before")
    parser.add_argument("--part", default="1/1", help="i/n: each n-th way, from the i-th on")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.part.split("/"))
    torch.set_num_threads(1)
    variants = list(all_variants())
    random.Random(0).shuffle(variants)
    mine = variants[part - 1 :: parts]
    print(f"{len(variants)} ways, {len(mine)} of them here, {options.skip} left out", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "tiny", tiny_config(), seed=3, quantized=False)
        models = {n: open_model(Path(folder) / "tiny", CpuBackend(n)) for n in VALUES["numerics"]}
        return _run(Bench(models), mine[options.skip :], options.seconds)


def _run(bench: Bench, variants: list[Variant], seconds: float) -> int:
    began = told = time.monotonic()
    totals: Counter[str] = Counter()
    for variant in variants:
        if time.monotonic() - began > seconds:
            break
        try:
            report = bench.run(variant)
        except Exception as error:
            totals["failed"] += 1
            _print(variant, f"{type(error).__name__}: {error}")
            continue
        finally:
            totals["ways"] += 1
        totals["different requests"] += len(report.differences)
        totals["ways with preemptions"] += report.preemptions > 0
        totals["ways with warm hits"] += report.warm_hits > 0
        totals["ways with late sampling"] += report.late_sampling > 0
        totals["ways with accepted drafts"] += report.accepted > 0
        for difference in report.differences:
            _print(variant, difference)
        if time.monotonic() - told > REPORT_EVERY_S:
            told = time.monotonic()
            print(f"{told - began:.0f} s", dict(totals), flush=True)
    print("done", dict(totals), flush=True)
    return int(bool(totals["failed"] or totals["different requests"]))


def _print(variant: Variant, what: str) -> None:
    print(json.dumps({"variant": str(variant), "difference": what}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
