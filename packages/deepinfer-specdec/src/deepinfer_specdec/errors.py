"""Errors of the package.

SpecdecError
|- SettingError       an option is not one of those allowed, or needs another one
|- VerifyInputError   an array or tensor has a shape or dtype outside its contract
|- CostTableError     a cost table cannot be read, is no table, or belongs to another engine
`- CalibrationError   a calibration cannot be read, is none, or belongs to another drafter
"""

from __future__ import annotations

__all__ = [
    "CalibrationError",
    "CostTableError",
    "SettingError",
    "SpecdecError",
    "VerifyInputError",
]


class SpecdecError(Exception):
    """Anything this package refuses."""


class SettingError(SpecdecError):
    """An option has a value that is not allowed, or lacks another option that it needs."""


class VerifyInputError(SpecdecError):
    """An array or tensor is not as the function's contract says."""


class CostTableError(SpecdecError):
    """A cost table is malformed, unreadable, or was measured on another engine."""


class CalibrationError(SpecdecError):
    """A calibration is malformed, unreadable, or was measured with another drafter."""
