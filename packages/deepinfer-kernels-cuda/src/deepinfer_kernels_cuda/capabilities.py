"""What this backend has, and what it needs of a machine."""

from __future__ import annotations

import torch

__all__ = ["CAPABILITIES", "MIN_CAPABILITY", "NUMERICS", "device_fault"]

NUMERICS = ("release", "ideal", "cache")
CAPABILITIES = (*NUMERICS, "graphs")

# fp8 products; kernels are written for Hopper (9.0) and compiled for Blackwell (10.0) as well.
MIN_CAPABILITY = (9, 0)


def device_fault() -> str | None:
    """Return None when kernels can run on the current device, else one sentence. Cheap."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA GPU, or no driver for it"
    found = torch.cuda.get_device_capability()
    if found < MIN_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(), found
        return (
            f"{name} has compute capability {major}.{minor}; kernels need "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (Hopper) or later"
        )
    return None
