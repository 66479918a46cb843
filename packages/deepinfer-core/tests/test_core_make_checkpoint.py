from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer_core.bench.demo_tokenizer import build_tokenizer
from deepinfer_core.bench.make_checkpoint import (
    demo_config,
    loading_config,
    second_geometry_config,
    write_checkpoint,
)
from deepinfer_core.errors import ConfigError, OutputError
from deepinfer_core.model.checkpoint import Checkpoint, StoredMatrix
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.engram import fold_vocabulary
from deepinfer_core.model.tensors import tensor_specs


def digest(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def dequantise(matrix: StoredMatrix) -> Tensor:
    """Values of a stored matrix in float32, straight from the description of the formats."""
    if matrix.scale is None:
        return matrix.payload.float()
    rows, width = matrix.shape
    scale = torch.exp2(matrix.scale.float() - 127)
    if matrix.format == "fp4_row":
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = torch.cat([magnitudes, -magnitudes])
        low, high = matrix.payload & 15, matrix.payload >> 4
        values = table[torch.stack([low, high], dim=-1).flatten(-2).long()]
    else:
        values = matrix.payload.float()
    if matrix.format == "fp8_tile":
        scale = scale.repeat_interleave(32, 0)[:rows]
    return values * scale.repeat_interleave(32, 1)[:, :width]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """The same random model, quantised and not."""
    root = tmp_path_factory.mktemp("pair")
    opened = []
    for quantized in (True, False):
        folder = root / str(quantized)
        config = write_checkpoint(folder, second_geometry_config(), seed=5, quantized=quantized)
        opened.append(Checkpoint.open(folder, config))
    return opened[0], opened[1]


@pytest.mark.parametrize("make", [demo_config, second_geometry_config])
def test_folder_is_a_complete_model(tmp_path: Path, make: Callable[[], dict[str, Any]]) -> None:
    folder = tmp_path / "model"
    written = write_checkpoint(folder, make())
    config = ModelConfig.from_folder(folder)
    assert config == written
    assert config.quantized
    assert set(Checkpoint.open(folder, config).names()) == set(tensor_specs(config))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config.vocab_size
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == [1]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10 * 2**20


def test_fold_count_in_the_config_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "model", demo_config())
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    classes = fold_vocabulary(tokenizer)
    assert config.engram_compressed_vocab_size == len(set(classes.tolist()))
    assert config.engram_compressed_vocab_size < config.vocab_size


def test_same_seed_same_bytes_and_other_seed_other_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_checkpoint(tmp_path / name, second_geometry_config(), seed=seed)
    first, again, other = (digest(tmp_path / name) for name in "abc")
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["tokenizer.json"] == other["tokenizer.json"]


def test_shards_come_with_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", second_geometry_config(), num_shards=3)
    names = {path.name for path in tmp_path.glob("model/*.safetensors")}
    assert names == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    index = json.loads(
        (tmp_path / "model" / "model.safetensors.index.json").read_text(encoding="utf-8")
    )
    assert set(index["weight_map"].values()) == names


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("layers.0.attn.wq_b", 0.035),
        ("layers.2.ffn.experts.3.w2", 0.15),
        ("layers.0.ffn.shared_experts.w1", 0.035),
        ("layers.3.engram.embed", 0.035),
        ("embed", 1e-9),
    ],
)
def test_quantised_weights_are_near_the_plain_ones(
    pair: tuple[Checkpoint, Checkpoint], name: str, error: float
) -> None:
    stored, plain = (checkpoint.matrix(name) for checkpoint in pair)
    assert plain.scale is None
    wanted = plain.payload.float()
    difference = dequantise(stored) - wanted
    assert difference.square().mean().sqrt() <= error * wanted.square().mean().sqrt()


def test_no_weight_saturates_its_format(pair: tuple[Checkpoint, Checkpoint]) -> None:
    stored = pair[0]
    for name in stored.names():
        tensor = stored.tensor(name)
        if tensor.dtype == torch.float8_e4m3fn:
            assert tensor.float().isfinite().all(), name


def test_norms_are_near_one_and_special_tokens_stay_silent(
    pair: tuple[Checkpoint, Checkpoint],
) -> None:
    plain = pair[1]
    norm = plain.tensor("norm.weight").float()
    assert 0.9 < norm.mean() < 1.1 and norm.std() < 0.2
    head = plain.tensor("head.weight")
    assert not head[[0, 2, 380]].any()
    assert head[[1, 3, 379]].abs().sum(dim=1).all()


def test_vocabulary_has_the_special_tokens_where_the_config_wants_them() -> None:
    tokenizer = build_tokenizer(700, {0: "<bos>", 1: "<eos>", 2: "<pad>", 650: "<noise>"})
    assert [tokenizer.id_to_token(i) for i in (0, 1, 2, 650)] == [
        "<bos>",
        "<eos>",
        "<pad>",
        "<noise>",
    ]
    assert all(tokenizer.id_to_token(i) is not None for i in range(700))
    assert tokenizer.encode("a<noise>b").ids[1] == 650


@pytest.mark.parametrize("vocab_size", [260, 384, 1024, 3000])
def test_every_text_survives_the_tokenizer(vocab_size: int) -> None:
    tokenizer = build_tokenizer(vocab_size, {0: "<bos>", 1: "<eos>", 2: "<pad>"})
    assert tokenizer.get_vocab_size() == vocab_size
    for text in ("The harbour town.", "  two\n\tlines ", "naïve Straße 漢字 \U0001f642", ""):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert all(token_id < vocab_size for token_id in ids)


def test_vocabulary_too_small_for_bytes() -> None:
    with pytest.raises(ConfigError, match="259 or more"):
        build_tokenizer(258, {0: "<bos>", 1: "<eos>", 2: "<pad>"})


def test_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="not empty"):
        write_checkpoint(tmp_path, second_geometry_config())
    assert digest(tmp_path) == {"notes.txt": b"mine"}


def test_invalid_config_writes_nothing(tmp_path: Path) -> None:
    config = second_geometry_config()
    config["text_config"]["index_topk"] = 1000
    with pytest.raises(ConfigError, match="index_topk"):
        write_checkpoint(tmp_path / "model", config)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left"), safetensors.SafetensorError("No space left")]
)
def test_full_disk_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def save(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    with pytest.raises(OutputError, match="No space left"):
        write_checkpoint(tmp_path / "model", second_geometry_config())


@pytest.mark.parametrize("megabytes", [64, 512])
def test_loading_preset_has_the_size_asked_for(megabytes: int) -> None:
    config = loading_config(megabytes)
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    }
    item = {"BF16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
    experts = 0
    for name, spec in tensor_specs(ModelConfig.from_dict(config)).items():
        if name.startswith("layers.") and ".experts." in name:
            rows, width = spec.shape
            experts += rows * width * item[spec.kind.dtypes[0]]
    assert megabytes * 2**20 <= experts < 1.2 * megabytes * 2**20
