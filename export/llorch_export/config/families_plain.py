"""Rows of families that differ from Llama in their settings and in the order of rotary pairs alone."""

from __future__ import annotations

from typing import Final

from llorch_export.config.family import Family

_BOTH_BIASES: Final = frozenset({"attention_bias", "mlp_bias"})

PLAIN: Final = (
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        defaults={
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
        },
        biases=frozenset({"mlp_bias"}),
        qkv_bias="attention_bias",
        fixed={"attention_out_bias": False},
        in_gguf=False,
    ),
    Family(
        "internlm3",
        "LlamaForCausalLM",
        defaults={
            "vocab_size": 128512,
            "intermediate_size": 10240,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
        },
        # transformers takes both for one, and refuses two values.
        fixed={"qkv_bias": False, "bias": False, "attention_bias": False, "mlp_bias": False},
        module="llama",
        in_gguf=False,
    ),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        defaults={
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
        },
        windows="all layers",
        scales_queries=True,
        in_gguf=False,
    ),
    Family(
        "ministral",
        "MinistralForCausalLM",
        defaults={
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        windows="pattern",
        null_window_is_none=True,
        in_gguf=False,
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        defaults={
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        biases=_BOTH_BIASES,
        bias_key="use_bias",
        interleaved=True,
        gguf_in_transformers=False,
    ),
    Family(
        "helium",
        "HeliumForCausalLM",
        defaults={
            "vocab_size": 48000,
            "hidden_size": 2560,
            "intermediate_size": 7040,
            "num_hidden_layers": 24,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
        },
        biases=frozenset({"mlp_bias"}),
        qkv_bias="attention_bias",
        interleaved=True,
        in_gguf=False,
    ),
)
