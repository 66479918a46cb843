"""The host's copy of the block tables: row `slot`, entry `position // block_size`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["BlockTables", "num_blocks_for"]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold positions `0 .. num_tokens - 1`."""
    return -(-num_tokens // block_size)


class BlockTables:
    """Block ids of every slot's sequence in every pool; all pools have equally many.

    block layout of one sequence, in tokens (L settled, U = L + in flight):
      [0, hit)    shared with the prefix index; read only
      [hit, L)    content is final; whole blocks may be published
      [L, U)      launched steps write here; drafts that were refused leave dead entries
      [U, end)    reserved room of the last block
    """

    def __init__(self, pools: Sequence[str], num_slots: int, table_len: int) -> None:
        """Make empty tables.

        Args:
            pools: names of the pools, in order.
            num_slots: rows.
            table_len: blocks of the longest sequence.
        """
        self.ids = {pool: np.full((num_slots, table_len), -1, dtype=np.int64) for pool in pools}
        self.num_blocks = np.zeros(num_slots, dtype=np.int64)
        """[num_slots]: blocks each sequence holds in each pool."""

    def blocks(self, slot: int) -> dict[str, np.ndarray]:
        """Return the blocks of a slot's sequence, by pool, in order."""
        count = self.num_blocks[slot]
        return {pool: ids[slot, :count].copy() for pool, ids in self.ids.items()}

    def extend(self, slot: int, blocks: Mapping[str, Sequence[int] | np.ndarray]) -> int:
        """Append as many blocks in each pool; returns how many."""
        first, added = int(self.num_blocks[slot]), 0
        for pool, ids in blocks.items():
            added = len(ids)
            self.ids[pool][slot, first : first + added] = ids
        self.num_blocks[slot] = first + added
        return added

    def extend_each(
        self, slots: np.ndarray, places: np.ndarray, blocks: Mapping[str, np.ndarray]
    ) -> None:
        """Append one block at each (slot, place); a slot's places follow what it holds."""
        for pool, ids in blocks.items():
            self.ids[pool][slots, places] = ids
        np.add.at(self.num_blocks, slots, 1)

    def truncate(self, slot: int, count: int) -> dict[str, np.ndarray]:
        """Remove the last `count` blocks of a slot and return them."""
        end = int(self.num_blocks[slot])
        removed = {pool: ids[slot, end - count : end].copy() for pool, ids in self.ids.items()}
        for ids in self.ids.values():
            ids[slot, end - count : end] = -1
        self.num_blocks[slot] = end - count
        return removed

    def clear(self, slot: int) -> None:
        """Forget the blocks of a slot; the caller has given them back."""
        self.truncate(slot, int(self.num_blocks[slot]))
