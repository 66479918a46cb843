"""The maps that steps read, on their device."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from deepinfer_eplb.balance import check_split
from deepinfer_eplb.dispatch import bounds_of
from deepinfer_eplb.errors import PlanInputError
from deepinfer_eplb.files import StoredMap
from deepinfer_eplb.maps import (
    Ints,
    Layout,
    Longs,
    as_array,
    check_map,
    lookup_of,
    num_replicas_of,
)
from deepinfer_eplb.plan import Plan

__all__ = ["ExpertMaps", "HostMap", "Source", "host_map"]

# What a map can be taken from; a bare one, [L, P], needs a layout beside it.
Source: TypeAlias = Plan | StoredMap | ArrayLike

_NO_BOUND = 1 << 32  # that no hash reaches: of last replicas, of padding, of empty slots


@dataclass(frozen=True, eq=False)
class ExpertMaps:
    """The maps that steps read, at fixed addresses: a migration writes them in place, by layer.

    Attributes:
        physical_to_logical: [L, P] int32, -1 for an empty slot.
        logical_to_physical: [L, E, C] int32, slots ascending, padded with -1; C is the most
            replicas that a map of these sizes can have.
        num_replicas: [L, E] int32.
        bounds: [L, E, C] int64, where the shares of an expert's replicas end, padded with 2^32: for
            each layer what `dispatch.bounds_of` says, so that `quota` on the device chooses as the
            reference does. 64 bits, since a bound may be 2^32.
    """

    physical_to_logical: Tensor
    logical_to_physical: Tensor
    num_replicas: Tensor
    bounds: Tensor

    @classmethod
    def of(
        cls,
        plan: Source,
        layout: Layout | None = None,
        device: torch.device | str = "cpu",
    ) -> ExpertMaps:
        """Return the maps of a plan, or of a map [L, P] whose replicas share evenly.

        Args:
            plan: a plan, a map of a file, or a map.
            layout: of a map; a plan or a file brings its own.
            device: of the tensors.
        Raises:
            PlanInputError: the map is not whole, its shares are not, or it comes without a layout.
        """
        host = host_map(plan, layout)
        rows = host.rows(slice(None))
        return cls(**{name: torch.from_numpy(row.copy()).to(device) for name, row in rows.items()})


@dataclass(frozen=True, eq=False)
class HostMap:
    """A map with the shares of its slots, on the host.

    Attributes:
        physical_to_logical: [L, P] int32.
        bounds: [L, P] int64, of the replica in each slot; 2^32 of an empty one.
        num_experts: E.
        layout: of the map.
    """

    physical_to_logical: Ints
    bounds: Longs
    num_experts: int
    layout: Layout

    @classmethod
    def of_steps(cls, maps: ExpertMaps, layout: Layout, num_layers: int) -> HostMap:
        """Return what steps read now.

        Raises:
            PlanInputError: the map is not whole, or is not of this layout and number of layers.
        """
        num_experts = maps.num_replicas.shape[1]
        slots = check_map(maps.physical_to_logical.cpu().numpy(), num_experts, layout, num_layers)
        shape = (num_layers, num_experts, _most_replicas(layout, num_experts))
        for name in ("logical_to_physical", "bounds"):
            if getattr(maps, name).shape != shape:
                raise PlanInputError(
                    f"`maps.{name}` has shape {list(getattr(maps, name).shape)}; needed: "
                    f"{list(shape)}. Make it by `ExpertMaps.of` with this layout."
                )
        by_slot = _by_slot(lookup_of(slots, num_experts), maps.bounds.cpu().numpy(), slots.shape)
        return cls(slots, by_slot, num_experts, layout)

    def rows(self, layers: slice) -> dict[str, Ints | Longs]:
        """Return what `ExpertMaps` holds of some layers, by its names."""
        target = self.physical_to_logical[layers]
        found = lookup_of(target, self.num_experts)
        slots = np.full(
            (*found.shape[:2], _most_replicas(self.layout, self.num_experts)), -1, np.int32
        )
        slots[:, :, : found.shape[2]] = found
        counts = num_replicas_of(target, self.num_experts)
        ends = self.bounds[layers][np.arange(len(target))[:, None, None], slots]
        ends[slots < 0] = _NO_BOUND
        values = (target, slots, counts, ends)
        return dict(zip((each.name for each in fields(ExpertMaps)), values, strict=True))

    def with_layer(self, layer: int, other: HostMap) -> HostMap:
        """Return this map with one layer of another one."""
        target, bounds = self.physical_to_logical.copy(), self.bounds.copy()
        target[layer] = other.physical_to_logical[layer]
        bounds[layer] = other.bounds[layer]
        return HostMap(target, bounds, self.num_experts, self.layout)

    def changed_layers(self, other: HostMap) -> list[int]:
        """Return the layers whose map or shares differ."""
        differs = (self.physical_to_logical != other.physical_to_logical).any(1)
        differs |= (self.bounds != other.bounds).any(1)
        return [int(layer) for layer in np.flatnonzero(differs)]

    def digest(self, more: str = "") -> int:
        """Return 64 bits that tell this map, and what else is given, from others."""
        content = self.physical_to_logical.tobytes() + self.bounds.tobytes() + more.encode()
        found = hashlib.blake2b(content, digest_size=8).digest()
        return int.from_bytes(found, "big", signed=True)


def host_map(
    plan: Source,
    layout: Layout | None,
    num_experts: int | None = None,
    num_layers: int | None = None,
) -> HostMap:
    """Return a plan's map and shares, or a map [L, P] with even shares.

    Args:
        plan: a plan, a map of a file, or a map.
        layout: of a map; a plan or a file brings its own.
        num_experts: E; None: as many as the map has.
        num_layers: L; None: as many as the map has.
    Raises:
        PlanInputError: the map is not whole, its shares are not, it has other sizes, or it comes
            without a layout.
    """
    split = None
    given: ArrayLike
    if isinstance(plan, Plan | StoredMap):
        given, layout, split = plan.physical_to_logical, plan.layout, plan.split
    else:
        given = plan
    if layout is None:
        raise PlanInputError("`layout` is missing: a map alone does not tell ranks from slots.")
    array = as_array(given, "physical_to_logical")
    if num_experts is None:
        # What is no integer is refused below.
        num_experts = int(array.max(initial=0)) + 1 if array.dtype.kind in "iu" else 1
        # Before anything is as large as an id in the map says.
        if num_experts > layout.num_physical:
            raise PlanInputError(
                f"The map has expert {num_experts - 1}, but {layout.num_physical} slots have room "
                f"for experts 0 to {layout.num_physical - 1} at most; give ids without gaps."
            )
    target = check_map(array, num_experts, layout, num_layers)
    if split is not None:
        split = check_split(split, target, num_experts)
    stored = StoredMap(target, num_experts, layout, split)
    bounds = np.stack([bounds_of(stored, layer) for layer in range(len(target))])
    by_slot = _by_slot(stored.logical_to_physical, bounds, target.shape)
    return HostMap(target, by_slot, num_experts, layout)


def _most_replicas(layout: Layout, num_experts: int) -> int:
    # A rank holds an expert once, unless it is the only one in use.
    spare, alone = layout.num_physical - num_experts, layout.slots_per_rank - num_experts + 1
    return max(min(spare + 1, layout.num_ranks), alone)


def _by_slot(lookup: Ints, bounds: Longs, shape: tuple[int, ...]) -> Longs:
    """Return the bounds of slots, [L, P], of those of experts' replicas, [L, E, C]."""
    found = np.full(shape, _NO_BOUND, np.int64)
    layers, experts, replicas = np.nonzero(lookup >= 0)
    found[layers, lookup[layers, experts, replicas]] = bounds[layers, experts, replicas]
    return found
