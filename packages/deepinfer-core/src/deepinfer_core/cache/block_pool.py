"""State of every physical block. The only place that hands blocks out and takes them back.

    FREE --allocate--> HELD(owner) --defer--> DEFERRED(owner) --free------> FREE
      ^                  |      |                 |
      |<-----cancel------+      |                 +--quarantine--> QUARANTINED --scrubbed--> FREE
      |                         +--publish--> SHARED --evict--> FREE

A block that a launched step may still touch is DEFERRED, never FREE; the fence that ends this is
kept by `scheduler/release.py`. `cancel` is for a reservation whose step was never launched. Who
uses a SHARED block is known to `cache/prefix_index.py`.

Moves take many blocks at once: numbers stand in arrays, so that a step's cost does not depend on
how many sequences grow in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from deepinfer_core.errors import DeepInferError

__all__ = ["BlockPool", "BlockPools", "BlockState", "Owner", "PoolExhausted"]


class Owner(NamedTuple):
    """One life of a sequence on the device; every preemption starts a new generation."""

    uid: int
    generation: int


NOBODY = Owner(-1, -1)


class BlockState(StrEnum):
    """What may be done with a block."""

    FREE = "free"
    HELD = "held"  # in the block table of its owner
    SHARED = "shared"  # published under its prefix: content is final, any sequence may read it
    DEFERRED = "deferred"  # given back, but a launched step may still read or write it
    QUARANTINED = "quarantined"  # holds non-finite values; the device must overwrite it first


class PoolExhausted(DeepInferError):
    """More blocks were asked for than are free. The scheduler counts first: users never see it."""


_MOVES: Mapping[str, tuple[BlockState, BlockState]] = {
    "allocate": (BlockState.FREE, BlockState.HELD),
    "cancel": (BlockState.HELD, BlockState.FREE),
    "evict": (BlockState.SHARED, BlockState.FREE),
    "defer": (BlockState.HELD, BlockState.DEFERRED),
    "free": (BlockState.DEFERRED, BlockState.FREE),
    "quarantine": (BlockState.DEFERRED, BlockState.QUARANTINED),
    "scrubbed": (BlockState.QUARANTINED, BlockState.FREE),
}
_OWNED = (BlockState.HELD, BlockState.DEFERRED)
_CODES = {state: code for code, state in enumerate(BlockState)}
_STATES = tuple(BlockState)
_CODED_MOVES = {name: (_CODES[source], _CODES[target]) for name, (source, target) in _MOVES.items()}
_HELD, _FREE, _SHARED = (
    _CODES[state] for state in (BlockState.HELD, BlockState.FREE, BlockState.SHARED)
)


class BlockPool:
    """Blocks `0 .. num_blocks - 1` of one pool.

    What came back last is handed out first, and the lowest ids before that: equal histories give
    equal tables, and memory that was never needed is never touched.
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
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)  # free ids, next one last
        self._num_free = num_blocks
        self._state = np.zeros(num_blocks, dtype=np.int8)
        self._uid = np.full(num_blocks, NOBODY.uid, dtype=np.int64)
        self._generation = np.full(num_blocks, NOBODY.generation, dtype=np.int64)
        self._counts = [num_blocks, *[0] * (len(_STATES) - 1)]

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self._num_free

    def count(self, state: BlockState) -> int:
        """Return the number of blocks in a state."""
        return self._counts[_CODES[state]]

    def blocks(self, state: BlockState) -> tuple[int, ...]:
        """Return the blocks in a state, ascending. Walks the pool: not for the steady path."""
        return tuple(np.flatnonzero(self._state == _CODES[state]).tolist())

    def held(self, blocks: np.ndarray) -> np.ndarray:
        """Return those of `blocks` that are held, in order: without what is shared."""
        found: np.ndarray = blocks[self._state[blocks] == _HELD]
        return found

    def allocate(self, owner: Owner, count: int) -> np.ndarray:
        """Take `count` free blocks for `owner`; returns their ids, [count] int64.

        Raises:
            PoolExhausted: fewer are free; nothing was taken.
        """
        return self.allocate_each(owner.uid, owner.generation, count)

    def allocate_each(self, uids: ArrayLike, generations: ArrayLike, count: int) -> np.ndarray:
        """Take `count` free blocks, one for each of the owners given as arrays or one for all.

        Raises:
            PoolExhausted: fewer are free; nothing was taken.
        """
        if count > self._num_free:
            raise PoolExhausted(
                f"Pool {self.name!r} has {self._num_free} free blocks, {count} needed."
            )
        blocks = self._stack[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._move("allocate", blocks, NOBODY.uid, NOBODY.generation, uids, generations)
        return blocks

    def cancel(self, owner: Owner, blocks: ArrayLike) -> None:
        """Take back blocks that no launched step names."""
        # In the order that makes a later `allocate` hand out the same ones.
        self._move("cancel", np.asarray(blocks, dtype=np.int64)[::-1], *owner, *NOBODY)

    def publish(self, owner: Owner, block: int) -> None:
        """Share a block that its owner holds; it stays in the owner's table."""
        # Blocks become final one by one; for one, arrays cost ten times what this does.
        right = self._state[block] == _HELD and self._uid[block] == owner.uid
        assert right and self._generation[block] == owner.generation, self._wrong(
            "publish", np.array([block]), owner
        )
        self._state[block] = _SHARED
        self._uid[block], self._generation[block] = NOBODY
        self._counts[_HELD] -= 1
        self._counts[_SHARED] += 1

    def evict(self, blocks: ArrayLike) -> None:
        """Make shared blocks usable: nobody reads them, and no prefix leads to them any more."""
        self._move("evict", blocks, *NOBODY, *NOBODY)

    def defer(self, owner: Owner, blocks: ArrayLike) -> None:
        """Mark blocks as given back, but not yet safe to use."""
        self._move("defer", blocks, *owner, *owner)

    def free(self, owner: Owner, blocks: ArrayLike) -> None:
        """Make deferred blocks usable: their fence has passed."""
        self._move("free", blocks, *owner, *NOBODY)

    def quarantine(self, owner: Owner, blocks: ArrayLike) -> None:
        """Keep deferred blocks out of use: their fence has passed, their values are bad."""
        self._move("quarantine", blocks, *owner, *NOBODY)

    def scrubbed(self, blocks: ArrayLike) -> None:
        """Make quarantined blocks usable: the device has overwritten them."""
        self._move("scrubbed", blocks, *NOBODY, *NOBODY)

    def holders(self, state: BlockState) -> dict[Owner, set[int]]:
        """Return the blocks in a state by owner. Walks the pool: for audits."""
        found: dict[Owner, set[int]] = {}
        for block in np.flatnonzero(self._state == _CODES[state]).tolist():
            owner = Owner(int(self._uid[block]), int(self._generation[block]))
            found.setdefault(owner, set()).add(block)
        return found

    def audit(self) -> None:
        """Check that every block is in exactly one state and all counts agree.

        Raises:
            AssertionError: they do not; the message names the pool and the difference.
        """
        if sorted(self._stack[: self._num_free].tolist()) != list(self.blocks(BlockState.FREE)):
            raise AssertionError(
                f"pool {self.name!r}: the free list differs from the blocks marked free"
            )
        counted = np.bincount(self._state, minlength=len(_STATES)).tolist()
        if counted != self._counts or sum(counted) != self.num_blocks:
            raise AssertionError(f"pool {self.name!r}: counts {self._counts}, found {counted}")
        owned = np.isin(self._state, [_CODES[state] for state in _OWNED])
        named = (self._uid != NOBODY.uid) | (self._generation != NOBODY.generation)
        if (wrong := np.flatnonzero(owned != named)).size:
            block = int(wrong[0])
            raise AssertionError(
                f"pool {self.name!r}: block {block} is {_STATES[self._state[block]].value} of "
                f"request {self._uid[block]}"
            )

    def _move(
        self,
        move: str,
        blocks: ArrayLike,
        uid: int,
        generation: int,
        new_uid: ArrayLike,
        new_generation: ArrayLike,
    ) -> None:
        source, target = _CODED_MOVES[move]
        ids = np.asarray(blocks, dtype=np.int64)
        count = ids.size
        if not count:
            return
        right = (self._state[ids] == source) & (self._uid[ids] == uid)
        right &= self._generation[ids] == generation
        assert right.all() and (count == 1 or np.unique(ids).size == count), self._wrong(
            move, ids, Owner(uid, generation)
        )
        self._state[ids] = target
        self._uid[ids] = new_uid
        self._generation[ids] = new_generation
        self._counts[source] -= count
        self._counts[target] += count
        if target == _FREE:
            self._stack[self._num_free : self._num_free + count] = ids
            self._num_free += count

    def _wrong(self, move: str, ids: np.ndarray, owner: Owner) -> str:
        found = [
            f"block {block} is {_STATES[self._state[block]].value} with owner "
            f"{self._uid[block]}/{self._generation[block]}"
            for block in ids.tolist()
        ]
        return f"pool {self.name!r}: {move} by {owner}, but {', '.join(found)}"


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

    def allocate(self, owner: Owner, count: int) -> dict[str, np.ndarray]:
        """Take `count` blocks in every pool, or none at all.

        Raises:
            PoolExhausted: some pool has fewer.
        """
        return self.allocate_each(owner.uid, owner.generation, count)

    def allocate_each(
        self, uids: ArrayLike, generations: ArrayLike, count: int
    ) -> dict[str, np.ndarray]:
        """Take blocks in every pool as `BlockPool.allocate_each`, or none at all.

        Raises:
            PoolExhausted: some pool has fewer.
        """
        taken: dict[str, np.ndarray] = {}
        try:
            for name, pool in self.pools.items():
                taken[name] = pool.allocate_each(uids, generations, count)
        except BaseException:
            for name, ids in taken.items():
                each = np.broadcast_arrays(ids, uids, generations)
                for block, uid, generation in zip(*(a.tolist() for a in each), strict=True):
                    self.pools[name].cancel(Owner(uid, generation), [block])
            raise
        return taken

    def cancel(self, owner: Owner, blocks: Mapping[str, ArrayLike]) -> None:
        """Take back, in each pool, blocks that no launched step names."""
        for name, ids in blocks.items():
            self.pools[name].cancel(owner, ids)

    def audit(self) -> None:
        """Audit every pool."""
        for pool in self.pools.values():
            pool.audit()
