"""Random models in the released on-disk format: weights, configuration and tokenizer.

    write_checkpoint("tiny", demo_config(), seed=0)

Every tensor is drawn from a generator of its own, seeded by `seed` and the tensor's name, so
the number of shards or another layer's shape does not change it. Spreads are chosen so that
activations keep their size from layer to layer, routing spreads over the experts, no gate
saturates and greedy decoding walks through the vocabulary.
"""

from __future__ import annotations

import copy
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer_core.bench.demo_tokenizer import build_tokenizer
from deepinfer_core.bench.presets import demo_config, loading_config, second_geometry_config
from deepinfer_core.errors import OutputError
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.shards import INDEX_NAME
from deepinfer_core.model.tensors import SCALE_GROUP, TensorKind, TensorSpec, tensor_specs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["demo_config", "loading_config", "second_geometry_config", "write_checkpoint"]

# Smaller vocabularies have no room beside the 256 bytes.
_CHAT_VOCAB_SIZE = 512

_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

_E2M1_MAX = 6.0
_E4M3_MAX = 448.0

# Matrices that get 1.5 / sqrt(width) instead of 1 / sqrt(width): what follows them damps (a mean
# over attended values, a clamped product, a sigmoid), or should tell its inputs clearly apart.
_WIDE = ("wq_b", "wo_b", "w1", "w2", "w3", "gate", "wgate")


def write_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    quantized: bool = True,
    num_shards: int = 1,
    tokenizer: Tokenizer | None = None,
) -> ModelConfig:
    """Write a random model: config.json, generation_config.json, tokenizer.json, safetensors.

    Args:
        folder: made if absent; must be empty.
        config: content of a config.json. Its `quantization_config` follows `quantized`, and its
            `engram_compressed_vocab_size` becomes what the tokenizer folds to.
        seed: decides all weights.
        quantized: FP8 and FP4 as released, or bfloat16 throughout.
        num_shards: files to spread the weights over; more than one come with an index.
        tokenizer: the tokenizer to write; by default a small byte-level one of `vocab_size` ids
            with the config's special tokens.
    Returns:
        The configuration as written, checked.
    Raises:
        ConfigError: the configuration is not a valid model.
        OutputError: the folder is not empty, or cannot be written.
    """
    folder = Path(folder)
    written: dict[str, Any] = copy.deepcopy(dict(config))
    written.pop("quantization_config", None)
    if quantized:
        written["quantization_config"] = dict(_QUANTIZATION)
    model = ModelConfig.from_dict(written)
    if tokenizer is None:
        tokenizer = build_tokenizer(model.vocab_size, _special_tokens(model))
    if model.engram_layer_ids:
        # imported here: the fold lives with the Engram module, which weights alone do not need
        from deepinfer_core.model.engram import fold_vocabulary

        num_classes = int(fold_vocabulary(tokenizer).max()) + 1
        written["text_config"]["engram_compressed_vocab_size"] = num_classes
        model = ModelConfig.from_dict(written)
    generation = {
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_ids),
        "pad_token_id": model.pad_token_id,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(f"`{folder}` is not empty; name a new folder for the model.")
        _write_json(folder / "config.json", written)
        _write_json(folder / "generation_config.json", generation)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        _write_weights(folder, model, seed, num_shards)
    except OSError as error:
        raise OutputError(f"`{folder}` cannot be written: {error.strerror or error}.") from error
    return model


