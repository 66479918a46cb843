"""Where every request is: waiting, resident (on the device) or leaving, and the moves in between.

At every instant a live request is in exactly one of the first two containers; one that ended is in
`leaving` until its resources are back.
"""

from __future__ import annotations

import heapq

import numpy as np

from deepinfer_core.cache.block_pool import BlockPools, BlockState, Owner
from deepinfer_core.cache.block_table import BlockTables, num_blocks_for
from deepinfer_core.cache.prefix_index import Node
from deepinfer_core.cache.slots import SlotPool
from deepinfer_core.scheduler.budget import GrowthEstimate, SchedulerLimits
from deepinfer_core.scheduler.lanes import Lanes
from deepinfer_core.scheduler.prefixes import Prefixes
from deepinfer_core.scheduler.queue import WaitingQueue
from deepinfer_core.scheduler.release import DeferredRelease
from deepinfer_core.scheduler.sequence import Sequence, State
from deepinfer_core.scheduler.totals import Totals
from deepinfer_core.types import FinishReason, Request, SequenceUpdate

__all__ = ["Roster"]

_VICTIMS = (State.PREFILL, State.RUNNING)
_FAILED = (FinishReason.ABORT, FinishReason.ERROR)
DEADLINE = (
    "The request did not end within its `timeout_s`; {count} tokens were produced. Raise it, or "
    "leave it out for no limit."
)


