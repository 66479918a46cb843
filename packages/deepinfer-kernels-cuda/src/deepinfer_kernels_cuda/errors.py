"""Errors of this package.

KernelError
|-- KernelInputError   an argument has a type, shape, stride, device or value its op cannot take
`-- Unsupported        this device or installation lacks what was asked for
"""

__all__ = ["KernelError", "KernelInputError", "Unsupported"]


class KernelError(Exception):
    """Base of all errors of this package."""


class KernelInputError(KernelError):
    """An argument of an op has a type, shape, stride, device or value it cannot take."""


class Unsupported(KernelError):
    """This device or installation lacks what was asked for."""
