"""Trainable float32 parameters, and the model's weights made of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from deepinfer_core.model.checkpoint import Checkpoint, StoredMatrix
from deepinfer_core.model.tensors import TensorKind, tensor_specs
from deepinfer_core.model.weights import (
    DrafterWeights,
    ModelWeights,
    load_drafter,
    load_weights,
)
from nano.training.rounding import as_fp4_rows, as_fp8_rows, as_fp8_tiles

if TYPE_CHECKING:
    from deepinfer_core.interfaces import KernelBackend
    from deepinfer_core.model.config import ModelConfig

__all__ = [
    "drafter_weights_of",
    "is_drafter",
    "is_trained",
    "muon_names",
    "released",
    "start_values",
    "weights_of",
]

# Matrices that feed the residual streams start small, so that a layer starts as little more than
# the identity.
_INTO_STREAMS = ("wo_b", "w2")


def is_drafter(name: str) -> bool:
    """Whether the parameter is the drafter's."""
    return name.startswith("mtp.")


def is_trained(name: str) -> bool:
    """Whether gradients change it; the router's biases follow the load instead."""
    return not name.endswith("gate.bias")


def muon_names(parameters: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the matrices whose updates are orthogonalised.

    All maps from activations; not tables, vocabularies and norms.
    """
    others = ("embed.weight", "head.weight", "head.proj.weight", ".q_weight", ".k_weight")
    return frozenset(
        name for name, value in parameters.items() if value.dim() >= 2 and not name.endswith(others)
    )


def start_values(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return all parameters by name; experts of a layer are stacked [experts, out, in].

    Every tensor is drawn from a generator of its own. `config` is the unquantised form.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in tensor_specs(config).values():
        name, shape = spec.name, spec.shape
        head, dot, tail = name.partition(".experts.")
        if dot:
            number, _, matrix = tail.partition(".")
            name, shape = f"{head}.experts.{matrix}", (int(number) + 1, *shape)
        if not name.endswith("bias_vl"):
            shapes[name] = shape
    return {name: _draw(name, shape, config, seed) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if "norm" in leaf or leaf in ("q_weight", "k_weight"):
        return torch.ones(shape)
    if leaf in ("bias", "attn_sink", "proj"):
        return torch.zeros(shape)
    noise = torch.randn(shape, generator=generator)
    if leaf.endswith("_scale"):
        return torch.full(shape, 0.1)
    if leaf.endswith("_base"):
        # streams start unlike, or they would stay alike; a stream mostly keeps what it holds
        streams = config.hc_mult
        base = 0.5 * noise
        base[:streams] -= 1.1
        base[2 * streams :] += 3.0 * torch.eye(streams).flatten()
        return base
    if leaf in ("embed", "head"):
        return noise * (0.02 if leaf == "head" else 0.5)
    spread = 1 / math.sqrt(shape[-1])
    if leaf in _INTO_STREAMS:
        spread *= 0.5
    values = noise * spread
    if name.endswith("engram.wkv.weight"):
        values[-config.hidden_size :] = 0  # the value: at first the memory says nothing
    return values


class _Store:
    """Reads parameters as a checkpoint is read; stands in for `Checkpoint` in `load_weights`."""

    def __init__(self, parameters: Mapping[str, Tensor], strength: Tensor):
        self._parameters, self._strength = parameters, strength

    def tensor(self, name: str) -> Tensor:
        # text and images share the router's bias: there are no images
        return self._parameters[name.replace("bias_vl", "bias")]

    def matrix(self, name: str, *, mapped: bool = False) -> StoredMatrix:
        value = self._parameters[f"{name}.weight"]
        rounded = as_fp8_rows if mapped else as_fp8_tiles
        kind = TensorKind.FP8_ROW if mapped else TensorKind.FP8_TILE
        return StoredMatrix(rounded(value, self._strength), None, kind.value)

    def experts(self, prefix: str, expert_ids: Sequence[int]) -> dict[str, StoredMatrix]:
        stacks = {}
        for matrix in ("w1", "w3", "w2"):
            value = self._parameters[f"{prefix}.{matrix}.weight"]
            payload = as_fp4_rows(value, self._strength)
            stacks[matrix] = StoredMatrix(payload, None, TensorKind.FP4_ROW.value)
        return stacks


def weights_of(
    parameters: Mapping[str, Tensor],
    strength: Tensor,
    config: ModelConfig,
    backend: KernelBackend,
) -> ModelWeights:
    """Return the target's weights; the gradient reaches the parameters.

    A matrix keeps the `format` that it will be stored in while its payload is wide: a training
    backend rounds the inputs of such a matrix as the released arithmetic does.

    Args:
        strength: [] float32, 0 = as they are .. 1 = rounded to their stored formats.
    """
    return load_weights(cast(Checkpoint, _Store(parameters, strength)), config, backend)


def drafter_weights_of(
    parameters: Mapping[str, Tensor],
    strength: Tensor,
    config: ModelConfig,
    backend: KernelBackend,
) -> DrafterWeights:
    """Return the drafter's weights, as `weights_of` does the target's."""
    weights = load_drafter(cast(Checkpoint, _Store(parameters, strength)), config, backend)
    assert weights is not None, "the model has draft stages"
    return weights


def released(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters under the names of a released checkpoint, one tensor an expert."""
    tensors = {}
    for name, value in parameters.items():
        head, dot, matrix = name.partition(".experts.")
        if dot:
            for number, expert in enumerate(value):
                tensors[f"{head}.experts.{number}.{matrix}"] = expert
            continue
        tensors[name] = value
        if name.endswith("gate.bias"):
            tensors[f"{name}_vl"] = value
    return tensors
