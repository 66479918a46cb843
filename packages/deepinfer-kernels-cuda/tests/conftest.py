"""Kernels run on the GPU where there is one, else in Triton's interpreter.

The variable is read when a kernel is decorated, so it is set before any of them is imported.
"""

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def products_of_one_order(monkeypatch):
    """Let the interpreter's products round a row the same whatever other rows there are.

    It leaves them to numpy, whose library sums a row in an order that depends on the processor and
    on how many rows there are. Summed in float64, that order does not show in float32.
    """
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        narrow = [x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating() for x in (a, b)]
        if any(narrow) or d.data.dtype != np.float32:
            return original(self, a, b, d, input_precision, max_num_imprecise_acc)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    original = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


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
