"""Rows of families whose layers have several experts behind attention."""

from __future__ import annotations

from typing import Final

from llorch_export.config.experts import (
    BY_EXPERT,
    GRANITE,
    GRANITE_STACKED,
    MIXTRAL,
    STACKED,
    ExpertKeys,
)
from llorch_export.config.family import Family

EXPERTS: Final = (
    # llama.cpp stores Mixtral as llama.
    Family(
        "mixtral",
        "MixtralForCausalLM",
        defaults={
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
        },
        windows="all layers",
        in_gguf=False,
        gguf="llama",
        gguf_in_transformers=False,
        permuted=True,
        experts=ExpertKeys(
            counts=("num_local_experts", "num_experts"),
            count=8,
            per_token=2,
            width="intermediate_size",
            names=(STACKED, MIXTRAL),
        ),
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        windows="by turns",
        qkv_bias="qkv_bias",
        gguf="qwen2moe",
        gguf_in_transformers=False,
        experts=ExpertKeys(
            counts=("num_experts",),
            count=60,
            per_token=4,
            width="moe_intermediate_size",
            names=(STACKED, BY_EXPERT),
            normalised=None,
            shared=True,
            some_layers=True,
            normalised_in_gguf=False,
        ),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
        },
        biases=frozenset({"attention_bias"}),
        windows="all layers if used",
        qk_norm=True,
        gguf="qwen3moe",
        gguf_in_transformers=False,
        experts=ExpertKeys(
            counts=("num_experts", "num_local_experts"),
            count=128,
            per_token=8,
            width="moe_intermediate_size",
            names=(STACKED, BY_EXPERT),
            normalised=None,
            some_layers=True,
        ),
    ),
    Family(
        "granitemoe",
        "GraniteMoeForCausalLM",
        defaults={"attention_multiplier": 1.0},
        biases=frozenset({"attention_bias"}),
        multipliers=True,
        gguf_in_transformers=False,
        permuted=True,
        experts=ExpertKeys(
            counts=("num_local_experts",),
            count=8,
            per_token=2,
            width="intermediate_size",
            names=(GRANITE_STACKED, GRANITE),
        ),
    ),
)
