"""From chosen rows to a frozen `StepPlan`: columns, and where each first token comes from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from deepinfer_core.cache.prefix_index import Node
from deepinfer_core.plans import (
    PHASES,
    PLACEHOLDER,
    Admission,
    Phase,
    RowExtras,
    SchedulerOutput,
    StepKind,
    StepPlan,
    StepRows,
    TableDelta,
)
from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.chunk_work import ChunkWork
from deepinfer_core.scheduler.lanes import CONSTRAINED, STRICT, Columns
from deepinfer_core.scheduler.prefixes import Resume
from deepinfer_core.scheduler.roster import Roster
from deepinfer_core.scheduler.sequence import Sequence

__all__ = ["ChunkRow", "DecodeRows", "UnsettledStep", "decode_step", "prefill_step"]

_NONE = np.zeros(0, dtype=np.int64)
_VERIFY = PHASES.index(Phase.VERIFY)


@dataclass(slots=True, eq=False)
class DecodeRows:
    """Sequences that decode in a step: columns of [R] int64, by ascending slot.

    Args:
        slots: whose rows they are.
        lane: their lanes.
        start: U before this step.
        source: row in the previous unsettled step, or -1 where the host supplies tokens.
        drafts: drafts to verify, at most; None is none for all.
        num_verified: how many of them all are verified, if fewer: the device chooses.
        remaining: tokens that may still be produced; a sampling step in flight counts as one.
        grown, missing: [n] places of rows that need blocks, and how many in every pool.
        grown_slots, grown_places: [n] where the taken ones stand in the tables.
    """

    slots: np.ndarray
    lane: Columns
    start: np.ndarray
    source: np.ndarray
    drafts: np.ndarray | None
    remaining: np.ndarray
    grown: np.ndarray
    missing: np.ndarray
    num_verified: int | None = None
    grown_slots: np.ndarray = field(default_factory=lambda: _NONE)
    grown_places: np.ndarray = field(default_factory=lambda: _NONE)

    @property
    def num_missing(self) -> int:
        """Blocks to take for all of them, in every pool."""
        return int(self.missing.sum()) if len(self.missing) else 0


@dataclass(slots=True, eq=False)
class ChunkRow:
    """One prompt's share of a step: decided and reserved, not yet booked.

    Args:
        sequence: who.
        phase: whether it ends the prompt.
        computed: U before this step: the first new token's position.
        size: new tokens.
        resume: where it starts, if it leaves the waiting queue with this step.
        stores: the length at which its window state is stored, which this chunk ends at, or 0.
        first_new: first block-table entry that the device does not know.
        num_added: blocks taken for it, in every pool.
        stored_slot: where the window state is stored.
        pinned: node whose stored window state is loaded.
    """

    sequence: Sequence
    phase: Phase
    computed: int
    size: int
    resume: Resume | None = None
    stores: int = 0
    first_new: int = 0
    num_added: int = 0
    stored_slot: int | None = None
    pinned: Node | None = None

    @property
    def enters(self) -> bool:
        """Whether it took a slot with this step."""
        return self.resume is not None

    @property
    def num_replay(self) -> int:
        """Rows before the new ones that only rebuild windows."""
        return 0 if self.resume is None else self.resume.plan.num_replay

    @property
    def start(self) -> int:
        """Position of the first row, replayed ones included."""
        return self.computed - self.num_replay

    @property
    def end(self) -> int:
        """U after this step."""
        return self.computed + self.size


@dataclass(frozen=True, slots=True, eq=False)
class UnsettledStep:
    """A launched step: its plan, and its sequences, so that results need no look-up by name.

    Args:
        plan: what was launched.
        sequences: those of the plan's rows.
        row_of_slot: [num_slots] int64: each slot's row in the plan if it yields a token, else -1.
        pinned: nodes whose window states it loads.
        work, predicted_ns: what a prefill step computes and how long it is to take, if time
            decided its chunks.
    """

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    row_of_slot: np.ndarray
    pinned: tuple[Node, ...] = ()
    work: ChunkWork | None = None
    predicted_ns: int = 0

    @property
    def step_seq(self) -> int:
        """Its number."""
        return self.plan.output.step_seq


def decode_step(
    step_seq: int, rows: DecodeRows, roster: Roster, preempted: tuple[int, ...]
) -> StepPlan:
    """Return a decode step of reserved rows."""
    lane, slots = rows.lane, rows.slots
    drafts: np.ndarray | int = 0 if rows.drafts is None else rows.drafts
    table = StepRows.of(
        len(slots),
        uid=lane.uid,
        generation=lane.generation,
        slot=slots,
        phase=_VERIFY,
        start=rows.start,
        num_rows=drafts + 1,
        source=rows.source,
        num_drafts=drafts,
        tail_start=lane.tail_start,
        remaining=rows.remaining,
    )
    most = len(slots) if rows.drafts is None else len(slots) + int(rows.drafts.sum())
    traits = int(np.bitwise_or.reduce(lane.traits))
    output = SchedulerOutput(
        step_seq=step_seq,
        kind=StepKind.DECODE,
        num_rows=most if rows.num_verified is None else len(slots) + rows.num_verified,
        strict=bool(traits & STRICT),
        delays_sampling=bool(traits & CONSTRAINED),
        preempted=preempted,
    )
    tables = {}
    if len(rows.grown_slots):
        tables = {
            pool: TableDelta(
                rows.grown_slots, rows.grown_places, ids[rows.grown_slots, rows.grown_places]
            )
            for pool, ids in roster.tables.ids.items()
        }
    return StepPlan(output, table, _decode_tokens(most, table, roster), tables=tables)


def _decode_tokens(total: int, rows: StepRows, roster: Roster) -> np.ndarray:
    """Return tokens of rows end to end: the host's where it knows them, else placeholders."""
    lanes = roster.lanes
    tokens = np.full(total, PLACEHOLDER, dtype=np.int64)
    known = (rows.source < 0).nonzero()[0]
    if not len(known):
        return tokens
    slots, first = rows.slot[known], (rows.num_rows.cumsum() - rows.num_rows)[known]
    tokens[first] = lanes.all.last_token[slots]
    drafts = rows.num_drafts[known]
    for draft in range(int(drafts.max())):
        has = drafts > draft
        tokens[first[has] + 1 + draft] = lanes.drafts[slots[has], draft]
    return tokens