class Roster:
    """All requests and the cache they share."""

    def __init__(self, limits: SchedulerLimits) -> None:
        """Start empty, with all blocks and slots free."""
        num_slots = limits.num_slots + limits.num_stored
        self.limits = limits
        self.totals = Totals()
        self.lanes = Lanes(num_slots, limits.max_drafts)
        self.pools = BlockPools(limits.num_blocks)
        self.slots = SlotPool(num_slots)
        self.tables = BlockTables(tuple(limits.num_blocks), num_slots, limits.table_len)
        self.prefixes = Prefixes(limits, self.pools, self.slots, self.tables)
        index = self.prefixes.index
        self.releases = DeferredRelease(self.pools, self.slots, self.tables, index)
        self.growth = GrowthEstimate(limits)
        self.waiting = WaitingQueue()
        self.resident: dict[int, Sequence] = {}
        self.leaving: dict[int, Sequence] = {}
        self.by_client: dict[str, Sequence] = {}
        self.by_slot: list[Sequence | None] = [None] * num_slots
        self.last_settled = 0
        self._num_arrivals = 0
        self._deadlines: list[tuple[int, int, Sequence]] = []

    # Coming

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue."""
        self._num_arrivals += 1
        sequence = Sequence(request, self._num_arrivals, self.lanes, self.limits)
        sequence.move(State.WAITING)
        self.waiting.add(sequence)
        self.by_client[request.client_id] = sequence
        if request.deadline_ns is not None:
            heapq.heappush(self._deadlines, (request.deadline_ns, request.uid, sequence))
            if len(self._deadlines) > 2 * len(self.by_client) + 64:  # most of them have ended
                live = set(self.by_client.values())
                self._deadlines = [each for each in self._deadlines if each[2] in live]
                heapq.heapify(self._deadlines)

    def is_known(self, uid: int) -> bool:
        """Whether a request of that uid is live, or still holds something."""
        return uid in self.leaving or self.find(uid) is not None

    def find(self, uid: int) -> Sequence | None:
        """Return the live sequence of that uid."""
        found = self.resident.get(uid)
        if found is None:
            found = next((s for s in self.waiting if s.uid == uid), None)
        return found

    @property
    def room_for_residents(self) -> int:
        """How many more sequences may enter; their slots can be had."""
        places = self.limits.num_slots - len(self.resident)
        return min(places, self.slots.num_free + self.prefixes.index.num_evictable_windows)

    def enter(self, sequence: Sequence) -> None:
        """Make a waiting sequence that is part of a launched step a resident."""
        assert sequence.slot is not None, f"request {sequence.uid} enters without a slot"
        self.waiting.remove(sequence)
        self.resident[sequence.uid] = sequence
        self.by_slot[sequence.slot] = sequence
        sequence.move(State.PREFILL)

    # Going

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence off the device; with steps in flight it leaves once they are settled."""
        sequence.move(State.PREEMPTING)
        sequence.num_preemptions += 1
        self.totals.preemptions += 1
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
        self.totals.aborts += reason is FinishReason.ABORT
        self.totals.overrun_tokens += sequence.inflight
        if not bad:
            self.prefixes.publish(sequence)
        sequence.move(State.ABORTING if reason in _FAILED else State.FINISHING)
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
            num_cached_tokens=sequence.num_cached,
            replayed=sequence.replayed,
        )

    def retire(self, sequence: Sequence) -> None:
        """Let a sequence that is on its way out go on, once nothing of it is in flight."""
        if sequence.unsettled:
            return
        if sequence.state is State.PREEMPTING:
            del self.resident[sequence.uid]
            self.prefixes.publish(sequence)
            self.totals.recomputed_tokens += sequence.settled_len
            self.releases.release(sequence)
            sequence.move(State.WAITING)
            sequence.restart()
            self.waiting.add(sequence)
        elif sequence.state in (State.FINISHING, State.ABORTING):
            sequence.move(State.RELEASING)

    def drain(self) -> None:
        """Return resources whose last step is settled."""
        for owner in self.releases.drain(self.last_settled):
            sequence = self.leaving.get(owner.uid)
            if sequence is not None and sequence.generation == owner.generation:
                self._gone(sequence)

    def expired(self, now_ns: int) -> list[SequenceUpdate]:
        """End the requests whose deadline has passed; returns their terminal updates."""
        updates = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            sequence = heapq.heappop(self._deadlines)[2]
            if self._is_live(sequence):
                error = DEADLINE.format(count=sequence.num_produced)
                update = self.end(sequence, FinishReason.ERROR, error, code="deadline_exceeded")
                updates.append(update)
        return updates

    def _is_live(self, sequence: Sequence) -> bool:
        return self.by_client.get(sequence.request.client_id) is sequence

    def _gone(self, sequence: Sequence) -> None:
        sequence.move(State.GONE)
        del self.leaving[sequence.uid]

    # Facts that decisions rest on

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many more blocks, in each pool, positions below `num_tokens` need."""
        held = 0 if sequence.slot is None else int(self.tables.num_blocks[sequence.slot])
        return max(0, num_blocks_for(num_tokens, self.limits.block_size) - held)

    def pending_free(self) -> int:
        """Blocks, in every pool, that come back without another preemption."""
        leaving = sum(
            int(self.tables.num_blocks[s.slot])
            for s in self.resident.values()
            if s.state is State.PREEMPTING and s.slot is not None
        )
        quarantined = self.pools.count(BlockState.QUARANTINED)
        return leaving + self.releases.pending_blocks + quarantined

    # Checks

    def audit(self) -> None:
        """Check that containers, states, lanes, pools and tables agree.

        Raises:
            AssertionError: they do not.
        """
        self.pools.audit()
        self.slots.audit()
        self.releases.audit()
        self._audit_holders()
        self._audit_index()
        for sequence in self.waiting:
            if sequence.state is not State.WAITING or sequence.slot is not None:
                raise AssertionError(f"request {sequence.uid} waits as {sequence.state.value}")
        for uid, sequence in self.resident.items():
            if sequence.state not in (*_VICTIMS, State.PREEMPTING) or uid in self.leaving:
                raise AssertionError(f"request {uid} is resident as {sequence.state.value}")
            if self.missing_blocks(sequence, sequence.planned_len):
                raise AssertionError(
                    f"request {uid}: blocks do not cover U = {sequence.planned_len}"
                )
            self._audit_lane(sequence)
        live = {s.uid for s in self.waiting} | set(self.resident)
        if live != {s.uid for s in self.by_client.values()} or len(live) != len(self.by_client):
            raise AssertionError("client ids and containers name different requests")

    def _audit_lane(self, sequence: Sequence) -> None:
        lanes, slot = self.lanes, sequence.slot
        assert slot is not None and self.by_slot[slot] is sequence, f"slot of {sequence.uid}"
        lane = lanes.at(np.array([slot]))
        found = (int(lane.uid[0]), int(lane.generation[0]), int((lane.limit - lane.left)[0]))
        if found != (*sequence.owner, len(sequence.tokens)):
            raise AssertionError(f"lane {slot} of {sequence.owner} says {found}")
        if bool(lanes.running[slot]) is not (sequence.state is State.RUNNING):
            raise AssertionError(f"lane {slot}: running differs from {sequence.state.value}")

    def _audit_holders(self) -> None:
        """Held blocks and slots are those of tables; all else in tables is shared."""
        held: dict[str, dict[Owner, set[int]]] = {name: {} for name in self.pools.pools}
        slots: dict[Owner, set[int]] = {}
        for sequence in self.resident.values():
            assert sequence.slot is not None, f"request {sequence.uid} is resident without a slot"
            slots[sequence.owner] = {sequence.slot}
            if sequence.pending_window is not None:
                slots[sequence.owner].add(sequence.pending_window[0])
            shared = {} if sequence.node is None else self.prefixes.index.path_blocks(sequence.node)
            for name, ids in self.tables.blocks(sequence.slot).items():
                pool = self.pools.pools[name]
                mine = set(pool.held(ids).tolist())
                if foreign := set(ids.tolist()) - mine - {int(b) for b in shared.get(name, ())}:
                    raise AssertionError(f"request {sequence.uid} names foreign blocks {foreign}")
                if mine:
                    held[name][sequence.owner] = mine
        if slots != self.slots.holders(BlockState.HELD):
            raise AssertionError("held slots differ from those of the resident sequences")
        for name, pool in self.pools.pools.items():
            if held[name] != pool.holders(BlockState.HELD):
                raise AssertionError(f"held blocks of {name!r} differ from the block tables")

    def _audit_index(self) -> None:
        references: dict[Node, int] = {}
        nodes = [s.node for s in self.resident.values() if s.node is not None]
        for node in [*nodes, *self.releases.references()]:
            references[node] = references.get(node, 0) + 1
        self.prefixes.index.audit(references)
