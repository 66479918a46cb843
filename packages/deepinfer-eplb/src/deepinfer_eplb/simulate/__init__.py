"""Strategies of planning on made-up or recorded traffic, graded on the interval after each plan.

runs = sweep(Sweep(regimes=("drift",), intervals=8))
print(table(summarise(runs)))

With hits of one's own, [pieces, layers, experts]: `sweep(Sweep(layout=..), trace=hits)`.
"""

from __future__ import annotations

from deepinfer_eplb.simulate.replay import (
    DECODE,
    PREFILL,
    Interval,
    Schedule,
    ratios,
    replay,
    unbeatable,
)
from deepinfer_eplb.simulate.report import conclusion, describe, json_line, plot, table, time_line
from deepinfer_eplb.simulate.strategies import (
    DEFAULT_STRATEGY,
    STRATEGIES,
    Moment,
    Strategy,
    make_strategy,
)
from deepinfer_eplb.simulate.sweep import TRACE, Line, Run, Sweep, summarise, sweep
from deepinfer_eplb.simulate.traffic import REGIMES, Traffic, generate

__all__ = [
    "DECODE",
    "DEFAULT_STRATEGY",
    "PREFILL",
    "REGIMES",
    "STRATEGIES",
    "TRACE",
    "Interval",
    "Line",
    "Moment",
    "Run",
    "Schedule",
    "Strategy",
    "Sweep",
    "Traffic",
    "conclusion",
    "describe",
    "generate",
    "json_line",
    "make_strategy",
    "plot",
    "ratios",
    "replay",
    "summarise",
    "sweep",
    "table",
    "time_line",
    "unbeatable",
]
