from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.bench.make_checkpoint import (
    demo_config,
    loading_config,
    second_geometry_config,
)
from deepinfer_core.errors import ConfigError
from deepinfer_core.model.config import ModelConfig, engram_primes
from deepinfer_core.model.tensors import TensorKind, tensor_specs

QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

# the shape of the released model, as published
RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "transformers_version": "5.6.0",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": QUANTIZATION,
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "compress_rope_theta": 160000,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_vocab_size": 16000000,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}


def changed(path: str, value: object, base: dict[str, Any] = RELEASED) -> dict[str, Any]:
    """Return the released config with one key set; a dot goes into a nested table."""
    config = copy.deepcopy(base)
    *tables, key = path.split(".")
    table = config
    for name in tables:
        table = table[name]
    table[key] = value
    return config


def without(path: str) -> dict[str, Any]:
    config = copy.deepcopy(RELEASED)
    *tables, key = path.split(".")
    table = config
    for name in tables:
        table = table[name]
    del table[key]
    return config


def test_released_config_is_read() -> None:
    config = ModelConfig.from_dict(RELEASED)
    assert config.quantized
    assert config.eos_token_ids == (1,)
    assert config.image_token_id == 129264
    assert config.gate_temp == 1.0
    assert config.rope_scaling.original_max_position_embeddings == 65536
    assert config.vision is not None and config.vision.max_wh_ratio is None
    assert config.last_kv_source == 20
    assert config.num_engram_columns == 24


