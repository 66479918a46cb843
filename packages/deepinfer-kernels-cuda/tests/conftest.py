"""Kernels run on the GPU where there is one, else in Triton's interpreter.

The variable is read when a kernel is decorated, so it is set before any of them is imported.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def filled_memory(monkeypatch):
    """Fill what ops allocate: nothing may come of memory that no kernel wrote.

    Floats are NaN, 16-bit ranks the highest there are, other integers far from any right one.
    """
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)

        def filled(*args, allocate=allocate, **options):
            out = allocate(*args, **options)
            if out.numel() and out.is_contiguous():
                ones = out.is_floating_point() or out.dtype == torch.int16
                out.view(-1).view(torch.uint8).fill_(0xFF if ones else 0x7F)
            return out

        monkeypatch.setattr(torch, name, filled)
