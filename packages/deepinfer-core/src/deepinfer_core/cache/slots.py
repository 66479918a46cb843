"""Slots: one for each sequence on the device.

A slot owns the window rings of all layers, the compressor carry and the token tail.
"""

from __future__ import annotations

from deepinfer_core.cache.block_pool import BlockPool, BlockState, Owner

__all__ = ["SlotPool"]


class SlotPool(BlockPool):
    """A pool of slots: the states and rules of blocks, and at most one held slot for each owner."""

    def __init__(self, num_slots: int) -> None:
        """Make a pool whose slots are all free."""
        super().__init__("slot", num_slots)

    def acquire(self, owner: Owner) -> int:
        """Take one slot for `owner`.

        Raises:
            PoolExhausted: none is free.
        """
        return self.allocate(owner, 1)[0]

    def audit(self) -> None:
        """Check the states, and that no owner holds two slots.

        Raises:
            AssertionError: a check fails.
        """
        super().audit()
        for owner, slots in self.holders(BlockState.HELD).items():
            if len(slots) != 1:
                raise AssertionError(f"{owner} holds the slots {sorted(slots)}")