def prefill_step(
    step_seq: int,
    rows: Seq[ChunkRow],
    roster: Roster,
    preempted: tuple[int, ...],
) -> StepPlan:
    """Return a prefill step of reserved rows."""
    sequences = [row.sequence for row in rows]
    columns = {
        "uid": [s.uid for s in sequences],
        "generation": [s.generation for s in sequences],
        "slot": [_slot(s) for s in sequences],
        "phase": [PHASES.index(row.phase) for row in rows],
        "start": [row.start for row in rows],
        "num_rows": [row.num_replay + row.size for row in rows],
        "num_replay": [row.num_replay for row in rows],
        "window_start": [0 if r.resume is None else r.resume.plan.window_start for r in rows],
        "tail_start": [s.tail_start for s in sequences],
        "remaining": [s.remaining for s in sequences],
    }
    table = StepRows.of(len(rows), **{name: np.array(values) for name, values in columns.items()})
    tokens = [token for row in rows for token in row.sequence.tokens[row.start : row.end]]
    samples = [row for row in rows if row.phase is Phase.FINAL_CHUNK]
    output = SchedulerOutput(
        step_seq=step_seq,
        kind=StepKind.PREFILL,
        num_rows=len(tokens),
        strict=any(s.request.strict for s in sequences),
        delays_sampling=any(row.sequence.constraint is not None for row in samples),
        preempted=preempted,
        window_loads=tuple(
            (row.resume.window_slot, _slot(row.sequence))
            for row in rows
            if row.resume is not None and row.resume.window_slot is not None
        ),
        window_saves=tuple(
            (_slot(row.sequence), row.stored_slot) for row in rows if row.stored_slot is not None
        ),
    )
    extras = {place: _extras(row, roster.limits) for place, row in enumerate(rows)}
    return StepPlan(
        output,
        table,
        np.array(tokens, dtype=np.int64),
        extras={place: extra for place, extra in extras.items() if extra != RowExtras()},
        tables=_new_entries(rows, roster),
    )


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, f"request {sequence.uid} is in a step without a slot"
    return sequence.slot


def _extras(row: ChunkRow, limits: SchedulerLimits) -> RowExtras:
    sequence = row.sequence
    params = sequence.request.params
    targets = _prompt_targets(sequence, row.start, row.end)
    admission = None
    if row.enters:
        told = params.uses_penalties or limits.max_drafts
        admission = Admission(
            params=params,
            seed=sequence.request.seed,
            history=tuple(sequence.tokens[max(0, row.start - limits.history_len) : row.start]),
            prompt_len=sequence.prompt_len,
            token_ids=tuple(sequence.tokens) if told else (),
        )
    return RowExtras(admission, params.prompt_logprobs if targets else None, targets)


def _prompt_targets(sequence: Sequence, start: int, end: int) -> tuple[int, ...]:
    """Return the prompt tokens after rows `start .. end - 1`, or () when all were delivered."""
    last = min(end, sequence.prompt_len - 1)  # position of the last target
    if sequence.request.params.prompt_logprobs is None or last < sequence.prompt_logprobs_from:
        return ()
    return sequence.request.prompt_token_ids[start + 1 : last + 1]


def _new_entries(rows: Seq[ChunkRow], roster: Roster) -> dict[str, TableDelta]:
    slots: list[int] = []
    places: list[int] = []
    for row in rows:
        slot = _slot(row.sequence)
        new = range(row.first_new, int(roster.tables.num_blocks[slot]))
        slots += [slot] * len(new)
        places += new
    if not slots:
        return {}
    at, index = np.array(slots), np.array(places)
    return {pool: TableDelta(at, index, ids[at, index]) for pool, ids in roster.tables.ids.items()}
