"""The blocks of one sequence in order: entry `position // block_size` holds the position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepinfer_core.types import BlockDelta

__all__ = ["BlockTable", "num_blocks_for"]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold positions `0 .. num_tokens - 1`."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Block ids of one sequence in every pool; all pools have equally many.

    block layout of one sequence, in tokens (L settled, U = L + in flight):
      [0, L)      content is final
      [L, U)      launched steps write here; drafts that were refused leave dead entries
      [U, end)    reserved room of the last block
    """

    __slots__ = ("block_size", "ids")

    def __init__(self, pools: Sequence[str], block_size: int) -> None:
        """Make an empty table.

        Args:
            pools: names of the pools, in order.
            block_size: tokens a block.
        """
        self.block_size = block_size
        self.ids: dict[str, list[int]] = {pool: [] for pool in pools}

    @property
    def num_blocks(self) -> int:
        """Blocks held in each pool."""
        for ids in self.ids.values():
            return len(ids)
        return 0

    def missing(self, num_tokens: int) -> int:
        """Return how many more blocks, in each pool, positions below `num_tokens` need."""
        return max(0, num_blocks_for(num_tokens, self.block_size) - self.num_blocks)

    def room(self, num_free: int) -> int:
        """Return the number of tokens that fit when `num_free` more blocks are added."""
        return (self.num_blocks + num_free) * self.block_size

    def extend(self, blocks: Mapping[str, Sequence[int]]) -> tuple[BlockDelta, ...]:
        """Append blocks in each pool and return what the device has to append."""
        deltas = []
        for pool, new in blocks.items():
            deltas.append(BlockDelta(pool, len(self.ids[pool]), tuple(new)))
            self.ids[pool].extend(new)
        return tuple(deltas)

    def truncate(self, deltas: Sequence[BlockDelta]) -> None:
        """Undo the `extend` that returned `deltas`; it was the last one."""
        for delta in deltas:
            ids = self.ids[delta.pool]
            assert tuple(ids[delta.first :]) == delta.block_ids, (
                "only the last extension can be undone"
            )
            del ids[delta.first :]
