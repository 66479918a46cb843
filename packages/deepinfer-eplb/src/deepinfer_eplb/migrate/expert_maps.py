"""The maps that steps read, on their device."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from deepinfer_eplb.errors import PlanInputError
from deepinfer_eplb.maps import Ints, Layout, check_map, lookup_of, num_replicas_of
from deepinfer_eplb.plan import Plan

__all__ = ["ExpertMaps", "HostMap", "host_map"]


@dataclass(frozen=True, eq=False)
class ExpertMaps:
    """The maps that steps read, at fixed addresses: a migration writes them in place, by layer.

    Attributes:
        physical_to_logical: [L, P] int32, -1 for an empty slot.
        logical_to_physical: [L, E, C] int32, slots ascending, padded with -1; C is the most
            replicas that a map of these sizes can have.
        num_replicas: [L, E] int32.
        split: [L, P] float32, the share of its expert's tokens that a slot takes, 0 if empty.
    """

    physical_to_logical: Tensor
    logical_to_physical: Tensor
    num_replicas: Tensor
    split: Tensor

    @classmethod
    def of(
        cls,
        plan: Plan | ArrayLike,
        layout: Layout | None = None,
        device: torch.device | str = "cpu",
    ) -> ExpertMaps:
        """Return the maps of a plan, or of a map [L, P] whose replicas share evenly.

        Args:
            plan: a plan or a map.
            layout: of a map; a plan brings its own.
            device: of the tensors.
        Raises:
            PlanInputError: the map is not whole, or comes without a layout.
        """
        host = host_map(plan, layout)
        rows = host.rows(slice(None))
        return cls(**{name: torch.from_numpy(row.copy()).to(device) for name, row in rows.items()})


@dataclass(frozen=True, eq=False)
class HostMap:
    """A map with the shares of its slots, on the host.

    Attributes:
        physical_to_logical: [L, P] int32.
        split: [L, P] float32.
        num_experts: E.
        layout: of the map.
    """

    physical_to_logical: Ints
    split: NDArray[np.float32]
    num_experts: int
    layout: Layout

    def rows(self, layers: slice) -> dict[str, NDArray[np.int32] | NDArray[np.float32]]:
        """Return what `ExpertMaps` holds of some layers, by its names."""
        target = self.physical_to_logical[layers]
        found = lookup_of(target, self.num_experts)
        slots = np.full((*found.shape[:2], self._most_replicas()), -1, np.int32)
        slots[:, :, : found.shape[2]] = found
        counts = num_replicas_of(target, self.num_experts)
        values = (target, slots, counts, self.split[layers])
        return dict(zip((each.name for each in fields(ExpertMaps)), values, strict=True))

    def _most_replicas(self) -> int:
        # A rank holds an expert once, unless it is the only one in use.
        ranks, spare = self.layout.num_ranks, self.layout.num_physical - self.num_experts
        alone = self.layout.slots_per_rank - self.num_experts + 1
        return max(min(spare + 1, ranks), alone)

    def with_layer(self, layer: int, other: HostMap) -> HostMap:
        """Return this map with one layer of another one."""
        target, split = self.physical_to_logical.copy(), self.split.copy()
        target[layer] = other.physical_to_logical[layer]
        split[layer] = other.split[layer]
        return HostMap(target, split, self.num_experts, self.layout)

    def changed_layers(self, other: HostMap) -> list[int]:
        """Return the layers whose map or shares differ."""
        differs = (self.physical_to_logical != other.physical_to_logical).any(1)
        differs |= (self.split != other.split).any(1)
        return [int(layer) for layer in np.flatnonzero(differs)]

    def digest(self, more: str = "") -> int:
        """Return 64 bits that tell this map, and what else is given, from others."""
        content = self.physical_to_logical.tobytes() + self.split.tobytes() + more.encode()
        found = hashlib.blake2b(content, digest_size=8).digest()
        return int.from_bytes(found, "big", signed=True)


def host_map(
    plan: Plan | ArrayLike,
    layout: Layout | None,
    num_experts: int | None = None,
    num_layers: int | None = None,
) -> HostMap:
    """Return a plan's map and shares, or a map [L, P] with even shares.

    Args:
        plan: a plan or a map.
        layout: of a map; a plan brings its own.
        num_experts: E; None: as many as the map has.
        num_layers: L; None: as many as the map has.
    Raises:
        PlanInputError: the map is not whole, has other sizes, or comes without a layout.
    """
    split = None
    given = plan
    if isinstance(plan, Plan):
        given, layout, split = plan.physical_to_logical, plan.layout, plan.split
    if layout is None:
        raise PlanInputError("`layout` is missing: a map alone does not tell ranks from slots.")
    array = np.asarray(given)
    if num_experts is None:
        num_experts = int(array.max(initial=0)) + 1
    target = check_map(array, num_experts, layout, num_layers)
    if split is None:
        counts = num_replicas_of(target, num_experts)
        split = 1.0 / np.take_along_axis(counts, np.maximum(target, 0), 1)
    shares = np.where(target >= 0, split, 0.0).astype(np.float32)
    return HostMap(target, shares, num_experts, layout)
