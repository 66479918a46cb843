"""Choosing the rows of a step and reserving their blocks: one transaction, undone when it fails."""

from __future__ import annotations

from deepinfer_core.cache.block_table import num_blocks_for
from deepinfer_core.scheduler.budget import TokenBudget
from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.sequence import Sequence, State
from deepinfer_core.scheduler.step import PlannedRow
from deepinfer_core.types import FinishReason, Phase, SequenceUpdate

__all__ = ["Selection"]

EXHAUSTED = (
    "The cache is full: the request has {length} tokens and needs another block, "
    "but it already holds all it can get of the {total} blocks of {size} tokens. Give the engine "
    "more cache or ask for fewer tokens."
)


class Selection:
    """The rows chosen for one step.

    Preemptions made on the way stay: a preempted sequence waits and has lost nothing. Everything
    else is undone by `rollback`.
    """

    def __init__(self, roster: Roster, previous_step: int) -> None:
        """Start with no rows.

        Args:
            roster: all requests.
            previous_step: number of the last unsettled step, or 0; its carry can supply tokens.
        """
        self.rows: list[PlannedRow] = []
        self.preempted: list[int] = []
        self.ended: list[SequenceUpdate] = []
        self._roster = roster
        self._limits = roster.limits
        self._previous_step = previous_step
        self._promised: int | None = None  # blocks that others will still take

    def rollback(self) -> None:
        """Give back what was reserved, last first."""
        while self.rows:
            self._roster.cancel(self.rows.pop())

    # Decode

    def num_decode_rows(self) -> int:
        """Return how many sequences could decode now if blocks were plenty."""
        return sum(self._may_decode(s) for s in self._roster.resident.values())

    def decode(self) -> None:
        """Take a row for every running sequence, as far as blocks go; preempt when they do not."""
        roster = self._roster
        rows = [self._decode_row(s) for s in roster.resident.values() if self._may_decode(s)]
        needs = {row.sequence.uid: row.sequence.table.missing(row.end) for row in rows}
        if sum(needs.values()) > roster.pools.num_free:
            self._make_room_to_decode(rows, needs)
            rows = [row for row in rows if row.sequence.state is State.RUNNING]
            rows.sort(key=lambda row: row.sequence.order)
        for row in rows:
            need = needs[row.sequence.uid]
            if not need or need <= roster.pools.num_free:
                self._take(row)
        roster.growth.decoded()

    def _make_room_to_decode(self, rows: list[PlannedRow], needs: dict[int, int]) -> None:
        """Preempt until the rows fit, now or once what is on its way back has arrived."""
        roster = self._roster

        def running() -> list[Sequence]:
            return [row.sequence for row in rows if row.sequence.state is State.RUNNING]

        def shortage() -> int:
            return sum(needs[s.uid] for s in running()) - roster.pools.num_free

        while shortage() > roster.pending_free():
            victim = roster.victim()
            if victim is None:
                self._exhausted(running()[0])
                return
            self._preempt(victim)

    def _may_decode(self, sequence: Sequence) -> bool:
        return (
            sequence.state is State.RUNNING
            and self._source_known(sequence)
            and sequence.remaining > 0  # with 0 left it ends for certain when its steps are settled
            and sequence.planned_len < self._limits.max_model_len
        )

    def _decode_row(self, sequence: Sequence) -> PlannedRow:
        """Return the last token and the drafts to verify, within the context and the cap."""
        start = sequence.planned_len
        room = self._limits.max_model_len - 1 - start
        drafts = min(self._limits.max_drafts, room, sequence.remaining - 1)
        return PlannedRow(sequence, Phase.VERIFY, start, 1 + drafts, drafts)

    # Prefill

    def prefill(self) -> None:
        """Fill the token budget with chunks by priority and arrival; at most one stays partial."""
        budget = TokenBudget(self._limits)
        first = self._roster.first_live()
        # One at a time: a later arrival never enters before an earlier one that does not fit.
        admitting = True
        for sequence in self._prefill_order():
            if sequence.uid in self.preempted:
                continue  # it has just made room for another
            enters = sequence.state is State.WAITING
            if enters and admitting:
                admitting = sequence is first or self._has_room_to_grow(sequence)
            if (enters and not admitting) or not self._source_known(sequence):
                continue
            size = self._fit(sequence, budget.chunk(len(sequence.tokens) - sequence.planned_len))
            if size <= 0:
                admitting = admitting and not enters
                continue
            start = sequence.planned_len
            final = start + size == len(sequence.tokens)
            phase = Phase.FINAL_CHUNK if final else Phase.CHUNK
            self._take(PlannedRow(sequence, phase, start, size, enters=enters))
            budget.take(size)
            if not final or budget.spent:
                return

    def _prefill_order(self) -> list[Sequence]:
        partial = [s for s in self._roster.resident.values() if s.state is State.PREFILL]
        entering = self._roster.waiting.head(self._roster.slots.num_free)
        return sorted([*partial, *entering], key=lambda s: s.order)

    def _has_room_to_grow(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence fits with the output expected of it and of others."""
        roster = self._roster
        if self._promised is None:
            self._promised = sum(self._promise(s) for s in roster.resident.values())
            self._promised += sum(self._promise(row.sequence) for row in self.rows if row.enters)
        # One block more than its tokens need in any case: a preempted sequence must not come back
        # only to leave again.
        whole = num_blocks_for(len(sequence.tokens), self._limits.block_size)
        wanted = max(whole + 1, self._promise(sequence))
        return wanted <= roster.pools.num_free - self._promised

    def _promise(self, sequence: Sequence) -> int:
        """Return the blocks a sequence will still take for its tokens and its expected output."""
        growth = self._roster.growth.tokens(sequence.remaining)
        return sequence.table.missing(len(sequence.tokens) + growth)

    def _fit(self, sequence: Sequence, size: int) -> int:
        """Return how much of a chunk fits; the first on the device makes room for itself."""
        roster = self._roster
        room = sequence.table.room(roster.pools.num_free) - sequence.planned_len
        # With rows chosen before this one, the step is not empty: whoever got them may have taken
        # the last blocks, and it is early to say that nobody else can make room.
        waits = sequence.state is State.WAITING or bool(self.rows)
        while room <= 0 and not waits and roster.is_first_resident(sequence):
            if roster.pending_free():
                break
            victim = roster.victim()
            if victim is None:
                self._exhausted(sequence)
                return 0
            self._preempt(victim)
            room = sequence.table.room(roster.pools.num_free) - sequence.planned_len
        return min(size, room)

    # Both

    def _source_known(self, sequence: Sequence) -> bool:
        """Whether the host or the previous step's carry knows where the sequence stands."""
        return not sequence.unsettled or sequence.unsettled[-1] == self._previous_step

    def _take(self, row: PlannedRow) -> None:
        before = self._promise(row.sequence) if self._promised is not None and not row.enters else 0
        self._roster.reserve(row)
        self.rows.append(row)
        if self._promised is not None:
            self._promised += self._promise(row.sequence) - before

    def _preempt(self, victim: Sequence) -> None:
        self.preempted.append(victim.uid)
        self._roster.preempt(victim)

    def _exhausted(self, sequence: Sequence) -> None:
        """End the only sequence left: nobody can make room for it. Its steps are settled first."""
        if sequence.unsettled:
            return
        roster = self._roster
        error = EXHAUSTED.format(
            length=len(sequence.tokens), total=roster.pools.num_blocks, size=self._limits.block_size
        )
        ended = roster.end(sequence, FinishReason.ERROR, error, code="cache_exhausted")
        self.ended.append(ended)
