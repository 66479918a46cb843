"""The error tree of the engine.

    DeepInferError
    |-- ConfigError          an option of the engine, or a field of a model's `config.json`
    |-- CheckpointError      a model folder: missing, extra, misshapen, truncated
    |-- RequestError         one request cannot be served as asked; others are not affected
    |   `-- DuplicateRequest the client id is in use
    |-- Unsupported          a backend lacks what was asked
    |-- KernelInputError     an op was called with a wrong shape, dtype or device
    |-- StuckStep            the device did not finish a step in time; nothing can go on
    `-- OutputError          results could not be written

A message says what was wrong, which value, what is allowed and what to do.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeepInferError",
    "DuplicateRequest",
    "KernelInputError",
    "OutputError",
    "RequestError",
    "StuckStep",
    "Unsupported",
    "shown",
]

_SHOWN_LEN = 160  # characters of a value in a message


def shown(value: object) -> str:
    """Return a value as messages show it: its `repr`, the middle of a long one left out."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    if len(text) <= _SHOWN_LEN:
        return text
    return f"{text[: _SHOWN_LEN // 2]}...{text[-_SHOWN_LEN // 4 :]}"


class DeepInferError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(DeepInferError):
    """An option or a configuration field is unknown, out of range, or contradicts another."""


class CheckpointError(DeepInferError):
    """A model folder cannot be used; the message lists every fault found in it."""


class RequestError(DeepInferError):
    """One request is invalid or cannot be completed.

    Attributes:
        param: the request field at fault, or None when the request as a whole is.
        code: a short machine-readable word, such as `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request"):
        """Keep the message and what it is about."""
        super().__init__(message)
        self.param = param
        self.code = code


class DuplicateRequest(RequestError):
    """A live request already has this client id."""


class Unsupported(DeepInferError):
    """A backend lacks an op, a format or a mode; the message names the nearest thing that works."""


class KernelInputError(DeepInferError):
    """An op was called with a shape, dtype, stride or device outside its contract."""


class StuckStep(DeepInferError):
    """The device did not finish a step within its deadline; the engine cannot go on.

    Attributes:
        step_seq: which step.
        dump: file with the records of the last steps, or None when it could not be written.
    """

    def __init__(self, message: str, *, step_seq: int, dump: Path | None) -> None:
        """Keep the message and what it is about."""
        super().__init__(message)
        self.step_seq = step_seq
        self.dump = dump


class OutputError(DeepInferError):
    """A result file could not be written; the message says how many results are safe."""
