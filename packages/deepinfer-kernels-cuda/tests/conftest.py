"""Kernels run on the GPU where there is one, else in Triton's interpreter.

The variable is read when a kernel is decorated, so it is set before any of them is imported.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
