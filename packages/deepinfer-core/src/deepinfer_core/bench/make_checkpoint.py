"""Random models in the released on-disk format: weights, configuration and tokenizer.

    write_checkpoint("tiny", demo_config(), seed=0)

Every tensor is drawn from a generator of its own, seeded by `seed` and the tensor's name, so
the number of shards or another layer's shape does not change it. Spreads are chosen so that
activations keep their size from layer to layer, routing spreads over the experts, no gate
saturates and greedy decoding walks through the vocabulary.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer_core.bench.demo_tokenizer import build_tokenizer
from deepinfer_core.bench.presets import demo_config, loading_config, second_geometry_config
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.tensors import TensorKind, TensorSpec, tensor_specs
from deepinfer_core.model.writer import QUANTIZATION, full_shape, write_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["demo_config", "loading_config", "second_geometry_config", "write_checkpoint"]

# Smaller vocabularies have no room beside the 256 bytes.
_CHAT_VOCAB_SIZE = 512

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
    written: dict[str, Any] = copy.deepcopy(dict(config))
    written.pop("quantization_config", None)
    if quantized:
        written["quantization_config"] = dict(QUANTIZATION)
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
    text = tokenizer.to_str(pretty=True)
    drawn = _Drawn(model, seed)
    return write_model(folder, written, drawn, text, generation, num_shards=num_shards)


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


class _Drawn(Mapping[str, Tensor]):
    """The tensors of a random model, each drawn when it is asked for."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        specs = tensor_specs(config).values()
        self._config, self._seed = config, seed
        self._specs = {spec.name: spec for spec in specs if spec.kind is not TensorKind.SCALE}

    def __getitem__(self, name: str) -> Tensor:
        return _values(self._config, self._specs[name], self._seed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def _values(config: ModelConfig, spec: TensorSpec, seed: int) -> Tensor:
    """Draw one tensor in float32."""
    shape = full_shape(spec)
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
