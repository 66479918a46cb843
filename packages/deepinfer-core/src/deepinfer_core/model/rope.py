"""Rotary frequencies.

Plain for window-only layers, YaRN for layers that read compressed KV.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_core.model.config import RopeScaling

__all__ = ["inverse_frequencies"]


def inverse_frequencies(channels: int, base: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return [channels / 2] float32.

    The order of float32 operations matters: one ulp here is 0.1 rad at a position of one million.
    """
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies = 1.0 / (base**exponents)
    if scaling is None:
        return frequencies

    def pivot(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return channels * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(math.floor(pivot(scaling.beta_fast)), 0)
    high = min(math.ceil(pivot(scaling.beta_slow)), channels - 1)
    places = torch.arange(channels // 2, dtype=torch.float32)
    ramp = ((places - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
