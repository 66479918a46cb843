"""Experts that can be told apart by every one of their bytes, and a layer that computes with them.

All numbers are small whole ones, so that sums come out the same in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_eplb.maps import Layout
from deepinfer_eplb.migrate import ExpertMaps, Migrator

NUM_LAYERS = 4
NUM_EXPERTS = 10
HIDDEN = 3
TOKENS = 12
TOP_K = 2

Map = NDArray[np.int32]


def expert(layer: int, number: int) -> dict[str, Tensor]:
    """All tensors of one expert; layers differ in which they have."""
    generator = torch.Generator().manual_seed(1000 * layer + number)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator)

    tensors = {
        "weight": whole(HIDDEN, HIDDEN).to(torch.bfloat16),
        "scale": whole(HIDDEN).to(torch.float8_e4m3fn),
        "codes": whole(5).abs().to(torch.uint8),
        "tag": torch.tensor(100 * layer + number, dtype=torch.int64),
    }
    if layer % 2:
        tensors["bias"] = whole(HIDDEN).to(torch.float32)
    return tensors


EXPERT_BYTES = [
    sum(each.numel() * each.element_size() for each in expert(layer, 0).values())
    for layer in range(NUM_LAYERS)
]


def random_map(rng: np.random.Generator, layout: Layout) -> Map:
    """A whole map in which no rank holds an expert twice."""
    active, per_rank = layout.active, layout.slots_per_rank
    found = np.full((NUM_LAYERS, layout.num_ranks, per_rank), -1, np.int32)
    for layer in range(NUM_LAYERS):
        held: list[list[int]] = [[] for _ in active]
        for number in rng.permutation(NUM_EXPERTS).tolist():
            free = [each for each in held if len(each) < per_rank]
            free[int(rng.integers(len(free)))].append(number)
        for rank, each in zip(active, held, strict=True):
            rest = np.setdiff1d(np.arange(NUM_EXPERTS), each)
            each += rng.choice(rest, per_rank - len(each), replace=False).tolist()
            found[layer, rank] = rng.permutation(each)
    return found.reshape(NUM_LAYERS, -1)


def layout_of(num_ranks: int, excluded: tuple[int, ...] = ()) -> Layout:
    """Slots for a few replicas; of four ranks one can be left out."""
    return Layout(num_ranks, 1 if num_ranks == 2 else 2, {2: 7, 4: 4}[num_ranks], excluded)


def maps_for(seed: int, *layouts: Layout) -> list[Map]:
    """A random map for each layout."""
    rng = np.random.default_rng(seed)
    return [random_map(rng, layout) for layout in layouts]


class Model:
    """One rank's experts, the maps and a migrator."""

    def __init__(
        self, live: Map, layout: Layout, rank: int, device: str = "cpu", **options: Any
    ) -> None:
        self.rank, self.layout = rank, layout
        first = rank * layout.slots_per_rank
        self.weights = []
        for layer in range(NUM_LAYERS):
            held = live[layer, first : first + layout.slots_per_rank].tolist()
            # What an empty slot holds must not matter.
            content = [expert(layer, max(number, 0)) for number in held]
            self.weights.append(
                {
                    name: torch.stack([bits(each[name]) for each in content])
                    .view(like.dtype)
                    .to(device)
                    for name, like in content[0].items()
                }
            )
        self.maps = ExpertMaps.of(live, layout, device)
        options = {"bytes_per_step": 1e9, "timeout_seconds": 10.0, **options}
        group = options.pop("group", dist.group.WORLD)
        self.migrator = Migrator(group, self.weights, self.maps, layout, **options)

    def check(self) -> None:
        """Every tensor of every slot is the map's, and the maps on the device say the same."""
        live = self.migrator.installed_map
        first = self.rank * self.layout.slots_per_rank
        for layer in range(NUM_LAYERS):
            for slot in range(self.layout.slots_per_rank):
                number = int(live[layer, first + slot])
                if number < 0:
                    continue
                for name, tensor in expert(layer, number).items():
                    found = self.weights[layer][name][slot].cpu()
                    assert torch.equal(bits(found), bits(tensor)), (layer, slot, number, name)
        assert torch.equal(self.maps.physical_to_logical.cpu(), torch.from_numpy(live))
        for layer in range(NUM_LAYERS):
            for number in range(NUM_EXPERTS):
                count = int(self.maps.num_replicas[layer, number])
                slots = self.maps.logical_to_physical[layer, number]
                want = np.flatnonzero(live[layer] == number).tolist()
                assert slots[:count].tolist() == want
                assert (slots[count:] == -1).all()

    def step(self, number: int, group: dist.ProcessGroup | None = None) -> None:
        """Compute with what the ranks hold, and compare with a model that never moves."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(-4, 5, (TOKENS, HIDDEN), generator=generator).double()
        for layer in range(NUM_LAYERS):
            chosen = torch.rand(TOKENS, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
            mine, reference = torch.zeros_like(tokens), torch.zeros_like(tokens)
            for token, logical in [(t, e) for t in range(TOKENS) for e in chosen[t].tolist()]:
                reference[token] += _apply(expert(layer, logical), tokens[token])
                replica = (token + number) % int(self.maps.num_replicas[layer, logical])
                slot = int(self.maps.logical_to_physical[layer, logical, replica])
                home, place = divmod(slot, self.layout.slots_per_rank)
                if home == self.rank:
                    held = {name: each[place].cpu() for name, each in self.weights[layer].items()}
                    mine[token] += _apply(held, tokens[token])
            dist.all_reduce(mine, group=group)
            assert torch.equal(mine, reference), f"layer {layer} of step {number}"
            tokens = reference % 5


def finish(model: Model, steps: Iterator[int]) -> list[tuple[int, ...]]:
    """Advance to the end, with a step and all checks after each advance."""
    found = []
    while model.migrator.busy:
        step = next(steps)
        found.append(model.migrator.advance(step))
        model.check()
        model.step(step)
    return found


def _apply(held: dict[str, Tensor], token: Tensor) -> Tensor:
    found = (held["weight"].double() @ token) * held["scale"].double()
    found = found + held["codes"].double().sum() + held["tag"].double()
    return found + held["bias"].double() if "bias" in held else found


def bits(tensor: Tensor) -> Tensor:
    """The same bytes in a dtype that can be stacked and compared."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
