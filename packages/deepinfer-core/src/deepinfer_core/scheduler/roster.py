"""Where every request is: waiting, resident (on the device) or leaving, and the moves in between.

At every instant a live request is in exactly one of the first two containers; one that ended is in
`leaving` until its resources are back.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_core.cache.block_pool import BlockPools, BlockState, Owner
from deepinfer_core.cache.block_table import BlockTable
from deepinfer_core.cache.slots import SlotPool
from deepinfer_core.scheduler.budget import GrowthEstimate, SchedulerLimits
from deepinfer_core.scheduler.queue import WaitingQueue
from deepinfer_core.scheduler.release import DeferredRelease
from deepinfer_core.scheduler.sequence import Sequence, State
from deepinfer_core.scheduler.step import PlannedRow
from deepinfer_core.types import FinishReason, Phase, Request, SequenceUpdate

__all__ = ["Roster"]

_VICTIMS = (State.PREFILL, State.RUNNING)


class Roster:
    """All requests and the cache they share."""

    def __init__(self, limits: SchedulerLimits) -> None:
        """Start empty, with all blocks and slots free."""
        self.limits = limits
        self.pools = BlockPools(limits.num_blocks)
        self.slots = SlotPool(limits.num_slots)
        self.releases = DeferredRelease(self.pools, self.slots)
        self.growth = GrowthEstimate(limits)
        self.waiting = WaitingQueue()
        self.resident: dict[int, Sequence] = {}
        self.leaving: dict[int, Sequence] = {}
        self.by_client: dict[str, Sequence] = {}
        self.num_preemptions = 0
        self.last_settled = 0
        self._num_arrivals = 0

    # Coming

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue."""
        self._num_arrivals += 1
        sequence = Sequence(request, self._num_arrivals, self._new_table(), self.limits)
        sequence.move(State.WAITING)
        self.waiting.add(sequence)
        self.by_client[request.client_id] = sequence

    def find(self, uid: int) -> Sequence | None:
        """Return the live sequence of that uid."""
        found = self.resident.get(uid)
        if found is None:
            found = next((s for s in self.waiting if s.uid == uid), None)
        return found

    def reserve(self, row: PlannedRow) -> None:
        """Take the slot and the blocks that a row needs; all or nothing."""
        sequence = row.sequence
        if row.enters:
            sequence.slot = self.slots.acquire(sequence.owner)
        try:
            missing = sequence.table.missing(row.end)
            if missing:
                row.blocks = sequence.table.extend(self.pools.allocate(sequence.owner, missing))
        except BaseException:
            self.cancel(row)
            raise

    def cancel(self, row: PlannedRow) -> None:
        """Undo `reserve` for a row whose step is not launched."""
        sequence = row.sequence
        sequence.table.truncate(row.blocks)
        self.pools.cancel(sequence.owner, {delta.pool: delta.block_ids for delta in row.blocks})
        if row.enters and sequence.slot is not None:
            self.slots.cancel(sequence.owner, (sequence.slot,))
            sequence.slot = None

    def book(self, row: PlannedRow, step_seq: int) -> None:
        """Make a reserved row part of launched step `step_seq`."""
        sequence = row.sequence
        if row.enters:
            self.waiting.remove(sequence)
            self.resident[sequence.uid] = sequence
            sequence.move(State.PREFILL)
        if row.phase is Phase.FINAL_CHUNK:
            sequence.move(State.RUNNING)
        sequence.inflight += row.num_rows
        sequence.unsettled.append(step_seq)
        sequence.last_step = step_seq
        sequence.num_unsettled_samples += row.phase is not Phase.CHUNK

    # Going

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence off the device; with steps in flight it leaves once they are settled."""
        sequence.move(State.PREEMPTING)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.growth.preempted()
        self.retire(sequence)
        self.drain()

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        *,
        code: str | None = None,
        bad: bool = False,
    ) -> SequenceUpdate:
        """End a live request at once, in any state, and return its terminal update.

        Args:
            sequence: who.
            reason: why it ended.
            error: a sentence for the user.
            code: what it was; see `SequenceUpdate`.
            bad: its cache content is not finite or not its own.
        """
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            del self.resident[sequence.uid]
        del self.by_client[sequence.request.client_id]
        self.leaving[sequence.uid] = sequence
        failed = reason in (FinishReason.ABORT, FinishReason.ERROR)
        sequence.move(State.ABORTING if failed else State.FINISHING)
        queued = self.releases.release(sequence, quarantine=bad)
        self.retire(sequence)
        if not queued:
            self._gone(sequence)
        self.drain()
        return SequenceUpdate(
            sequence.uid,
            finish_reason=reason,
            error=error,
            error_code=code,
            num_preemptions=sequence.num_preemptions,
        )

    def retire(self, sequence: Sequence) -> None:
        """Let a sequence that is on its way out go on, once nothing of it is in flight."""
        if sequence.unsettled:
            return
        if sequence.state is State.PREEMPTING:
            del self.resident[sequence.uid]
            self.releases.release(sequence)
            sequence.move(State.WAITING)
            sequence.restart(self._new_table())
            self.waiting.add(sequence)
        elif sequence.state in (State.FINISHING, State.ABORTING):
            sequence.move(State.RELEASING)

    def drain(self) -> None:
        """Return resources whose last step is settled, which implies that the device has run it.

        Waiting for the settlement and not only for the device matters: only then is it known
        whether the content is finite.
        """
        for owner in self.releases.drain(self.last_settled):
            sequence = self.leaving.get(owner.uid)
            if sequence is not None and sequence.generation == owner.generation:
                self._gone(sequence)

    def _gone(self, sequence: Sequence) -> None:
        sequence.move(State.GONE)
        del self.leaving[sequence.uid]

    # Facts that decisions rest on

    def pending_free(self) -> int:
        """Blocks, in every pool, that come back without another preemption."""
        leaving = sum(
            s.table.num_blocks for s in self.resident.values() if s.state is State.PREEMPTING
        )
        count = self.pools.count
        return leaving + count(BlockState.DEFERRED) + count(BlockState.QUARANTINED)

    def first_live(self) -> Sequence | None:
        """Return the first of all live sequences in order: nothing may stand in its way."""
        candidates = [*self.resident.values(), *self.waiting.head(1)]
        return min(candidates, key=lambda s: s.order, default=None)

    def is_first_resident(self, sequence: Sequence) -> bool:
        """Whether a sequence is the first on the device, which is never preempted."""
        return all(sequence.order <= other.order for other in self.resident.values())

    def victim(self) -> Sequence | None:
        """Return who has to leave when blocks run out, or None when only one could.

        Lowest priority, then latest arrival. The oldest of each priority is spared while others are
        left; the first in order always is, so that something always gets done.
        """
        candidates = sorted(self._candidates(), key=lambda s: s.order)
        oldest: set[int] = set()
        spared: set[int] = set()
        for sequence in candidates:
            if sequence.request.priority not in oldest:
                oldest.add(sequence.request.priority)
                spared.add(sequence.uid)
        for sequence in reversed(candidates):
            if sequence.uid not in spared:
                return sequence
        return candidates[-1] if len(candidates) > 1 else None

    def _candidates(self) -> Iterator[Sequence]:
        return (s for s in self.resident.values() if s.state in _VICTIMS)

    def _new_table(self) -> BlockTable:
        return BlockTable(tuple(self.limits.num_blocks), self.limits.block_size)

    # Checks

    def audit(self) -> None:
        """Check that containers, states, pools and tables agree.

        Raises:
            AssertionError: they do not.
        """
        self.pools.audit()
        self.slots.audit()
        self.releases.audit()
        self._audit_holders()
        for sequence in self.waiting:
            if sequence.state is not State.WAITING or sequence.slot is not None:
                raise AssertionError(f"request {sequence.uid} waits as {sequence.state.value}")
        for uid, sequence in self.resident.items():
            if sequence.state not in (*_VICTIMS, State.PREEMPTING) or uid in self.leaving:
                raise AssertionError(f"request {uid} is resident as {sequence.state.value}")
            if sequence.table.missing(sequence.planned_len):
                raise AssertionError(
                    f"request {uid}: blocks do not cover U = {sequence.planned_len}"
                )
        live = {s.uid for s in self.waiting} | set(self.resident)
        if live != {s.uid for s in self.by_client.values()} or len(live) != len(self.by_client):
            raise AssertionError("client ids and containers name different requests")

    def _audit_holders(self) -> None:
        held: dict[str, dict[Owner, set[int]]] = {name: {} for name in self.pools.pools}
        slots: dict[Owner, set[int]] = {}
        for sequence in self.resident.values():
            assert sequence.slot is not None, f"request {sequence.uid} is resident without a slot"
            slots[sequence.owner] = {sequence.slot}
            for name, ids in sequence.table.ids.items():
                held[name][sequence.owner] = set(ids)
        if slots != self.slots.holders(BlockState.HELD):
            raise AssertionError("held slots differ from those of the resident sequences")
        for name, pool in self.pools.pools.items():
            if held[name] != pool.holders(BlockState.HELD):
                raise AssertionError(f"held blocks of {name!r} differ from the block tables")
