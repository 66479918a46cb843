"""Deferred release: what was given back while the device, or a transfer, may still touch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from deepinfer_core.cache.block_pool import BlockPools, BlockState, Owner
from deepinfer_core.cache.block_table import BlockTables
from deepinfer_core.cache.prefix_index import Node, PrefixIndex
from deepinfer_core.cache.slots import SlotPool
from deepinfer_core.scheduler.sequence import Sequence

__all__ = ["DeferredRelease", "Scrub", "Tickets", "cannot_revoke"]


def cannot_revoke(ticket: int) -> bool:
    """Return False: no peer can be shut out."""
    return False


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


class Tickets:
    """Transfers that touch a sequence's resources beside the steps, each with a lease.

    Completions come in any order, and any number of times.
    """

    def __init__(self) -> None:
        """Start with no transfer."""
        self.num_unknown = 0
        self._open: dict[int, tuple[Owner, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of open tickets."""
        return len(self._open)

    def open(self, owner: Owner, lease_end_ns: int) -> int:
        """Return a new ticket: what `owner` holds is not freed before it is completed."""
        self._count += 1
        self._open[self._count] = (owner, lease_end_ns)
        return self._count

    def complete(self, ticket: int) -> None:
        """Note the end of a transfer; one that is not open is counted and else ignored."""
        if self._open.pop(ticket, None) is None:
            self.num_unknown += 1

    def holds(self, owner: Owner) -> bool:
        """Whether a transfer still touches what `owner` gave back."""
        return any(each == owner for each, _ in self._open.values())

    def expire(self, now_ns: int, revoke: Callable[[int], bool]) -> list[Owner]:
        """End the tickets whose lease is over; return owners whose peer could not be shut out.

        Args:
            now_ns: the instant.
            revoke: shuts the peer of a ticket out; returns whether that worked.
        """
        over = [ticket for ticket, (_, end_ns) in self._open.items() if end_ns <= now_ns]
        owners = [self._open.pop(ticket)[0] for ticket in over]
        return [owner for ticket, owner in zip(over, owners, strict=True) if not revoke(ticket)]


@dataclass(slots=True)
class _Entry:
    fence: int  # last step that names the resources
    owner: Owner
    blocks: Mapping[str, np.ndarray]  # held ones; shared ones are the prefix index's
    num_blocks: int  # of its table, shared ones included
    slots: tuple[int, ...]
    node: Node | None
    quarantine: bool


class DeferredRelease:
    """Entries by fence. An entry leaves when the step of its fence is settled, which implies that
    the device has run it, and no ticket of its owner is open.

    Waiting for the settlement and not only for the device matters: only then is it known whether
    the content is finite.
    """

    def __init__(
        self, pools: BlockPools, slots: SlotPool, tables: BlockTables, index: PrefixIndex
    ) -> None:
        """Start empty.

        Args:
            pools: blocks go back here.
            slots: slots go back here.
            tables: name what a sequence holds.
            index: holds the references of sequences to shared blocks.
        """
        self.tickets = Tickets()
        self.pending_blocks = 0
        """Blocks, in every pool, of sequences that have given back all they held."""
        self._pools = pools
        self._slots = slots
        self._tables = tables
        self._index = index
        self._entries: list[_Entry] = []
        self._exposed: set[Owner] = set()  # a peer may still write to what they hold

    def __len__(self) -> int:
        """Return the number of entries whose fence has not passed."""
        return len(self._entries)

    @property
    def oldest_fence(self) -> int | None:
        """The first step that an entry waits for."""
        return min((entry.fence for entry in self._entries), default=None)

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
        slot, owner = sequence.slot, sequence.owner
        if slot is None:
            return False
        num_blocks = int(self._tables.num_blocks[slot])
        blocks = {
            name: self._pools.pools[name].held(ids)
            for name, ids in self._tables.blocks(slot).items()
        }
        slots = (slot,) if sequence.pending_window is None else (slot, sequence.pending_window[0])
        for name, ids in blocks.items():
            self._pools.pools[name].defer(owner, ids)
        self._slots.defer(owner, slots)
        self._tables.clear(slot)
        fence, quarantine = sequence.last_step, quarantine or owner in self._exposed
        self._exposed.discard(owner)
        entry = _Entry(fence, owner, blocks, num_blocks, slots, sequence.node, quarantine)
        self._entries.append(entry)
        self.pending_blocks += num_blocks
        sequence.node = sequence.pending_window = None
        return True

    def taint(self, owner: Owner) -> bool:
        """Quarantine what `owner` gave back: a step under way at the time was not finite.

        Returns:
            Whether it has given anything back that waits.
        """
        mine = [entry for entry in self._entries if entry.owner == owner]
        for entry in mine:
            entry.quarantine = True
        return bool(mine)

    def drain(self, last_settled: int) -> list[Owner]:
        """Free, or quarantine, everything whose fence has passed; return the owners."""
        if not self._entries:
            return []
        passed: list[_Entry] = []
        waiting: list[_Entry] = []
        for entry in self._entries:
            ready = entry.fence <= last_settled
            if ready and len(self.tickets) and self.tickets.holds(entry.owner):
                ready = False
            (passed if ready else waiting).append(entry)
        self._entries = waiting
        for entry in passed:
            self._give_back(entry)
        return [entry.owner for entry in passed]

    def expire_tickets(self, now_ns: int, revoke: Callable[[int], bool]) -> list[Owner]:
        """End overdue transfers; what a peer may still write to is quarantined.

        Returns:
            Owners that still hold all of it; what they publish from now on could change.
        """
        owners = self.tickets.expire(now_ns, revoke)
        holding = [owner for owner in owners if not self.taint(owner)]
        self._exposed.update(holding)
        return holding

    def _give_back(self, entry: _Entry) -> None:
        for name, ids in entry.blocks.items():
            pool = self._pools.pools[name]
            (pool.quarantine if entry.quarantine else pool.free)(entry.owner, ids)
        give_slots = self._slots.quarantine if entry.quarantine else self._slots.free
        give_slots(entry.owner, entry.slots)
        if entry.node is not None:
            self._index.release(entry.node)
        self.pending_blocks -= entry.num_blocks

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

    def references(self) -> list[Node]:
        """Return the nodes that entries still refer to: for audits."""
        return [entry.node for entry in self._entries if entry.node is not None]

    def audit(self) -> None:
        """Check that the deferred blocks and slots are exactly those of the entries.

        Raises:
            AssertionError: they are not.
        """
        slots = {entry.owner: set(entry.slots) for entry in self._entries}
        if slots != self._slots.holders(BlockState.DEFERRED):
            raise AssertionError(f"deferred slots differ from the release queue: {slots}")
        for name, pool in self._pools.pools.items():
            blocks = {
                e.owner: set(e.blocks[name].tolist()) for e in self._entries if len(e.blocks[name])
            }
            if blocks != pool.holders(BlockState.DEFERRED):
                raise AssertionError(f"deferred blocks of {name!r} differ from the release queue")
        if self.pending_blocks != sum(entry.num_blocks for entry in self._entries):
            raise AssertionError(f"{self.pending_blocks} blocks pending differ from the entries")
