"""Invariants of verify lengths: what a budget may know, and what the device makes of it."""

from __future__ import annotations

import numpy as np

from deepinfer_core.plans import RowStatus, StepKind
from deepinfer_core.testing.world import World
from deepinfer_core.testing.world_watch import Planned

__all__ = ["budgets", "verified"]


def budgets(world: World) -> None:
    """A step has room for as many drafts as the planner said, which knew no newer record.

    It knows what the step before the last launched one told of a sequence in this generation, and
    nothing else; what it does not know it is not given as known.
    """
    for planned in world.fresh.planned:
        plan, asked = planned.plan, planned.asked
        available = plan.rows.num_drafts
        room = plan.output.num_rows - int((plan.rows.num_rows - available).sum())
        if plan.output.kind is StepKind.PREFILL or asked is None:
            assert room == available.sum(), f"{room} of {available} drafts, and nobody chose"
            assert not (world.watched_planner and room), "the planner was not asked"
            continue
        assert np.array_equal(asked.available, available), f"{asked} for {available} drafts"
        wanted = min(asked.budget.total, int(available.sum()))
        assert room == wanted, f"room for {room} drafts, the planner said {wanted}"
        _check_known(planned)


def _check_known(planned: Planned) -> None:
    asked, rows = planned.asked, planned.plan.rows
    assert asked is not None
    for row, expected in enumerate(planned.records):
        who = f"{rows.uid[row]}/{rows.generation[row]} in step {planned.plan.output.step_seq}"
        known = bool(asked.known[row])
        assert known is (expected is not None), f"a record of {who} is known: {known}"
        if expected is not None:
            found = asked.survival[row]
            assert np.array_equal(found, expected), f"{who} goes by {found}, not {expected}"


def verified(world: World) -> None:
    """The device verifies as many drafts as there is room for, of each sequence at most its own.

    It yields no more tokens and writes no position beyond what was reserved; they are counted.
    """
    for item in world.fresh.settled:
        plan, result = item.planned.plan, item.result
        rows, lengths = plan.rows, result.num_verified
        room = plan.output.num_rows - int((rows.num_rows - rows.num_drafts).sum())
        assert int(lengths.sum()) == room, f"{lengths} verified, there is room for {room}"
        assert ((lengths >= 0) & (lengths <= rows.num_drafts)).all(), f"{lengths} of {rows.data}"
        assert (result.num_tokens <= 1 + lengths).all(), f"{result.num_tokens} of {lengths}"
        good = (result.status == RowStatus.OK) & (rows.num_replay == 0)
        end = result.start + rows.num_rows - rows.num_drafts + lengths
        assert (end <= rows.start + rows.num_rows)[good].all(), f"ends {end}, {rows.data}"
    total = world.scheduler.totals.verified_tokens
    assert total == world.num_verified, f"{total} drafts counted, {world.num_verified} verified"
