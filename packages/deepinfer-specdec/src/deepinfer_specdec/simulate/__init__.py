"""Verification policies on simulated traffic, without a model.

lines = sweep(Sweep(loads=(16, 60), ranks=8))
print(table(lines, ranks=8))
"""

from __future__ import annotations

from deepinfer_specdec.simulate.acceptance import Trace, Traffic, draw
from deepinfer_specdec.simulate.measured import MeasuredPoint
from deepinfer_specdec.simulate.policies import make_policy
from deepinfer_specdec.simulate.report import check_plot, describe, json_line, plot, table
from deepinfer_specdec.simulate.serving import OperatingPoint, Outcome, simulate
from deepinfer_specdec.simulate.sweep import DEFAULT_LOADS, DEFAULT_POLICIES, Line, Sweep, sweep

__all__ = [
    "DEFAULT_LOADS",
    "DEFAULT_POLICIES",
    "Line",
    "MeasuredPoint",
    "OperatingPoint",
    "Outcome",
    "Sweep",
    "Trace",
    "Traffic",
    "check_plot",
    "describe",
    "draw",
    "json_line",
    "make_policy",
    "plot",
    "simulate",
    "sweep",
    "table",
]