# What a conversation needs, spelled as in the released tokenizer.
_CHAT_TOKENS = (
    *("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    *("｜DSML｜", "<｜latest_reminder｜>"),
)


def _special_tokens(config: ModelConfig) -> dict[int, str]:
    special = {config.bos_token_id: "<｜begin▁of▁sentence｜>", config.pad_token_id: "<pad>"}
    for place, token_id in enumerate(config.eos_token_ids):
        special[token_id] = f"<eos_{place}>" if place else "<｜end▁of▁sentence｜>"
    if config.num_nextn_predict_layers:
        special[config.dspark_noise_token_id] = "<noise>"
    if config.image_token_id is not None:
        special[config.image_token_id] = "<｜image｜>"
    if config.vocab_size >= _CHAT_VOCAB_SIZE:
        free = (each for each in reversed(range(config.vocab_size)) if each not in special)
        special |= dict(zip(free, _CHAT_TOKENS, strict=False))
    return special


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: Path, config: ModelConfig, seed: int, num_shards: int) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    specs = tensor_specs(config)
    # a matrix and its scales are drawn together and stay in one file
    owners = [spec for spec in specs.values() if spec.kind is not TensorKind.SCALE]
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
        tensors = dict(item for spec in shard for item in _draw(config, spec, seed))
        try:
            save_file(tensors, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OutputError(f"`{folder / name}` cannot be written: {error}.") from error
        weight_map |= dict.fromkeys(tensors, name)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    if num_shards > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        _write_json(folder / INDEX_NAME, index)


def _draw(config: ModelConfig, spec: TensorSpec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, and its scales if it has any, as they go to the file."""
    *rows, width = spec.shape
    if spec.kind is TensorKind.FP4_ROW:
        width *= 2
    values = _values(config, spec, (*rows, width), seed)
    if spec.scale_name is None:
        plain = torch.float32 if spec.kind is TensorKind.FLOAT32 else torch.bfloat16
        yield spec.name, values.to(plain)
        return
    payload, scale = _QUANTIZERS[spec.kind](values)
    yield spec.name, payload
    yield spec.scale_name, scale.view(torch.float8_e8m0fnu)


def _values(config: ModelConfig, spec: TensorSpec, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw one tensor in float32."""
    name = spec.name.removesuffix(".weight")
    leaf = name.rpartition(".")[2]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {spec.name}".encode()))
    if leaf in ("hc_attn_scale", "hc_ffn_scale"):
        return torch.empty(shape).uniform_(0.6, 1.1, generator=generator)
    noise = torch.randn(shape, generator=generator)
    if "norm" in leaf:
        return 1 + 0.1 * noise
    if leaf in ("q_weight", "k_weight"):
        return 1 + 0.2 * noise
    if leaf.endswith("_base"):
        return 0.7 * noise
    if leaf in ("bias", "bias_vl"):
        return (0.2 if ".gate." in name else 0.1) * noise
    if leaf in ("embed", "attn_sink") or leaf.startswith("image_"):
        return noise
    if leaf == "head":
        # logits spread by 2. Tokens that are no text are left at 0, far below the winners.
        noise *= 2 / math.sqrt(shape[-1])
        if "markov" not in name:
            silent = _special_tokens(config).keys() - set(config.eos_token_ids)
            noise[sorted(silent)] = 0
            return noise
        return noise / 2
    wide = leaf in _WIDE or leaf.endswith("_fn")
    return noise * ((1.5 if wide else 1.0) / math.sqrt(shape[-1]))


def _power_of_two(limit: Tensor, largest: float) -> Tensor:
    """Return exponent bytes of the least powers of two that bring `limit` down to `largest`."""
    exponent = torch.ceil(torch.log2(limit.clamp(min=1e-30) / largest))
    return (exponent + 127).clamp(0, 254).to(torch.uint8)


def _two_to(exponent_bytes: Tensor) -> Tensor:
    exponents = exponent_bytes.to(torch.int32) - 127
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def _quantize_tiles(values: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> float8_e4m3fn [out, in] and one exponent byte per 32 x 32 tile."""
    rows, width = values.shape
    padding = (0, -width % SCALE_GROUP, 0, -rows % SCALE_GROUP)
    padded = torch.nn.functional.pad(values.abs(), padding)
    tiles = padded.view(-1, SCALE_GROUP, padded.shape[1] // SCALE_GROUP, SCALE_GROUP)
    scale = _power_of_two(tiles.amax(dim=(1, 3)), _E4M3_MAX)
    spread = _two_to(scale).repeat_interleave(SCALE_GROUP, 0).repeat_interleave(SCALE_GROUP, 1)
    return (values / spread[:rows, :width]).to(torch.float8_e4m3fn), scale


def _quantize_fp8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, width] -> float8_e4m3fn [rows, width], an exponent byte per row and 32 channels."""
    groups = values.view(len(values), -1, SCALE_GROUP)
    scale = _power_of_two(groups.abs().amax(dim=2), _E4M3_MAX)
    return (groups / _two_to(scale).unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn), scale


def _quantize_fp4_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 [out, in / 2], an exponent byte per row and 32 channels."""
    groups = values.view(len(values), -1, SCALE_GROUP)
    scale = _power_of_two(groups.abs().amax(dim=2), _E2M1_MAX)
    scaled = (groups / _two_to(scale).unsqueeze(2)).flatten(1)
    size = scaled.abs()
    # codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, evenly spaced in three stretches; the half more
    # makes truncation a rounding to nearest, ties upwards
    upper = torch.where(size <= 4, size + 2.5, size / 2 + 4.5)
    codes = torch.where(size <= 2, size * 2 + 0.5, upper).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed.view(torch.int8), scale


_QUANTIZERS: dict[TensorKind, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    TensorKind.FP8_TILE: _quantize_tiles,
    TensorKind.FP8_ROW: _quantize_fp8_rows,
    TensorKind.FP4_ROW: _quantize_fp4_rows,
}
