"""Slots: one for each sequence on the device, and for each stored window state.

A slot owns the window rings of all layers, the compressor carry and the token tail. A stored window
state is a slot whose content is that of a published prefix, to resume exactly from.
"""

from __future__ import annotations

from deepinfer_core.cache.block_pool import BlockPool, Owner

__all__ = ["SlotPool"]


class SlotPool(BlockPool):
    """A pool of slots: the states and rules of blocks."""

    def __init__(self, num_slots: int) -> None:
        """Make a pool whose slots are all free."""
        super().__init__("slot", num_slots)

    def acquire(self, owner: Owner) -> int:
        """Take one slot for `owner`.

        Raises:
            PoolExhausted: none is free.
        """
        return int(self.allocate(owner, 1)[0])
