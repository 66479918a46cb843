"""Errors of the package.

EplbError
|- PlanInputError      loads, a map or sizes are not as the function's contract says
|- SettingError        an option is not one of those allowed, or needs another one
|- FileError           a file of loads, of a map or of a trace cannot be read or written
`- MigrationError      ranks disagree about a migration, or one of them failed
"""

from __future__ import annotations

__all__ = ["EplbError", "FileError", "MigrationError", "PlanInputError", "SettingError"]


class EplbError(Exception):
    """Anything this package refuses."""


class PlanInputError(EplbError):
    """Loads, a map or sizes are not as the function's contract says."""


class SettingError(EplbError):
    """An option has a value that is not allowed, or lacks another option that it needs."""


class FileError(EplbError):
    """A file cannot be read or written, or does not hold what was asked of it."""


class MigrationError(EplbError):
    """Ranks disagree about a migration, or one of them failed; what was installed stays."""
