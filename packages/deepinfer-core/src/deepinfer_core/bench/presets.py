"""Configurations of small and of large random models, in the layout of `config.json`.

`engram_compressed_vocab_size` depends on the tokenizer; `write_checkpoint` fills it in.
"""

from __future__ import annotations

from typing import Any

__all__ = ["config_json", "demo_config", "loading_config", "second_geometry_config", "yarn"]

# FP4: half a byte a weight, and one scale byte for 32 of them.
_EXPERT_BYTES_PER_WEIGHT = 17 / 32


def demo_config() -> dict[str, Any]:
    """Return the demo model: twelve layers with every role, a few MB, 4096 tokens of context."""
    return config_json(
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_lora_rank=64,
        o_groups=2,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=4096,
        rope_scaling=yarn(factor=16, original=256),
        sliding_window=32,
        compress_ratios=[0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        kv_source_layer_ids=[2, 4, 6],
        index_source_layer_ids=[2, 4, 6, 8, 10],
        index_n_heads=8,
        index_head_dim=64,
        index_topk=32,
        candidate_source_layer_id=6,
        candidate_topk_blocks=16,
        candidate_block_size=4,
        engram_layer_ids=[1, 4],
        engram_num_embeddings=[3144, 3424],
        engram_max_ngram_size=4,
        engram_vocab_size=500,
        engram_n_heads=2,
        engram_head_dim=32,
        num_nextn_predict_layers=3,
        dspark_block_size=5,
        dspark_noise_token_id=1021,
        dspark_target_layer_ids=[9, 10, 11],
        dspark_markov_rank=32,
        dspark_n_routed_experts=8,
        dspark_num_experts_per_tok=2,
        image_token_id=1022,
    )


def second_geometry_config() -> dict[str, Any]:
    """Return a small model that shares no size or layer number with the others.

    A layer without compressed KV lies between layers that read it, a ratio-2 layer chooses anew
    from the keys of an older one, Engram sits at layers 0 and 3 with 3-grams, three streams.
    """
    return config_json(
        vocab_size=384,
        hidden_size=96,
        num_hidden_layers=9,
        num_attention_heads=6,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=3,
        moe_intermediate_size=32,
        n_routed_experts=5,
        num_experts_per_tok=2,
        gate_temp=1.25,
        hc_mult=3,
        max_position_embeddings=512,
        rope_scaling=yarn(factor=8, original=64),
        sliding_window=8,
        compress_ratios=[0, 2, 2, 0, 2, 1, 1, 1, 1, 0, 0],
        kv_source_layer_ids=[1, 5],
        index_source_layer_ids=[1, 4, 5, 7],
        index_n_heads=4,
        index_head_dim=32,
        index_topk=10,
        candidate_source_layer_id=5,
        candidate_topk_blocks=5,
        candidate_block_size=2,
        engram_layer_ids=[0, 3],
        engram_num_embeddings=[384, 552],
        engram_max_ngram_size=3,
        engram_vocab_size=50,
        engram_n_heads=3,
        engram_head_dim=32,
        num_nextn_predict_layers=2,
        dspark_block_size=4,
        dspark_noise_token_id=380,
        dspark_target_layer_ids=[5, 8],
        dspark_markov_rank=12,
        dspark_n_routed_experts=3,
        dspark_num_experts_per_tok=1,
    )


def loading_config(megabytes: int = 512) -> dict[str, Any]:
    """Return a model of at least this many megabytes (2**20), nearly all of them experts.

    It has a vision tower, which loading is expected to leave out.
    """
    num_layers, hidden, inner = 8, 1024, 512
    expert_bytes = 3 * hidden * inner * _EXPERT_BYTES_PER_WEIGHT
    config = config_json(
        vocab_size=1024,
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=256,
        o_lora_rank=128,
        o_groups=4,
        moe_intermediate_size=inner,
        n_routed_experts=max(8, int(-(-megabytes * 2**20 // (num_layers * expert_bytes)))),
        num_experts_per_tok=4,
        max_position_embeddings=4096,
        rope_scaling=yarn(factor=16, original=256),
        sliding_window=64,
        compress_ratios=[0, 2, 2, 1, 1, 1, 1, 1, 0],
        kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 3, 5],
        index_n_heads=8,
        index_head_dim=64,
        index_topk=64,
        candidate_source_layer_id=3,
        candidate_topk_blocks=32,
        candidate_block_size=4,
        engram_layer_ids=[0],
        engram_num_embeddings=[120182],
        engram_max_ngram_size=4,
        engram_vocab_size=20000,
        engram_n_heads=2,
        engram_head_dim=64,
        num_nextn_predict_layers=1,
        dspark_block_size=4,
        dspark_noise_token_id=1021,
        dspark_target_layer_ids=[6, 7],
        dspark_markov_rank=64,
        dspark_n_routed_experts=8,
        dspark_num_experts_per_tok=2,
        image_token_id=1022,
    )
    config["vision_config"] = {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "patch_size": 14,
        "rope_theta": 10000.0,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    }
    return config


def yarn(*, factor: float, original: int) -> dict[str, Any]:
    """Return a `rope_scaling`; `original` is the context before it, in tokens."""
    return {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": factor,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }


def config_json(*, image_token_id: int | None = None, **text: Any) -> dict[str, Any]:
    """Return a whole config.json: what small models share, and the given `text_config` fields.

    A given field wins over one that is shared.
    """
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    shared = {
        "model_type": "deepseek_v41_text",
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_pad_token_id": ids["pad_token_id"],
        "engram_compressed_vocab_size": text["vocab_size"],
    }
    config: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **ids,
        "text_config": {**shared, **ids, **text},
    }
    if image_token_id is not None:
        config["image_token_id"] = image_token_id
    return config
