"""A worker without a model: it runs `StepPlan`s on a cache of plain integers and trusts nothing.

The next token is a hash of all tokens before it. Each cache position holds (position, token, hash
of the prefix); a step reads the whole prefix back through block tables built from `BlockDelta`s
alone and compares every entry. Use after free, a wrong row, a wrong length or a stale token is an
error at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from deepinfer_core.scheduler import SchedulerLimits, Scrub
from deepinfer_core.testing.reference import logprob_of, mix, next_token
from deepinfer_core.types import (
    Phase,
    PromptLogprob,
    RowStatus,
    SequenceMetadata,
    StepPlan,
    StepResult,
    TokenLogprob,
)

__all__ = ["FakeWorker"]


@dataclass(slots=True)
class _Slot:
    """Device state of one sequence."""

    uid: int
    generation: int
    seed: int
    prompt_len: int
    tables: dict[str, list[int]]
    state_at: dict[int, int] = field(
        default_factory=dict
    )  # length -> prefix hash: a window, in effect


@dataclass(frozen=True, slots=True)
class _Carry:
    """What a row leaves for the next step."""

    uid: int
    start: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Row:
    """What one sequence of a step yields."""

    start: int
    status: RowStatus
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    carry: _Carry | None = None


class FakeWorker:
    """Runs steps in the order of their launch, when told to."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        vocab_size: int = 50,
        accepts: Callable[[int, int], bool] = lambda uid, position: True,
        poison: Callable[[SequenceMetadata], bool] = lambda meta: False,
    ) -> None:
        """Make a worker with an empty cache.

        Args:
            limits: the scheduler's.
            vocab_size: tokens are below this.
            accepts: whether the draft for a position of a request is right.
            poison: whether a sequence's values are not finite in a step.
        """
        self._limits = limits
        self._vocab_size = vocab_size
        self._accepts = accepts
        self._poison = poison
        self._memory: dict[str, list[list[tuple[int, int, int] | None]]] = {
            pool: [[None] * limits.block_size for _ in range(count)]
            for pool, count in limits.num_blocks.items()
        }
        self._unclean: set[tuple[str, int]] = (
            set()
        )  # blocks and slots with values that are not finite
        self._slots: dict[int, _Slot] = {}
        self._carries: dict[int, list[_Carry | None]] = {}
        self._queue: deque[StepPlan] = deque()
        self._results: dict[int, StepResult] = {}
        self.num_rows = 0

    # Host side

    def launch(self, plan: StepPlan) -> None:
        """Queue a step."""
        self._queue.append(plan)

    def run_one(self) -> bool:
        """Let the device run the oldest queued step; False when there is none."""
        if not self._queue:
            return False
        plan = self._queue.popleft()
        self._results[plan.output.step_seq] = self._run(plan)
        return True

    def result(self, plan: StepPlan) -> StepResult:
        """Return the result of a launched step, running what is queued before it."""
        while plan.output.step_seq not in self._results:
            assert self.run_one(), f"step {plan.output.step_seq} was never launched"
        return self._results.pop(plan.output.step_seq)

    def scrub(self, scrub: Scrub) -> None:
        """Zero blocks and slots, behind everything launched before."""
        while self.run_one():
            pass
        for pool, ids in scrub.blocks.items():
            for block in ids:
                self._memory[pool][block] = [None] * self._limits.block_size
                self._unclean.discard((pool, block))
        for slot in scrub.slots:
            self._slots.pop(slot, None)
            self._unclean.discard(("slot", slot))

    # Device side

    def _run(self, plan: StepPlan) -> StepResult:
        sources = self._carries.get(plan.output.step_seq - 1, [])
        remap = [source for source in plan.output.remap if source >= 0]
        assert len(remap) == len(set(remap)), "two rows read the same carry"
        assert plan.output.num_rows == sum(m.num_rows for m in plan.sequences)
        carries: list[_Carry | None] = []
        rows = []
        for meta, source in zip(plan.sequences, plan.output.remap, strict=True):
            carry = sources[source] if source >= 0 else None
            rows.append(self._run_sequence(meta, carry, source))
            carries.append(rows[-1].carry)
        self._carries = {plan.output.step_seq: carries}
        self.num_rows += plan.output.num_rows
        return StepResult(
            step_seq=plan.output.step_seq,
            token_ids=tuple(row.token_ids for row in rows),
            status=tuple(row.status for row in rows),
            logprobs=tuple(row.logprobs for row in rows),
            prompt_logprobs=tuple(row.prompt_logprobs for row in rows),
            start=tuple(row.start for row in rows),
        )

    def _run_sequence(self, meta: SequenceMetadata, carry: _Carry | None, source: int) -> _Row:
        slot = self._enter(meta)
        if source >= 0:
            assert not meta.token_ids, "a row has two sources"
            if carry is None or carry.uid != meta.uid:
                return _Row(meta.start, RowStatus.BAD_SOURCE, (0,) if meta.samples else ())
            meta = replace(meta, token_ids=(carry.token_id,))
        start, token_ids = meta.start if carry is None else carry.start, meta.token_ids
        assert start <= meta.start and meta.kv_len == meta.start + meta.num_rows
        expected = 1 if meta.phase is Phase.VERIFY else meta.num_rows
        assert len(token_ids) == expected, "token ids and rows differ"
        if ("slot", meta.slot) in self._unclean or self._poison(meta):  # it stays not finite
            self._mark_unclean(slot, meta)
            return _Row(start, RowStatus.NON_FINITE, (0,) if meta.samples else ())
        state = self._read_prefix(slot, meta, start)
        if meta.phase is Phase.VERIFY:
            return self._verify(slot, meta, start, token_ids[0], state)
        return self._chunk(slot, meta, token_ids, state)

    def _enter(self, meta: SequenceMetadata) -> _Slot:
        if meta.admission is not None:
            assert ("slot", meta.slot) not in self._unclean, f"slot {meta.slot} was not scrubbed"
            tables: dict[str, list[int]] = {pool: [] for pool in self._memory}
            self._slots[meta.slot] = _Slot(
                meta.uid, meta.generation, meta.admission.seed, meta.admission.prompt_len, tables
            )
        slot = self._slots[meta.slot]
        assert (slot.uid, slot.generation) == (meta.uid, meta.generation), (
            f"slot {meta.slot} belongs to {slot.uid}/{slot.generation}, "
            f"but {meta.uid}/{meta.generation} runs in it"
        )
        for delta in meta.blocks:
            table = slot.tables[delta.pool]
            assert len(table) == delta.first, f"a gap in the block table of request {meta.uid}"
            for block in delta.block_ids:
                assert (delta.pool, block) not in self._unclean, f"block {block} was not scrubbed"
            table.extend(delta.block_ids)
        return slot

    def _read_prefix(self, slot: _Slot, meta: SequenceMetadata, start: int) -> int:
        """Read positions `0 .. start - 1` in every pool and return the hash they add up to."""
        state = 1
        for position in range(start):
            index, offset = divmod(position, self._limits.block_size)
            entries = {
                self._memory[pool][table[index]][offset] for pool, table in slot.tables.items()
            }
            assert len(entries) == 1, f"pools differ at position {position} of request {meta.uid}"
            entry = entries.pop()
            assert entry is not None and entry[0] == position, (
                f"request {meta.uid} reads {entry} at position {position}"
            )
            state = mix(state, entry[1])
            assert entry[2] == state, (
                f"foreign content at position {position} of request {meta.uid}"
            )
        if start:
            assert slot.state_at.get(start) == state, f"slot state of request {meta.uid} is stale"
        return state

    def _write(self, slot: _Slot, position: int, token_id: int, state: int) -> int:
        """Write one position and return the hash with it."""
        state = mix(state, token_id)
        index, offset = divmod(position, self._limits.block_size)
        for pool, table in slot.tables.items():
            self._memory[pool][table[index]][offset] = (position, token_id, state)
        slot.state_at[position + 1] = state
        return state

    def _chunk(
        self, slot: _Slot, meta: SequenceMetadata, token_ids: Sequence[int], state: int
    ) -> _Row:
        known = []
        for row, token_id in enumerate(token_ids):
            state = self._write(slot, meta.start + row, token_id, state)
            if row < len(meta.prompt_targets):
                value = logprob_of(state, meta.prompt_targets[row])
                known.append(PromptLogprob(meta.start + row + 1, value))
        if meta.phase is Phase.CHUNK:
            return _Row(meta.start, RowStatus.OK, (), prompt_logprobs=tuple(known))
        token_id = next_token(state, slot.seed, self._vocab_size)
        logprobs = () if meta.logprobs is None else (logprob_of(state, token_id),)
        carry = _Carry(meta.uid, meta.kv_len, token_id)
        return _Row(meta.start, RowStatus.OK, (token_id,), logprobs, tuple(known), carry)

    def _verify(
        self, slot: _Slot, meta: SequenceMetadata, start: int, fed: int, state: int
    ) -> _Row:
        """Feed the last token and its drafts; accept drafts up to the first wrong one."""
        accepted: list[int] = []
        logprobs = []
        right = True
        for row in range(1 + meta.num_drafts):
            state = self._write(slot, start + row, fed, state)
            target = next_token(state, slot.seed, self._vocab_size)
            if right:
                accepted.append(target)
                logprobs.append(logprob_of(state, target))
            good = self._accepts(meta.uid, start + row + 1)
            right = right and good
            fed = target if good else (target + 1) % self._vocab_size
        carry = _Carry(meta.uid, start + len(accepted), accepted[-1])
        shown = () if meta.logprobs is None else tuple(logprobs)
        return _Row(start, RowStatus.OK, tuple(accepted), shown, (), carry)

    def _mark_unclean(self, slot: _Slot, meta: SequenceMetadata) -> None:
        for pool, table in slot.tables.items():
            self._unclean |= {(pool, block) for block in table}
        self._unclean.add(("slot", meta.slot))
