"""One layer on its way from the live map to the next one, on one rank.

Who may touch what, while the layer is being staged:
    its slots            read by steps and by transfers; written by nobody
    staging              written by transfers and by copies inside the rank; read by nobody
and while it is being installed, which no rank does before every rank has received and sent all:
    its slots, its map   written in the order of the steps' stream: no running step is disturbed
    staging              read on that stream; transfers of the next layer wait for these copies
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepinfer_eplb.errors import MigrationError, PlanInputError
from deepinfer_eplb.maps import Layout
from deepinfer_eplb.migrate.agreement import Members
from deepinfer_eplb.migrate.expert_maps import ExpertMaps, HostMap
from deepinfer_eplb.migrate.lane import Lane
from deepinfer_eplb.moves import Change, difference, rounds

__all__ = ["LayerSlots", "Load", "Staging"]

Load = Callable[[int, int], Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class LayerSlots:
    """The tensors of a layer's experts on this rank.

    Attributes:
        layer: its number.
        tensors: by name, [slots, ...] of any dtype.
        content: the same memory by name, sorted, as [slots, bytes] uint8: not every backend
            carries every dtype.
    """

    layer: int
    tensors: Mapping[str, Tensor]
    content: Mapping[str, Tensor]

    @classmethod
    def of(cls, layer: int, tensors: Mapping[str, Tensor], layout: Layout) -> LayerSlots:
        """Check the tensors of a layer.

        Raises:
            PlanInputError: none, or one is empty, not contiguous, or has another number of slots.
        """
        slots = layout.slots_per_rank
        if not tensors:
            raise PlanInputError(f"`weights`[{layer}] is empty; leave out layers without experts.")
        for name, tensor in tensors.items():
            if tensor.dim() < 1 or tensor.shape[0] != slots or not tensor.numel():
                raise PlanInputError(
                    f"`weights`[{layer}][{name!r}] has shape {list(tensor.shape)}; needed: "
                    f"[{slots}, ...], one entry a slot, not empty."
                )
            if not tensor.is_contiguous():
                raise PlanInputError(
                    f"`weights`[{layer}][{name!r}] has strides {tensor.stride()}; needed: "
                    "contiguous, so that an expert is one run of bytes. Store it as it is read."
                )
        content = {
            name: tensors[name].view(slots, -1).view(torch.uint8) for name in sorted(tensors)
        }
        return cls(layer, tensors, content)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of one expert, by name."""
        return {name: each.shape[1] for name, each in self.content.items()}


