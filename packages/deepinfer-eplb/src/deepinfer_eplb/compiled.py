"""How functions of this package are compiled, and where the result is kept.

A compiled function must call none of another module: numba's cache looks at the file of the outer
one alone, so a change of the inner one would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

__all__ = ["compiled"]

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Return a function that numba compiles at its first call for arguments of some types.

    It holds no interpreter lock while it runs, so that a thread can plan beside a step loop, and
    gives the same result in every process: operations keep their order, on one thread.

    What was compiled is kept for other processes: in `NUMBA_CACHE_DIR` if that is set, beside the
    source, or in the user's folder for caches, whichever can be written first. Where none can, as
    in a read-only installation without a home, every process compiles anew.
    """
    try:
        made = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba's word for: there is no place to keep it
        made = njit(nogil=True)(function)
    return cast("Function", made)
