"""Errors of this package.

KernelError
|-- KernelInputError   an argument of an op has a shape, dtype, stride or device it cannot take
`-- Unsupported        this device or installation lacks what was asked for
"""

__all__ = ["KernelError", "KernelInputError", "Unsupported"]


class KernelError(Exception):
    """Base of all errors of this package."""


class KernelInputError(KernelError):
    """An argument of an op has a shape, dtype, stride or device it cannot take."""


class Unsupported(KernelError):
    """This device or installation lacks what was asked for."""
