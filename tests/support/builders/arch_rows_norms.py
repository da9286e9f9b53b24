"""Configs of the families whose norms, pairs or activation differ, as overrides of the tiny config."""

from __future__ import annotations

from typing import Any

from support.builders.checkpoints import of_family

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def _olmo3(**overrides: object) -> dict[str, Any]:
    usual = {"head_dim": None, "sliding_window": 9, "num_hidden_layers": 5, "rope_theta": 500000.0}
    return of_family("olmo3", **{**usual, **overrides})


def _ministral3(**rope: object) -> dict[str, Any]:
    usual = {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    return of_family("ministral3", rope_parameters={**usual, **rope})


NORMS: dict[str, dict[str, Any]] = {
    "olmo2": of_family("olmo2", head_dim=None),
    "olmo2, bias, tied, one kv head": of_family(
        "olmo2", head_dim=None, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1
    ),
    "olmo3": _olmo3(),
    "olmo3, yarn where there is no window": _olmo3(rope_scaling=_YARN, rope_theta=10000.0),
    "olmo3, yarn that is truncated whatever is said": _olmo3(
        rope_scaling={**_YARN, "truncate": False}, rope_theta=10000.0
    ),
    "olmo3, layer types": _olmo3(
        num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], attention_bias=True
    ),
    "exaone4": of_family("exaone4", sliding_window=9, num_hidden_layers=5),
    "exaone4, types beside a pattern in letters": of_family(
        "exaone4",
        sliding_window=9,
        sliding_window_pattern="LG",
        layer_types=["sliding_attention", "full_attention"],
    ),
    "cohere": of_family("cohere", logit_scale=0.25),
    "cohere, untied, bias, one kv head": of_family(
        "cohere", tie_word_embeddings=False, attention_bias=True, num_key_value_heads=1, logit_scale=1.0
    ),
    "cohere, tied": of_family("cohere", tie_word_embeddings=None),
    "cohere2": of_family("cohere2", sliding_window=9, num_hidden_layers=5, tie_word_embeddings=None),
    "cohere2, pattern, bias, heads of 24": of_family(
        "cohere2",
        sliding_window=9,
        sliding_window_pattern=2,
        num_hidden_layers=3,
        attention_bias=True,
        head_dim=24,
    ),
    "starcoder2": of_family("starcoder2", tie_word_embeddings=None),
    "starcoder2, window, no biases": of_family("starcoder2", sliding_window=9, use_bias=False),
    "stablelm": of_family("stablelm", partial_rotary_factor=None),
    "stablelm, parallel, biases": of_family(
        "stablelm", use_parallel_residual=True, use_qkv_bias=True, partial_rotary_factor=0.5
    ),
    "phi": of_family("phi"),
    "phi, all rotated, one kv head": of_family("phi", partial_rotary_factor=1.0, num_key_value_heads=1),
    "nemotron": of_family("nemotron"),
    "nemotron, biases, tied": of_family(
        "nemotron", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, partial_rotary_factor=0.25
    ),
    "glm": of_family("glm"),
    "glm, all rotated, no bias": of_family("glm", partial_rotary_factor=1.0, attention_bias=False),
    "glm4": of_family("glm4"),
    "glm4, no bias, heads of 24": of_family("glm4", attention_bias=False, head_dim=24),
    "arcee": of_family("arcee"),
    "arcee, biases, tied": of_family(
        "arcee", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=24
    ),
    "seed_oss": of_family("seed_oss"),
    "seed_oss, other biases": of_family("seed_oss", attention_bias=False, mlp_bias=True),
    "exaone": of_family(
        "exaone",
        num_hidden_layers=None,
        rms_norm_eps=None,
        hidden_act=None,
        num_layers=2,
        layer_norm_epsilon=2.0**-17,
        activation_function="silu",
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "exaone, tied": of_family("exaone", tie_word_embeddings=True),
    "internlm3": of_family("internlm3"),
    "internlm3, dynamic": of_family("internlm3", rope_scaling={"rope_type": "dynamic", "factor": 6.0}),
    "ministral3": _ministral3(llama_4_scaling_beta=0.4),
    "ministral3, queries as they are": _ministral3(llama_4_scaling_beta=0.0),
    "ministral3, heads of 24, window": {
        **_ministral3(llama_4_scaling_beta=1.0, original_max_position_embeddings=7),
        "head_dim": 24,
        "sliding_window": 9,
    },
    "ministral3, scaling by default": of_family("ministral3"),
    "ministral": of_family("ministral", sliding_window=9),
    "ministral, layer types": of_family(
        "ministral", sliding_window=9, layer_types=["full_attention", "sliding_attention"]
    ),
    "ernie4_5": of_family("ernie4_5"),
    "ernie4_5, biases, tied": of_family("ernie4_5", use_bias=True, tie_word_embeddings=None),
    "helium": of_family("helium"),
    "helium, biases": of_family("helium", attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    "hunyuan": of_family("hunyuan_v1_dense"),
    "hunyuan, alpha": of_family(
        "hunyuan_v1_dense",
        attention_bias=True,
        rope_scaling={
            "type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "apertus": of_family("apertus"),
    "apertus, bias, tied, heads of 24": of_family(
        "apertus",
        attention_bias=True,
        tie_word_embeddings=True,
        head_dim=24,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "apertus, scaling": of_family(
        "apertus",
        rope_theta=10000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "minicpm": of_family("minicpm"),
    "minicpm, untied, biases, one kv head": of_family(
        "minicpm", attention_bias=True, tie_word_embeddings=False, num_key_value_heads=1
    ),
    "minicpm, dynamic": of_family("minicpm", rope_scaling={"type": "dynamic", "factor": 4.0}),
}
