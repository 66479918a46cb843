"""The shape of `deepinfer-nano`: every role of a V4.1 layer in eight of them."""

from __future__ import annotations

from typing import Any

from deepinfer_core.bench.presets import config_json, yarn
from deepinfer_core.model.writer import QUANTIZATION

__all__ = ["SEQUENCE_LEN", "config_dict"]

# Tokens of a training row. Answers are asked for up to this length.
SEQUENCE_LEN = 1024


def config_dict(compressed_vocab_size: int, *, quantized: bool = False) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        compressed_vocab_size: classes the tokenizer folds to (`fold_vocabulary`).
        quantized: whether the weights beside it are FP8 and FP4.
    """
    config = config_json(
        vocab_size=4096,
        hidden_size=192,
        num_hidden_layers=8,
        # layer            0    1       2     3       4               5      6        7
        # role             SWA  SWA     Full  Reuse   Full            Reuse  Reindex  Reuse
        # besides               Engram        Engram  candidates
        compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1, 0, 0],
        kv_source_layer_ids=[2, 4],
        index_source_layer_ids=[2, 4, 6],
        candidate_source_layer_id=4,
        candidate_topk_blocks=32,
        candidate_block_size=8,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=128,
        sliding_window=64,
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=96,
        o_lora_rank=64,
        o_groups=4,
        rope_scaling=yarn(factor=16, original=256),
        max_position_embeddings=4096,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=2,
        hc_sinkhorn_iters=4,
        engram_layer_ids=[1, 3],
        engram_num_embeddings=[8266, 8358],
        engram_max_ngram_size=3,
        engram_vocab_size=2048,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_compressed_vocab_size=compressed_vocab_size,
        num_nextn_predict_layers=2,
        dspark_block_size=5,
        dspark_noise_token_id=3,
        dspark_target_layer_ids=[5, 6, 7],
        dspark_markov_rank=64,
        dspark_n_routed_experts=8,
        dspark_num_experts_per_tok=2,
    )
    if quantized:
        config["quantization_config"] = dict(QUANTIZATION)
    return config
