"""Configs of the Gemma families, as overrides of the tiny config."""

from __future__ import annotations

from typing import Any

from support.builders.checkpoints import of_family


def _gemma3(**overrides: object) -> dict[str, Any]:
    usual = {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 9,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 16,
    }
    return of_family("gemma3_text", **{**usual, **overrides})


def _gemma2(**overrides: object) -> dict[str, Any]:
    usual = {"sliding_window": 9, "num_hidden_layers": 3, "query_pre_attn_scalar": 16}
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return of_family("gemma2", **{**usual, **caps, **overrides})


GEMMA: dict[str, dict[str, Any]] = {
    "gemma": of_family("gemma"),
    "gemma, tied, one kv head": of_family("gemma", tie_word_embeddings=None, num_key_value_heads=1),
    "gemma, GELU by its old name, bias, linear": of_family(
        "gemma",
        hidden_act="gelu",
        attention_bias=True,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    ),
    "gemma2": _gemma2(),
    "gemma2, tied": _gemma2(tie_word_embeddings=None),
    "gemma2, caps by default, tied": _gemma2(
        attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=None
    ),
    "gemma2, layer types, heads of 24, scale of another head": _gemma2(
        head_dim=24,
        query_pre_attn_scalar=144,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3": _gemma3(),
    "gemma3, tied": _gemma3(tie_word_embeddings=None, num_key_value_heads=1),
    "gemma3, scale of another head": _gemma3(query_pre_attn_scalar=None),
    "gemma3, pattern": _gemma3(sliding_window_pattern=2, num_hidden_layers=3),
    "gemma3, layer types": _gemma3(
        num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], head_dim=32
    ),
    "gemma3, all local": _gemma3(num_hidden_layers=2),
    "gemma3, window beyond the context": _gemma3(sliding_window=128, sliding_window_pattern=2),
    "gemma3, linear": _gemma3(rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "gemma3, heads of 24, cap of logits, bias": _gemma3(
        head_dim=24,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,  # which transformers reads and does not apply
        attention_bias=True,
        sliding_window_pattern=2,
    ),
    "gemma3, settings by kind of layer": _gemma3(
        rope_theta=None,
        rope_local_base_freq=None,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "gemma3, exact GELU": _gemma3(hidden_activation="gelu", num_hidden_layers=2),
}
