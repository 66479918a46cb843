"""Choosing the rows of a step and reserving what they need: one transaction, undone when it fails.

Preemptions made on the way stay: a preempted sequence waits and has lost nothing.
"""

from __future__ import annotations

import numpy as np

from deepinfer_core.interfaces import VerifyPlanner
from deepinfer_core.scheduler.chunks import ChunkBudget
from deepinfer_core.scheduler.prefill import PrefillRows
from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.sequence import Sequence, State
from deepinfer_core.scheduler.step import DecodeRows, UnsettledStep
from deepinfer_core.scheduler.victims import victim_of

__all__ = ["Selection"]


class Selection:
    """The rows chosen for one step: of sequences that decode, or of prompts."""

    def __init__(
        self, roster: Roster, previous: UnsettledStep | None, planner: VerifyPlanner | None = None
    ) -> None:
        """Start with no rows.

        Args:
            roster: all requests.
            previous: the last launched step if it is unsettled: its carry can supply tokens.
            planner: says how many drafts to verify; None verifies all.
        """
        self.decode_rows: DecodeRows | None = None
        self.prefill_rows = PrefillRows(roster, 0 if previous is None else previous.step_seq)
        self._roster = roster
        self._limits = roster.limits
        self._previous = previous
        self._planner = planner

    @property
    def empty(self) -> bool:
        """Whether nothing was chosen."""
        return self.decode_rows is None and not self.prefill_rows.rows

    def rollback(self) -> None:
        """Give back what was reserved, last first."""
        self.prefill_rows.rollback()
        if self.decode_rows is not None:
            self._cancel(self.decode_rows)
            self.decode_rows = None

    # Prefill

    def prefill(self, budget: ChunkBudget) -> None:
        """Fill the budget with chunks."""
        self.prefill_rows.choose(budget)

    # Decode

    def num_decodable(self) -> int:
        """Return how many sequences could decode now if blocks were plenty."""
        return len(self._decodable())

    def decode(self) -> None:
        """Take a row for every running sequence, as far as blocks go; preempt when they do not."""
        roster = self._roster
        rows = self._rows_of(self._decodable())
        needed = rows.num_missing
        if needed > roster.pools.num_free:
            if needed > roster.prefixes.num_available:
                # Drafts are given up before anybody has to leave.
                rows = self._squeezed(self._rows_of(rows.slots, drafting=False))
            roster.prefixes.make_room(rows.num_missing)
        if len(rows.slots):
            self._trim(rows)
            self._reserve(rows)
            self.decode_rows = rows
        roster.growth.decoded()

    def _decodable(self) -> np.ndarray:
        previous = 0 if self._previous is None else self._previous.step_seq
        return self._roster.lanes.decodable(previous, self._limits.max_model_len)

    def _rows_of(self, slots: np.ndarray, *, drafting: bool = True) -> DecodeRows:
        """Return the last token and the drafts to verify, within the context and the cap."""
        lane = self._roster.lanes.at(slots)
        start = lane.settled + lane.inflight
        if self._previous is None:
            source = np.full(len(slots), -1, dtype=np.int64)
        else:
            source = self._previous.row_of_slot[slots]
        remaining = lane.left - lane.samples
        drafts = None
        end = start + 1
        if self._limits.max_drafts and drafting:
            drafts = np.minimum(lane.max_drafts, remaining - 1)
            drafts = np.minimum(drafts, self._limits.max_model_len - 1 - start)
            # What the host supplies it has to know.
            drafts = np.where(source >= 0, drafts, np.minimum(drafts, lane.known_drafts))
            end += drafts
        # Blocks for positions below `end`, less those held; negative where some are to spare.
        missing = (end + (self._limits.block_size - 1)) // self._limits.block_size
        missing -= self._roster.tables.num_blocks[slots]
        grown = (missing > 0).nonzero()[0]
        return DecodeRows(slots, lane, start, source, drafts, remaining, grown, missing[grown])

    def _trim(self, rows: DecodeRows) -> None:
        """Settle how many drafts the step verifies; blocks are reserved for all of them."""
        if self._planner is None or rows.drafts is None:
            return
        survival, known = self._roster.lanes.earlier_survival(rows.slots)
        total = self._planner.budget(survival, known, rows.drafts).total
        if total < int(rows.drafts.sum()):
            rows.num_verified = total

    def _reserve(self, rows: DecodeRows) -> None:
        """Take the blocks that the rows still need, one transaction for all."""
        roster, lane = self._roster, self._roster.lanes.all
        if not len(rows.grown):
            return
        slots = rows.slots[rows.grown]
        places = roster.tables.num_blocks[slots]
        counts = rows.missing
        if int(counts.max()) > 1:
            first = np.repeat(np.cumsum(counts) - counts, counts)
            places = np.repeat(places, counts) + np.arange(len(first)) - first
            slots = np.repeat(slots, counts)
        uids, generations = lane.uid[slots], lane.generation[slots]
        blocks = roster.pools.allocate_each(uids, generations, len(slots))
        roster.tables.extend_each(slots, places, blocks)
        rows.grown_slots, rows.grown_places = slots, places

    def _cancel(self, rows: DecodeRows) -> None:
        roster = self._roster
        for slot in dict.fromkeys(rows.grown_slots[::-1].tolist()):
            sequence = roster.by_slot[slot]
            assert sequence is not None, f"slot {slot} has no sequence"
            count = int((rows.grown_slots == slot).sum())
            roster.pools.cancel(sequence.owner, roster.tables.truncate(slot, count))

    # When blocks are short

    def _squeezed(self, rows: DecodeRows) -> DecodeRows:
        """Preempt until the rows fit, now or once what is on its way back has arrived.

        Returns:
            Rows that fit now: first come those that the order of sequences puts first.
        """
        roster = self._roster
        needs = dict.fromkeys(rows.slots.tolist(), 0)
        needs |= zip(rows.slots[rows.grown].tolist(), rows.missing.tolist(), strict=True)
        found = [roster.by_slot[slot] for slot in needs]
        sequences = sorted((s for s in found if s is not None), key=lambda s: s.order)
        self._preempt_for(sequences, needs)
        left = roster.prefixes.num_available
        fitting = []
        for sequence in sequences:
            slot = sequence.slot
            if sequence.state is not State.RUNNING or slot is None:
                continue
            if needs[slot] <= left:
                left -= needs[slot]
                fitting.append(slot)
        return self._rows_of(np.array(sorted(fitting), dtype=np.int64), drafting=False)

    def _preempt_for(self, sequences: list[Sequence], needs: dict[int, int]) -> None:
        roster = self._roster

        def running() -> list[Sequence]:
            return [s for s in sequences if s.state is State.RUNNING]

        def shortage() -> int:
            wanted = sum(needs[s.slot] for s in running() if s.slot is not None)
            return wanted - roster.prefixes.num_available

        while shortage() > roster.pending_free():
            victim = victim_of(roster)
            if victim is None:
                self.prefill_rows.give_up(running()[0])
                return
            self.prefill_rows.preempt(victim)
