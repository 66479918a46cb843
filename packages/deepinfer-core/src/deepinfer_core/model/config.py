"""The model's shapes and the role of each layer, read from `config.json` and checked.

Names are those of the file. Every count, width and layer number of the model comes from here:
code that runs the model holds none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from deepinfer_core.errors import ConfigError
from deepinfer_core.model.config_checks import check_config
from deepinfer_core.model.config_file import (
    check_keys,
    check_quantization,
    fail,
    read_fields,
    read_json,
    read_tables,
)

__all__ = ["LayerRole", "ModelConfig", "RopeScaling", "VisionConfig", "engram_primes"]

_TABLES = ("text_config", "vision_config", "quantization_config")

# Token ids that the file may state at the top level, in `text_config`, or in both alike.
_SHARED_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")

# Fields of `ModelConfig` that are not taken from a key of the same name in `text_config`.
_DERIVED = ("model_type", "rope_scaling", "eos_token_ids", "quantized", "vision", "layers")


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers that read compressed KV."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """Shapes of the vision tower. `min_pixels` counts pixels, `patch_size` is in pixels."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True)
class LayerRole:
    """What one layer reads and publishes.

    Attributes:
        layer_id: the layer.
        ratio: tokens per entry of the compressed cache it reads; 0 = sliding window only.
        kv_source: the layer whose compressed KV it reads; None when `ratio` is 0.
        index_source: the layer whose selection it uses; None when `ratio` is 0.
        is_kv_source: it owns a compressor, index keys and their norm.
        is_index_source: it runs an indexer.
        publishes_candidates: its candidate blocks bound later index sources.
        uses_candidates: its indexer selects inside those blocks.
        engram_index: its place in `engram_layer_ids`, or None.
        is_draft_target: its streams are a feature of the drafter.
    """

    layer_id: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_kv_source: bool
    is_index_source: bool
    publishes_candidates: bool
    uses_candidates: bool
    engram_index: int | None
    is_draft_target: bool


