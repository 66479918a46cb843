"""The prefix index as sequences use it: look up, resume, publish, store window states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_core.cache.block_pool import BlockPools, PoolExhausted
from deepinfer_core.cache.block_table import BlockTables
from deepinfer_core.cache.prefix_index import Node, PrefixIndex, chain_keys
from deepinfer_core.cache.slots import SlotPool
from deepinfer_core.cache.swa import ResumePlan, publish_point, resume_plan
from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.lanes import Lanes
from deepinfer_core.scheduler.sequence import Sequence

__all__ = ["Prefixes", "Resume"]


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a waiting sequence would start, and from which published prefix.

    Args:
        plan: rows to replay and to compute.
        node: deepest shared node it reads, or None without a hit.
        num_blocks: shared blocks, in every pool.
        num_idle: those of them that nobody uses now, which count as available until it does.
    """

    plan: ResumePlan
    node: Node | None
    num_blocks: int
    num_idle: int

    @property
    def window_slot(self) -> int | None:
        """The slot whose stored window state is copied, when nothing is replayed."""
        return self.node.window_slot if self.node is not None and not self.plan.num_replay else None


class Prefixes:
    """The prefix index of a rank as sequences use it.

    Three kinds of content never meet, as their keys differ: that of strict sequences, that of
    others without encoder-side replay, and what may stand behind a replay. Sequences without
    encoder-side replay resume only where the exact window state is stored; without slots for that
    they do not publish either.
    """

    def __init__(
        self, limits: SchedulerLimits, pools: BlockPools, slots: SlotPool, tables: BlockTables
    ) -> None:
        """Start with nothing published."""
        self._limits = limits
        self._pools = pools
        self._slots = slots
        self._tables = tables
        self.index = PrefixIndex(pools, slots, limits.block_size)

    @property
    def num_available(self) -> int:
        """Blocks, in every pool, that are free or can be evicted now."""
        return self._pools.num_free + self.index.num_evictable

    def make_room(self, num_blocks: int) -> None:
        """Evict until `num_blocks` are free in every pool, as far as that goes."""
        missing = num_blocks - self._pools.num_free
        if missing > 0:
            self.index.evict(missing)

    def make_room_for_slot(self) -> None:
        """Give up a stored window state when a sequence needs its slot."""
        if not self._slots.num_free:
            self.index.evict_windows(1)

    def takes_part(self, sequence: Sequence) -> bool:
        """Whether a sequence publishes what it computes."""
        if not self._limits.prefix_cache or not sequence.request.use_cache:
            return False
        if sequence.keeps_to_itself:
            return False
        return sequence.request.replay_encoder or self._limits.num_stored > 0

    def find(self, sequence: Sequence) -> Resume:
        """Return where a waiting sequence would start; changes nothing."""
        return self._resume(sequence, self._match(sequence))

    def afresh(self, sequence: Sequence) -> Resume:
        """Return a start without a hit."""
        return self._resume(sequence, None)

    def _resume(self, sequence: Sequence, node: Node | None) -> Resume:
        num_blocks, num_idle, above = 0 if node is None else node.depth, 0, node
        while above is not None and not above.active:
            num_idle, above = num_idle + 1, above.parent
        plan = resume_plan(
            num_blocks * self._limits.block_size,
            len(sequence.tokens),
            sequence.prompt_len,
            self._limits.window,
            replay_encoder=sequence.request.replay_encoder,
            replay_decoder=sequence.request.replay_decoder,
            stored_window=not sequence.request.replay_encoder and node is not None,
        )
        return Resume(plan, node, num_blocks, num_idle)

    def _match(self, sequence: Sequence) -> Node | None:
        request = sequence.request
        undelivered = sequence.prompt_logprobs_from < sequence.prompt_len
        if request.params.prompt_logprobs is not None and undelivered:
            return None  # every prompt row has to be computed to be scored
        if not self.takes_part(sequence):
            return None
        whole = (len(sequence.tokens) - 1) // self._limits.block_size  # one token is computed
        keys = self._keys(sequence, whole)[:whole]
        if request.replay_encoder:
            return self.index.match(keys)
        return self.index.match_window(
            keys, window=self._limits.window, tail_start=sequence.tail_start
        )

    def pin(self, resume: Resume) -> Node | None:
        """Keep a stored window state until the step that loads it is settled."""
        if resume.window_slot is None or resume.node is None:
            return None
        self.index.pin_window(resume.node)
        return resume.node

    def attach(self, sequence: Sequence, resume: Resume) -> None:
        """Put the shared blocks into the table of a sequence that has taken a slot."""
        slot, node = sequence.slot, resume.node
        assert slot is not None, f"request {sequence.uid} has no slot"
        if node is None:
            return
        self.index.acquire(node)
        sequence.node = node
        self._tables.extend(slot, self.index.path_blocks(node))
        # All of the hit is final, and nothing of it is to be published again.
        sequence.lanes.all.settled[slot] = resume.plan.hit_len
        sequence.lanes.all.published[slot] = resume.num_blocks

    def detach(self, sequence: Sequence) -> None:
        """Undo `attach` for a step that is not launched; the table is emptied as well."""
        if sequence.node is not None:
            self.index.release(sequence.node)
            sequence.node = None
        if sequence.slot is not None:
            self._tables.clear(sequence.slot)

    def has_copies(self, sequence: Sequence) -> bool:
        """Whether it keeps published blocks of others beside its own with the same tokens."""
        slot, node = sequence.slot, sequence.node
        if slot is None or node is None:
            return False
        paths = self.index.path_blocks(node)
        return any(
            ids[slot, : node.depth].tolist() != paths[p] for p, ids in self._tables.ids.items()
        )

    # Publishing

    def unpublished(self, lanes: Lanes) -> np.ndarray:
        """Return the slots of live sequences with whole settled blocks not offered yet."""
        full = lanes.all.settled // self._limits.block_size
        return np.flatnonzero(lanes.live & (full > lanes.all.published))

    def publish(self, sequence: Sequence) -> None:
        """Publish whole blocks of settled tokens; one that others have published stays private."""
        slot = sequence.slot
        if slot is None or sequence.released or not self.takes_part(sequence):
            return
        lane, size = sequence.lanes.all, self._limits.block_size
        visible = min(sequence.settled_len, len(sequence.tokens))
        first, whole = int(lane.published[slot]), visible // size
        if first < whole:
            self._publish(sequence, slot, first, whole)
            lane.published[slot] = whole
        self._store_window(sequence)

    def _publish(self, sequence: Sequence, slot: int, first: int, whole: int) -> None:
        keys = self._keys(sequence, whole)
        assert (sequence.node.depth if sequence.node else 0) == first, (
            f"request {sequence.uid} published {first} blocks"
        )
        tables = self._tables.ids
        node = sequence.node
        for place in range(first, whole):
            blocks = [int(ids[slot, place]) for ids in tables.values()]
            child, _ = self.index.publish(node, keys[place], blocks, sequence.owner)
            self.index.acquire(child)
            if node is not None:
                self.index.release(node)
            sequence.node = node = child

    # Stored window states

    def point_to_store(self, sequence: Sequence) -> int:
        """Return the length at which a prefill is to pause for its window to be stored, or 0."""
        if sequence.request.replay_encoder or not self._limits.num_stored:
            return 0
        if not self.takes_part(sequence):
            return 0
        return publish_point(sequence.prompt_len, self._limits.block_size)

    def reserve_window(self, sequence: Sequence, length: int) -> int | None:
        """Take a slot to store the window state at `length` in; None when there is none to have."""
        if not self._slots.num_free:
            self.index.evict_windows(1)
        try:
            slot = self._slots.acquire(sequence.owner)
        except PoolExhausted:
            return None
        sequence.pending_window = (slot, length)
        return slot

    def cancel_window(self, sequence: Sequence) -> None:
        """Undo `reserve_window` for a step that is not launched."""
        if sequence.pending_window is not None:
            self._slots.cancel(sequence.owner, (sequence.pending_window[0],))
            sequence.pending_window = None

    def _store_window(self, sequence: Sequence) -> None:
        pending = sequence.pending_window
        if pending is None or sequence.settled_len < pending[1]:
            return
        slot, length = pending
        node = sequence.node
        while node is not None and node.depth * self._limits.block_size > length:
            node = node.parent
        sequence.pending_window = None
        stored = node is not None and node.depth * self._limits.block_size == length
        if (
            node is None
            or not stored
            or not self.index.store_window(
                node, sequence.owner, slot, tail_start=sequence.tail_start
            )
        ):
            self._slots.cancel(sequence.owner, (slot,))  # its step is settled: nothing touches it

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        if len(sequence.keys) < count:
            sequence.keys = chain_keys(
                sequence.tokens,
                self._limits.block_size,
                exact=sequence.request.strict,
                replayed=sequence.request.replay_encoder,
                keys=sequence.keys,
            )
        return sequence.keys
