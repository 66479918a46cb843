"""Time of a decode step of V4.1-Flash by its rows: the ops of its layers, each timed at those rows.

    python packages/deepinfer-kernels-cuda/benchmarks/decode_step.py --out step.json

One rank of eight, so 48 of 384 experts; 60 sequences with 64k of context and 5 drafts each. Ops are
captured and timed one by one, then added by how often a step runs them. Left out: launches, which a
captured step does not have, exchange between ranks, and small ops (rings, packing, rotation).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import attention
import indexer
import linear
import moe
import norm
import sampling
import torch
import triton

from deepinfer_kernels_cuda.testing.bench import Case, time_us

SEQUENCES, DRAFTS = 60, 5
ROWS = tuple(range(60, 361, 30))
SELECTED = tuple(range(SEQUENCES, SEQUENCES * (1 + DRAFTS) + 1, SEQUENCES))  # whole rows a sequence
BLOCK = SEQUENCES * DRAFTS  # rows of a draft stage

# op and end of its shape -> how often a step of n rows runs it
LAYER = {
    ("fp8_linear wq_a", ""): 40, ("fp8_linear wq_b", ""): 40, ("fp8_linear wkv", ""): 40,
    ("fp8_linear wo_b", ""): 40, ("grouped_linear wo_a", ""): 40,
    ("attend", "context 64k"): 40,
    ("experts", ""): 40, ("route", ""): 40, ("shared_expert", ""): 40,
    ("mhc_mix", ""): 80, ("mhc_collapse", ""): 80, ("mhc_merge", ""): 80,
    ("rms_norm", " x 5120"): 80,
    ("fp8_linear index.wq_b", ""): 8, ("plain_linear index.weights", ""): 8,
    ("linear_float32 compressor", ""): 8,
    ("fp8_linear engram.wkv", ""): 2,
    ("linear_float32 head", ""): 1, ("sample", "rows, noise"): 1,
}  # fmt: skip
SELECT = ("index_select", "64k")  # of 8 layers, at whole rows a sequence
# what a step runs of it for its drafts, whatever is verified: 3 stages, heads, 5 draws
DRAFT = {
    ("fp8_linear wq_a", ""): 3, ("fp8_linear wq_b", ""): 3, ("fp8_linear wkv", ""): 3,
    ("fp8_linear wo_b", ""): 3, ("grouped_linear wo_a", ""): 3,
    ("attend", "window only"): 3,
    ("experts", ""): 3, ("route", ""): 3, ("shared_expert", ""): 3,
    ("mhc_mix", ""): 6, ("mhc_collapse", ""): 6, ("mhc_merge", ""): 6,
    ("rms_norm", " x 5120"): 6,
    ("linear_float32 head", ""): 1,
}  # fmt: skip
SERIAL = {("linear_float32 markov.head", ""): 5, ("sample", "rows, noise"): 5}  # at SEQUENCES rows
FEED = {("fp8_linear main_proj", ""): 1}  # at the rows of the step


def cases() -> Iterator[Case]:
    """Yield the cases of all families at the rows of a decode step."""
    for module in (attention, linear, moe, norm, sampling):
        module.ROWS = ROWS
    attention.CONTEXTS = (65536,)
    indexer.SHAPES = [(SEQUENCES, rows // SEQUENCES, 65536, 1) for rows in SELECTED]
    yield from attention.attend_cases()
    yield from indexer.cases()
    yield from linear.cases()
    yield from moe.cases()
    yield from norm.cases()
    yield from sampling.cases()


def rows_of(case: Case) -> int:
    """Return the rows of a case, by its shape."""
    words = case.shape.replace(",", " ").split()
    if case.op.startswith("index_"):
        return int(words[0]) * int(words[2])
    return int(words[0])


def measured(wanted: dict[tuple[str, str], set[int]]) -> dict[tuple[str, str], dict[int, float]]:
    """Return the microseconds of wanted ops by rows."""
    found: dict[tuple[str, str], dict[int, float]] = {key: {} for key in wanted}
    for case in cases():
        for (op, end), rows in wanted.items():
            if case.op == op and case.shape.endswith(end) and rows_of(case) in rows:
                found[op, end].setdefault(rows_of(case), time_us(case.run, case.captured, 15.0))
    return found


def main() -> None:
    """Print the step's time by rows, and write it for a simulator."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No CUDA device is here; this benchmark times kernels on a GPU.")
    wanted: dict[tuple[str, str], set[int]] = {SELECT: set(SELECTED)}
    for ops, rows in (
        (LAYER, ROWS), (DRAFT, (BLOCK,)), (SERIAL, (SEQUENCES,)), (FEED, ROWS),
    ):  # fmt: skip
        for key in ops:
            wanted.setdefault(key, set()).update(rows)
    times = measured(wanted)
    missing = {key: sorted(rows - times[key].keys()) for key, rows in wanted.items()}
    assert not any(missing.values()), f"not timed: { {k: v for k, v in missing.items() if v} }"
    draft = sum(count * times[key][BLOCK] for key, count in DRAFT.items())
    draft += sum(count * times[key][SEQUENCES] for key, count in SERIAL.items())
    print(f"{torch.cuda.get_device_name()}: drafting {draft / 1000:.2f} ms of each step")
    print(f"{'rows':>5} {'ms':>7} {'experts':>8} {'attend':>7} {'select':>7} {'products':>8}")
    steps = {}
    for rows in ROWS:
        low = rows // SEQUENCES * SEQUENCES
        high = min(low + SEQUENCES, SELECTED[-1])
        share = (rows - low) / SEQUENCES
        select = 8 * ((1 - share) * times[SELECT][low] + share * times[SELECT][high])
        parts = {key: count * times[key][rows] for key, count in (LAYER | FEED).items()}
        steps[rows] = (sum(parts.values()) + select + draft) * 1e-6
        products = sum(us for (op, _), us in parts.items() if "linear" in op)
        print(
            f"{rows:5} {steps[rows] * 1e3:7.2f} {parts['experts', ''] / 1e3:8.2f} "
            f"{parts['attend', 'context 64k'] / 1e3:7.2f} {select / 1e3:7.2f} {products / 1e3:8.2f}"
        )
    figures = {
        "rows": list(steps), "seconds": list(steps.values()), "draft_seconds": draft * 1e-6,
        "requests": SEQUENCES, "num_drafts": DRAFTS, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__,
        "command": "python packages/deepinfer-kernels-cuda/benchmarks/decode_step.py",
    }  # fmt: skip
    print(json.dumps(figures))
    if options.out is not None:
        options.out.write_text(json.dumps(figures) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
