"""Configs of the families whose layers have several experts, as overrides of the tiny config."""

from __future__ import annotations

from typing import Any

from support.builders.checkpoints import of_family

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.25,
    "logits_scaling": 0.5,
}
QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "attention_bias": True,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": of_family("mixtral", num_local_experts=4),
    "mixtral, 8 experts by default, each taken alone": of_family("mixtral", num_experts_per_tok=1),
    "mixtral, all experts taken, window": of_family(
        "mixtral", num_local_experts=3, num_experts_per_tok=3, sliding_window=9
    ),
    "mixtral, the other name of the number": of_family("mixtral", num_experts=5, num_experts_per_tok=3),
    "qwen2_moe": of_family("qwen2_moe", **QWEN2_MOE),
    "qwen2_moe, normalised, no biases": of_family(
        "qwen2_moe", **QWEN2_MOE, norm_topk_prob=True, qkv_bias=False
    ),
    "qwen2_moe, every second layer": of_family(
        "qwen2_moe", **QWEN2_MOE, num_hidden_layers=4, decoder_sparse_step=2
    ),
    "qwen2_moe, one layer without": of_family("qwen2_moe", **QWEN2_MOE, mlp_only_layers=[1, 7]),
    "qwen2_moe, no experts": of_family("qwen2_moe", **{**QWEN2_MOE, "num_experts": 0}),
    "qwen2_moe, windows by turns": of_family(
        "qwen2_moe",
        **QWEN2_MOE,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
    ),
    "qwen3_moe": of_family("qwen3_moe", **QWEN3_MOE, norm_topk_prob=True),
    "qwen3_moe, shares of all experts": of_family("qwen3_moe", **QWEN3_MOE),
    "qwen3_moe, bias, one layer without": of_family(
        "qwen3_moe", **QWEN3_MOE, attention_bias=True, mlp_only_layers=[0]
    ),
    "qwen3_moe, window, yarn": of_family(
        "qwen3_moe", **QWEN3_MOE, use_sliding_window=True, sliding_window=9, rope_scaling=YARN
    ),
    "qwen3_moe, window off": of_family("qwen3_moe", **QWEN3_MOE, sliding_window=9),
    "granitemoe": of_family("granitemoe", **GRANITE, num_local_experts=4),
    "granitemoe, 8 experts by default, tied, biases": of_family(
        "granitemoe", attention_bias=True, tie_word_embeddings=True
    ),
    "olmoe": of_family("olmoe", num_experts=6, num_experts_per_tok=3),
    "olmoe, normalised, one kv head, biases": of_family(
        "olmoe",
        num_local_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_key_value_heads=1,
        attention_bias=True,
    ),
    "gpt_oss": of_family("gpt_oss", **GPT_OSS, swiglu_limit=0.7),
    "gpt_oss, default scaling and limit, four layers": of_family(
        "gpt_oss", **GPT_OSS, rope_theta=None, num_hidden_layers=4, num_key_value_heads=1
    ),
    "gpt_oss, no biases, layer types, tied": of_family(
        "gpt_oss",
        **{**GPT_OSS, "attention_bias": False},
        swiglu_limit=0.5,
        swiglu_alpha=1.0,
        layer_types=["full_attention", "sliding_attention"],
        rope_scaling={**YARN, "truncate": False},
        tie_word_embeddings=True,
        head_dim=24,
    ),
    "gpt_oss, no scaling": of_family("gpt_oss", **GPT_OSS, rope_scaling={"rope_type": "default"}),
}
