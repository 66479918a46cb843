"""A random model as small as one with every kind of layer can be."""

from __future__ import annotations

from typing import Any

from deepinfer_core.bench.presets import config_json, yarn

__all__ = ["tiny_config"]


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return four layers: a window alone, a pair source, a single source, one that reads it.

    Args:
        changes: fields with other values, as for `config_json`.
    """
    fields = dict(
        vocab_size=384,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=2,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        max_position_embeddings=512,
        rope_scaling=yarn(factor=8, original=64),
        sliding_window=8,
        compress_ratios=[0, 2, 1, 1],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2],
        index_n_heads=2,
        index_head_dim=32,
        index_topk=6,
        candidate_source_layer_id=2,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        engram_layer_ids=[0],
        engram_num_embeddings=[384],
        engram_max_ngram_size=3,
        engram_vocab_size=50,
        engram_n_heads=3,
        engram_head_dim=32,
        num_nextn_predict_layers=0,
    )
    return config_json(**{**fields, **changes})
