"""Device memory of the fakes: blocks and block tables whose content can be recognised.

Every block position holds (position, token, prefix hash), every block the stamp of its last writer:
a number that each admission draws anew. What a step reads is compared with what must stand there;
a difference is an `AssertionError` that says where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_core.plans import TableDelta
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.reference import EMPTY_HASH, mix_rows

__all__ = ["BlockPool", "StepSpan", "ragged"]

_PIECE = 8192  # positions compared at once: temporaries stay in a cache of 512 KiB


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for `counts[i]` items of each i, laid end to end: their i, and their place in it."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True, eq=False)
class StepSpan:
    """Where the sequences of a step read and write; all arrays are [R] int64.

    Attributes:
        uid, slot, stamp: whose they are.
        start: first position fed; what is below it is read.
        write: first position written to blocks; what is below it must stand there.
        end: one past the last position.
    """

    uid: np.ndarray
    slot: np.ndarray
    stamp: np.ndarray
    start: np.ndarray
    write: np.ndarray
    end: np.ndarray


class BlockPool:
    """One pool of blocks and the block table of each slot."""

    def __init__(self, name: str, num_blocks: int, limits: SchedulerLimits) -> None:
        """Make an empty pool whose tables hold the longest sequence and its drafts."""
        self.name, self.block_size = name, limits.block_size
        places = -(-(limits.max_model_len + limits.max_drafts) // limits.block_size) + 1
        self.table = np.full((limits.num_slots + limits.num_stored, places), -1, dtype=np.int64)
        # writer of a block when it entered the table: who else may have filled it
        self.table_writer = np.full_like(self.table, -1)
        self.position = np.full((num_blocks, limits.block_size), -1, dtype=np.int32)
        self.token = np.full_like(self.position, -1)
        self.hash = np.zeros(self.position.shape, dtype=np.uint64)
        self.writer = np.full(num_blocks, -1, dtype=np.int64)
        self.unclean = np.zeros(num_blocks, dtype=bool)

    def clear(self, slots: Sequence[int]) -> None:
        """Empty the tables of slots that sequences enter."""
        self.table[slots] = -1
        self.table_writer[slots] = -1

    def apply(self, delta: TableDelta) -> None:
        """Write new table entries."""
        ids = delta.block_ids
        assert ((ids >= 0) & (ids < len(self.writer))).all(), (
            f"pool {self.name!r} has no block among {ids.tolist()}; it has {len(self.writer)}"
        )
        dirty = ids[self.unclean[ids]]
        assert not len(dirty), f"block {dirty[0]} of pool {self.name!r} was not scrubbed"
        self.table[delta.slots, delta.places] = ids
        self.table_writer[delta.slots, delta.places] = self.writer[ids]
        inner = delta.places > 0
        before = self.table[delta.slots[inner], delta.places[inner] - 1]
        assert (before >= 0).all(), (
            f"a gap in the block table of slot {delta.slots[inner][before < 0][:1]}"
        )

    def blocks_of(self, slot: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the block of each (slot, position), -1 where its table has none."""
        found: np.ndarray = self.table[slot, position // self.block_size]
        return found

    def hash_at(self, slot: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the prefix hash that stands at each (slot, position)."""
        found: np.ndarray = self.hash[self.blocks_of(slot, position), position % self.block_size]
        return found

    def state_before(self, slot: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Return the hash of the first `length` tokens of each slot, [R] uint64."""
        found = self.hash_at(slot, np.maximum(length - 1, 0))
        return np.where(length > 0, found, np.uint64(EMPTY_HASH))

    def verify(self, span: StepSpan, first: np.ndarray) -> np.ndarray:
        """Compare positions `first .. span.write - 1` of each sequence with what must stand there.

        Returns:
            [R] uint64: the hash before `span.write`. With `first` 0 it stands for every token.
        """
        size, low = self.block_size, first // self.block_size
        counts = np.maximum(-(-span.write // size) - low, 0)
        row, offset = ragged(counts)
        place = low[row] + offset
        blocks = self.table[span.slot[row], place]
        self._check_blocks(span, row, place, blocks)
        last = self.hash[blocks, -1]
        before = np.roll(last, 1)
        before[place == 0] = EMPTY_HASH
        unread = (offset == 0) & (place > 0)  # what stands before such a block
        ends = np.minimum(span.write[row] - place * size, size).astype(np.int32)
        first_of = (place * size).astype(np.int32)
        columns = np.arange(size, dtype=np.int32)
        piece = max(_PIECE // size, 1)
        for begin in range(0, len(blocks), piece):
            part = slice(begin, begin + piece)
            ids = blocks[part]
            hashes = self.hash[ids]
            left = np.empty_like(hashes)
            left[:, 0], left[:, 1:] = before[part], hashes[:, :-1]
            same = mix_rows(left, self.token[ids]) == hashes
            same[unread[part], 0] = True
            same &= self.position[ids] == first_of[part, None] + columns
            cut = np.flatnonzero(ends[part] < size)
            same[cut] |= columns >= ends[part][cut, None]
            if not same.all():
                item, column = (int(found[0]) for found in np.nonzero(~same))
                item += begin
                self._report(span, int(row[item]), int(first_of[item]) + column)
        return self.state_before(span.slot, span.write)

    def _check_blocks(
        self, span: StepSpan, row: np.ndarray, place: np.ndarray, blocks: np.ndarray
    ) -> None:
        """Check that blocks are there, finite, and filled by their reader or as it found them."""
        if (blocks < 0).any():
            item = int(np.flatnonzero(blocks < 0)[0])
            self._report(span, int(row[item]), int(place[item]) * self.block_size)
        writer = self.writer[blocks]
        own = writer == span.stamp[row]
        good = own | (writer == self.table_writer[span.slot[row], place])
        good &= ~self.unclean[blocks]
        if not good.all():
            item = int(np.flatnonzero(~good)[0])
            what = "holds values that are not finite" if self.unclean[blocks[item]] else (
                "changed hands"
            )  # fmt: skip
            raise AssertionError(
                f"block {blocks[item]} of pool {self.name!r}, which request "
                f"{span.uid[row[item]]} reads at position {place[item] * self.block_size}, {what}"
            )

    def _report(self, span: StepSpan, row: int, position: int) -> None:
        block = int(self.table[span.slot[row], position // self.block_size])
        offset = position % self.block_size
        held = (int(self.position[block, offset]), int(self.token[block, offset]))
        what = f"block {block} holds (position, token) {held}" if block >= 0 else "it has no block"
        raise AssertionError(
            f"foreign content: request {span.uid[row]} reads position {position} of pool "
            f"{self.name!r}, where {what}"
        )

    def claim(self, span: StepSpan) -> None:
        """Make the sequences of a step the writers of the blocks their rows fall into.

        Nobody else of the step may read them, and a block that somebody else began stays his.
        """
        size = self.block_size
        first = span.write // size
        row, offset = ragged(np.maximum(-(-span.end // size) - first, 0))
        place = first[row] + offset
        blocks = self.table[span.slot[row], place]
        if (blocks < 0).any():
            item = int(np.flatnonzero(blocks < 0)[0])
            raise AssertionError(
                f"request {span.uid[row[item]]} writes past its blocks in pool {self.name!r}: "
                f"positions from {place[item] * size} on have none"
            )
        begun = (place * size < span.write[row]) & (self.writer[blocks] != span.stamp[row])
        readers = self._readers(span)[blocks]
        if begun.any() or (readers > 1).any():
            item = int(np.flatnonzero(begun | (readers > 1))[0])
            raise AssertionError(
                f"request {span.uid[row[item]]} writes block {blocks[item]} of pool "
                f"{self.name!r}, which somebody else uses"
            )
        self.writer[blocks] = span.stamp[row]

    def _readers(self, span: StepSpan) -> np.ndarray:
        """Return how many sequences of the step name each block."""
        row, place = ragged(-(-span.end // self.block_size))
        named = self.table[span.slot[row], place]
        return np.bincount(named[named >= 0], minlength=len(self.writer))

    def write(
        self, slot: np.ndarray, position: np.ndarray, token_ids: np.ndarray, hashes: np.ndarray
    ) -> None:
        """Fill positions, each array one item a position."""
        block, offset = self.blocks_of(slot, position), position % self.block_size
        assert (block >= 0).all(), f"a write past the blocks of slot {slot[block < 0][:1]}"
        self.position[block, offset] = position
        self.token[block, offset] = token_ids
        self.hash[block, offset] = hashes

    def taint(self, slot: int, write: int, end: int) -> None:
        """Mark what a sequence with values that are not finite writes."""
        blocks = self.table[slot, write // self.block_size : -(-end // self.block_size)]
        self.unclean[blocks[blocks >= 0]] = True

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero blocks."""
        ids = np.asarray(blocks, dtype=np.int64)
        self.position[ids], self.token[ids], self.hash[ids] = -1, -1, 0
        self.writer[ids], self.unclean[ids] = -1, False
