"""State of every physical block. The only place that hands blocks out and takes them back.

    FREE --allocate--> HELD(owner) --defer--> DEFERRED(owner) --free------> FREE
      ^                  |                        |
      |<-----cancel------+                        +--quarantine--> QUARANTINED --scrubbed--> FREE

A block that a launched step may still touch is DEFERRED, never FREE; the fence that ends this is
kept by `scheduler/release.py`. `cancel` is for a reservation whose step was never launched.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from deepinfer_core.errors import DeepInferError

__all__ = ["BlockPool", "BlockPools", "BlockState", "Owner", "PoolExhausted"]


class Owner(NamedTuple):
    """One life of a sequence on the device; every preemption starts a new generation."""

    uid: int
    generation: int


class BlockState(StrEnum):
    """What may be done with a block."""

    FREE = "free"
    HELD = "held"  # in the block table of its owner
    DEFERRED = "deferred"  # given back, but a launched step may still read or write it
    QUARANTINED = "quarantined"  # holds non-finite values; the device must overwrite it first


class PoolExhausted(DeepInferError):
    """More blocks were asked for than are free. The scheduler counts first: users never see it."""


_MOVES: Mapping[str, tuple[BlockState, BlockState]] = {
    "allocate": (BlockState.FREE, BlockState.HELD),
    "cancel": (BlockState.HELD, BlockState.FREE),
    "defer": (BlockState.HELD, BlockState.DEFERRED),
    "free": (BlockState.DEFERRED, BlockState.FREE),
    "quarantine": (BlockState.DEFERRED, BlockState.QUARANTINED),
    "scrubbed": (BlockState.QUARANTINED, BlockState.FREE),
}
_OWNED = (BlockState.HELD, BlockState.DEFERRED)


class BlockPool:
    """Blocks `0 .. num_blocks - 1` of one pool.

    The lowest free id is handed out first: equal histories give equal tables, and memory that was
    never needed is never touched.
    """

    def __init__(self, name: str, num_blocks: int) -> None:
        """Make a pool whose blocks are all free.

        Args:
            name: for messages and metrics, such as `compressed`.
            num_blocks: at least 1.
        """
        assert num_blocks >= 1, f"pool {name!r} has {num_blocks} blocks"
        self.name = name
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))  # a sorted list is a heap
        self._state = [BlockState.FREE] * num_blocks
        self._owner: list[Owner | None] = [None] * num_blocks
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def count(self, state: BlockState) -> int:
        """Return the number of blocks in a state."""
        return self._counts[state]

    def blocks(self, state: BlockState) -> tuple[int, ...]:
        """Return the blocks in a state, ascending. Walks the pool: not for the steady path."""
        return tuple(block for block, now in enumerate(self._state) if now is state)

    def allocate(self, owner: Owner, count: int) -> list[int]:
        """Take `count` free blocks for `owner`, lowest ids first.

        Raises:
            PoolExhausted: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise PoolExhausted(
                f"Pool {self.name!r} has {len(self._free)} free blocks, {count} needed."
            )
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        self._move("allocate", blocks, None, owner)
        return blocks

    def cancel(self, owner: Owner, blocks: Iterable[int]) -> None:
        """Take back blocks that no launched step names."""
        self._move("cancel", blocks, owner, None)

    def defer(self, owner: Owner, blocks: Iterable[int]) -> None:
        """Mark blocks as given back, but not yet safe to use."""
        self._move("defer", blocks, owner, owner)

    def free(self, owner: Owner, blocks: Iterable[int]) -> None:
        """Make deferred blocks usable: their fence has passed."""
        self._move("free", blocks, owner, None)

    def quarantine(self, owner: Owner, blocks: Iterable[int]) -> None:
        """Keep deferred blocks out of use: their fence has passed, their values are bad."""
        self._move("quarantine", blocks, owner, None)

    def scrubbed(self, blocks: Iterable[int]) -> None:
        """Make quarantined blocks usable: the device has overwritten them."""
        self._move("scrubbed", blocks, None, None)

    def holders(self, state: BlockState) -> dict[Owner, set[int]]:
        """Return the blocks in a state by owner. Walks the pool: for audits."""
        found: dict[Owner, set[int]] = {}
        for block, owner in enumerate(self._owner):
            if owner is not None and self._state[block] is state:
                found.setdefault(owner, set()).add(block)
        return found

    def audit(self) -> None:
        """Check that every block is in exactly one state and all counts agree.

        Raises:
            AssertionError: they do not; the message names the pool and the difference.
        """
        if sorted(self._free) != list(self.blocks(BlockState.FREE)):
            raise AssertionError(
                f"pool {self.name!r}: the free list differs from the blocks marked free"
            )
        counted = dict.fromkeys(BlockState, 0)
        for state in self._state:
            counted[state] += 1
        if counted != self._counts or sum(counted.values()) != self.num_blocks:
            raise AssertionError(f"pool {self.name!r}: counts {self._counts}, found {counted}")
        for block, state in enumerate(self._state):
            if (self._owner[block] is not None) != (state in _OWNED):
                raise AssertionError(
                    f"pool {self.name!r}: block {block} is {state.value} of {self._owner[block]}"
                )

    def _move(
        self, move: str, blocks: Iterable[int], owner: Owner | None, new_owner: Owner | None
    ) -> None:
        source, target = _MOVES[move]
        for block in blocks:
            assert self._state[block] is source and self._owner[block] == owner, (
                f"pool {self.name!r}: {move} of block {block} by {owner}, "
                f"but it is {self._state[block].value} with owner {self._owner[block]}"
            )
            self._state[block] = target
            self._owner[block] = new_owner
            self._counts[source] -= 1
            self._counts[target] += 1
            if target is BlockState.FREE:
                heapq.heappush(self._free, block)


class BlockPools:
    """The pools of a rank together: a position needs block `position // block_size` in each."""

    def __init__(self, num_blocks: Mapping[str, int]) -> None:
        """Make one pool per name."""
        self.pools = {name: BlockPool(name, count) for name, count in num_blocks.items()}
        self.num_blocks = min(num_blocks.values())

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated in every pool."""
        return min(pool.num_free for pool in self.pools.values())

    def count(self, state: BlockState) -> int:
        """Return the blocks in a state that every pool has at least."""
        return min(pool.count(state) for pool in self.pools.values())

    def allocate(self, owner: Owner, count: int) -> dict[str, list[int]]:
        """Take `count` blocks in every pool, or none at all.

        Raises:
            PoolExhausted: some pool has fewer.
        """
        taken: dict[str, list[int]] = {}
        try:
            for name, pool in self.pools.items():
                taken[name] = pool.allocate(owner, count)
        except BaseException:
            self.cancel(owner, taken)
            raise
        return taken

    def cancel(self, owner: Owner, blocks: Mapping[str, Iterable[int]]) -> None:
        """Take back, in each pool, blocks that no launched step names."""
        for name, ids in blocks.items():
            self.pools[name].cancel(owner, ids)

    def audit(self) -> None:
        """Audit every pool."""
        for pool in self.pools.values():
            pool.audit()