def test_released_tensors_have_the_published_count_and_size() -> None:
    specs = tensor_specs(ModelConfig.from_dict(RELEASED))
    item = {"BF16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
    total = 0
    for spec in specs.values():
        count = item[spec.kind.dtypes[0]]
        for size in spec.shape:
            count *= size
        total += count
    assert len(specs) == 96_085
    assert total == 510_286_023_000


@pytest.mark.parametrize(
    ("suffix", "count"),
    [
        (".wq_a.weight", 43),
        (".compressor.wkv.weight", 4),
        (".compressor.wgate.weight", 3),
        (".indexer.wq_b.weight", 8),
        (".indexer.wk.weight", 4),
        (".engram.embed.weight", 2),
    ],
)
def test_released_tensors_of_one_sort(suffix: str, count: int) -> None:
    names = tensor_specs(ModelConfig.from_dict(RELEASED))
    assert sum(name.endswith(suffix) for name in names) == count


def test_unquantized_specs_have_no_scales() -> None:
    specs = tensor_specs(ModelConfig.from_dict(changed("quantization_config", None)))
    kinds = {spec.kind for spec in specs.values()}
    assert kinds == {TensorKind.PLAIN, TensorKind.FLOAT32}
    assert specs["layers.0.ffn.experts.0.w1.weight"].shape == (2304, 5120)


def test_vision_tensors_only_with_a_vision_tower() -> None:
    with_tower = tensor_specs(ModelConfig.from_dict(RELEASED))
    blind = tensor_specs(ModelConfig.from_dict(without("vision_config")))
    assert set(with_tower) - set(blind) == {n for n, s in with_tower.items() if s.is_vision}
    assert "image_start" in with_tower and "image_start" not in blind


def test_roles_of_the_released_layers() -> None:
    layers = ModelConfig.from_dict(RELEASED).layers
    assert [role.layer_id for role in layers] == list(range(40))
    assert [role.layer_id for role in layers if role.is_kv_source] == [2, 8, 14, 20]
    assert [role.layer_id for role in layers if role.uses_candidates] == [24, 28, 32, 36]
    assert [role.layer_id for role in layers if role.publishes_candidates] == [20]
    assert [role.layer_id for role in layers if role.is_draft_target] == [37, 38, 39]
    assert [role.engram_index for role in layers if role.engram_index is not None] == [0, 1]
    assert layers[14].engram_index == 1
    assert (layers[1].ratio, layers[1].kv_source, layers[1].index_source) == (0, None, None)
    assert (layers[9].ratio, layers[9].kv_source, layers[9].index_source) == (2, 8, 8)
    assert (layers[39].ratio, layers[39].kv_source, layers[39].index_source) == (1, 20, 36)


def test_roles_of_the_second_geometry() -> None:
    layers = ModelConfig.from_dict(second_geometry_config()).layers
    assert [role.kv_source for role in layers] == [None, 1, 1, None, 1, 5, 5, 5, 5]
    assert [role.index_source for role in layers] == [None, 1, 1, None, 4, 5, 5, 7, 7]
    assert [role.layer_id for role in layers if role.uses_candidates] == [7]
    assert layers[4].is_index_source and not layers[4].is_kv_source


def test_engram_buckets_are_successive_unused_primes() -> None:
    config = ModelConfig.from_dict(second_geometry_config())
    assert engram_primes(config) == ((53, 59, 61, 67, 71, 73), (79, 83, 89, 97, 101, 103))
    released = engram_primes(ModelConfig.from_dict(RELEASED))
    assert [sum(columns) for columns in released] == [384006168, 384016682]
    assert len({prime for columns in released for prime in columns}) == 48


@pytest.mark.parametrize("make", [demo_config, second_geometry_config, loading_config])
def test_presets_are_valid(make: Callable[[], dict[str, Any]]) -> None:
    ModelConfig.from_dict(make())


def test_config_is_hashable_and_replace_checks_again() -> None:
    config = ModelConfig.from_dict(demo_config())
    assert hash(config) == hash(ModelConfig.from_dict(demo_config()))
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        dataclasses.replace(config, num_experts_per_tok=1000)


def test_end_token_may_be_a_list() -> None:
    config = changed("eos_token_id", [1, 5])
    assert ModelConfig.from_dict(config).eos_token_ids == (1, 5)


def test_parts_may_be_absent() -> None:
    config = copy.deepcopy(RELEASED)
    text = config["text_config"]
    for key in [key for key in text if key.startswith(("engram_", "dspark_", "candidate_"))]:
        del text[key]
    text["num_nextn_predict_layers"] = 0
    text["compress_ratios"] = text["compress_ratios"][:40]
    model = ModelConfig.from_dict(config)
    assert model.engram_layer_ids == () and model.dspark_target_layer_ids == ()
    assert model.candidate_source_layer_id is None
    assert not any(role.uses_candidates for role in model.layers)
    assert not any("mtp" in name or "engram" in name for name in tensor_specs(model))


UNKNOWN = [
    ("qk_norm", True, ["top level", "`qk_norm`"]),
    ("text_config.slidng_window", 64, ["`slidng_window`", "nearest known name: `sliding_window`"]),
    ("text_config.rope_scaling.mscale", 1.0, ["`text_config.rope_scaling`", "`mscale`"]),
    ("vision_config.window", 3, ["`vision_config`", "`window`"]),
    ("quantization_config.scale_fmtt", "ue8m0", ["`quantization_config`", "`scale_fmt`"]),
    ("dim", 5120, ["`dim`", "inference/config.json", "text_config"]),
    ("n_layers", 40, ["`n_layers`", "inference/config.json"]),
]


@pytest.mark.parametrize(("path", "value", "words"), UNKNOWN, ids=[row[0] for row in UNKNOWN])
def test_unknown_key_is_an_error(path: str, value: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(path, value))
    for word in words:
        assert word in str(caught.value)


ONE_VALUE = [
    ("model_type", "deepseek_v4"),
    ("tie_word_embeddings", True),
    ("text_config.model_type", "deepseek_v4"),
    ("text_config.hidden_act", "gelu"),
    ("text_config.scoring_func", "softmax"),
    ("text_config.topk_method", "greedy"),
    ("text_config.norm_topk_prob", False),
    ("text_config.attention_bias", True),
    ("text_config.attention_dropout", 0.1),
    ("text_config.tie_word_embeddings", True),
    ("text_config.num_key_value_heads", 8),
    ("text_config.n_shared_experts", 2),
    ("text_config.rope_scaling.rope_type", "linear"),
    ("vision_config.model_type", "other_vision"),
    ("quantization_config.quant_method", "awq"),
    ("quantization_config.activation_scheme", "static"),
    ("quantization_config.weight_block_size", [128, 128]),
    ("quantization_config.scale_fmt", "float"),
    ("quantization_config.expert_dtype", "fp8"),
    ("quantization_config.fmt", "e5m2"),
]


@pytest.mark.parametrize(("path", "value"), ONE_VALUE, ids=[row[0] for row in ONE_VALUE])
def test_key_with_one_supported_value(path: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(path, value))
    message = str(caught.value)
    assert path.rpartition(".")[2] in message
    assert repr(value) in message
    assert "supported" in message or "must be" in message


BAD_VALUES = [
    ("text_config.vocab_size", "many", "must be an integer"),
    ("text_config.vocab_size", True, "must be an integer"),
    ("text_config.hidden_size", 0, "must be above 0"),
    ("text_config.rope_theta", float("nan"), "finite"),
    ("text_config.compress_ratios", 2, "list of integers"),
    ("text_config.compress_ratios", ["2"], "must be an integer"),
    ("text_config.rope_scaling", None, "must be an object"),
    ("text_config.rope_scaling.factor", -1, "must be above 0"),
    ("text_config", [], "must be an object"),
    ("eos_token_id", None, "must be an integer or a list"),
    ("eos_token_id", [], "one or more ids"),
    ("eos_token_id", 129280, "below `vocab_size`"),
    ("image_token_id", 200000, "below `vocab_size`"),
    ("image_token_id", None, "`vision_config` needs one"),
    ("text_config.bos_token_id", 7, "must be the same"),
    ("text_config.dspark_noise_token_id", 129280, "below `vocab_size`"),
    ("text_config.engram_pad_token_id", -1, "at least 0"),
    ("text_config.rope_theta", 10**400, "must be a finite number"),
    ("text_config.rope_theta", 1, "above 1"),
    ("text_config.compress_rope_theta", 1.0, "above 1"),
    ("text_config.hc_sinkhorn_iters", 0, "above 0"),
    ("text_config.hc_sinkhorn_iters", 1001, "at most 1000"),
    ("text_config.o_groups", 7, "must divide `num_attention_heads`"),
    ("text_config.qk_rope_head_dim", 63, "must be even"),
    ("text_config.qk_rope_head_dim", 514, "at most 512"),
    ("text_config.index_head_dim", 32, "at least `qk_rope_head_dim`"),
    ("text_config.q_lora_rank", 1290, "multiple of 32"),
    ("text_config.moe_intermediate_size", 2300, "multiple of 32"),
    ("text_config.o_lora_rank", 1023, "multiple of 32"),
    ("text_config.compress_ratios", [0] * 42, "must have 43"),
    ("text_config.compress_ratios", [0] * 42 + [1], "must be 0 for a draft stage"),
    ("text_config.compress_ratios", [0, 0] + [4] * 41, "must be 0, 1 or 2"),
    ("text_config.compress_ratios", [0, 1] + [2] * 18 + [1] * 20 + [0] * 3, "kv source at or"),
    ("text_config.compress_ratios", [0, 0] + [2] * 17 + [1] * 21 + [0] * 3, "must be 2"),
    ("text_config.kv_source_layer_ids", [1, 8, 14, 20], "but is 0"),
    ("text_config.kv_source_layer_ids", [8, 2, 14, 20], "ascending"),
    ("text_config.kv_source_layer_ids", [], "one or more"),
    ("text_config.kv_source_layer_ids", [2, 8, 14, 20, 40], "below 40"),
    ("text_config.kv_source_layer_ids", [2, 8, 14, 20, 22], "22 is absent"),
    ("text_config.index_source_layer_ids", [2, 2, 8, 14, 20], "ascending"),
    ("text_config.candidate_source_layer_id", 21, "one of `index_source_layer_ids`"),
    ("text_config.candidate_source_layer_id", 14, "below the last kv source"),
    ("text_config.candidate_topk_blocks", 63, "504 entries"),
    ("text_config.num_experts_per_tok", 385, "at most `n_routed_experts`"),
    ("text_config.dspark_num_experts_per_tok", 129, "at most `dspark_n_routed_experts`"),
    ("text_config.dspark_target_layer_ids", [38, 40], "below 40"),
    ("text_config.dspark_target_layer_ids", [], "one or more"),
    ("text_config.engram_layer_ids", [14, 1], "ascending"),
    ("text_config.engram_num_embeddings", [384006168], "one entry per Engram layer"),
    ("text_config.engram_num_embeddings", [384006168, 384016683], "384016682"),
    ("text_config.engram_max_ngram_size", 1, "at least 2"),
    ("text_config.engram_compressed_vocab_size", 129281, "at most `vocab_size`"),
    ("vision_config.num_attention_heads", 7, "multiple of 4"),
    ("vision_config.patch_size", 0, "must be above 0"),
]


@pytest.mark.parametrize(
    ("path", "value", "words"), BAD_VALUES, ids=[f"{row[0]}={row[1]}"[:60] for row in BAD_VALUES]
)
def test_bad_value_names_key_and_what_is_allowed(path: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(path, value))
    message = str(caught.value)
    assert words in message
    assert "config.json" in message
    assert len(message) < 400


@pytest.mark.parametrize(
    "path",
    [
        "text_config",
        "model_type",
        "text_config.hidden_size",
        "text_config.rope_scaling.factor",
        "text_config.engram_head_dim",
        "vision_config.patch_size",
        "quantization_config.scale_fmt",
    ],
)
def test_absent_key_is_an_error_that_names_it(path: str) -> None:
    with pytest.raises(ConfigError, match=path.rpartition(".")[2]):
        ModelConfig.from_dict(without(path))


def test_several_unknown_keys_are_named_at_once() -> None:
    config = changed("text_config.alpha", 1, changed("text_config.beta", 2))
    with pytest.raises(ConfigError, match=r"`beta`.*`alpha`"):
        ModelConfig.from_dict(config)


def test_plain_checkpoint_needs_no_multiple_of_the_scale_group() -> None:
    config = changed("quantization_config", None, changed("text_config.q_lora_rank", 1290))
    assert not ModelConfig.from_dict(config).quantized


def test_from_folder_reads_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED), encoding="utf-8")
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_dict(RELEASED)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        ('{"model_type": ', "not valid JSON"),
        ("[1, 2]", "not a JSON object"),
        ("", "not valid JSON"),
    ],
)
def test_unreadable_config_file(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_folder(tmp_path)


def test_config_that_is_a_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_folder(tmp_path)