@dataclass(frozen=True)
class ModelConfig:
    """A checked `config.json`; constructing one raises `ConfigError` if fields contradict.

    Attributes:
        compress_ratios: one entry per layer, then one (always 0) per draft stage.
        candidate_source_layer_id: None when every index source scores all entries.
        quantized: matrices are stored in FP8 and FP4; False = plain bfloat16 or float32.
        layers: one role per backbone layer.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    gate_temp: float
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    image_token_id: int | None
    quantized: bool
    vision: VisionConfig | None
    layers: tuple[LayerRole, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the fields against one another and derive the layer roles."""
        check_config(self)
        rows = tuple(map(sum, engram_primes(self)))
        if rows != self.engram_num_embeddings:
            raise fail(
                "engram_num_embeddings",
                list(self.engram_num_embeddings),
                f"the buckets that `engram_vocab_size` {self.engram_vocab_size} leads to sum to "
                f"{list(rows)}",
            )
        object.__setattr__(self, "layers", tuple(map(self._role, range(self.num_hidden_layers))))

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` of a model folder.

        Raises:
            ConfigError: the file is absent or not JSON, or as for `from_dict`.
        """
        return cls.from_dict(read_json(Path(folder) / "config.json"))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a `config.json`.

        Raises:
            ConfigError: a key is unknown, absent or of the wrong type, a value is not supported,
                or fields contradict one another.
        """
        tables = read_tables(config, _TABLES)
        if "text_config" not in tables:
            raise ConfigError(
                "`text_config` in config.json is absent: the shapes of the language model are "
                "expected in it. Use the config.json at the top of a model folder."
            )
        top = {key: value for key, value in config.items() if key not in _TABLES}
        check_keys(top, "", {"model_type", *_SHARED_KEYS}, {"model_type": "deepseek_v41"})
        if "model_type" not in top:
            raise fail("model_type", None, "only 'deepseek_v41' is supported")
        values = _read_text(tables["text_config"], top)
        if "quantization_config" in tables:
            check_quantization(tables["quantization_config"])
        vision = None
        if "vision_config" in tables:
            fixed = {"model_type": "deepseek_v41_vision"}
            table = tables["vision_config"]
            vision = VisionConfig(**read_fields(VisionConfig, table, "vision_config", fixed=fixed))
        return cls(
            model_type=top["model_type"],
            quantized="quantization_config" in tables,
            vision=vision,
            **values,
        )

    @property
    def last_kv_source(self) -> int:
        """The last layer that writes compressed KV; prompt tails suffice above it."""
        return self.kv_source_layer_ids[-1]

    @property
    def num_engram_columns(self) -> int:
        """Table rows read per token and Engram layer: n-gram lengths times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def _role(self, layer_id: int) -> LayerRole:
        ratio = self.compress_ratios[layer_id]
        candidate = self.candidate_source_layer_id
        is_index_source = layer_id in self.index_source_layer_ids
        engram = self.engram_layer_ids
        return LayerRole(
            layer_id=layer_id,
            ratio=ratio,
            kv_source=_last_at(self.kv_source_layer_ids, layer_id) if ratio else None,
            index_source=_last_at(self.index_source_layer_ids, layer_id) if ratio else None,
            is_kv_source=layer_id in self.kv_source_layer_ids,
            is_index_source=is_index_source,
            publishes_candidates=layer_id == candidate,
            uses_candidates=is_index_source and candidate is not None and layer_id > candidate,
            engram_index=engram.index(layer_id) if layer_id in engram else None,
            is_draft_target=layer_id in self.dspark_target_layer_ids,
        )


def engram_primes(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Return the bucket count of every Engram column: one tuple per Engram layer.

    Columns come in the order (n = 2, all heads), (n = 3, all heads), ...; a layer's table holds
    the buckets of its columns one after another. Each n-gram length of each layer looks upwards
    from `engram_vocab_size` for primes that no earlier column has taken.

    Source: the released DeepSeek-V4.1 format.
    """
    taken: set[int] = set()
    layers = []
    for _ in config.engram_layer_ids:
        columns = []
        for _ in range(config.engram_max_ngram_size - 1):
            candidate = config.engram_vocab_size
            for _ in range(config.engram_n_heads):
                while candidate in taken or not _is_prime(candidate):
                    candidate += 1
                taken.add(candidate)
                columns.append(candidate)
        layers.append(tuple(columns))
    return tuple(layers)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))


def _last_at(sources: tuple[int, ...], layer_id: int) -> int | None:
    return max((source for source in sources if source <= layer_id), default=None)


def _empty_fields(prefix: str) -> dict[str, object]:
    empty = {"int": 0, "int | None": None, "tuple[int, ...]": ()}
    return {f.name: empty[str(f.type)] for f in fields(ModelConfig) if f.name.startswith(prefix)}


def _read_text(table: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's fields, from `text_config` and the ids of the top level."""
    text = dict(table)
    for key in _SHARED_KEYS:
        if key in top and key in text and text[key] != top[key]:
            raise fail(key, top[key], f"`text_config` says {text[key]!r}; they must be the same")
        if key in top:
            text[key] = top[key]
    eos, scaling = text.pop("eos_token_id", None), text.pop("rope_scaling", None)
    if not isinstance(scaling, Mapping):
        raise fail("text_config.rope_scaling", scaling, "must be an object")
    yarn = {"type": "yarn", "rope_type": "yarn"}
    if not yarn.keys() & scaling.keys():
        raise fail("text_config.rope_scaling", scaling, "must state `rope_type`, only 'yarn'")
    # a model without Engram layers, draft stages or candidates need not state their sizes
    optional: dict[str, object] = {"gate_temp": 1.0, "num_nextn_predict_layers": 0}
    if not text.get("engram_layer_ids"):
        optional |= _empty_fields("engram_")
    if not text.get("num_nextn_predict_layers"):
        optional |= _empty_fields("dspark_")
    if text.get("candidate_source_layer_id") is None:
        optional |= _empty_fields("candidate_")
    values = read_fields(
        ModelConfig,
        text,
        "text_config",
        fixed={"model_type": "deepseek_v41_text"},
        derived=_DERIVED,
        optional=optional,
    )
    values["rope_scaling"] = RopeScaling(
        **read_fields(RopeScaling, scaling, "text_config.rope_scaling", fixed=yarn)
    )
    # one end token, or a list of them
    ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise fail("eos_token_id", eos, "must be an integer or a list of integers")
    values["eos_token_ids"] = tuple(ids)
    return values
