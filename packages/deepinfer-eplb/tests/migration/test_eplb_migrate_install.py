"""A migration that goes well: slots, maps, steps in between, throttle, agreement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from migration_experts import (
    EXPERT_BYTES,
    NUM_EXPERTS,
    NUM_LAYERS,
    Map,
    Model,
    finish,
    layout_of,
    maps_for,
)

from deepinfer_eplb.balance import even_split
from deepinfer_eplb.dispatch import bounds_of
from deepinfer_eplb.errors import EplbError, PlanInputError
from deepinfer_eplb.files import load_map, save_map
from deepinfer_eplb.maps import Layout
from deepinfer_eplb.migrate import ExpertMaps, Migrator, Vote
from deepinfer_eplb.moves import Change, difference
from deepinfer_eplb.plan import Plan, Planner

pytestmark = pytest.mark.dist
OnRanks = Callable[..., list[Any]]


# ---- random pairs of maps -----------------------------------------------------------------------


def go_through_maps(
    rank: int, num_ranks: int, folder: Path, maps: list[Map], layouts: list[Layout]
) -> list[list[tuple[int, ...]]]:
    model = Model(maps[0], layouts[0], rank, bytes_per_step=3 * EXPERT_BYTES[0])
    steps = itertools.count()
    model.check()
    model.step(next(steps))
    found = []
    for target, layout in zip(maps[1:], layouts[1:], strict=True):
        before = model.migrator.installed_map
        model.migrator.start(target, layout)
        found.append(finish(model, steps))
        assert (model.migrator.installed_map == target).all()
        changed = np.flatnonzero((before != target).any(1)).tolist()
        assert [layer for each in found[-1] for layer in each] == changed
        assert all(len(each) <= 1 for each in found[-1])
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_slots_and_steps_are_right_after_every_install(on_ranks: OnRanks, num_ranks: int) -> None:
    # Ranks 1 and 0 are drained in turn, then all are in use again.
    drained = [(), (), (1,), (0,), ()] if num_ranks == 4 else [(), (), (), ()]
    layouts = [layout_of(num_ranks, each) for each in drained]
    maps = maps_for(num_ranks, *layouts)
    answers = on_ranks(go_through_maps, num_ranks, maps, layouts)
    # All ranks install the same layer before the same step.
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0][0]) > NUM_LAYERS


def spoil_a_byte(rank: int, num_ranks: int, folder: Path, maps: list[Map], name: str) -> bool:
    model = Model(maps[0], layout_of(num_ranks), rank)
    model.migrator.start(maps[1])
    finish(model, itertools.count())
    if rank == 1:
        model.weights[1][name][2].view(-1).view(torch.uint8)[-1] ^= 1
    try:
        model.check()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", ["weight", "scale", "bias", "codes", "tag"])
def test_the_check_of_slots_sees_one_bit(on_ranks: OnRanks, name: str) -> None:
    layout = layout_of(2)
    assert on_ranks(spoil_a_byte, 2, maps_for(5, layout, layout), name) == [False, True]


def leave_a_layer_out(rank: int, num_ranks: int, folder: Path, maps: list[Map]) -> int:
    model = Model(maps[0], layout_of(num_ranks), rank)
    model.migrator.start(maps[1])
    finish(model, itertools.count())
    if rank == 0:  # as if this rank had installed later than the others
        model.maps.num_replicas[2].copy_(ExpertMaps.of(maps[0], model.layout).num_replicas[2])
        slots = ExpertMaps.of(maps[0], model.layout).logical_to_physical[2]
        model.maps.logical_to_physical[2].copy_(slots)
    try:
        model.step(100)
    except AssertionError:
        return 1
    return 0


def test_a_step_sees_ranks_with_different_maps(on_ranks: OnRanks) -> None:
    layout = layout_of(2)
    assert on_ranks(leave_a_layer_out, 2, maps_for(6, layout, layout)) == [1, 1]


def shares_alone(rank: int, num_ranks: int, folder: Path, live: Map) -> list[int]:
    model = Model(live, layout_of(num_ranks), rank)
    split = even_split(live, NUM_EXPERTS)
    number = int(np.flatnonzero(np.bincount(live[1]) == 2)[0])
    twice = np.flatnonzero(live[1] == number)
    split[1, twice] = [0.25, 0.75]
    plan = Plan(live, NUM_EXPERTS, model.layout, split, live, np.ones((NUM_LAYERS, NUM_EXPERTS)))
    model.migrator.start(plan)
    installed = finish(model, itertools.count())
    assert installed == [(1,)]
    assert model.migrator.bytes_sent == model.migrator.bytes_received == 0
    for layer in range(NUM_LAYERS):
        found = model.maps.bounds[layer, :, :2].numpy()
        assert np.array_equal(found, bounds_of(plan, layer)), layer
    return model.maps.bounds[1, number].tolist()


def test_new_shares_are_installed_where_nothing_moves(on_ranks: OnRanks) -> None:
    (live,) = maps_for(7, layout_of(2))
    assert on_ranks(shares_alone, 2, live) == [[1 << 30, 1 << 32]] * 2


# ---- throttle -----------------------------------------------------------------------------------


def count_bytes(
    rank: int, num_ranks: int, folder: Path, maps: list[Map], limit: float
) -> tuple[list[tuple[int, int]], int, int, int]:
    model = Model(maps[0], layout_of(num_ranks), rank, bytes_per_step=limit)
    model.migrator.start(maps[1])
    moved: list[tuple[int, int]] = []
    real = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        for each in operations:
            sent, received = moved[-1]
            size = each.tensor.numel() * each.tensor.element_size()
            out = each.op is dist.isend
            moved[-1] = (sent + size, received) if out else (sent, received + size)
        return real(operations)

    dist.batch_isend_irecv = counting
    steps = itertools.count()
    while model.migrator.busy:
        moved.append((0, 0))
        model.migrator.advance(next(steps))
    model.check()
    return moved, model.migrator.bytes_sent, model.migrator.bytes_received, len(moved)


@pytest.mark.parametrize("num_experts", [0.1, 1, 2.5, 1000, math.inf])
def test_ranks_move_no_more_than_the_limit_for_a_step(
    on_ranks: OnRanks, num_experts: float
) -> None:
    layout = layout_of(4)
    maps = maps_for(9, layout, layout)
    limit = num_experts * max(EXPERT_BYTES)
    answers = on_ranks(count_bytes, 4, maps, limit)
    moves = difference(maps[0], maps[1], layout)
    for rank, (moved, sent, received, _) in enumerate(answers):
        assert max(map(max, moved)) <= max(limit, max(EXPERT_BYTES))
        assert [sum(each) for each in zip(*moved, strict=True)] == [sent, received]
        assert sent == moves.num_sent[:, rank] @ EXPERT_BYTES
        assert received == moves.num_received[:, rank] @ EXPERT_BYTES
    steps = answers[0][3]
    busiest = np.maximum(moves.num_sent, moves.num_received).max(1)
    if num_experts <= 1:
        assert steps >= busiest.sum() > NUM_LAYERS
    assert moves.count(Change.RECEIVED).min() > 4
    if num_experts == math.inf:
        assert sum(max(each) > 0 for each in answers[0][0]) == NUM_LAYERS


# ---- agreement ----------------------------------------------------------------------------------


def by_ballot(rank: int, num_ranks: int, folder: Path, maps: list[Map]) -> list[tuple[int, ...]]:
    """An engine's agreement: ballots are exchanged while a step runs, the decision waits."""
    decision = Vote.WAIT
    options = {"agree": lambda vote: decision, "bytes_per_step": 2 * EXPERT_BYTES[0]}
    model = Model(maps[0], layout_of(num_ranks), rank, **options)
    model.migrator.start(maps[1])
    found = []
    for step in itertools.count():
        if not model.migrator.busy:
            break
        found.append(model.migrator.advance(step))
        model.check()
        ballot = torch.tensor(int(model.migrator.vote))
        if rank == 0 and sum(map(len, found)) == 2:
            # After its ballot said READY or WAIT; a layer that the group installs comes first.
            model.migrator.abort("no time")
        model.step(step)
        dist.all_reduce(ballot, op=dist.ReduceOp.MIN)
        decision = Vote(int(ballot))
    model.check()
    assert model.migrator.stopped == ("no time" if rank == 0 else "asked for by another rank")
    return found


