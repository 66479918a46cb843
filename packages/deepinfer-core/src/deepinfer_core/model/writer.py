"""Writes a model folder in the released on-disk format, from float32 tensors by released name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.errors import CheckpointError, OutputError
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.quantize import quantize
from deepinfer_core.model.shards import INDEX_NAME
from deepinfer_core.model.tensors import TensorKind, TensorSpec, tensor_specs

__all__ = ["QUANTIZATION", "full_shape", "write_model"]

# `quantization_config` of a folder whose weights are FP8 and FP4 as released.
QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def full_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a tensor's values: of packed FP4 twice as wide as what is stored."""
    *rows, width = spec.shape
    return (*rows, width * 2 if spec.kind is TensorKind.FP4_ROW else width)


def write_model(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer_json: str,
    generation: Mapping[str, Any],
    *,
    num_shards: int = 1,
) -> ModelConfig:
    """Write config.json, generation_config.json, tokenizer.json and the weights.

    Args:
        folder: made if absent; must be empty.
        config: content of config.json. With a `quantization_config` (see `QUANTIZATION`) matrices
            are stored as FP8 and FP4, without it as bfloat16.
        tensors: float values of every tensor but the scales, by released name. Each is asked for
            once, shard by shard, so that a mapping may make them when they are asked for.
        tokenizer_json: content of tokenizer.json.
        generation: content of generation_config.json.
        num_shards: files to spread the weights over; more than one come with an index.
    Returns:
        The configuration as written, checked.
    Raises:
        ConfigError: the configuration is not a valid model.
        CheckpointError: a tensor is missing, not of this model, misshapen or not finite; nothing
            was written if the mapping's names show it.
        OutputError: the folder is not empty, or cannot be written.
    """
    folder = Path(folder)
    model = ModelConfig.from_dict(config)
    # a matrix and its scales are written together and stay in one file
    owners = [s for s in tensor_specs(model).values() if s.kind is not TensorKind.SCALE]
    _check_names({spec.name for spec in owners}, tensors)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(f"`{folder}` is not empty; name a new folder for the model.")
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", generation)
        (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        _write_weights(folder, owners, tensors, num_shards)
    except OSError as error:
        raise OutputError(f"`{folder}` cannot be written: {error.strerror or error}.") from error
    return model


def _check_names(wanted: set[str], tensors: Mapping[str, Tensor]) -> None:
    given = set(tensors)
    faults = [f"missing: `{name}`" for name in sorted(wanted - given)]
    faults += [f"not of this model: `{name}`" for name in sorted(given - wanted)]
    if faults:
        raise CheckpointError("The tensors do not fit the configuration:\n  " + "\n  ".join(faults))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path, owners: list[TensorSpec], tensors: Mapping[str, Tensor], num_shards: int
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    sizes = [math.prod(spec.shape) for spec in owners]
    shards: list[list[TensorSpec]] = [[] for _ in range(num_shards)]
    done, total = 0, sum(sizes)
    for spec, size in zip(owners, sizes, strict=True):
        shards[done * num_shards // total].append(spec)
        done += size
    weight_map: dict[str, str] = {}
    total_size = 0
    for place, shard in enumerate(shards, start=1):
        name = f"model-{place:05d}-of-{num_shards:05d}.safetensors"
        if num_shards == 1:
            name = "model.safetensors"
        stored = dict(item for spec in shard for item in _stored(spec, tensors[spec.name]))
        try:
            save_file(stored, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OutputError(f"`{folder / name}` cannot be written: {error}.") from error
        weight_map |= dict.fromkeys(stored, name)
        total_size += sum(tensor.nbytes for tensor in stored.values())
    if num_shards > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        _write_json(folder / INDEX_NAME, index)


def _stored(spec: TensorSpec, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, and its scales if it has any, as they go to the file."""
    if tuple(values.shape) != full_shape(spec):
        raise CheckpointError(
            f"`{spec.name}` is {list(values.shape)}, must be {list(full_shape(spec))}."
        )
    values = values.detach().to("cpu", torch.float32)
    if not torch.isfinite(values).all():  # in a code of four bits nobody would see it any more
        raise CheckpointError(f"`{spec.name}` holds values that are not finite; train it again.")
    if spec.scale_name is None:
        plain = torch.float32 if spec.kind is TensorKind.FLOAT32 else torch.bfloat16
        # a file holds each tensor's own bytes, so a view of another one will not do
        yield spec.name, values.to(plain, copy=True).contiguous()
        return
    payload, scale = quantize(spec.kind, values)
    yield spec.name, payload.contiguous()
    yield spec.scale_name, scale.view(torch.float8_e8m0fnu)
