"""A migration that goes wrong: a rank dies, raises, loses touch, or wants to stop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from migration_experts import (
    EXPERT_BYTES,
    NUM_LAYERS,
    Map,
    Model,
    expert,
    finish,
    layout_of,
    maps_for,
)
from migration_processes import DIED, die, meet

from deepinfer_eplb.errors import EplbError, MigrationError
from deepinfer_eplb.maps import Layout
from deepinfer_eplb.migrate import Vote, vote_over

pytestmark = pytest.mark.dist
OnRanks = Callable[..., list[Any]]

LAYOUT = layout_of(4)
ALL = range(4)
# After a death, ranks that do not talk to the dead one find out after so long. Living ranks must be
# quicker than that, on a machine with other work too.
TIMEOUT = 5.0


class Fault(Exception):
    """What a test makes a rank raise."""


def on_call(number: int, before: Callable[[], None], function: Callable[..., Any]) -> Any:
    """Return a function that does something else before its call of this number."""
    calls = itertools.count(1)

    def called(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            before()
        return function(*arguments, **options)

    return called


def after_ready(number: int, then: Callable[[], None]) -> Callable[[Vote], int]:
    """Return a vote that does something when the group has said READY for this time."""
    assert dist.group.WORLD is not None
    vote, times = vote_over(dist.group.WORLD, TIMEOUT), itertools.count(1)

    def agree(mine: Vote) -> int:
        least = vote(mine)
        if least == Vote.READY and next(times) == number:
            then()
        return least

    return agree


def run(model: Model, most_layers: int = NUM_LAYERS) -> tuple[list[int], str]:
    """Advance and step until layers are installed or something fails; return both."""
    found: list[int] = []
    try:
        for step in itertools.count():
            if not model.migrator.busy or len(found) == most_layers:
                return found, ""
            found += model.migrator.advance(step)
            model.check()
            model.step(step)
    except MigrationError as error:
        return found, str(error)
    except RuntimeError as error:  # of the step: its own collective fails when a rank has died
        return found, f"in a step: {error}"
    raise AssertionError("the loop ends by itself")


# ---- a rank dies --------------------------------------------------------------------------------


def lose_a_rank(
    rank: int, num_ranks: int, folder: Path, maps: list[Map], dead: int, when: str
) -> dict[str, Any]:
    meet(folder / "hasty", rank, num_ranks, TIMEOUT)
    options = {"bytes_per_step": EXPERT_BYTES[0], "load": expert, "timeout_seconds": TIMEOUT}
    model = Model(maps[0], LAYOUT, rank, **options)
    migrator = model.migrator
    if rank == dead and when == "after a vote":
        migrator._agree = after_ready(2, die)
    migrator.start(maps[1])
    if rank == dead and when == "in a transfer":
        dist.batch_isend_irecv = on_call(7, die, dist.batch_isend_irecv)
    if rank == dead and when == "before a vote":
        migrator._agree = on_call(7, die, migrator._agree)
    if rank == dead and when == "in a step":
        # A vote and a sum for each layer make up a round of the loop.
        dist.all_reduce = on_call(7 * (1 + NUM_LAYERS) + 3, die, dist.all_reduce)
    installed, failure = run(model)
    broken = migrator.installed_map
    if not migrator.busy:
        with pytest.raises(MigrationError, match="call `recover`"):
            migrator.advance(1000)
        with pytest.raises(MigrationError, match="cannot start: a migration failed"):
            migrator.start(maps[1])
    model.check()
    left = [each for each in ALL if each != dead]
    group = meet(folder / "second", left.index(rank), len(left))
    migrator.recover(group, left)
    model.check()
    recovered = migrator.installed_map
    with pytest.raises(Exception, match=rf"The plan uses ranks \[{dead}\], which are not in"):
        migrator.start(maps[1])
    # Until the end some experts have only the dead rank, so no step can run in between.
    migrator.start(maps[2], Layout(4, 2, LAYOUT.slots_per_rank, (dead,)))
    for step in itertools.count(2000):
        if not migrator.busy:
            break
        migrator.advance(step)
        model.check()
    assert (migrator.installed_map == maps[2]).all()
    model.step(3000)
    return {
        "installed": installed,
        "failure": failure,
        "broken": broken.tolist(),
        "recovered": recovered.tolist(),
    }


@pytest.mark.parametrize(
    ("when", "dead"),
    [("before a vote", 0), ("after a vote", 1), ("in a transfer", 2), ("in a step", 3)],
)
def test_ranks_that_are_left_agree_on_the_map_and_go_on(
    on_ranks: OnRanks, when: str, dead: int
) -> None:
    maps = maps_for(dead, LAYOUT, LAYOUT, Layout(4, 2, LAYOUT.slots_per_rank, (dead,)))
    answers = on_ranks(lose_a_rank, 4, maps, dead, when)
    assert answers[dead] == DIED
    alive = [each for each in answers if each != DIED]
    for answer in alive:
        assert answer["failure"]
        rows = answer["recovered"]
        assert rows == alive[0]["recovered"]
        # Each layer is wholly old or new, and new up to one layer, in order.
        new = [row == maps[1][layer].tolist() for layer, row in enumerate(rows)]
        old = [row == maps[0][layer].tolist() for layer, row in enumerate(rows)]
        assert new == sorted(new, reverse=True)
        assert all(a != b for a, b in zip(new, old, strict=True))
        assert 0 < sum(new) < NUM_LAYERS
        assert len(answer["installed"]) <= sum(new) <= len(answer["installed"]) + 1
    if when == "before a vote":
        assert all(f"layer {len(a['installed'])}: the vote failed" in a["failure"] for a in alive)


# ---- a rank loses touch in a vote ---------------------------------------------------------------


def lose_touch(
    rank: int, num_ranks: int, folder: Path, maps: list[Map], lost: list[int]
) -> tuple[int, int, str]:
    def fail() -> None:
        raise Fault("the answer was lost")

    model = Model(maps[0], LAYOUT, rank)
    if rank in lost:
        model.migrator._agree = after_ready(2, fail)
    model.migrator.start(maps[1])
    installed: list[int] = []
    failure = ""
    for step in itertools.count():
        try:
            installed += model.migrator.advance(step)
        except MigrationError as error:
            failure = str(error)
        if failure or len(installed) == 2:
            break
        if lost == list(ALL) and len(installed) == 2:
            raise AssertionError("no rank can know that the layer may be installed")
    before = len(installed)
    model.migrator.recover(meet(folder / "second", rank, num_ranks), ALL)
    model.check()
    model.step(1000)
    after = int((model.migrator.installed_map == maps[1]).all(1).sum())
    model.migrator.start(maps[1])
    finish(model, itertools.count(2000))
    return before, after, failure


def test_rank_in_doubt_installs_what_another_has_installed(on_ranks: OnRanks) -> None:
    answers = on_ranks(lose_touch, 4, maps_for(20, LAYOUT, LAYOUT), [1, 3])
    assert [before for before, _, _ in answers] == [2, 1, 2, 1]
    assert [after for _, after, _ in answers] == [2, 2, 2, 2]
    assert "Rank 1, step" in answers[1][2]
    assert "layer 1: the vote failed: the answer was lost" in answers[1][2]


def test_layer_that_no_rank_has_installed_stays_old(on_ranks: OnRanks) -> None:
    answers = on_ranks(lose_touch, 4, maps_for(21, LAYOUT, LAYOUT), list(ALL))
    assert [each[:2] for each in answers] == [(1, 1)] * 4


def drift_apart(rank: int, num_ranks: int, folder: Path, maps: list[Map]) -> str:
    model = Model(maps[rank], layout_of(num_ranks), rank)
    with pytest.raises(MigrationError, match="ranks have different live maps"):
        model.migrator.start(maps[0])
    with pytest.raises(MigrationError, match=r"hold different maps, digests \[") as caught:
        model.migrator.recover(meet(folder / "second", rank, num_ranks), range(num_ranks))
    return str(caught.value)


def test_maps_that_differ_otherwise_are_an_error(on_ranks: OnRanks) -> None:
    answers = on_ranks(drift_apart, 2, maps_for(22, layout_of(2), layout_of(2)))
    assert answers[0].partition(":")[0] == "Rank 0"


# ---- a rank raises ------------------------------------------------------------------------------


def raise_in_a_transfer(
    rank: int, num_ranks: int, folder: Path, maps: list[Map]
) -> tuple[list[int], str]:
    def fail() -> None:
        raise Fault("out of memory")

    model = Model(maps[0], LAYOUT, rank, bytes_per_step=EXPERT_BYTES[0])
    real = dist.batch_isend_irecv
    if rank == 2:
        dist.batch_isend_irecv = on_call(5, fail, real)
    model.migrator.start(maps[1])
    found = run(model)
    model.check()
    model.step(999)
    dist.batch_isend_irecv = real
    model.migrator.recover(meet(folder / "second", rank, num_ranks), ALL)
    model.migrator.start(maps[1])
    finish(model, itertools.count(1000))
    assert (model.migrator.installed_map == maps[1]).all()
    return found


def test_rank_that_raises_stops_all_before_the_same_step(on_ranks: OnRanks) -> None:
    answers = on_ranks(raise_in_a_transfer, 4, maps_for(23, LAYOUT, LAYOUT))
    assert all(installed == answers[0][0] for installed, _ in answers)
    assert 0 < len(answers[0][0]) < NUM_LAYERS
    where = answers[0][1].partition(":")[0].removeprefix("Rank 0, ")
    for rank, (_, failure) in enumerate(answers):
        said = "out of memory" if rank == 2 else "another rank reported a fault"
        assert failure.startswith(f"Rank {rank}, {where}: {said}. This layer and later ones keep")


def read_experts(
    rank: int, num_ranks: int, folder: Path, maps: list[Map], what: str
) -> tuple[int, str]:
    """Ranks 0 and 1 of three go on alone: what only rank 2 held is read."""
    left, reads = [0, 1], []

    def load(layer: int, number: int) -> dict[str, torch.Tensor]:
        reads.append((layer, number))
        tensors = dict(expert(layer, number))
        if what == "wrong" and rank == 1:
            tensors["scale"] = tensors["scale"][:2]
        return tensors

    layout = Layout(3, 1, 7)
    model = Model(maps[0], layout, rank, ranks=left, load=None if what == "none" else load)
    try:
        model.migrator.start(maps[1], Layout(3, 1, 7, (2,)))
        while model.migrator.busy:
            model.migrator.advance(len(reads) + 100 * (model.migrator._step or 1))
            model.check()
    except MigrationError as error:
        return len(reads), str(error)
    model.step(1)
    return len(reads), ""


def test_experts_of_a_rank_outside_the_group_are_read(on_ranks: OnRanks) -> None:
    maps = maps_for(24, Layout(3, 1, 7), Layout(3, 1, 7, (2,)))
    # Some experts are on rank 2 alone.
    for layer in range(NUM_LAYERS):
        maps[0][layer] = [*range(7), *range(1, 8), *range(3, 10)]
    assert all(number > 0 and not text for number, text in on_ranks(read_experts, 2, maps, "right"))


def test_lost_experts_without_a_checkpoint_are_named(on_ranks: OnRanks) -> None:
    maps = maps_for(25, Layout(3, 1, 7), Layout(3, 1, 7, (2,)))
    for layer in range(NUM_LAYERS):
        maps[0][layer] = [*range(7), *range(1, 8), *range(3, 10)]
    for _, text in on_ranks(read_experts, 2, maps, "none"):
        assert "No member of the group holds expert 8 of layer 0, nor 7 more experts." in text


def test_wrong_content_of_a_checkpoint_fails_all_ranks(on_ranks: OnRanks) -> None:
    maps = maps_for(26, Layout(3, 1, 7), Layout(3, 1, 7, (2,)))
    for layer in range(NUM_LAYERS):
        maps[0][layer] = [*range(7), *range(1, 8), *range(3, 10)]
        maps[1][layer, :14] = [*range(7), *range(3, 10)]
    answers = on_ranks(read_experts, 2, maps, "wrong")
    assert "another rank reported a fault" in answers[0][1]
    assert "`load` gave torch.float8_e4m3fn [2] for 'scale' of expert 8" in answers[1][1]


def wait_for_a_stuck_rank(rank: int, num_ranks: int, folder: Path, maps: list[Map]) -> str:
    aside = dist.new_group(range(num_ranks))
    options: dict[str, Any] = {"agree": lambda vote: vote, "timeout_seconds": 0.5}
    model = Model(maps[0], layout_of(num_ranks), rank, **options)
    model.migrator.start(maps[1])
    text, steps = "", itertools.count()
    while rank == 0 and not text:  # rank 1 never starts its side of the transfers
        try:
            assert not model.migrator.advance(next(steps))
        except MigrationError as error:
            text = str(error)
        model.check()
    dist.barrier(group=aside)
    return text


def test_transfers_that_do_not_end_are_given_up(on_ranks: OnRanks) -> None:
    answers = on_ranks(wait_for_a_stuck_rank, 2, maps_for(27, layout_of(2), layout_of(2)))
    assert answers[0].startswith("Rank 0, step ")
    assert "Timed out" in answers[0] or "within 0.5 s" in answers[0]


def believe(
    rank: int, num_ranks: int, folder: Path, maps: list[Map], decision: int
) -> tuple[str, bool]:
    options = {"agree": lambda vote: decision, "bytes_per_step": 1.0}
    model = Model(maps[0], layout_of(num_ranks), rank, **options)
    model.migrator.start(maps[1])
    with pytest.raises(MigrationError) as caught:
        model.migrator.advance(3)
    model.check()
    return str(caught.value), bool((model.migrator.installed_map == maps[0]).all())


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (3, "the group installs the layer, and this rank has not said READY"),
        (7, "the vote failed: 7 is not a valid Vote"),
    ],
)
def test_decision_that_cannot_be_right_is_not_followed(
    on_ranks: OnRanks, decision: int, text: str
) -> None:
    for said, unchanged in on_ranks(believe, 2, maps_for(30, layout_of(2), layout_of(2)), decision):
        assert text in said
        assert unchanged


# ---- a rank is called with what cannot be -------------------------------------------------------


def start_with_a_bad_plan(
    rank: int, num_ranks: int, folder: Path, maps: list[Map], bad: object
) -> str:
    model = Model(maps[0], layout_of(num_ranks), rank)
    said = ""
    try:
        model.migrator.start(bad if rank == 0 else maps[1])
    except EplbError as error:
        said = f"{type(error).__name__}: {error}"
    assert not model.migrator.busy
    model.check()
    # All are where they were, and the same group goes on.
    model.migrator.start(maps[1])
    finish(model, itertools.count())
    assert (model.migrator.installed_map == maps[1]).all()
    return said


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((NUM_LAYERS, 14), int), "`physical_to_logical` loses expert 1 of layer 0"),
        (np.full((NUM_LAYERS, 14), 10**9), "`physical_to_logical`[0, 0] is 1000000000"),
        ([[0], [1, 2]], "`physical_to_logical` is no array"),
        (None, "`physical_to_logical` has shape []; needed"),
    ],
)
def test_plan_that_one_rank_refuses_starts_on_none(
    on_ranks: OnRanks, bad: object, message: str
) -> None:
    answers = on_ranks(start_with_a_bad_plan, 2, maps_for(31, layout_of(2), layout_of(2)), bad)
    assert answers[0].startswith("PlanInputError: ") and message in answers[0]
    assert answers[1].startswith("MigrationError: Rank 1 cannot start: ranks [0] refuse the plan")


def give_a_bad_step(
    rank: int, num_ranks: int, folder: Path, maps: list[Map], bad: Any
) -> tuple[str, bool]:
    model = Model(maps[0], layout_of(num_ranks), rank, bytes_per_step=1.0)
    model.migrator.start(maps[1])
    model.migrator.advance(4)
    with pytest.raises(MigrationError) as caught:
        model.migrator.advance(bad if rank == 0 else 5)
    assert model.migrator.vote is Vote.FAULT  # for an engine that exchanges ballots
    model.check()
    unchanged = bool((model.migrator.installed_map == maps[0]).all())
    model.migrator.recover(meet(folder / "second", rank, num_ranks), range(num_ranks))
    model.migrator.start(maps[1])
    finish(model, itertools.count(6))
    return str(caught.value), unchanged


@pytest.mark.parametrize("bad", [4, 3, "5", True])
def test_step_that_does_not_grow_on_one_rank_ends_it_on_all(on_ranks: OnRanks, bad: Any) -> None:
    answers = on_ranks(give_a_bad_step, 2, maps_for(32, layout_of(2), layout_of(2)), bad)
    assert f"`step` is {bad!r} after 4; needed: whole numbers that grow" in answers[0][0]
    assert "another rank reported a fault" in answers[1][0]
    assert [unchanged for _, unchanged in answers] == [True, True]


# ---- a rank wants to stop -----------------------------------------------------------------------


def stop(
    rank: int, num_ranks: int, folder: Path, maps: list[Map], askers: list[int]
) -> tuple[list[tuple[int, ...]], str | None]:
    model = Model(maps[0], LAYOUT, rank, bytes_per_step=EXPERT_BYTES[0])
    model.migrator.abort("before anything")
    assert model.migrator.vote is Vote.WAIT
    model.migrator.start(maps[1])
    found = []
    for step in itertools.count():
        if not model.migrator.busy:
            break
        found.append(model.migrator.advance(step))
        model.check()
        model.step(step)
        if found[-1] == (0,) and rank in askers:  # the next layer begins with all its ranks
            model.migrator.abort("weights are loaded anew")
    stopped = model.migrator.stopped
    # The same group goes on, to where it was before and from there to the end.
    for target in (maps[0], maps[1]):
        model.migrator.start(target)
        finish(model, itertools.count(1000 if target is maps[0] else 2000))
        assert (model.migrator.installed_map == target).all()
    assert model.migrator.stopped is None
    return found, stopped


@pytest.mark.parametrize("askers", [[2], [0, 1, 2, 3]])
def test_end_asked_for_by_one_rank_or_all_ends_it_on_all(
    on_ranks: OnRanks, askers: list[int]
) -> None:
    answers = on_ranks(stop, 4, maps_for(28, LAYOUT, LAYOUT), askers)
    assert all(found == answers[0][0] for found, _ in answers)
    assert 1 <= sum(map(len, answers[0][0])) < NUM_LAYERS
    for rank, (_, stopped) in enumerate(answers):
        asked = rank in askers
        assert stopped == ("weights are loaded anew" if asked else "asked for by another rank")


def stop_too_late(rank: int, num_ranks: int, folder: Path, maps: list[Map]) -> list[Any]:
    """Asked for when the group has all of the last layer and says so, by ballots one step old."""
    decision = Vote.WAIT
    model = Model(maps[0], layout_of(num_ranks), rank, agree=lambda vote: decision)
    found: list[Any] = []
    steps = itertools.count()
    for target in (maps[1], maps[0]):
        model.migrator.start(target)
        installed = 0
        while model.migrator.busy:
            installed += len(model.migrator.advance(next(steps)))
            ballot = torch.tensor(int(model.migrator.vote))
            dist.all_reduce(ballot, op=dist.ReduceOp.MIN)
            decision = Vote(int(ballot))
            last = installed == NUM_LAYERS - 1 and decision is Vote.READY
            if rank == 0 and target is maps[1] and last:
                model.migrator.abort("too late")
                assert model.migrator.vote is Vote.ABORT
        model.check()
        found.append((installed, model.migrator.stopped))
        decision = Vote.WAIT
    return found


def test_end_asked_for_too_late_does_not_end_the_next_migration(on_ranks: OnRanks) -> None:
    answers = on_ranks(stop_too_late, 2, maps_for(33, layout_of(2), layout_of(2)))
    assert answers == [[(NUM_LAYERS, None)] * 2] * 2
