"""Slot state of the fakes: what a sequence has on the device besides its blocks.

window   last window + max_drafts positions, of all layers
late     the same of the layers after the last KV source; rows below `tail_start` leave gaps
pair     the first position of a compression pair that is not complete
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.fake_memory import BlockPool, StepSpan, ragged

__all__ = ["Ring", "SlotWindows"]

_PAIR = 2  # positions compressed into one entry


class Ring:
    """Per slot the last `length` positions of a sequence, position p at p % length."""

    def __init__(self, name: str, num_slots: int, length: int) -> None:
        """Make empty rings."""
        self.name, self.length = name, length
        self.position = np.full((num_slots, length), -1, dtype=np.int64)
        self.hash = np.zeros((num_slots, length), dtype=np.uint64)

    def clear(self, slot: int) -> None:
        """Empty the ring of a slot."""
        self.position[slot] = -1

    def copy(self, source: int, target: int) -> None:
        """Copy one slot's ring to another."""
        self.position[target], self.hash[target] = self.position[source], self.hash[source]

    def check(self, span: StepSpan, low: np.ndarray, high: np.ndarray, blocks: BlockPool) -> None:
        """Compare positions `low .. high - 1` of each sequence with the blocks' hashes there."""
        row, offset = ragged(np.maximum(high - low, 0))
        position = low[row] + offset
        slot = span.slot[row]
        held = self.position[slot, position % self.length]
        same = held == position
        same &= self.hash[slot, position % self.length] == blocks.hash_at(slot, position)
        if not same.all():
            item = int(np.flatnonzero(~same)[0])
            raise AssertionError(
                f"{self.name} of request {span.uid[row[item]]} is stale: it needs position "
                f"{position[item]} and holds position {held[item]}"
            )

    def write(
        self, span: StepSpan, row: np.ndarray, position: np.ndarray, hashes: np.ndarray
    ) -> None:
        """Fill positions, `row[i]` in the span; only the last ones of a sequence stay."""
        kept = np.flatnonzero(position >= span.end[row] - self.length)
        slot, place = span.slot[row[kept]], position[kept] % self.length
        self.position[slot, place] = position[kept]
        self.hash[slot, place] = hashes[kept]


class SlotWindows:
    """The rings of all slots."""

    def __init__(self, limits: SchedulerLimits, num_slots: int) -> None:
        """Make empty rings."""
        self._window_len = limits.window
        length = max(limits.window + limits.max_drafts, 1)
        self.window = Ring("the window", num_slots, length)
        self.late = Ring("the late layers' window", num_slots, length)
        self.pair = Ring("the compression pair", num_slots, _PAIR + limits.max_drafts)
        self._rings = (self.window, self.late, self.pair)

    def arrays(self) -> Iterator[np.ndarray]:
        """Iterate over the device state."""
        for ring in self._rings:
            yield from (ring.position, ring.hash)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        for ring in self._rings:
            ring.clear(slot)

    def copy(self, source: int, target: int) -> None:
        """Copy a slot to another."""
        for ring in self._rings:
            ring.copy(source, target)

    def check(
        self, span: StepSpan, window_start: np.ndarray, tail_start: np.ndarray, blocks: BlockPool
    ) -> None:
        """Check that the windows of a step's rows, and its open compression pairs, are there.

        Args:
            span: the sequences.
            window_start, tail_start: [R], as in the plan.
            blocks: a verified pool.
        """
        reach = self._window_len - 1
        assert (window_start <= span.start).all(), "a window starts behind its row"
        low = np.maximum(window_start, span.start - reach)
        self.window.check(span, np.maximum(low, 0), span.start, blocks)
        first = np.maximum(span.start, tail_start)  # first row that runs the late layers
        low = np.maximum(np.maximum(window_start, tail_start), first - reach)
        high = np.where(first < span.end, np.minimum(first, span.start), 0)
        self.late.check(span, low, high, blocks)
        odd = span.write % _PAIR
        self.pair.check(span, span.write - odd, span.write, blocks)

    def write(
        self,
        span: StepSpan,
        tail_start: np.ndarray,
        row: np.ndarray,
        position: np.ndarray,
        hashes: np.ndarray,
    ) -> None:
        """Take what rows leave: `position[i]` of sequence `row[i]` of the span."""
        self.window.write(span, row, position, hashes)
        for ring, floor in ((self.late, tail_start), (self.pair, span.write)):
            kept = np.flatnonzero(position >= floor[row])
            ring.write(span, row[kept], position[kept], hashes[kept])
