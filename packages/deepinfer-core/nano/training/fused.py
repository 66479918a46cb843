"""Compilation of single ops, where it pays.

An op becomes a few kernels the first time it meets a CUDA tensor; ops of equal shape share them,
whichever layer calls. (Compiled as one graph, eight layers of two dozen ops take five minutes.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["fused"]

P = ParamSpec("P")
R = TypeVar("R")

# A test names a compiler here that needs no GPU, to see that everything can be traced.
_COMPILER: str | None = None


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, compiled for CUDA tensors: all its tensors lie on one device."""
    compiled: Callable[P, R] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        if not (_COMPILER or any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)):
            return function(*args, **kwargs)
        if compiled is None:
            config: Any = torch._dynamo.config
            config.recompile_limit = 64  # a compilation for each shape
            compiled = torch.compile(
                function, fullgraph=True, dynamic=False, backend=_COMPILER or "inductor"
            )
        return compiled(*args, **kwargs)

    return call
