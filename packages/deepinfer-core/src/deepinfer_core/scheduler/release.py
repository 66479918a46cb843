"""Deferred release: what sequences gave back while the device may still touch it."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepinfer_core.cache.block_pool import BlockPools, BlockState, Owner
from deepinfer_core.cache.slots import SlotPool
from deepinfer_core.scheduler.sequence import Sequence

__all__ = ["DeferredRelease", "Scrub"]


@dataclass(frozen=True, slots=True)
class Scrub:
    """Resources with non-finite content: the worker zeroes them, the scheduler takes them back.

    Args:
        blocks: pool name -> block ids.
        slots: slot numbers.
    """

    blocks: Mapping[str, tuple[int, ...]] = field(hash=False)
    slots: tuple[int, ...]

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.slots) or any(self.blocks.values())


@dataclass(slots=True, order=True)
class _Entry:
    fence: int  # last step that names the resources
    number: int  # entries of one fence leave in the order they came
    owner: Owner = field(compare=False)
    blocks: Mapping[str, list[int]] = field(compare=False)
    slot: int = field(compare=False)
    quarantine: bool = field(compare=False)


class DeferredRelease:
    """Entries by fence. An entry leaves when the step of its fence has run on the device."""

    def __init__(self, pools: BlockPools, slots: SlotPool) -> None:
        """Start empty.

        Args:
            pools: blocks go back here.
            slots: slots go back here.
        """
        self._pools = pools
        self._slots = slots
        self._entries: list[_Entry] = []
        self._number = 0

    def __len__(self) -> int:
        """Return the number of entries whose fence has not passed."""
        return len(self._entries)

    def release(self, sequence: Sequence, *, quarantine: bool = False) -> bool:
        """Give back all a sequence holds. Nothing else does; a second call changes nothing.

        Args:
            sequence: its present generation is released, fenced on the last step that contains it.
            quarantine: the content is not finite; keep it out of use until it was scrubbed.
        Returns:
            Whether an entry was queued. A sequence without a slot holds nothing.
        """
        if sequence.released:
            return False
        sequence.released = True
        slot, owner, blocks = sequence.slot, sequence.owner, sequence.table.ids
        if slot is None:
            assert not sequence.table.num_blocks, f"{owner} holds blocks but no slot"
            return False
        for name, ids in blocks.items():
            self._pools.pools[name].defer(owner, ids)
        self._slots.defer(owner, (slot,))
        self._number += 1
        entry = _Entry(sequence.last_step, self._number, owner, blocks, slot, quarantine)
        heapq.heappush(self._entries, entry)
        return True

    def taint(self, owner: Owner) -> None:
        """Quarantine what `owner` gave back: a step under way at the time was not finite."""
        for entry in self._entries:
            if entry.owner == owner:
                entry.quarantine = True

    def drain(self, last_done_step_seq: int) -> list[Owner]:
        """Free, or quarantine, everything whose fence has passed; return the owners."""
        passed = []
        while self._entries and self._entries[0].fence <= last_done_step_seq:
            entry = heapq.heappop(self._entries)
            for name, ids in entry.blocks.items():
                pool = self._pools.pools[name]
                (pool.quarantine if entry.quarantine else pool.free)(entry.owner, ids)
            give_slot = self._slots.quarantine if entry.quarantine else self._slots.free
            give_slot(entry.owner, (entry.slot,))
            passed.append(entry.owner)
        return passed

    def quarantined(self) -> Scrub:
        """Return everything that waits to be scrubbed."""
        pools = self._pools.pools
        if not self._slots.count(BlockState.QUARANTINED):  # every quarantine includes a slot
            return Scrub(dict.fromkeys(pools, ()), ())
        blocks = {name: pool.blocks(BlockState.QUARANTINED) for name, pool in pools.items()}
        return Scrub(blocks, self._slots.blocks(BlockState.QUARANTINED))

    def scrubbed(self, scrub: Scrub) -> None:
        """Take back what the device has overwritten, or will before any later step runs."""
        for name, ids in scrub.blocks.items():
            self._pools.pools[name].scrubbed(ids)
        self._slots.scrubbed(scrub.slots)

    def audit(self) -> None:
        """Check that the deferred blocks and slots are exactly those of the entries.

        Raises:
            AssertionError: they are not.
        """
        slots = {entry.owner: {entry.slot} for entry in self._entries}
        if slots != self._slots.holders(BlockState.DEFERRED):
            raise AssertionError(f"deferred slots differ from the release queue: {slots}")
        for name, pool in self._pools.pools.items():
            blocks = {e.owner: set(e.blocks[name]) for e in self._entries if e.blocks[name]}
            if blocks != pool.holders(BlockState.DEFERRED):
                raise AssertionError(f"deferred blocks of {name!r} differ from the release queue")
