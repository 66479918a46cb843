"""The state-machine test finds planted faults, each within the histories that pass without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_core.scheduler import Scheduler
from deepinfer_core.scheduler import settlement as settlement_module
from deepinfer_core.scheduler.lanes import Lanes
from deepinfer_core.scheduler.prefixes import Prefixes
from deepinfer_core.scheduler.release import DeferredRelease
from deepinfer_core.scheduler.selection import Selection
from deepinfer_core.scheduler.sequence import State
from deepinfer_core.testing import fake_model as fake_model_module
from deepinfer_core.testing.fake_windows import Ring
from deepinfer_core.testing.input_ring import InputRing
from deepinfer_core.testing.scheduler_machine import draw_history, replay

SEED, NUM_HISTORIES = 24, 16

Patch = pytest.MonkeyPatch


def settled_length_where_planned_is_needed(patch: Patch) -> None:
    """Rows and their blocks are computed from L instead of U."""
    real = Lanes.at

    def at(self, slots):
        lane = real(self, slots)
        return lane._replace(inflight=np.zeros_like(lane.inflight))

    patch.setattr(Lanes, "at", at)


def release_without_a_fence(patch: Patch) -> None:
    """What is given back is free at once, also under a step in flight."""
    real = DeferredRelease.drain
    patch.setattr(DeferredRelease, "drain", lambda self, last_settled: real(self, 2**60))


def remap_off_by_one(patch: Patch) -> None:
    """Each row reads the carry of its neighbour."""
    real = Selection._rows_of

    def rows_of(self, slots, **options):
        rows = real(self, slots, **options)
        if self._previous is not None:
            moved = (rows.source + 1) % len(self._previous.plan.rows)
            rows.source = np.where(rows.source >= 0, moved, -1)
        return rows

    patch.setattr(Selection, "_rows_of", rows_of)


def stale_carry(patch: Patch) -> None:
    """A sequence that the last step left out goes on from what the host settled before."""

    def decodable(self, previous_step, max_model_len):
        lane = self.all
        can = self.running & (lane.left > lane.samples)
        return (can & (lane.settled + lane.inflight < max_model_len)).nonzero()[0]

    patch.setattr(Lanes, "decodable", decodable)


def ring_slot_reused_early(patch: Patch) -> None:
    """There is one host buffer for all steps in flight."""
    real = InputRing.__init__
    patch.setattr(InputRing, "__init__", lambda self, num_slots: real(self, 1))


def unsettled_blocks_published(patch: Patch) -> None:
    """Blocks are published up to U instead of L."""
    real = Prefixes.publish

    def unpublished(self, lanes):
        full = (lanes.all.settled + lanes.all.inflight) // self._limits.block_size
        return np.flatnonzero(lanes.live & (full > lanes.all.published))

    def publish(self, sequence):
        slot, settled, more = sequence.slot, sequence.lanes.all.settled, sequence.inflight
        if slot is not None:
            settled[slot] += more
        real(self, sequence)
        if slot is not None:
            settled[slot] -= more

    patch.setattr(Prefixes, "unpublished", unpublished)
    patch.setattr(Prefixes, "publish", publish)


def window_ring_without_margin_for_drafts(patch: Patch) -> None:
    """Refused drafts overwrite the oldest positions that the window still needs."""
    real = Ring.__init__

    def init(self, name, num_slots, length):
        real(self, name, num_slots, min(length, 4) if "window" in name else length)

    patch.setattr(Ring, "__init__", init)


def double_release(patch: Patch) -> None:
    """What a sequence gave back is taken back twice."""
    real = DeferredRelease._give_back

    def give_back(self, entry):
        real(self, entry)
        real(self, entry)

    patch.setattr(DeferredRelease, "_give_back", give_back)


def grammar_advanced_twice(patch: Patch) -> None:
    """A matcher takes committed tokens once more."""
    real = settlement_module.advance

    def advance(sequence, token_ids):
        found = real(sequence, token_ids)
        sequence.constraint.accepted += token_ids
        return found

    patch.setattr(settlement_module, "advance", advance)


def ledger_not_settled_for_preempted(patch: Patch) -> None:
    """Tokens of a sequence that is being preempted stay in flight."""
    real = Scheduler._close

    def close(self, plan):
        step = real(self, plan)
        for sequence, tokens in zip(step.sequences, plan.rows.num_rows.tolist(), strict=True):
            if sequence.state is State.PREEMPTING:
                self._ledger.total_inflight_tokens += tokens
        return step

    patch.setattr(Scheduler, "_close", close)


def last_stop_instead_of_first(patch: Patch) -> None:
    """A run of accepted tokens is cut behind its last stop id."""

    def cut(token_ids, kept, stops):
        counts = np.arange(token_ids.shape[1]) < kept[:, None]
        found = (token_ids[:, :, None] == stops[:, None, :]).any(2) & counts
        stopped = found.any(1)
        last = token_ids.shape[1] - found[:, ::-1].argmax(1)
        return np.where(stopped, last, kept), stopped

    patch.setattr(settlement_module, "_cut_at_stops", cut)


def loaded_window_not_pinned(patch: Patch) -> None:
    """A stored window state may be evicted while the step that loads it is in flight."""
    patch.setattr(Prefixes, "pin", lambda self, resume: None)


def newest_record_instead_of_the_earlier_one(patch: Patch) -> None:
    """A budget knows what was said of the very drafts that it is about."""

    def survival(self, slots):
        return self.survival[0, slots], self.all.num_records[slots] > 0

    patch.setattr(Lanes, "earlier_survival", survival)


def records_kept_across_a_preemption(patch: Patch) -> None:
    """A request that comes back is known by what its slot has."""
    real = Lanes.enter

    def enter(self, slot, **fields):
        real(self, slot, **fields)
        self.all.num_records[slot] = 2 if fields["generation"] else 0

    patch.setattr(Lanes, "enter", enter)


def records_of_the_last_request_in_a_slot(patch: Patch) -> None:
    """A slot goes on with the records that are in it when a new request enters."""
    real = Lanes.enter

    def enter(self, slot, **fields):
        count = 0 if fields["generation"] else self.all.num_records[slot]
        real(self, slot, **fields)
        self.all.num_records[slot] = count

    patch.setattr(Lanes, "enter", enter)


def last_record_stands_for_the_one_before(patch: Patch) -> None:
    """Of the two records of a sequence the older one is lost."""
    real = Lanes.record

    def record(self, slots, survival):
        real(self, slots, survival)
        self.survival[1, slots] = survival

    patch.setattr(Lanes, "record", record)


def more_drafts_than_are_available(patch: Patch) -> None:
    """A step has room for a draft that no sequence has."""
    real = Selection._trim

    def trim(self, rows):
        real(self, rows)
        if self._planner is not None and rows.drafts is not None:
            most = int(rows.drafts.sum())
            rows.num_verified = most + 1 if rows.num_verified is None else rows.num_verified

    patch.setattr(Selection, "_trim", trim)


def budget_of_rows_instead_of_drafts(patch: Patch) -> None:
    """The rows that sequences have anyway are taken off the budget."""
    real = Selection._trim

    def trim(self, rows):
        real(self, rows)
        if rows.num_verified is not None:
            rows.num_verified = max(0, rows.num_verified - len(rows.slots))

    patch.setattr(Selection, "_trim", trim)


def blocks_for_the_budget_alone(patch: Patch) -> None:
    """Blocks are taken for the rows of a step, as if its first sequences got all the drafts."""
    real = Selection._trim

    def trim(self, rows):
        real(self, rows)
        if rows.num_verified is None:
            return
        before = rows.drafts.cumsum() - rows.drafts
        drafts = (rows.num_verified - before).clip(0, rows.drafts)
        size = self._limits.block_size
        missing = (rows.start + 1 + drafts + size - 1) // size
        missing -= self._roster.tables.num_blocks[rows.slots]
        rows.grown = (missing > 0).nonzero()[0]
        rows.missing = missing[rows.grown]

    patch.setattr(Selection, "_trim", trim)


def planned_drafts_counted_as_verified(patch: Patch) -> None:
    """What was verified is counted by the plan, not by the result."""
    real = settlement_module._count

    def count(roster, step, result, num_tokens):
        real(roster, step, replace(result, num_verified=step.plan.rows.num_drafts), num_tokens)

    patch.setattr(settlement_module, "_count", count)


def device_verifies_more_than_there_is_room_for(patch: Patch) -> None:
    """Each sequence gets a draft more than the device has chosen."""
    real = fake_model_module.trimmed

    def more(plan, lengths):
        return real(plan, np.minimum(lengths + 1, plan.rows.num_drafts))

    patch.setattr(fake_model_module, "trimmed", more)


FAULTS: tuple[Callable[[Patch], None], ...] = (
    settled_length_where_planned_is_needed,
    release_without_a_fence,
    remap_off_by_one,
    stale_carry,
    ring_slot_reused_early,
    unsettled_blocks_published,
    window_ring_without_margin_for_drafts,
    double_release,
    grammar_advanced_twice,
    ledger_not_settled_for_preempted,
    last_stop_instead_of_first,
    loaded_window_not_pinned,
    newest_record_instead_of_the_earlier_one,
    records_kept_across_a_preemption,
    records_of_the_last_request_in_a_slot,
    last_record_stands_for_the_one_before,
    more_drafts_than_are_available,
    budget_of_rows_instead_of_drafts,
    blocks_for_the_budget_alone,
    planned_drafts_counted_as_verified,
    device_verifies_more_than_there_is_room_for,
)


def run_histories() -> None:
    for number in range(NUM_HISTORIES):
        replay(draw_history(SEED, number))


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_fault_is_found(monkeypatch, plant):
    plant(monkeypatch)
    # A host that reads a poisoned buffer stumbles over an index.
    with pytest.raises((AssertionError, IndexError)):
        run_histories()


def test_the_same_histories_pass_without_a_fault():
    run_histories()
