"""The drafter's training computes what core's drafter computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from nano.geometry import config_dict
from nano.training.drafter import DrafterTrainer, _anchors
from nano.training.parameters import (
    drafter_weights_of,
    is_drafter,
    is_trained,
    start_values,
    weights_of,
)
from nano.training.target import Target
from torch import Tensor

from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.model.engram import EngramHash
from deepinfer_core.model.state import ModelState, StateSizes

LENGTH, SECOND = 128, 48  # the second document of the row begins here
ANCHORS = (3, 30, 47 - 5, SECOND, SECOND + 20, SECOND + 70)


def geometry() -> ModelConfig:
    shape = config_dict(4096)
    shape["text_config"] |= {"sliding_window": 16}
    return ModelConfig.from_dict(shape)


def drawn(config: ModelConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the drafter's parameters and the target's."""
    generator = torch.Generator().manual_seed(0)
    values = start_values(config, 5)
    for name, value in values.items():
        if value.abs().max() == 0 or "markov" in name:
            values[name] = 0.3 * torch.randn(value.shape, generator=generator)
    own = {name: value for name, value in values.items() if is_drafter(name)}
    return own, {name: value for name, value in values.items() if not is_drafter(name)}


def row() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 4096, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(LENGTH) >= SECOND).long().unsqueeze(0)
    return tokens, documents


def by_core(
    config: ModelConfig, values: dict[str, Tensor], tokens: Tensor, anchor: int
) -> tuple[Tensor, Tensor]:
    """Return logits [g, V] and confidences [g] of core's drafter behind position `anchor`."""
    backend = CpuBackend("ideal", strict=False)
    off = torch.tensor(0.0)
    drafter = drafter_weights_of(values, off, config, backend)
    weights = replace(weights_of(values, off, config, backend), drafter=drafter)
    hashes = EngramHash.build(config, np.arange(4096))
    model = DeepseekV41(config, weights, hashes, torch.device("cpu"))
    sizes = StateSizes(1, {"compressed": 2, "index": 2}, 64, LENGTH, 0)
    state = ModelState.allocate(config, backend, sizes, drafter=True)
    for table in state.tables.values():
        table[0, :2] = torch.arange(2)
    assert model.drafter is not None
    with torch.no_grad():
        if anchor:
            rows = RowBatch.build(backend, [anchor], [0], [0], window=config.sliding_window)
            done = model.forward(backend, tokens[:anchor], rows, state)
            assert done.features is not None
            model.drafter.feed(backend, done.features, rows, state)
        ahead = tokens[anchor + 1 :]
        drafted = model.drafter.draft(
            backend,
            tokens[anchor : anchor + 1],
            [anchor],
            [0],
            state,
            pick=lambda logits, drafts: ahead[drafts.shape[1] :][:1],
        )
    return drafted.logits[0], drafted.confidence[0]


def test_blocks_behind_packed_anchors_equal_cores() -> None:
    config = geometry()
    own, target = drawn(config)
    tokens, documents = row()
    trainer = DrafterTrainer(
        Target(config, EngramHash.build(config, np.arange(4096)), torch.float32)
    )
    off = torch.tensor(0.0)
    with torch.no_grad():
        blocks = trainer.draft(own, target, tokens, documents, torch.tensor(ANCHORS), off, off)
    for number, place in enumerate(ANCHORS):
        start, stop = (SECOND, LENGTH) if place >= SECOND else (0, SECOND)
        logits, confidence = by_core(config, own | target, tokens[0, start:stop], place - start)
        assert (blocks.drafted.logits[number] - logits).abs().max() < 1e-3, place
        assert (blocks.drafted.confidence[number] - confidence).abs().max() < 1e-3, place
        assert blocks.wanted[number].tolist() == tokens[0, place + 1 : place + 6].tolist()


def test_anchors_stand_before_replies_and_drafts_end_with_the_document() -> None:
    documents = torch.tensor([[0] * 10 + [1] * 6])
    weights = torch.zeros(1, 16)
    weights[0, 4:10] = 1.0  # a reply that ends the first document
    weights[0, 13:15] = 1.0
    jitter = torch.linspace(0, 0.9, 16).unsqueeze(0)
    places, counts = _anchors(documents, weights, jitter, 8, 5)
    assert sorted(places.tolist()) == [3, 4, 5, 6, 7, 8, 12, 13]
    found = dict(zip(places.tolist(), counts.sum(1).int().tolist(), strict=True))
    assert found == {3: 5, 4: 5, 5: 4, 6: 3, 7: 2, 8: 1, 12: 2, 13: 1}


def test_every_parameter_of_the_drafter_has_a_gradient_and_the_target_none() -> None:
    config = geometry()
    own, target = drawn(config)
    own = {name: value.requires_grad_(is_trained(name)) for name, value in own.items()}
    target = {name: value.requires_grad_(is_trained(name)) for name, value in target.items()}
    tokens, documents = row()
    trainer = DrafterTrainer(
        Target(config, EngramHash.build(config, np.arange(4096)), torch.float32), 16
    )
    weights, jitter = torch.ones(1, LENGTH), torch.rand(1, LENGTH)
    loss, metrics = trainer.loss(own, target, tokens, documents, weights, torch.tensor(1.0), jitter)
    trained = [name for name in own if is_trained(name)]
    grads = torch.autograd.grad(loss, [own[name] for name in trained], retain_graph=True)
    for name, grad in zip(trained, grads, strict=True):
        assert torch.isfinite(grad).all() and grad.abs().max() > 0, name
    assert metrics["load"].sum(1).tolist() == [16 * 5 * config.dspark_num_experts_per_tok] * 2
    inside = [
        name for name in target if is_trained(name) and name not in ("embed.weight", "head.weight")
    ]
    found = torch.autograd.grad(loss, [target[name] for name in inside], allow_unused=True)
    assert all(each is None for each in found)
