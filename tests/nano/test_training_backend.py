"""The training backend computes what core's own backend computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nano.geometry import config_dict
from nano.training import rounding
from nano.training.backend import TrainingBackend
from nano.training.parameters import is_drafter, is_trained, start_values, weights_of
from nano.training.target import Target
from torch import Tensor

from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.cpu.ops.attention import round_entry
from deepinfer_core.cpu.ops.formats import round_fp8
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.model.engram import EngramHash
from deepinfer_core.model.state import ModelState, StateSizes

LENGTH = 192
# documents of each row; beginnings divide by the candidate block, so that both sides cut alike
DOCUMENTS = ((0, 64, 136), (0, 24))


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    shape = config_dict(4096)
    # small selections, so that they leave something out in so short a text
    shape["text_config"] |= {"index_topk": 12, "candidate_topk_blocks": 3, "sliding_window": 16}
    return ModelConfig.from_dict(shape)


@pytest.fixture(scope="module")
def hashes(config: ModelConfig) -> EngramHash:
    return EngramHash.build(config, np.arange(4096))


@pytest.fixture(scope="module")
def parameters(config: ModelConfig) -> dict[str, Tensor]:
    values = start_values(config, 3)
    generator = torch.Generator().manual_seed(0)
    for name, value in values.items():
        if "engram.wkv" in name or value.abs().max() == 0:  # what starts at zero would hide faults
            values[name] = 0.1 * torch.randn(value.shape, generator=generator)
    return values


def packed() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 4096, (len(DOCUMENTS), LENGTH), generator=generator)
    documents = torch.zeros_like(tokens)
    for row, starts in enumerate(DOCUMENTS):
        for start in starts[1:]:
            documents[row, start:] += 1
    return tokens, documents


def core_hidden(
    config: ModelConfig,
    hashes: EngramHash,
    parameters: dict[str, Tensor],
    tokens: Tensor,
    strength: float,
    numerics: str,
) -> Tensor:
    """Return the collapsed streams [n, D] of one sequence by core's backend."""
    backend = CpuBackend(numerics, strict=False)
    weights = weights_of(parameters, torch.tensor(strength), config, backend)
    model = DeepseekV41(config, weights, hashes, torch.device("cpu"))
    sizes = StateSizes(
        num_slots=1,
        num_blocks={"compressed": 4, "index": 4},
        block_size=64,
        max_len=LENGTH,
        max_drafts=0,
    )
    state = ModelState.allocate(config, backend, sizes)
    for table in state.tables.values():
        table[0, :4] = torch.arange(4)[: table.shape[1]]
    rows = RowBatch.build(backend, [len(tokens)], [0], [0], window=config.sliding_window)
    with torch.no_grad():
        return model.forward(backend, tokens, rows, state).hidden


@pytest.mark.parametrize("numerics", ["ideal", "cache"])
def test_packed_documents_equal_sequences_of_their_own(
    config: ModelConfig, hashes: EngramHash, parameters: dict[str, Tensor], numerics: str
) -> None:
    tokens, documents = packed()
    strength = float(numerics == "cache")
    target = Target(config, hashes, torch.float32, round_inputs=False)
    with torch.no_grad():
        done = target.run(parameters, tokens, documents, torch.tensor(strength), torch.tensor(True))
    ours = done.result.hidden.unflatten(0, tokens.shape)
    far = []
    for row, starts in enumerate(DOCUMENTS):
        for start, stop in zip(starts, (*starts[1:], LENGTH), strict=True):
            wanted = core_hidden(
                config, hashes, parameters, tokens[row, start:stop], strength, numerics
            )
            far.append((ours[row, start:stop] - wanted).abs().amax(-1))
    distance = torch.cat(far)
    if numerics == "ideal":
        assert distance.max() < 1e-3
    else:  # a last bit apart, a value rounds to the other side: what follows is near at best
        assert distance.quantile(0.1) < 1e-3


def test_unlike_weights_are_seen(
    config: ModelConfig, hashes: EngramHash, parameters: dict[str, Tensor]
) -> None:
    """The comparison above would notice a change of any single parameter."""
    tokens, documents = packed()
    target = Target(config, hashes, torch.float32)
    off, on = torch.tensor(0.0), torch.tensor(True)

    def hidden(values: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return target.run(values, tokens, documents, off, on).result.hidden

    base = hidden(parameters)
    for name in ("layers.4.attn.indexer.wq_b.weight", "layers.6.attn.indexer.wq_b.weight"):
        changed = parameters | {name: -parameters[name]}
        assert (hidden(changed) - base).abs().max() > 1e-3, name


def test_every_trained_parameter_has_a_gradient(
    config: ModelConfig, hashes: EngramHash, parameters: dict[str, Tensor]
) -> None:
    tokens, documents = packed()
    values = {
        name: value.clone().requires_grad_(is_trained(name))
        for name, value in parameters.items()
        if not is_drafter(name)
    }
    loss, metrics = Target(config, hashes, torch.float32).loss(
        values,
        tokens,
        documents,
        torch.ones(tokens.shape),
        torch.tensor(1.0),
        torch.tensor(True),
    )
    loss.backward()
    assert torch.isfinite(loss)
    for name, value in values.items():
        if is_trained(name):
            assert value.grad is not None, name
            assert torch.isfinite(value.grad).all(), name
            assert value.grad.abs().max() > 0, name
    tokens_routed = tokens.numel() * config.num_experts_per_tok
    assert metrics["load"].sum(1).tolist() == [tokens_routed] * config.num_hidden_layers


def test_rounding_is_that_of_the_formats() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 128, generator=generator) * torch.logspace(-6, 3, 64).unsqueeze(1)
    x[5, :32] = 0
    x[7] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 16)
    assert torch.equal(rounding.fp8_rows(x), round_fp8(x))
    assert torch.equal(rounding.fp8_rows(x), round_entry("window", x))
    assert torch.equal(rounding.fp4_rows(x), round_entry("index", x))
    assert torch.equal(rounding.fp4_compressed(x), round_entry("compressed", x))


def test_blend_has_the_gradient_of_the_identity() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    rounding.blend(x, rounding.fp8_rows(x), torch.tensor(1.0)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_strength_none_and_full(config: ModelConfig) -> None:
    x = torch.randn(8, 64)
    kept = TrainingBackend(torch.tensor(0.0), torch.tensor(True), window=16)
    full = replace_strength(kept, 1.0)
    assert torch.equal(kept.round_window(x), x)
    assert torch.equal(full.round_window(x), round_entry("window", x))


def replace_strength(backend: TrainingBackend, strength: float) -> TrainingBackend:
    return TrainingBackend(torch.tensor(strength), backend.sparse, window=backend.window)
