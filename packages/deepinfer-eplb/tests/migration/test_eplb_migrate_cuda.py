"""A migration between two GPUs: right after every install, and beside the steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from migration_experts import EXPERT_BYTES, Map, Model, expert, finish, layout_of, maps_for

from deepinfer_eplb.errors import SettingError
from deepinfer_eplb.migrate import vote_over

pytestmark = [
    pytest.mark.dist,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
OnRanks = Callable[..., list[Any]]


def on_device(live: Map, rank: int, num_ranks: int, **options: Any) -> Model:
    torch.cuda.set_device(rank)
    group, over = dist.new_group(range(num_ranks), backend="nccl"), dist.group.WORLD
    options = {"group": group, "agree": vote_over(over), **options}
    return Model(live, layout_of(num_ranks), rank, f"cuda:{rank}", **options)


def go_through_maps(rank: int, num_ranks: int, folder: Path, maps: list[Map]) -> list[Any]:
    model = on_device(maps[0], rank, num_ranks, bytes_per_step=2 * EXPERT_BYTES[0])
    steps, found = itertools.count(), []
    for target in maps[1:]:
        model.migrator.start(target)
        found.append(finish(model, steps))
        assert (model.migrator.installed_map == target).all()
    return found


def test_slots_and_steps_are_right_after_every_install_on_gpus(on_ranks: OnRanks) -> None:
    answers = on_ranks(go_through_maps, 2, maps_for(40, *[layout_of(2)] * 4))
    # A layer waits for transfers that take a different time each run, but for the same one on all.
    assert answers[0] == answers[1]


def run_ahead(rank: int, num_ranks: int, folder: Path, maps: list[Map]) -> int:
    """Steps are launched without waiting; each reads its layers late, and must see them whole."""
    model = on_device(maps[0], rank, num_ranks, bytes_per_step=2 * EXPERT_BYTES[0])
    model.migrator.start(maps[1])
    seen, ahead = [], 0
    for step in itertools.count():
        if not model.migrator.busy:
            break
        torch.cuda._sleep(20_000_000)  # cycles: some 10 ms
        late = torch.cuda.Event()
        late.record()
        slots = [layer["tag"].clone() for layer in model.weights]
        seen.append((model.migrator.installed_map, slots, model.maps.physical_to_logical.clone()))
        model.migrator.advance(step)
        ahead += not late.query()
    first = rank * model.layout.slots_per_rank
    for live, slots, on_gpu in seen:
        assert torch.equal(on_gpu.cpu(), torch.from_numpy(live))
        for layer, tags in enumerate(slots):
            held = live[layer, first : first + model.layout.slots_per_rank].tolist()
            assert tags.tolist() == [int(expert(layer, number)["tag"]) for number in held]
    model.check()
    return ahead


def test_steps_launched_before_an_install_see_the_old_layer(on_ranks: OnRanks) -> None:
    answers = on_ranks(run_ahead, 2, maps_for(41, layout_of(2), layout_of(2)))
    # The host does not wait for the steps' stream, so it is ahead of it at least at times.
    assert min(answers) > 0


def without_agreement(rank: int, num_ranks: int, folder: Path, live: Map) -> str:
    with pytest.raises(SettingError) as caught:
        on_device(live, rank, num_ranks, agree=None)
    return str(caught.value)


def test_vote_over_the_transfers_group_is_refused(on_ranks: OnRanks) -> None:
    answers = on_ranks(without_agreement, 2, maps_for(42, layout_of(2))[0])
    assert "`agree` is missing for tensors on 'cuda:0'" in answers[0]