def test_a_decision_one_step_old_installs_layers_too(on_ranks: OnRanks) -> None:
    layout = layout_of(2)
    answers = on_ranks(by_ballot, 2, maps_for(10, layout, layout))
    assert answers[0] == answers[1]
    assert 2 <= sum(map(len, answers[0])) < NUM_LAYERS


def refused(rank: int, num_ranks: int, folder: Path, maps: list[Map]) -> list[str]:
    layout = layout_of(num_ranks)
    model = Model(maps[0], layout, rank)
    migrator, weights = model.migrator, model.weights
    lost = maps[1].copy()
    lost[0, lost[0] == 3] = 4
    group, said = dist.group.WORLD, []

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
            said.append("nothing")
        except EplbError as error:
            said.append(f"{type(error).__name__}: {error}")

    def make(weights: list[dict[str, torch.Tensor]], **options: Any) -> Callable[[], object]:
        options = {"bytes_per_step": 1.0, **options}
        return lambda: type(migrator)(group, weights, model.maps, layout, **options)

    attempt(lambda: migrator.start(lost))
    attempt(lambda: migrator.start(maps[1], Layout(num_ranks, 2, layout.slots_per_rank)))
    attempt(lambda: migrator.start(maps[1][:2]))
    attempt(lambda: migrator.start(maps[1] if rank else maps[2]))
    attempt(make(weights, bytes_per_step=0))
    attempt(make(weights, bytes_per_step=math.nan))
    attempt(make(weights, timeout_seconds=-1.0))
    attempt(make(weights, timeout_seconds=math.inf))
    attempt(make(weights, ranks=[0, 0]))
    attempt(make(weights[:2]))
    attempt(make([{}, *weights[1:]]))
    attempt(make([{"tag": weights[0]["tag"][1:]}, *weights[1:]]))
    attempt(make([{"weight": weights[0]["weight"].transpose(1, 2)}, *weights[1:]]))
    attempt(lambda: ExpertMaps.of(maps[0]))
    attempt(lambda: ExpertMaps.of([[0, 1, 2, 10**9]], Layout(2, 1, 2)))
    attempt(lambda: ExpertMaps.of([[0, 1], [2]], Layout(2, 1, 1)))
    attempt(lambda: ExpertMaps.of([[0.5, 1.0]], Layout(2, 1, 1)))
    migrator.start(maps[1])
    attempt(lambda: migrator.start(maps[2]))
    finish(model, itertools.count(5))
    assert (migrator.installed_map == maps[1]).all()
    return said


