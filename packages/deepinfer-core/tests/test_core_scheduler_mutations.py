"""The state-machine test finds planted faults, each within the histories that pass without one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from deepinfer_core.scheduler import Scheduler
from deepinfer_core.scheduler import settlement as settlement_module
from deepinfer_core.scheduler.lanes import Lanes
from deepinfer_core.scheduler.prefixes import Prefixes
from deepinfer_core.scheduler.release import DeferredRelease
from deepinfer_core.scheduler.selection import Selection
from deepinfer_core.scheduler.sequence import State
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
