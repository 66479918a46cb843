"""Our strategies against the published greedy, on the interval after each plan.

    python packages/deepinfer-eplb/benchmarks/simulate.py [--out FILE] [--seeds 0,1] [--layers 6]

The base line is `published_greedy` of the tests: planned anew from the last window each time. What
is compared is what slowest rank over mean has over 1, of pieces of the next interval. Decode is
EP64 with one spare slot a rank, prefill EP4 and EP2 with four.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from deepinfer_eplb import Layout, Plan
from deepinfer_eplb.simulate import (
    DECODE,
    PREFILL,
    STRATEGIES,
    Line,
    Moment,
    Strategy,
    Sweep,
    Traffic,
    json_line,
    make_strategy,
    summarise,
    sweep,
    table,
)

NUM_EXPERTS = 384
BASE = "published-greedy"
GREEDY_FILE = Path(__file__).parents[1] / "tests" / "published_greedy.py"
# name -> layout, schedule, expert choices of a rank's step in one layer
CASES = {
    "decode EP64": (Layout(64, 8, 7), DECODE, 60 * 6),
    "prefill EP4": (Layout(4, 1, 100), PREFILL, 8192 * 6),
    "prefill EP2": (Layout(2, 1, 196), PREFILL, 8192 * 6),
}


def main() -> int:
    """Run all cases and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="append JSON lines here")
    parser.add_argument("--seeds", default="0,1", help="of the traffic (default: 0,1)")
    parser.add_argument("--layers", type=int, default=6, help="of the traffic (default: 6)")
    parser.add_argument("--intervals", type=int, default=14, help="of the traffic (default: 14)")
    parser.add_argument("--cases", default=",".join(CASES), help="default: all")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="default: all")
    options = parser.parse_args()
    chosen = options.cases.split(",")
    if not set(chosen) <= set(CASES):
        parser.error(f"--cases is {options.cases!r}; allowed: {', '.join(CASES)}")
    names = tuple(options.strategies.split(","))
    strategies = {BASE: _published()} | {name: make_strategy(name) for name in names}
    for case in chosen:
        layout, schedule, hits = CASES[case]
        asked = Sweep(
            layout=layout,
            schedule=schedule,
            traffic=Traffic(
                num_layers=options.layers,
                num_experts=NUM_EXPERTS,
                hits_per_step=layout.num_ranks * hits,
            ),
            seeds=tuple(map(int, options.seeds.split(","))),
            intervals=options.intervals,
            strategies=names,
        )
        lines = summarise(sweep(asked, strategies, watch=_say))
        print(f"{case}\n\n{table(lines)}\n\n{against(lines)}\n", flush=True)
        if options.out:
            extra = {"case": case, "base": BASE, "command": shlex.join(["python", *sys.argv])}
            with options.out.open("a", encoding="utf-8") as stream:
                stream.write(json_line(asked, lines, extra) + "\n")
    return 0


def against(lines: Sequence[Line]) -> str:
    """Return a table of the excess over 1 of each regime: how far it is below the base line's."""
    pieces = {(line.regime, line.strategy): line.piece for line in lines}
    regimes = list(dict.fromkeys(line.regime for line in lines))
    names = list(dict.fromkeys(line.strategy for line in lines))
    rows = ["excess over 1 lower by (and difference of the ratio)".ljust(24)]
    rows.append(" " * 24 + "".join(f"{regime:>18}" for regime in regimes))
    for name in names[1:]:
        if name == "none":  # many times the base line's: the table says it
            continue
        cells = []
        for regime in regimes:
            base, own = pieces[regime, names[0]], pieces[regime, name]
            lower = f"{1 - (own - 1) / (base - 1):.1%}" if base > 1 else "-"
            cells.append(f"{lower} ({own - base:+.4f})".rjust(18))
        rows.append(name.ljust(24) + "".join(cells))
    return "\n".join(rows)


def _published() -> Strategy:
    """Return the base line as a strategy."""
    spec = importlib.util.spec_from_file_location("published_greedy", GREEDY_FILE)
    assert spec is not None and spec.loader is not None, f"{GREEDY_FILE} is missing"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def strategy(moment: Moment) -> Plan:
        layout = moment.layout
        found = module.published_greedy(moment.loads, layout.num_ranks, layout.slots_per_rank)
        return Plan(found, moment.loads.shape[1], layout, None, None, moment.loads)

    return strategy


def _say(regime: str, seed: int) -> None:
    print(f"{regime}, seed {seed}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