def test_what_cannot_be_is_refused_and_changes_nothing(on_ranks: OnRanks) -> None:
    layout = layout_of(2)
    answers = on_ranks(refused, 2, maps_for(11, layout, layout, layout))
    parts = [
        "PlanInputError: `physical_to_logical` loses expert 3 of layer 0",
        "PlanInputError: The plan is for 2 ranks on 2 nodes with 7 slots; there are 2 on 1 with 7",
        "PlanInputError: `physical_to_logical` has shape [2, 14]",
        "MigrationError: Rank 0: ranks have different plans",
        "SettingError: `bytes_per_step` is 0",
        "SettingError: `bytes_per_step` is nan",
        "SettingError: `timeout_seconds` is -1.0",
        "SettingError: `timeout_seconds` is inf; allowed: numbers above 0, up to 1e+06",
        "PlanInputError: `ranks` is [0, 0] for a group of 2",
        "PlanInputError: `physical_to_logical` has shape [4, 14]; needed: [2, 14]",
        "PlanInputError: `weights`[0] is empty",
        "PlanInputError: `weights`[0]['tag'] has shape [6]; needed: [7, ...]",
        "PlanInputError: `weights`[0]['weight'] has strides (9, 1, 3)",
        "PlanInputError: `layout` is missing",
        "PlanInputError: The map has expert 1000000000, but 4 slots have room for experts 0 to 3",
        "PlanInputError: `physical_to_logical` is no array",
        "PlanInputError: `physical_to_logical` has dtype float64; needed: integers",
        "MigrationError: Rank 0 cannot start: a migration is under way",
    ]
    for said, part in zip(answers[0], parts, strict=True):
        assert part in said
    assert "ranks have different plans" in answers[1][3]


