"""Where kernels run in tests: the GPU, or Triton's interpreter on the CPU."""

from __future__ import annotations

import torch
import triton

__all__ = ["DEVICE", "INTERPRETED", "ON_GPU"]

INTERPRETED = bool(triton.knobs.runtime.interpret)
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
