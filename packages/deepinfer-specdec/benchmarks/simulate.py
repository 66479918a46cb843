"""Verification policies on simulated traffic: the default table, and what its figures hang on.

    python packages/deepinfer-specdec/benchmarks/simulate.py [--out FILE]

The first part is `deepinfer-specdec simulate`. The second changes one property of the traffic or of
the steps at a time and shows `delayed` on one rank and `group-k` on a group, against full length.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from deepinfer_specdec.simulate import (
    OperatingPoint,
    Sweep,
    Trace,
    Traffic,
    describe,
    draw,
    json_line,
    make_policy,
    simulate,
    sweep,
    table,
)
from deepinfer_specdec.survival import survival

LOADS = (16, 32, 60)
RANKS = 16
STEPS = 150


@dataclass(frozen=True)
class Case:
    """One change of the default.

    Attributes:
        name: what is changed, and to what.
        traffic, point: what requests are like and what steps cost.
        distort: what the planners are told instead of the true confidences.
    """

    name: str
    traffic: Traffic = field(default_factory=Traffic)
    point: OperatingPoint = field(default_factory=OperatingPoint)
    distort: Callable[[Trace], Trace] = lambda trace: trace


def heated(temperature: float) -> Callable[[Trace], Trace]:
    """Return a distortion: confidences whose logits are divided by a temperature."""

    def distort(trace: Trace) -> Trace:
        before = np.ones_like(trace.survival)
        before[:, :, 1:] = trace.survival[:, :, :-1]
        chance = np.clip(trace.survival / np.maximum(before, 1e-30), 1e-6, 1 - 1e-6)
        odds = (chance / (1 - chance)) ** (1 / temperature)
        told = (odds / (1 + odds)).reshape(-1, trace.survival.shape[2])
        return replace(trace, survival=survival(told).reshape(trace.survival.shape))

    return distort


def cases() -> list[Case]:
    """Return the default and its changes."""
    result = [Case("default")]
    changes: dict[str, tuple[float, ...]] = {
        "drift_correlation": (0.0, 0.5, 1.0),
        "noise": (0.0, 1.5, 3.0),
        "rank_spread": (0.0, 0.5),
        "request_steps": (10.0, 1000.0),
        "accepted_len": (2.5, 4.5),
    }
    for name, values in changes.items():
        for value in values:
            result.append(Case(f"{name} {value:g}", replace(Traffic(), **{name: value})))
    forgets = replace(Traffic(), request_spread=0.0, drift_spread=0.0, block_spread=1.04)
    result.append(Case("records tell nothing", replace(forgets, rank_spread=0.0)))
    # The other reading of the published share: the jumps are part of the 39 %.
    result.append(Case("jumps within 39 %", point=replace(OperatingPoint(), row_share=0.35)))
    result.append(Case("no jumps", point=replace(OperatingPoint(), step_share=0.0)))
    for temperature in (0.5, 2.0):
        result.append(Case(f"logits / {temperature:g}", distort=heated(temperature)))
    return result


def measure(case: Case, seed: int) -> dict[str, object]:
    """Return the gains of one case over full length, as shares, at each load."""
    figures: dict[str, object] = {"case": case.name}
    for requests in LOADS:
        true = draw(case.traffic, [requests] * RANKS, STEPS, seed)
        trace = case.distort(true)
        costs = case.point.costs(requests * (1 + case.traffic.num_drafts))
        runs = {
            name: simulate(
                trace, make_policy(name, costs, RANKS, case.traffic.num_drafts), case.point
            )
            for name in ("fixed-5", "own-k", "group-k")
        }
        full = runs["fixed-5"]
        figures[f"delayed {requests}"] = runs["own-k"].alone / full.alone - 1
        figures[f"group-k {requests}"] = runs["group-k"].group / full.group - 1
        figures[f"verified {requests}"] = runs["own-k"].verified
    figures["record correlation"] = true.autocorrelation(2)
    return figures


def main() -> None:
    """Run both parts and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = Sweep(seed=options.seed)
    print(describe(asked), end="\n\n", flush=True)
    lines = sweep(asked)
    print(table(lines, asked.ranks), end="\n\n", flush=True)
    results = []
    columns = [f"{kind} {n}" for n in LOADS for kind in ("delayed", "group-k", "verified")]
    print("  ".join(["case".ljust(24), "corr.", *columns]))
    for case in cases():
        results.append(measure(case, options.seed))
        cells = [case.name.ljust(24), f"{results[-1]['record correlation']:5.2f}"]
        for column in columns:
            form = ".2f" if column.startswith("verified") else "+.1%"
            cells.append(f"{results[-1][column]:{form}}".rjust(len(column)))
        print("  ".join(cells), flush=True)
    rounded = [
        {name: round(v, 5) if isinstance(v, float) else v for name, v in result.items()}
        for result in results
    ]
    extra: dict[str, object] = {
        "sensitivity": {"ranks": RANKS, "steps": STEPS, "results": rounded},
        "command": shlex.join(["python", *sys.argv]),
    }
    line = json_line(asked, lines, extra)
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    else:
        print(json.dumps(json.loads(line)["sensitivity"]))


if __name__ == "__main__":
    main()
