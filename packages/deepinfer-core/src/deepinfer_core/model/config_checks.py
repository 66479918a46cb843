"""Checks of a model configuration's fields against one another."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING

from deepinfer_core.model.config_file import fail

if TYPE_CHECKING:
    from deepinfer_core.model.config import ModelConfig

__all__ = ["check_config"]

# One scale per 32 channels in the 8-bit formats and in packed FP4 weights.
_SCALE_GROUP = 32

_RATIOS = (0, 1, 2)

_MAX_SINKHORN_ITERS = 1000  # far beyond convergence; the release has 20

_TOKEN_IDS = (
    "bos_token_id",
    "pad_token_id",
    "image_token_id",
    "engram_pad_token_id",
    "dspark_noise_token_id",
)


def check_config(config: ModelConfig) -> None:
    """Check every field of a configuration, except those derived from it.

    Raises:
        ConfigError: the first field found at fault, its value and what is allowed.
    """
    _check_ranges(config)
    _check_widths(config)
    _check_ratios(config)
    _check_sources(config)
    _check_candidates(config)
    _check_experts(config)
    _check_drafter(config)
    _check_engram(config)
    _check_vision(config)


def _check_ranges(config: ModelConfig) -> None:
    # a part of the model that is absent has no sizes
    absent = ["num_nextn_predict_layers"]
    if not config.engram_layer_ids:
        absent.append("engram_")
    if not config.num_nextn_predict_layers:
        absent.append("dspark_")
    if config.candidate_source_layer_id is None:
        absent.append("candidate_")
    for name in (f.name for f in fields(config) if f.init):
        value = getattr(config, name)
        may_be_zero = name.endswith(("token_id", "layer_id")) or name.startswith(tuple(absent))
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value < 0 or (value == 0 and not may_be_zero):
            raise fail(name, value, f"must be {'at least 0' if may_be_zero else 'above 0'}")
    for name in ("rope_theta", "compress_rope_theta"):
        if getattr(config, name) <= 1:  # YaRN divides by its logarithm
            raise fail(name, getattr(config, name), "must be above 1")
    if config.hc_sinkhorn_iters > _MAX_SINKHORN_ITERS:
        allowed = f"must be at most {_MAX_SINKHORN_ITERS}"
        raise fail("hc_sinkhorn_iters", config.hc_sinkhorn_iters, allowed)
    for name in _TOKEN_IDS:
        value = getattr(config, name)
        if value is not None and value >= config.vocab_size:
            raise fail(name, value, f"must be below `vocab_size`, {config.vocab_size}")
    eos = config.eos_token_ids
    if not eos or not all(0 <= token < config.vocab_size for token in eos):
        allowed = f"must be one or more ids below `vocab_size`, {config.vocab_size}"
        raise fail("eos_token_id", list(eos), allowed)
    scaling = config.rope_scaling
    for name in (f.name for f in fields(scaling)):
        if getattr(scaling, name) <= 0:
            raise fail(f"rope_scaling.{name}", getattr(scaling, name), "must be above 0")


def _check_widths(config: ModelConfig) -> None:
    if config.num_attention_heads % config.o_groups:
        allowed = f"must divide `num_attention_heads`, {config.num_attention_heads}"
        raise fail("o_groups", config.o_groups, allowed)
    rope = config.qk_rope_head_dim
    if rope % 2 or rope > config.head_dim:
        raise fail("qk_rope_head_dim", rope, f"must be even and at most {config.head_dim}")
    if rope > config.index_head_dim:
        allowed = f"must be at least `qk_rope_head_dim`, {rope}"
        raise fail("index_head_dim", config.index_head_dim, allowed)
    if not config.quantized:
        return
    names = ["hidden_size", "q_lora_rank", "moe_intermediate_size", "head_dim", "index_head_dim"]
    if config.engram_layer_ids:
        names.append("engram_head_dim")
    widths = [(name, int(getattr(config, name))) for name in names]
    widths.append(("o_groups * o_lora_rank", config.o_groups * config.o_lora_rank))
    for name, width in widths:
        if width % _SCALE_GROUP:
            allowed = f"the quantised formats need a multiple of {_SCALE_GROUP}"
            raise fail(name, width, allowed)


def _check_ratios(config: ModelConfig) -> None:
    ratios = config.compress_ratios
    stages = config.num_nextn_predict_layers
    wanted = config.num_hidden_layers + stages
    if len(ratios) != wanted:
        raise fail(
            "compress_ratios",
            list(ratios),
            f"has {len(ratios)} entries, must have {wanted}: `num_hidden_layers` "
            f"({config.num_hidden_layers}) and `num_nextn_predict_layers` ({stages})",
        )
    for i, ratio in enumerate(ratios):
        if ratio not in _RATIOS:
            raise fail(f"compress_ratios[{i}]", ratio, "must be 0, 1 or 2")
        if ratio and i >= config.num_hidden_layers:
            raise fail(f"compress_ratios[{i}]", ratio, "must be 0 for a draft stage")


def _check_layer_list(config: ModelConfig, name: str, *, may_be_empty: bool = False) -> None:
    layer_ids: tuple[int, ...] = getattr(config, name)
    in_range = all(0 <= layer_id < config.num_hidden_layers for layer_id in layer_ids)
    ascending = all(low < high for low, high in pairwise(layer_ids))
    if not in_range or not ascending or not (layer_ids or may_be_empty):
        need = "" if may_be_empty else "one or more "
        allowed = f"must be {need}layer ids below {config.num_hidden_layers}, ascending"
        raise fail(name, list(layer_ids), allowed)


def _check_sources(config: ModelConfig) -> None:
    _check_layer_list(config, "kv_source_layer_ids")
    _check_layer_list(config, "index_source_layer_ids")
    ratios, kv_sources = config.compress_ratios, config.kv_source_layer_ids
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer_id in getattr(config, name):
            if ratios[layer_id] == 0:
                allowed = "`compress_ratios` must be 1 or 2 there, but is 0"
                raise fail(name, layer_id, allowed)
    for source in kv_sources:
        # a selection made against older keys would point into another cache
        if source not in config.index_source_layer_ids:
            allowed = f"must hold every kv source, but {source} is absent"
            raise fail("index_source_layer_ids", list(config.index_source_layer_ids), allowed)
    for layer_id, ratio in enumerate(ratios[: config.num_hidden_layers]):
        if ratio == 0:
            continue
        owner = max((source for source in kv_sources if source <= layer_id), default=None)
        if owner is None:
            allowed = f"needs a kv source at or below layer {layer_id}, first is {kv_sources[0]}"
            raise fail(f"compress_ratios[{layer_id}]", ratio, allowed)
        if ratios[owner] != ratio:
            allowed = f"must be {ratios[owner]}, the ratio of its kv source, layer {owner}"
            raise fail(f"compress_ratios[{layer_id}]", ratio, allowed)


def _check_candidates(config: ModelConfig) -> None:
    source = config.candidate_source_layer_id
    if source is None:
        return
    if source not in config.index_source_layer_ids:
        allowed = f"must be one of `index_source_layer_ids`, {list(config.index_source_layer_ids)}"
        raise fail("candidate_source_layer_id", source, allowed)
    # candidates are entries of one cache: later index sources must score the same one
    if source < config.kv_source_layer_ids[-1]:
        allowed = f"must not be below the last kv source, layer {config.kv_source_layer_ids[-1]}"
        raise fail("candidate_source_layer_id", source, allowed)
    num_entries = config.candidate_topk_blocks * config.candidate_block_size
    if num_entries < config.index_topk:
        raise fail(
            "candidate_topk_blocks",
            config.candidate_topk_blocks,
            f"with `candidate_block_size` {config.candidate_block_size} that is {num_entries} "
            f"entries, must be at least `index_topk`, {config.index_topk}",
        )


def _check_experts(config: ModelConfig) -> None:
    if config.n_shared_experts != 1:
        raise fail("n_shared_experts", config.n_shared_experts, "only 1 is supported")
    pairs = [("num_experts_per_tok", "n_routed_experts")]
    if config.num_nextn_predict_layers:
        pairs.append(("dspark_num_experts_per_tok", "dspark_n_routed_experts"))
    for chosen, available in pairs:
        value, limit = getattr(config, chosen), getattr(config, available)
        if value > limit:
            raise fail(chosen, value, f"must be at most `{available}`, {limit}")


def _check_drafter(config: ModelConfig) -> None:
    has_stages = config.num_nextn_predict_layers > 0
    _check_layer_list(config, "dspark_target_layer_ids", may_be_empty=not has_stages)
    if config.dspark_target_layer_ids and not has_stages:
        allowed = "must be empty without draft stages (`num_nextn_predict_layers` is 0)"
        raise fail("dspark_target_layer_ids", list(config.dspark_target_layer_ids), allowed)


def _check_engram(config: ModelConfig) -> None:
    _check_layer_list(config, "engram_layer_ids", may_be_empty=True)
    if len(config.engram_num_embeddings) != len(config.engram_layer_ids):
        allowed = f"must have one entry per Engram layer, {len(config.engram_layer_ids)}"
        raise fail("engram_num_embeddings", list(config.engram_num_embeddings), allowed)
    if not config.engram_layer_ids:
        return
    if config.engram_max_ngram_size < 2:
        raise fail("engram_max_ngram_size", config.engram_max_ngram_size, "must be at least 2")
    if config.engram_compressed_vocab_size > config.vocab_size:
        allowed = f"must be at most `vocab_size`, {config.vocab_size}"
        raise fail("engram_compressed_vocab_size", config.engram_compressed_vocab_size, allowed)


def _check_vision(config: ModelConfig) -> None:
    vision = config.vision
    if vision is None:
        return
    for name in (f.name for f in fields(vision)):
        value = getattr(vision, name)
        if value is not None and value <= 0:
            raise fail(f"vision_config.{name}", value, "must be above 0")
    # a head's rotary channels are halved twice: row and column angles, then pairs
    if vision.hidden_size % (4 * vision.num_attention_heads):
        allowed = f"`hidden_size` {vision.hidden_size} must be a multiple of 4 times it"
        raise fail("vision_config.num_attention_heads", vision.num_attention_heads, allowed)
    if config.image_token_id is None:
        raise fail("image_token_id", None, "a model with `vision_config` needs one")
