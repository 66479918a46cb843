"""Expert-parallel load balancing: plans, simulates, explains and migrates where experts live."""

from deepinfer_eplb.errors import (
    EplbError,
    FileError,
    MigrationError,
    PlanInputError,
    SettingError,
)
from deepinfer_eplb.maps import Layout
from deepinfer_eplb.plan import Plan, Planner, plan, warm_up

__version__ = "0.1.0"

__all__ = [
    "EplbError",
    "FileError",
    "Layout",
    "MigrationError",
    "Plan",
    "PlanInputError",
    "Planner",
    "SettingError",
    "plan",
    "warm_up",
]
