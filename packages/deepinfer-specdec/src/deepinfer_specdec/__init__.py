"""DSpark verification of speculative decoding: which drafts, how many, and which of them stand."""

from deepinfer_specdec.accept import Acceptance, Rejection, TargetNoise, committed_lengths
from deepinfer_specdec.algorithm1 import early_stop_lengths
from deepinfer_specdec.budget import Budget, DelayedPlanner, FixedPlanner, ThresholdPlanner
from deepinfer_specdec.calibrate import (
    DrafterCalibration,
    Fit,
    Temperatures,
    TrafficCalibration,
    auc,
    ece,
    fit,
)
from deepinfer_specdec.cost import CostTable
from deepinfer_specdec.dspark import Dspark
from deepinfer_specdec.errors import (
    CalibrationError,
    CostTableError,
    SettingError,
    SpecdecError,
    VerifyInputError,
)
from deepinfer_specdec.group import agree, gains, share
from deepinfer_specdec.lengths import best_lengths, threshold_lengths
from deepinfer_specdec.online import OnlineCosts
from deepinfer_specdec.stats import VerifyReport, VerifyStats
from deepinfer_specdec.survival import survival, survival_of

__version__ = "0.1.0"

__all__ = [
    "Acceptance",
    "Budget",
    "CalibrationError",
    "CostTable",
    "CostTableError",
    "DelayedPlanner",
    "DrafterCalibration",
    "Dspark",
    "Fit",
    "FixedPlanner",
    "OnlineCosts",
    "Rejection",
    "SettingError",
    "SpecdecError",
    "TargetNoise",
    "Temperatures",
    "ThresholdPlanner",
    "TrafficCalibration",
    "VerifyInputError",
    "VerifyReport",
    "VerifyStats",
    "agree",
    "auc",
    "best_lengths",
    "committed_lengths",
    "early_stop_lengths",
    "ece",
    "fit",
    "gains",
    "share",
    "survival",
    "survival_of",
    "threshold_lengths",
]
