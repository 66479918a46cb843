"""Weights into the stored formats, and a model folder from tensors by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer_core.bench.make_checkpoint import second_geometry_config
from deepinfer_core.cpu.ops.formats import e2m1_codes, e2m1_values, scale_value, unpack_nibbles
from deepinfer_core.errors import CheckpointError, ConfigError, OutputError
from deepinfer_core.model.checkpoint import Checkpoint
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.engram import fold_vocabulary
from deepinfer_core.model.quantize import quantize
from deepinfer_core.model.tensors import TensorKind, tensor_specs
from deepinfer_core.model.writer import QUANTIZATION, full_shape, write_model


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_fp4_codes_are_those_of_the_kernels_ties_to_even(generator: torch.Generator) -> None:
    # every multiple of an eighth up to 6, and its negative: ties and values of all codes
    grid = torch.arange(-48, 49) / 8
    row = torch.cat((grid, torch.randn(31, generator=generator).clamp(-6, 6))).view(4, 32)
    row[:, 0] = 6.0  # so that the scale is 1
    payload, scale = quantize(TensorKind.FP4_ROW, row)
    assert (scale == 127).all()
    assert torch.equal(unpack_nibbles(payload.view(torch.uint8)), e2m1_codes(row))


@pytest.mark.parametrize(
    ("limit", "byte"), [(6.0, 127), (6.0001, 128), (3.0, 126), (3.1, 127), (0.0, 25)]
)
def test_scale_is_the_least_power_of_two_that_fits(limit: float, byte: int) -> None:
    values = torch.zeros(1, 32)
    values[0, 5] = -limit
    payload, scale = quantize(TensorKind.FP4_ROW, values)
    assert scale.item() == byte
    back = e2m1_values(unpack_nibbles(payload.view(torch.uint8))) * scale_value(scale)
    assert back[0, 5] == pytest.approx(-limit, rel=0.26)


@pytest.mark.parametrize("kind", [TensorKind.FP8_TILE, TensorKind.FP8_ROW])
@pytest.mark.parametrize("shape", [(32, 64), (5, 32), (40, 96)])
def test_fp8_is_within_half_a_step_of_every_value(
    kind: TensorKind, shape: tuple[int, int], generator: torch.Generator
) -> None:
    values = torch.randn(shape, generator=generator) * 10
    values[0, 0] = 448 * 1.0001  # the limit over its scale is rounded
    payload, scale = quantize(kind, values)
    rows = scale if kind is TensorKind.FP8_ROW else scale.repeat_interleave(32, 0)[: shape[0]]
    spread = scale_value(rows).repeat_interleave(32, 1)
    step = torch.maximum(values.abs() / 16, spread * 2**-9 / 2)  # normal numbers, and the smallest
    assert payload.float().isfinite().all()
    assert ((payload.float() * spread - values).abs() <= step).all()


def test_tiles_may_be_narrower_than_a_group() -> None:
    payload, scale = quantize(TensorKind.FP8_TILE, torch.ones(3, 40))
    assert payload.shape == (3, 40) and scale.shape == (1, 2)


# ---- the folder ------------------------------------------------------------------------------


@pytest.fixture
def config(tokenizer_json: str) -> dict[str, Any]:
    config = copy.deepcopy(second_geometry_config())
    classes = int(fold_vocabulary(Tokenizer.from_str(tokenizer_json)).max()) + 1
    config["text_config"]["engram_compressed_vocab_size"] = classes
    return {**config, "quantization_config": dict(QUANTIZATION)}


@pytest.fixture
def tokenizer_json() -> str:
    from deepinfer_core.bench.demo_tokenizer import build_tokenizer

    vocab_size = second_geometry_config()["text_config"]["vocab_size"]
    return str(build_tokenizer(vocab_size, {0: "<bos>", 1: "<eos>", 2: "<pad>"}).to_str())


def made(config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    return {
        spec.name: torch.randn(full_shape(spec), generator=generator)
        for spec in tensor_specs(ModelConfig.from_dict(config)).values()
        if spec.kind is not TensorKind.SCALE
    }


def test_folder_reads_back_as_it_was_given(
    tmp_path: Path, config: dict[str, Any], tokenizer_json: str, generator: torch.Generator
) -> None:
    tensors = made(config, generator)
    folder = tmp_path / "model"
    written = write_model(folder, config, tensors, tokenizer_json, {"do_sample": False})
    assert ModelConfig.from_folder(folder) == written
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert generation == {"do_sample": False}
    with Checkpoint.open(folder, written) as checkpoint:
        for name in checkpoint.names():
            spec = checkpoint.spec(name)
            if spec.kind is TensorKind.SCALE:
                continue
            stored = checkpoint.tensor(name)
            if spec.scale_name is not None:
                payload, scale = quantize(spec.kind, tensors[name])
                assert torch.equal(stored.view(torch.uint8), payload.view(torch.uint8)), name
                assert torch.equal(checkpoint.tensor(spec.scale_name), scale), name
            else:
                assert torch.equal(stored, tensors[name].to(stored.dtype)), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "missing: `norm.weight`"),
        (lambda tensors: tensors.update(colour=torch.ones(1)), "not of this model: `colour`"),
    ],
)
def test_tensors_of_another_model_write_nothing(
    tmp_path: Path,
    config: dict[str, Any],
    tokenizer_json: str,
    generator: torch.Generator,
    change: Any,
    message: str,
) -> None:
    tensors = made(config, generator)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        write_model(tmp_path / "model", config, tensors, tokenizer_json, {})
    assert not (tmp_path / "model").exists()


def test_wrong_shape_is_named(
    tmp_path: Path, config: dict[str, Any], tokenizer_json: str, generator: torch.Generator
) -> None:
    tensors = made(config, generator) | {"norm.weight": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"`norm.weight` is \[3\], must be"):
        write_model(tmp_path / "model", config, tensors, tokenizer_json, {})


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.ffn.experts.0.w1.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite_is_named(
    tmp_path: Path,
    config: dict[str, Any],
    tokenizer_json: str,
    generator: torch.Generator,
    name: str,
    value: float,
) -> None:
    tensors = made(config, generator)
    tensors[name].flatten()[3] = value
    with pytest.raises(CheckpointError, match=f"`{name}` holds values that are not finite"):
        write_model(tmp_path / "model", config, tensors, tokenizer_json, {})


def test_folder_in_use_and_invalid_config_are_left_alone(
    tmp_path: Path, config: dict[str, Any], tokenizer_json: str, generator: torch.Generator
) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="not empty"):
        write_model(tmp_path, config, made(config, generator), tokenizer_json, {})
    with pytest.raises(ConfigError):
        write_model(tmp_path, {**config, "colour": 1}, {}, tokenizer_json, {})
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
