"""Starting a kernel while the one before it on the stream comes to its end.

A short kernel takes about as long to start as to run. One that is launched with `OVERLAP` is
prepared while the kernel before runs; `begin` waits until that one is complete and its results can
be read. Kernels of others are waited for likewise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels_cuda.kernel_math import INTERPRET

__all__ = ["OVERLAP", "begin"]

# Options of such a launch; the interpreter knows none of them.
OVERLAP: dict[str, bool] = {} if INTERPRET.value else {"launch_pdl": True}


@triton.jit
def begin(EARLY: tl.constexpr = False):
    """Wait for the kernel before; the first thing a kernel launched with `OVERLAP` does.

    EARLY: whether the next kernel's programs may take their places as soon as all of this one's
        have theirs. Right before many small programs. Few large ones would be spread unevenly over
        multiprocessors that are still half full: up to 1.5 times slower on an H200.
    """
    if not INTERPRET:
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
