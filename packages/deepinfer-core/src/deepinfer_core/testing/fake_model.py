"""A model without arithmetic: it runs `StepPlan`s on memory with canaries and trusts nothing.

The next token is a hash of all tokens before it. A step reads the whole prefix of each sequence
back through block tables built from `StepPlan.tables` alone and compares every position in every
pool, and the slot's windows, with what must stand there. Use after free, a wrong row, a wrong
length, a stale token or a window pruned too early is an `AssertionError` at once, or changes the
hash and with it all tokens that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deepinfer_core.plans import (
    PHASES,
    PLACEHOLDER,
    Masks,
    Phase,
    RowStatus,
    SequenceMetadata,
    StepPlan,
    StepResult,
)
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.fake_memory import BlockPool, StepSpan, ragged
from deepinfer_core.testing.fake_sampler import Carry, Drafter, FakeSampler, Sampled
from deepinfer_core.testing.fake_trim import Confidence, trimmed
from deepinfer_core.testing.fake_windows import SlotWindows
from deepinfer_core.testing.reference import chain_rows

__all__ = ["Checks", "FakeModel"]

Checks = Literal["all", "window", "none"]
_VERIFY, _CHUNK = PHASES.index(Phase.VERIFY), PHASES.index(Phase.CHUNK)


@dataclass(frozen=True, slots=True, eq=False)
class _Fed:
    """What the rows of a step feed, corrected by the carry."""

    start: np.ndarray  # [R]
    status: np.ndarray  # [R]
    token_ids: np.ndarray  # [T]


class FakeModel:
    """Device state of one rank. Steps run in the order of their calls: forward, then sample."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        vocab_size: int = 50,
        accepts: Drafter = 1.0,
        confidence: Confidence | None = None,
        poison: Callable[[SequenceMetadata], bool] | None = None,
        checks: Checks = "all",
    ) -> None:
        """Make a model with an empty cache.

        Args:
            limits: the scheduler's.
            vocab_size: tokens are below this; at least 2.
            accepts: (uid, position) -> whether the draft for a position of a request is right, or
                the share of right drafts; 0.0 is a drafter that is always wrong.
            confidence: the chance of each draft if those before it pass; it has no influence on
                what is right. None for a drafter that tells none: all drafts are equal then.
            poison: whether a sequence's values are not finite in a step; None for never.
            checks: "all" compares the whole prefix, "window" its last window, "none" nothing; the
                tokens are the same.
        """
        self.limits, self.checks, self.poison = limits, checks, poison
        num_slots = limits.num_slots + limits.num_stored
        self.sampler = FakeSampler(num_slots, limits.max_drafts, vocab_size, accepts, confidence)
        self.pools = {n: BlockPool(n, count, limits) for n, count in limits.num_blocks.items()}
        self._first_pool = next(iter(self.pools.values()))
        self.windows = SlotWindows(limits, num_slots)
        self.owner = np.full((3, num_slots), -1, dtype=np.int64)  # uid, generation, stamp
        self.length = np.zeros(num_slots, dtype=np.int64)  # positions of a sequence that are final
        self.unclean_slots: set[int] = set()
        self._lost_slots: set[int] = set()  # their sequences missed a step
        self._num_stamps = 0
        self._carry = Carry.empty(limits.max_drafts)
        self._open: tuple[StepPlan, Sampled] | None = None
        self.num_rows = 0

    def forward(self, plan: StepPlan) -> None:
        """Run a step but for its sampling.

        Raises:
            AssertionError: the step before was not sampled, or the plan or what it reads is wrong.
        """
        assert self._open is None, "the sampling of the step before was not launched"
        self._enter(plan)
        planned, lengths = plan.rows.num_drafts, self.sampler.lengths(plan)
        if plan.trims:
            plan = trimmed(plan, lengths)
        fed = self._correct(plan)
        self._poison(plan, fed)
        sampled = self._compute(plan, fed, planned)
        for source, target in plan.output.window_saves:
            self._copy_slot(source, target)
        self._open = (plan, sampled)
        self.num_rows += plan.output.num_rows

    def sample(self, masks: Mapping[int, Masks] | None = None) -> StepResult:
        """Sample the step whose forward ran last, leave its carry, and return its result.

        Args:
            masks: place in the plan -> what its rows may yield, behind all drafts that the plan
                has, trimmed ones included.
        """
        assert self._open is not None, "sampling without a forward before it"
        plan, sampled = self._open
        self._open = None
        result, self._carry = self.sampler.sample(plan, sampled, masks or {})
        known = np.flatnonzero(result.status != RowStatus.BAD_SOURCE)
        self.length[plan.rows.slot[known]] = self._carry.length[known]
        return result

    def lose(self, plan: StepPlan) -> None:
        """Take the place of a step that failed: its sequences entered, what they wrote is unclean.

        Their later rows end as BAD_SOURCE.
        """
        self._enter(plan)
        for row, slot in enumerate(plan.rows.slot.tolist()):
            self._lost_slots.add(slot)
            self._taint(plan, row, int(plan.rows.start[row]))
        self._carry = Carry.empty(self.limits.max_drafts)

    def arrays(self) -> Iterator[np.ndarray]:
        """Iterate over all device state that is an array."""
        for pool in self.pools.values():
            yield from (pool.table, pool.table_writer, pool.position, pool.token, pool.hash)
            yield from (pool.writer, pool.unclean)
        yield from self.windows.arrays()
        yield from (self.owner, self.length, *self.sampler.arrays())

    def scrub(self, blocks: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Zero blocks and slots."""
        for name, ids in blocks.items():
            self.pools[name].scrub(ids)
        for slot in slots:
            self.unclean_slots.discard(slot)
            self.windows.clear(slot)

    # Entering a step

    def _enter(self, plan: StepPlan) -> None:
        """Check the plan by itself, then apply admissions, stored windows and table entries."""
        rows, output = plan.rows, plan.output
        most, verify = int(rows.num_rows.sum()), rows.phase == _VERIFY
        least = len(rows) if verify.all() else most  # drafts may be trimmed where all decode
        assert least <= output.num_rows <= most == len(plan.token_ids), (
            f"step {output.step_seq} counts {output.num_rows} rows, its sequences "
            f"{most}, its tokens {len(plan.token_ids)}"
        )
        assert (rows.num_rows == 1 + rows.num_drafts)[verify].all(), "rows and drafts differ"
        assert (rows.num_drafts <= self.limits.max_drafts).all(), "more drafts than there are"
        assert len(np.unique(rows.slot)) == len(rows), "two sequences share a slot"
        sources = rows.source[rows.source >= 0]
        assert len(np.unique(sources)) == len(sources), "two rows read the same carry"
        for place, extras in plan.extras.items():
            if extras.admission is not None:
                self._admit(int(rows.slot[place]), int(rows.uid[place]), plan, place)
        wrong = (self.owner[0, rows.slot] != rows.uid) | (
            self.owner[1, rows.slot] != rows.generation
        )
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            uid, generation, _ = self.owner[:, rows.slot[row]].tolist()
            raise AssertionError(
                f"slot {rows.slot[row]} belongs to {uid}/{generation}, but "
                f"{rows.uid[row]}/{rows.generation[row]} runs in it"
            )
        for source, target in output.window_loads:
            assert source not in self.unclean_slots, f"stored window {source} is not finite"
            self._copy_slot(source, target)
        for name, delta in plan.tables.items():
            assert np.isin(delta.slots, rows.slot).all(), "a table entry of nobody in the step"
            self.pools[name].apply(delta)

    def _admit(self, slot: int, uid: int, plan: StepPlan, place: int) -> None:
        admission = plan.extras[place].admission
        assert admission is not None
        assert slot not in self.unclean_slots, f"slot {slot} was not scrubbed"
        self._lost_slots.discard(slot)
        self.windows.clear(slot)
        for pool in self.pools.values():
            pool.clear([slot])
        self._num_stamps += 1
        self.owner[:, slot] = uid, int(plan.rows.generation[place]), self._num_stamps
        self.length[slot] = plan.rows.start[place]
        self.sampler.admit(slot, admission)

    def _copy_slot(self, source: int, target: int) -> None:
        self.windows.copy(source, target)
        self.length[target] = self.length[source]
        (self.unclean_slots.add if source in self.unclean_slots else self.unclean_slots.discard)(
            target
        )

    def _correct(self, plan: StepPlan) -> _Fed:
        """Take start and tokens from the carry where a row names a source."""
        rows, carry = plan.rows, self._carry
        carried = rows.source >= 0
        owner, place = ragged(rows.num_rows)
        held = plan.token_ids == PLACEHOLDER
        assert (held == carried[owner]).all(), "a row has two sources, or none"
        inside = ~carried[owner]
        legal = (plan.token_ids >= 0) & (plan.token_ids < self.sampler.vocab_size)
        assert legal[inside].all(), f"an illegal id is fed: {plan.token_ids[inside & ~legal][:1]}"
        assert (rows.phase[carried] == _VERIFY).all(), "a chunk reads the carry"
        lost = np.isin(rows.slot, list(self._lost_slots))
        if not carried.any():
            status = np.where(lost, RowStatus.BAD_SOURCE, RowStatus.OK).astype(np.int64)
            return _Fed(rows.start.copy(), status, plan.token_ids)
        good = carried & (rows.source < len(carry.tag))
        good[good] = carry.tag[rows.source[good]] == self.owner[2, rows.slot[good]]
        start = rows.start.copy()
        start[good] = carry.length[rows.source[good]]
        assert (start <= rows.start).all(), "a sequence is longer than its upper bound"
        token_ids = plan.token_ids.copy()
        supplied = good[owner]
        token_ids[supplied] = carry.token_ids[rows.source[owner[supplied]], place[supplied]]
        status = np.where((carried & ~good) | lost, RowStatus.BAD_SOURCE, RowStatus.OK).astype(
            np.int64
        )
        return _Fed(start, status, token_ids)

    def _poison(self, plan: StepPlan, fed: _Fed) -> None:
        """Find rows whose values are not finite; what they write, and their slot, is unclean."""
        rows, bad = plan.rows, set()
        if self.unclean_slots:
            bad |= set(np.flatnonzero(np.isin(rows.slot, list(self.unclean_slots))).tolist())
        if self.poison is not None:
            bad |= {row for row, meta in enumerate(plan.sequences) if self.poison(meta)}
        for row in bad:
            if fed.status[row] != RowStatus.OK:
                continue
            fed.status[row] = RowStatus.NON_FINITE
            self._taint(plan, row, int(fed.start[row]))

    def _taint(self, plan: StepPlan, row: int, start: int) -> None:
        slot = int(plan.rows.slot[row])
        write, end = start + plan.rows.num_replay[row], start + plan.rows.num_rows[row]
        self.unclean_slots.add(slot)
        for pool in self.pools.values():
            pool.taint(slot, int(write), int(end))

    # Running the rows

    def _compute(self, plan: StepPlan, fed: _Fed, planned: np.ndarray) -> Sampled:
        rows = plan.rows
        live = np.flatnonzero(fed.status == RowStatus.OK)
        start, slot, num_rows = fed.start[live], rows.slot[live], rows.num_rows[live]
        write = start + rows.num_replay[live]
        off = np.flatnonzero(start != self.length[slot])
        assert not len(off), (
            f"request {rows.uid[live][off[0]]} starts at {start[off[0]]}, but the device stands "
            f"at {self.length[slot[off[0]]]}"
        )
        stamp, end = self.owner[2, slot], start + num_rows
        span = StepSpan(rows.uid[live], slot, stamp, start, write, end)
        self._check_rows(plan)
        owner, _ = ragged(rows.num_rows)
        alive = fed.status[owner] == RowStatus.OK
        tokens = fed.token_ids[alive]
        if self.checks != "none":
            self._verify(span)
            self._check_history(plan)
        hashes = chain_rows(self._first_pool.state_before(slot, start), tokens, num_rows)
        row, offset = ragged(num_rows)
        position = start[row] + offset
        if self.checks != "none":
            tail = rows.tail_start[live]
            self.windows.check(span, rows.window_start[live], tail, self._first_pool)
            self._check_replayed(span, row, position, hashes)
            self.windows.write(span, tail, row, position, hashes)
        written = np.flatnonzero(position >= write[row])
        for pool in self.pools.values():
            if self.checks != "none":
                pool.claim(span)
            pool.write(slot[row[written]], position[written], tokens[written], hashes[written])
        self.length[slot] = span.end  # sampling takes rejected drafts back
        every = np.zeros(len(fed.token_ids), dtype=np.uint64)
        every[alive] = hashes
        tag = self.owner[2, rows.slot]
        return Sampled(fed.start, fed.status, fed.token_ids, every, tag, planned)

    def _check_rows(self, plan: StepPlan) -> None:
        """Check that the numbers of a row fit each other."""
        rows = plan.rows
        verify = rows.phase == _VERIFY
        assert (rows.num_rows > 0).all(), "a sequence without rows"
        assert int(rows.num_rows.sum()) == plan.output.num_rows, "the device chose other numbers"
        assert (rows.num_drafts[~verify] == 0).all(), "a chunk with drafts"
        replay = rows.num_replay
        assert (replay[verify] == 0).all() and (replay < rows.num_rows).all(), (
            "replay without a computed row"
        )
        last = rows.start + rows.num_rows - 1
        tail = (rows.tail_start <= last) | (rows.phase == _CHUNK)
        assert tail.all(), "a sampled row skips the late layers"
        for place, extras in plan.extras.items():
            if extras.prompt_logprobs is not None and extras.prompt_targets:
                assert rows.tail_start[place] <= rows.start[place], "a scored row skips late layers"

    def _verify(self, span: StepSpan) -> None:
        """Read the prefixes back; what replayed rows stand on belongs to them."""
        first = np.zeros_like(span.start)
        if self.checks == "window":
            first = np.maximum(span.start - self.limits.window, 0)
        found = [pool.verify(span, first) for pool in self.pools.values()]
        for pool, hashes in zip(self.pools, found, strict=True):
            differs = np.flatnonzero(hashes != found[0])
            assert not len(differs), (
                f"foreign content: pool {pool!r} holds another prefix of request "
                f"{span.uid[differs[0]]} than the first one"
            )

    def _check_history(self, plan: StepPlan) -> None:
        """Compare the ids before the first position of entering sequences with their blocks."""
        for place, extras in plan.extras.items():
            if extras.admission is None or not self.limits.history_len:
                continue
            start, uid = int(plan.rows.start[place]), plan.rows.uid[place]
            length = min(self.limits.history_len, start)
            slot, position = plan.rows.slot[[place] * length], np.arange(start - length, start)
            block = self._first_pool.blocks_of(slot, position)
            held = self._first_pool.token[block, position % self.limits.block_size].tolist()
            assert list(extras.admission.history) == held, (
                f"history of request {uid} is {extras.admission.history}, its blocks hold {held}"
            )

    def _check_replayed(
        self, span: StepSpan, row: np.ndarray, position: np.ndarray, hashes: np.ndarray
    ) -> None:
        """Compare replayed rows with the blocks of the hit, which they must not write."""
        replayed = np.flatnonzero(position < span.write[row])
        if not len(replayed):
            return
        held = self._first_pool.hash_at(span.slot[row[replayed]], position[replayed])
        same = held == hashes[replayed]
        assert same.all(), (
            f"request {span.uid[row[replayed]][~same][0]} replays another token than its hit "
            f"has at position {position[replayed][~same][0]}"
        )
