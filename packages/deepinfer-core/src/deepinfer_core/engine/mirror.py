"""Host buffers and the buffers on the device that they are copied to."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.interfaces import DeviceRuntime

__all__ = ["GrowingMirror", "Mirror", "Parts"]

# Arrays by name; a tuple is stacked.
Parts = dict[str, np.ndarray | tuple[np.ndarray, ...]]

_SMALLEST = 1024  # items of a buffer that grows


class Mirror:
    """A pinned host buffer and the buffer on the device that it is copied to."""

    def __init__(self, runtime: DeviceRuntime, size: int, dtype: torch.dtype):
        """Allocate both; their addresses never change."""
        self.host = runtime.pinned((size,), dtype)
        self.array: np.ndarray = self.host.numpy()
        # not zeroed: that work could be done after the first copy, which is on another queue
        self.device = torch.empty(size, dtype=dtype, device=runtime.device)

    def send(self, count: int) -> None:
        """Copy the first `count` items to the device (copy-in queue)."""
        self.device[:count].copy_(self.host[:count], non_blocking=True)


class GrowingMirror:
    """A mirror for what few steps have, replaced by a larger one when a step has more.

    Holds named arrays end to end, from one `fill` to the next.
    """

    def __init__(self, runtime: DeviceRuntime, dtype: torch.dtype):
        """Start small."""
        self._runtime, self._dtype = runtime, dtype
        self._mirror = Mirror(runtime, _SMALLEST, dtype)
        self._spans: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._size = 0

    def fill(self, parts: Parts) -> None:
        """Copy the arrays into the host buffer, in place of what was there."""
        self._spans, self._size = {}, 0
        for name, part in parts.items():
            shape = (len(part), *part[0].shape) if isinstance(part, tuple) else part.shape
            self._spans[name] = (self._size, shape)
            self._size += prod(shape)
        if self._size > len(self._mirror.array):
            self._mirror = Mirror(self._runtime, 1 << (self._size - 1).bit_length(), self._dtype)
        first, array = 0, self._mirror.array
        for part in parts.values():
            for each in part if isinstance(part, tuple) else (part,):
                array[first : first + each.size] = each.reshape(-1)
                first += each.size

    def send(self) -> None:
        """Copy all of it to the device (copy-in queue)."""
        if self._size:
            self._mirror.send(self._size)

    def __contains__(self, name: str) -> bool:
        """Whether there is an array of that name."""
        return name in self._spans

    def __getitem__(self, name: str) -> Tensor:
        """Return an array on the device."""
        first, shape = self._spans[name]
        return self._mirror.device[first : first + prod(shape)].view(shape)

    def get(self, name: str) -> Tensor | None:
        """Return an array on the device, or None where there is none of that name."""
        return None if name not in self._spans else self[name]
