"""The chunks of a prefill step: by priority and arrival, from where the prefix index lets them."""

from __future__ import annotations

from functools import partial

import numpy as np

from deepinfer_core.cache.block_pool import PoolExhausted
from deepinfer_core.cache.block_table import num_blocks_for
from deepinfer_core.plans import Phase
from deepinfer_core.scheduler.chunks import ChunkBudget
from deepinfer_core.scheduler.prefixes import Resume
from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.sequence import Sequence, State
from deepinfer_core.scheduler.step import ChunkRow
from deepinfer_core.scheduler.victims import exhausted, first_live, is_first_resident, victim_of
from deepinfer_core.types import SequenceUpdate

__all__ = ["PrefillRows"]


class PrefillRows:
    """Chunks chosen and reserved for one step; at most one of them leaves its prompt unfinished."""

    def __init__(self, roster: Roster, previous_step: int) -> None:
        """Start with no rows.

        Args:
            roster: all requests.
            previous_step: number of the last launched step if it is unsettled, else 0.
        """
        self.rows: list[ChunkRow] = []
        self.preempted: list[int] = []
        self.ended: list[SequenceUpdate] = []
        self._roster = roster
        self._limits = roster.limits
        self._previous_step = previous_step
        self._promised: int | None = None  # blocks that residents will still take

    def choose(self, budget: ChunkBudget) -> None:
        """Fill the budget."""
        # One at a time: a later arrival never enters before an earlier one that does not fit.
        admitting = True
        order = self._order()
        first = first_live(self._roster) if order else None
        for sequence in order:
            if sequence.uid in self.preempted:
                continue  # it has just made room for another
            enters = sequence.state is State.WAITING
            if enters and not admitting:
                continue
            if not enters and not self._source_known(sequence):
                continue
            resume = self._resume(sequence) if enters else None
            if enters and sequence is not first and not self._has_room_to_grow(sequence, resume):
                admitting = False
                continue
            row = self._row(sequence, resume, budget)
            if row is None or not self._take(row, budget):
                admitting = admitting and not enters
                continue
            if row.phase is Phase.CHUNK or budget.spent:
                return

    def preempt(self, victim: Sequence) -> None:
        """Take a sequence off the device to make room."""
        self.preempted.append(victim.uid)
        self._roster.preempt(victim)

    def give_up(self, sequence: Sequence) -> None:
        """End the only sequence left, for which nobody can make room.

        Unless it is in its own way: it keeps published copies of blocks that it has itself. Then it
        starts anew and keeps to itself, or others would publish such copies again, for ever.
        """
        prefixes = self._roster.prefixes
        if not sequence.unsettled and prefixes.has_copies(sequence):
            sequence.keeps_to_itself = True
            self.preempt(sequence)
            prefixes.index.clear()
        else:
            self.ended += exhausted(self._roster, sequence)

    def rollback(self) -> None:
        """Give back what was reserved, last first."""
        while self.rows:
            self._cancel(self.rows.pop())

    # Choosing

    def _order(self) -> list[Sequence]:
        roster = self._roster
        entering = roster.waiting.head(max(0, roster.room_for_residents))
        slots = np.flatnonzero(roster.lanes.prefilling).tolist()
        partial = [s for slot in slots if (s := roster.by_slot[slot]) is not None]
        return sorted([*partial, *entering], key=lambda s: s.order)

    def _source_known(self, sequence: Sequence) -> bool:
        """Whether the host knows where the sequence stands: chunks need no carry."""
        return not sequence.unsettled or sequence.last_step == self._previous_step

    def _resume(self, sequence: Sequence) -> Resume:
        resume = self._roster.prefixes.find(sequence)
        if resume.plan.num_replay >= self._limits.max_step_tokens:
            return self._roster.prefixes.afresh(sequence)  # replay alone would fill the step
        return resume

    def _has_room_to_grow(self, sequence: Sequence, resume: Resume | None) -> bool:
        """Whether a waiting sequence fits with the output expected of it and of others."""
        roster = self._roster
        if self._promised is None:
            self._promised = self._promised_to_residents()
            self._promised += sum(self._promise(row.sequence) for row in self.rows if row.enters)
        shared = 0 if resume is None else resume.num_blocks
        kept = 0 if resume is None else resume.num_idle
        # One block more than its tokens need in any case: a preempted sequence must not come back
        # only to leave again.
        whole = num_blocks_for(len(sequence.tokens), self._limits.block_size)
        wanted = max(whole + 1, self._promise(sequence)) - shared
        return wanted <= roster.prefixes.num_available - kept - self._promised

    def _promised_to_residents(self) -> int:
        """Return the blocks that sequences on the device will still take."""
        lanes, tables = self._roster.lanes, self._roster.tables
        slots = np.flatnonzero(lanes.live)
        lane = lanes.at(slots)
        growth = self._roster.growth.tokens_each(lane.left - lane.samples)
        wanted = -(-(lane.limit - lane.left + growth) // self._limits.block_size)
        return int(np.maximum(wanted - tables.num_blocks[slots], 0).sum())

    def _promise(self, sequence: Sequence) -> int:
        """Return the blocks a sequence will still take for its tokens and its expected output."""
        growth = self._roster.growth.tokens(sequence.remaining)
        return self._roster.missing_blocks(sequence, len(sequence.tokens) + growth)

    def _row(
        self, sequence: Sequence, resume: Resume | None, budget: ChunkBudget
    ) -> ChunkRow | None:
        """Return the next chunk of a sequence, or None if there is no room for one."""
        computed = sequence.planned_len if resume is None else resume.plan.hit_len
        num_replay = 0 if resume is None else resume.plan.num_replay
        missing = len(sequence.tokens) - computed
        pause = self._roster.prefixes.point_to_store(sequence)
        chunk = partial(
            budget.chunk,
            computed,
            missing,
            sequence.prompt_len,
            replay_rows=num_replay,
            tail_start=sequence.tail_start,
        )
        wish = chunk()
        most = pause - computed if computed < pause < computed + wish else wish
        size = self._fit(sequence, resume, computed, most)
        if 0 < size < wish:
            size = chunk(most=size)  # a rest that is not taken is no reason to exceed the budget
        if size <= 0:
            return None
        final = size == missing
        return ChunkRow(
            sequence=sequence,
            phase=Phase.FINAL_CHUNK if final else Phase.CHUNK,
            computed=computed,
            size=size,
            resume=resume,
            stores=pause if computed + size == pause else 0,
        )

    def _fit(self, sequence: Sequence, resume: Resume | None, computed: int, size: int) -> int:
        """Return how much of a chunk fits; the first on the device makes room for itself."""
        roster = self._roster
        # With rows chosen before this one, the step is not empty: whoever got them may have taken
        # the last blocks, and it is early to say that nobody else can make room.
        waits = sequence.state is State.WAITING or bool(self.rows)
        room = self._room(sequence, resume, computed)
        while room <= 0 < size and not waits and is_first_resident(roster, sequence):
            if roster.pending_free():
                break
            victim = victim_of(roster)
            if victim is None:
                self.give_up(sequence)
                return 0
            self.preempt(victim)
            room = self._room(sequence, resume, computed)
        return min(size, room)

    def _room(self, sequence: Sequence, resume: Resume | None, computed: int) -> int:
        """Return the tokens that blocks can be had for behind the first `computed`."""
        available = self._roster.prefixes.num_available
        if resume is not None:
            held, available = resume.num_blocks, available - resume.num_idle
        else:
            assert sequence.slot is not None, f"request {sequence.uid} is resident without a slot"
            held = int(self._roster.tables.num_blocks[sequence.slot])
        return (held + available) * self._limits.block_size - computed

    # Reserving

    def _take(self, row: ChunkRow, budget: ChunkBudget) -> bool:
        """Reserve a row; False when others in this step have taken what it needs."""
        sequence = row.sequence
        counted = self._promised is not None
        before = self._promise(sequence) if counted and not row.enters else 0
        try:
            self._reserve(row)
        except PoolExhausted:
            # Its slot was a stored window that a row before it is to load. Later it can be had.
            if not self.rows:
                raise
            return False
        self.rows.append(row)
        budget.take(
            row.size,
            row.computed,
            replay_rows=row.num_replay,
            tail_start=sequence.tail_start,
        )
        if self._promised is not None:
            self._promised += self._promise(sequence) - before
        return True

    def _reserve(self, row: ChunkRow) -> None:
        """Take the slot and the blocks that a row needs; all or nothing."""
        roster, sequence = self._roster, row.sequence
        prefixes = roster.prefixes
        try:
            if row.resume is not None:
                row.pinned = prefixes.pin(row.resume)
                prefixes.make_room_for_slot()
                sequence.enter(roster.slots.acquire(sequence.owner), self._limits.max_drafts)
                prefixes.attach(sequence, row.resume)
            assert sequence.slot is not None, f"request {sequence.uid} has no slot"
            missing = roster.missing_blocks(sequence, row.end)
            prefixes.make_room(missing)
            row.first_new = 0 if row.enters else int(roster.tables.num_blocks[sequence.slot])
            if missing:
                blocks = roster.pools.allocate(sequence.owner, missing)
                row.num_added = roster.tables.extend(sequence.slot, blocks)
            if row.stores:
                row.stored_slot = prefixes.reserve_window(sequence, row.stores)
        except BaseException:
            self._cancel(row)
            raise

    def _cancel(self, row: ChunkRow) -> None:
        """Undo `_reserve` for a row whose step is not launched."""
        roster, sequence = self._roster, row.sequence
        if row.stored_slot is not None:
            roster.prefixes.cancel_window(sequence)
        if row.num_added and sequence.slot is not None:
            added = roster.tables.truncate(sequence.slot, row.num_added)
            roster.pools.cancel(sequence.owner, added)
        if row.enters and sequence.slot is not None:
            roster.prefixes.detach(sequence)
            roster.slots.cancel(sequence.owner, (sequence.slot,))
            sequence.leave()
        if row.pinned is not None:
            roster.prefixes.index.unpin_window(row.pinned)