# ---- the maps that steps read -------------------------------------------------------------------


@pytest.mark.parametrize("excluded", [(), (1,)])
def test_bounds_on_the_device_are_those_of_the_reference(excluded: tuple[int, ...]) -> None:
    """With shares in float32 one bound in three would be another."""
    loads = np.random.default_rng(12).gamma(0.5, 100, (3, 64))
    planner = Planner(split="quota", excluded_ranks=excluded)
    plan = planner.plan(loads, ranks=8, nodes=1, slots_per_rank=12)
    maps = ExpertMaps.of(plan)
    assert maps.bounds.dtype == torch.int64
    assert maps.bounds.shape == maps.logical_to_physical.shape
    most = plan.logical_to_physical.shape[2]
    for layer in range(3):
        found = maps.bounds[layer].numpy()
        assert np.array_equal(found[:, :most], bounds_of(plan, layer))
        assert (found[:, most:] == 1 << 32).all()


def test_map_of_a_file_has_the_bounds_of_its_plan(tmp_path: Path) -> None:
    loads = np.random.default_rng(13).gamma(0.5, 100, (2, 16))
    plan = Planner(split="quota").plan(loads, ranks=4, nodes=1, slots_per_rank=5)
    save_map(tmp_path / "map.json", plan)
    stored = ExpertMaps.of(load_map(tmp_path / "map.json"))
    assert torch.equal(stored.bounds, ExpertMaps.of(plan).bounds)


def test_shares_that_are_none_are_refused() -> None:
    live = np.array([[0, 1, 0, 2]], np.int32)
    split = np.array([[0.5, 1.0, 0.4, 1.0]])
    plan = Plan(live, 3, Layout(2, 1, 2), split, None, np.ones((1, 3)))
    with pytest.raises(PlanInputError, match=r"`split` of expert 0 of layer 0 sums to 0\.9 over"):
        ExpertMaps.of(plan)


def room_for_others(rank: int, num_ranks: int, folder: Path, live: Map) -> str:
    """The 14 slots were 7 ranks of 2 when the maps were made."""
    maps = ExpertMaps.of(np.tile(np.arange(14) % 10, (NUM_LAYERS, 1)), Layout(7, 1, 2))
    maps.physical_to_logical.copy_(torch.from_numpy(live))
    weights = [{"tag": torch.zeros(7)}] * NUM_LAYERS
    with pytest.raises(PlanInputError) as caught:
        Migrator(dist.group.WORLD, weights, maps, layout_of(2), bytes_per_step=1.0)
    return str(caught.value)


def test_maps_without_room_for_all_replicas_are_refused(on_ranks: OnRanks) -> None:
    for said in on_ranks(room_for_others, 2, maps_for(14, layout_of(2))[0]):
        assert "`maps.logical_to_physical` has shape [4, 10, 5]; needed: [4, 10, 2]" in said
