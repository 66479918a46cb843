from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer_core.bench.make_checkpoint import second_geometry_config, write_checkpoint
from deepinfer_core.errors import CheckpointError
from deepinfer_core.model.checkpoint import Checkpoint, resolve_model
from deepinfer_core.model.config import ModelConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EXPERTS = "layers.2.ffn.experts"


def config_with_vision() -> dict[str, Any]:
    config = second_geometry_config()
    config["image_token_id"] = 381
    config["vision_config"] = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "patch_size": 4,
        "rope_theta": 10000.0,
        "downsample_ratio": 3,
        "max_image_tokens": 64,
        "min_pixels": 144,
        "max_wh_ratio": None,
    }
    return config


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model each in one file, in three files, and unquantised; not to be changed."""
    root = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(root / "single", config_with_vision(), seed=3)
    write_checkpoint(root / "sharded", config_with_vision(), seed=3, num_shards=3)
    write_checkpoint(root / "plain", config_with_vision(), seed=3, quantized=False)
    return {name: root / name for name in ("single", "sharded", "plain")}


@pytest.fixture
def copied(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(originals[name], tmp_path / name))

    return copy


def open_folder(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, ModelConfig.from_folder(folder))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", ["single", "plain"])
def test_every_tensor_is_read_bit_for_bit(originals: dict[str, Path], name: str) -> None:
    expected = load_file(originals[name] / WEIGHTS)
    with open_folder(originals[name]) as checkpoint:
        assert set(checkpoint.names(vision=True)) == set(expected)
        for key, value in expected.items():
            read = checkpoint.tensor(key)
            assert read.shape == value.shape == checkpoint.spec(key).shape
            assert torch.equal(raw(read), raw(value)), key
            assert torch.equal(raw(checkpoint.mapped(key)), raw(value)), key
            assert checkpoint.num_bytes(key) == value.nbytes


def test_shards_hold_the_same_model_as_one_file(originals: dict[str, Path]) -> None:
    one, many = open_folder(originals["single"]), open_folder(originals["sharded"])
    assert one.names() == many.names()
    for key in one.names():
        assert torch.equal(raw(one.tensor(key)), raw(many.tensor(key))), key


def test_stored_formats_keep_their_dtypes(originals: dict[str, Path]) -> None:
    checkpoint = open_folder(originals["single"])
    dense = checkpoint.matrix("layers.0.attn.wq_b")
    assert (dense.format, dense.payload.dtype) == ("fp8_tile", torch.float8_e4m3fn)
    assert dense.scale is not None and dense.scale.dtype == torch.uint8
    assert dense.shape == (192, 64) and dense.scale.shape == (6, 2)
    table = checkpoint.matrix("layers.0.engram.embed", mapped=True)
    assert (table.format, table.shape) == ("fp8_row", (384, 32))
    assert table.scale is not None and table.scale.shape == (384, 1)
    plain = checkpoint.matrix("embed")
    assert (plain.format, plain.scale, plain.payload.dtype) == ("plain", None, torch.bfloat16)
    assert checkpoint.tensor("layers.0.attn.attn_sink").dtype == torch.float32


def test_experts_are_stacked_in_the_order_asked_for(originals: dict[str, Path]) -> None:
    checkpoint = open_folder(originals["sharded"])
    ids = [4, 0, 4, 2]
    stacked = checkpoint.experts(EXPERTS, ids)
    assert list(stacked) == ["w1", "w3", "w2"]
    for name, matrix in stacked.items():
        assert matrix.format == "fp4_row" and matrix.payload.dtype == torch.uint8
        assert matrix.shape == ((96, 32) if name == "w2" else (32, 96))
        assert matrix.scale is not None
        for place, expert in enumerate(ids):
            one = checkpoint.matrix(f"{EXPERTS}.{expert}.{name}")
            assert one.scale is not None
            assert torch.equal(matrix.payload[place], one.payload)
            assert torch.equal(matrix.scale[place], one.scale)


def test_plain_experts_have_no_scale(originals: dict[str, Path]) -> None:
    stacked = open_folder(originals["plain"]).experts("mtp.1.ffn.experts", [1])
    assert {matrix.format for matrix in stacked.values()} == {"plain"}
    assert all(matrix.scale is None for matrix in stacked.values())


def test_no_experts_is_an_empty_stack(originals: dict[str, Path]) -> None:
    stacked = open_folder(originals["single"]).experts(EXPERTS, [])
    assert stacked["w1"].payload.shape == (0, 32, 48)


def test_unknown_expert_is_an_error(originals: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"experts\.5\.w1"):
        open_folder(originals["single"]).experts(EXPERTS, [0, 5])


def test_rows_are_a_slice(originals: dict[str, Path]) -> None:
    checkpoint = open_folder(originals["single"])
    whole = checkpoint.tensor("embed.weight")
    assert torch.equal(checkpoint.rows("embed.weight", 7, 20), whole[7:20])
    assert checkpoint.rows("embed.weight", 7, 7).shape == (0, 96)
    with pytest.raises(CheckpointError, match="384"):
        checkpoint.rows("embed.weight", 380, 385)


def test_a_tensor_has_memory_of_its_own(originals: dict[str, Path]) -> None:
    checkpoint = open_folder(originals["single"])
    first = checkpoint.tensor("norm.weight")
    assert first.untyped_storage().nbytes() == first.nbytes
    first.zero_()
    assert checkpoint.tensor("norm.weight").abs().sum() > 0


def test_vision_is_left_out_unless_asked_for(originals: dict[str, Path]) -> None:
    checkpoint = open_folder(originals["single"])
    assert not any(
        name.startswith(("vision.", "aligner.", "image_")) for name in checkpoint.names()
    )
    assert "vision.norm.weight" in checkpoint.names(vision=True)
    assert checkpoint.tensor("image_end").shape == (96,)


def test_reading_after_close_opens_the_files_again(originals: dict[str, Path]) -> None:
    checkpoint = open_folder(originals["single"])
    kept = checkpoint.mapped("norm.weight")
    checkpoint.close()
    assert torch.equal(checkpoint.tensor("norm.weight"), kept)


def test_plain_matrix_in_a_quantised_checkpoint(copied: Callable[[str], Path]) -> None:
    folder = copied("single")

    def unquantise(tensors: dict[str, Tensor]) -> None:
        for name, shape in (("layers.0.attn.wq_a", (64, 96)), (f"{EXPERTS}.0.w1", (32, 96))):
            del tensors[f"{name}.scale"]
            tensors[f"{name}.weight"] = torch.ones(shape, dtype=torch.float32)

    rewrite(folder, unquantise)
    checkpoint = open_folder(folder)
    matrix = checkpoint.matrix("layers.0.attn.wq_a")
    assert (matrix.format, matrix.payload.dtype) == ("plain", torch.float32)
    assert "layers.0.attn.wq_a.scale" not in checkpoint.names()
    with pytest.raises(CheckpointError, match="different formats"):
        checkpoint.experts(EXPERTS, [0, 1])
    assert checkpoint.experts(EXPERTS, [1, 2])["w1"].format == "fp4_row"


def test_one_error_lists_every_fault(copied: Callable[[str], Path]) -> None:
    folder = copied("single")

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["layers.1.attn.kv_norm.weight"]
        del tensors["layers.4.attn.indexer.wq_b.scale"]
        tensors["layers.0.attn.bonus"] = torch.zeros(3)
        tensors["norm.weight"] = torch.zeros(95, dtype=torch.bfloat16)
        tensors["layers.3.hc_attn_fn"] = tensors["layers.3.hc_attn_fn"].to(torch.bfloat16)
        tensors["embed.weight"] = tensors["embed.weight"].to(torch.float16)
        tensors["layers.2.attn.wkv.weight"] = torch.zeros(32, 96, dtype=torch.bfloat16)

    rewrite(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder)
    message = str(caught.value)
    for line in (
        f"Model folder `{folder}` cannot be used: 7 faults.",
        "Missing tensors (2):",
        "  `layers.1.attn.kv_norm.weight`",
        "  `layers.4.attn.indexer.wq_b.scale`",
        "Extra tensor (1):",
        "  `layers.0.attn.bonus`",
        "Wrong shape (1):",
        "  `norm.weight` is [95], must be [96]",
        "Wrong dtype (3):",
        "  `embed.weight` is F16, must be BF16 or F32",
        "  `layers.2.attn.wkv.weight` is BF16, must be F8_E4M3",
        "  `layers.3.hc_attn_fn` is BF16, must be F32",
    ):
        assert line in message.splitlines()


def test_long_lists_are_counted_by_layer(copied: Callable[[str], Path]) -> None:
    folder = copied("plain")

    def spoil(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "experts" in name]:
            del tensors[name]

    rewrite(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder)
    message = str(caught.value)
    # 9 layers of 5 routed experts and a shared one, 2 stages of 3 and one: three matrices each
    assert "Missing tensors (186):" in message
    assert "and 86 more: " in message and "12 in mtp.1" in message
    assert len(message.splitlines()) == 104


def test_scales_without_quantization_config_are_told(copied: Callable[[str], Path]) -> None:
    folder = copied("single")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="no `quantization_config`"):
        open_folder(folder)


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_file_is_named(copied: Callable[[str], Path], cut: int) -> None:
    folder = copied("single")
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-cut])
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder)
    message = str(caught.value)
    assert f"`{WEIGHTS}` is truncated" in message
    assert f"{len(data)} bytes, the file has {len(data) - cut}" in message
    assert "1 fault." in message


@pytest.mark.parametrize("length", [0, 5, 8, 2000])
def test_file_cut_inside_its_header_is_named(copied: Callable[[str], Path], length: int) -> None:
    folder = copied("single")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:length])
    with pytest.raises(CheckpointError, match=rf"`{WEIGHTS}` is truncated") as caught:
        open_folder(folder)
    assert "Missing" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"not json", "header that is not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 3}', "broken header"),
        (b'{"a": {"dtype": "Q7", "shape": [], "data_offsets": [0, 0]}}', "broken header"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "broken header"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "broken header"),
        (b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', "broken header"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}', "broken header"),
    ],
)
def test_broken_header_is_named(copied: Callable[[str], Path], header: bytes, words: str) -> None:
    folder = copied("single")
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_folder(folder)
    assert WEIGHTS in str(caught.value)


def test_other_kind_of_file_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("single")
    (folder / WEIGHTS).write_bytes(b"PK\x03\x04" * 1000)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        open_folder(folder)


def test_absent_and_truncated_shards_are_named_together(copied: Callable[[str], Path]) -> None:
    folder = copied("sharded")
    first, second, third = sorted(folder.glob("*.safetensors"))
    first.unlink()
    third.write_bytes(third.read_bytes()[:100])
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder)
    message = str(caught.value)
    assert f"`{first.name}` is absent, but `{INDEX}` names it" in message
    assert f"`{third.name}` is truncated" in message
    assert second.name not in message
    assert "2 faults" in message and "Missing" not in message


def test_index_without_files(copied: Callable[[str], Path]) -> None:
    folder = copied("sharded")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="3 faults"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"weight_map": {', "not valid JSON"),
        ("[]", "no `weight_map`"),
        ('{"weight_map": {}}', "no `weight_map`"),
        ('{"weight_map": {"norm.weight": "../other.safetensors"}}', "beside the index"),
    ],
)
def test_bad_index(copied: Callable[[str], Path], content: str, words: str) -> None:
    folder = copied("sharded")
    (folder / INDEX).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=words) as caught:
        open_folder(folder)
    assert INDEX in str(caught.value)


def test_file_not_in_the_index_is_not_read(copied: Callable[[str], Path]) -> None:
    folder = copied("sharded")
    save_file({"other": torch.zeros(3)}, folder / "consolidated.safetensors")
    open_folder(folder)


def test_tensor_in_two_files(copied: Callable[[str], Path]) -> None:
    folder = copied("single")
    save_file({"norm.weight": torch.zeros(96)}, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"`norm.weight` is in both"):
        open_folder(folder)


def test_unreadable_file_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("single")
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    with pytest.raises(CheckpointError, match=rf"`{WEIGHTS}` cannot be read"):
        open_folder(folder)


def test_file_that_shrinks_after_opening(copied: Callable[[str], Path]) -> None:
    folder = copied("single")
    checkpoint = open_folder(folder)
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(200_000)
    with pytest.raises(CheckpointError, match="changed after it was opened"):
        for name in checkpoint.names():
            checkpoint.tensor(name)


def test_file_that_vanishes_after_opening(copied: Callable[[str], Path]) -> None:
    folder = copied("single")
    checkpoint = open_folder(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.tensor("norm.weight")


def test_not_a_folder_and_empty_folder(originals: dict[str, Path], tmp_path: Path) -> None:
    config = ModelConfig.from_folder(originals["single"])
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(tmp_path / "nowhere", config)
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpoint.open(originals["single"] / WEIGHTS, config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        Checkpoint.open(tmp_path / "empty", config)


def test_resolve_takes_a_folder_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "a/b/c", "name", "", "a//b"])
def test_resolve_refuses_what_is_no_folder_and_no_id(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model(model)


def test_resolve_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model(tmp_path / "file")


def test_resolve_fetches_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = {}

    def fetch(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/Model-1.5", revision="v2") == tmp_path
    assert (asked["model"], asked["revision"]) == ("owner/Model-1.5", "v2")
    assert "*.safetensors" in asked["allow_patterns"]
    resolve_model("owner/Model-1.5", config_only=True)
    assert asked["allow_patterns"] == ["config.json"]


@dataclass(frozen=True)
class _Answer:
    """The little of an HTTP answer that the hub's errors look at."""

    headers: Mapping[str, str] = field(default_factory=dict)
    request: None = None
    status_code: int = 404


def hub_error(name: str) -> Exception:
    kind = getattr(hub_errors, name)
    if issubclass(kind, hub_errors.HfHubHTTPError):
        return kind("said so", response=_Answer())  # type: ignore[no-any-return]
    return kind("said so")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RepositoryNotFoundError", "neither a folder here nor a model on the hub"),
        ("HFValidationError", "neither a folder here nor a model on the hub"),
        ("GatedRepoError", "gated"),
        ("RevisionNotFoundError", "no revision 'v2'"),
        ("LocalEntryNotFoundError", "HF_HUB_OFFLINE"),
        ("OfflineModeIsEnabled", "HF_HUB_OFFLINE"),
        ("HfHubHTTPError", "said so"),
    ],
)
def test_hub_failures_are_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, words: str
) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise hub_error(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve_model("owner/model", revision="v2")
    assert "owner/model" in str(caught.value)


def test_full_disk_while_fetching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="No space left"):
        resolve_model("owner/model")