class Staging:
    """What a rank receives, copies and reads for one layer, until it is installed.

    Attributes:
        layer: its number.
        complete: whether this rank has received and sent all; set by `check`.
    """

    def __init__(
        self,
        slots: LayerSlots,
        live: HostMap,
        target: HostMap,
        members: Members,
        lane: Lane,
        bytes_per_step: float,
        load: Load | None,
    ) -> None:
        """Make room, and copy what the rank has itself.

        Args:
            slots: of the layer; read here, written by `install` alone.
            live, target: maps of all layers.
            members: who takes part; what is on other ranks is out of reach.
            lane: where copies and transfers run.
            bytes_per_step: see `Migrator`.
            load: see `Migrator`.
        """
        self.layer = slots.layer
        self.complete = False
        self._slots, self._members, self._lane, self._load = slots, members, lane, load
        self._layout = target.layout
        one = slice(self.layer, self.layer + 1)
        moves = difference(
            live.physical_to_logical[one],
            target.physical_to_logical[one],
            self._layout,
            cannot_send=members.others(self._layout.num_ranks),
        )
        self._experts = moves.physical_to_logical[0]
        transfers, expert_bytes = moves.transfers(0), sum(slots.sizes.values())
        # The limit may be infinite.
        limit = min(bytes_per_step, len(transfers) * expert_bytes)
        self._rounds = rounds(transfers, self._layout, max(1, int(limit // expert_bytes)))
        self._num_started = 0
        self._deadline = float("inf")
        first = members.rank * self._layout.slots_per_rank
        mine = slice(first, first + self._layout.slots_per_rank)
        changed = np.flatnonzero(moves.change[0, mine] > Change.KEPT)
        self._expert_of = {int(slot): int(self._experts[first + slot]) for slot in changed}
        # An expert for two slots of the rank is staged once.
        needed = sorted(set(self._expert_of.values()))
        self._row_of = {expert: row for row, expert in enumerate(needed)}
        lane.follow_steps()
        rows = target.rows(one)
        self._map_rows = {name: lane.upload(array[0]) for name, array in rows.items()}
        with lane.beside():
            self._buffers = {
                name: torch.empty(len(needed), size, dtype=torch.uint8, device=members.device)
                for name, size in slots.sizes.items()
            }
            for slot, expert in self._expert_of.items():
                source = int(moves.source[0, first + slot]) - first
                if 0 <= source < self._layout.slots_per_rank:
                    for name, live_content in slots.content.items():
                        self._row(name, expert).copy_(live_content[source])
        lane.mark()

    def _row(self, name: str, expert: int) -> Tensor:
        return self._buffers[name][self._row_of[expert]]

    def advance(self, timeout_seconds: float) -> tuple[int, int]:
        """Start the next round, if one is left; return bytes that it sends and receives."""
        num_bytes = (0, 0)
        if self._num_started < len(self._rounds):
            num_bytes = self._start(self._num_started)
            self._num_started += 1
        if self._num_started == len(self._rounds) and self._deadline == float("inf"):
            self._deadline = time.monotonic() + timeout_seconds
        return num_bytes

    def _start(self, number: int) -> tuple[int, int]:
        per_rank, ranks = self._layout.slots_per_rank, self._members.ranks
        group = self._members.group
        # Both ends go through transfers and names in the same order: that is how messages match.
        operations: list[dist.P2POp] = []
        sent = received = 0
        for source, destination in self._rounds[number].tolist():
            sender, receiver = source // per_rank, destination // per_rank
            expert = int(self._experts[destination])
            if source < 0:
                if receiver == self._members.rank:
                    self._read(expert)
                continue
            for name, content in self._slots.content.items():
                if sender == self._members.rank:
                    tensor, peer = content[source % per_rank], ranks.index(receiver)
                    sent += tensor.numel()
                    operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=peer))
                elif receiver == self._members.rank:
                    tensor, peer = self._row(name, expert), ranks.index(sender)
                    received += tensor.numel()
                    operations.append(dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer))
        if operations:
            self._lane.start(operations)
        return sent, received

    def _read(self, expert: int) -> None:
        """Take an expert from the checkpoint."""
        assert self._load is not None, "a migration with lost experts starts only with `load`"
        given = self._load(self.layer, expert)
        for name, live in self._slots.tensors.items():
            tensor = given.get(name)
            if tensor is None or (tensor.dtype, tensor.shape) != (live.dtype, live.shape[1:]):
                found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise PlanInputError(
                    f"`load` gave {found} for {name!r} of expert {expert} of layer {self.layer}; "
                    f"needed: {live.dtype} {list(live.shape[1:])}."
                )
            with self._lane.beside():
                self._row(name, expert).copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        self._lane.mark()

    def check(self, timeout_seconds: float) -> None:
        """Set `complete` once all is here and all that others need is sent.

        Raises:
            MigrationError: that takes too long.
            RuntimeError: of torch, if a transfer failed.
        """
        if self.complete or self._num_started < len(self._rounds):
            return
        self.complete = self._lane.done()
        if not self.complete and time.monotonic() > self._deadline:
            raise MigrationError(
                f"experts of the layer did not come or go within {timeout_seconds:g} s of the last "
                "start"
            )

    def install(self, maps: ExpertMaps) -> None:
        """Write slots and map of the layer, in the order of the steps' stream."""
        self._lane.lead_steps()
        for slot, expert in self._expert_of.items():
            for name, content in self._slots.content.items():
                content[slot].copy_(self._row(name, expert))
        for name, row in self._map_rows.items():
            getattr(maps, name)[self.layer].copy_(row)
        # The buffers go back to the lane, and what it does with them must follow these copies.
        self._lane.follow_steps()
