"""Configs of every family and rotary scaling, as overrides of the tiny config, for tests that go through all
of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from support.builders.arch_rows_experts import EXPERTS
from support.builders.arch_rows_gemma import GEMMA
from support.builders.arch_rows_norms import NORMS
from support.builders.checkpoints import of_family

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0]
LONG = [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.25,
    "logits_scaling": 0.5,
}
# Each row: what must be exact, with enough tokens and weights that leaving it out would show.
HF: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": YARN},
    "yarn by type": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "yarn in rope_parameters": {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 500000.0}},
    "yarn, attention factor 1": {"rope_scaling": {**YARN, "attention_factor": 1.0}},
    "yarn, attention factor": {"rope_scaling": {**YARN, "attention_factor": 1.5}},
    "yarn, mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4}},
    "yarn, mscale alone": {"rope_scaling": {**YARN, "mscale": 0.7}},
    "yarn, betas": {"rope_scaling": {**YARN, "beta_fast": 6.0, "beta_slow": 0.5}},
    "yarn, not truncated": {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 6.0}},
    "yarn, original beside": {
        "original_max_position_embeddings": 32,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "yarn, original by default": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "dynamic by type": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "longrope, all short": {
        "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 128, "factor": 4.0},
    },
    "heads of 8": {"head_dim": 8},
    "heads of 24": {"head_dim": 24},
    "heads of 40, one kv head": {"head_dim": 40, "num_key_value_heads": 1},
    "mistral": of_family("mistral", sliding_window=None),
    "mistral, window": of_family("mistral", sliding_window=9),
    "mistral, window of 1": of_family("mistral", sliding_window=1),
    "mistral, window beyond the context": of_family("mistral", sliding_window=128),
    "mistral, window by default": of_family("mistral"),
    "qwen2": of_family("qwen2"),
    "qwen2, tied, one kv head": of_family("qwen2", tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2, window off": of_family("qwen2", use_sliding_window=False, sliding_window=9, max_window_layers=1),
    "qwen2, window in later layers": of_family(
        "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen2, window in all layers": of_family(
        "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=0
    ),
    "qwen2, window by layer_types": of_family(
        "qwen2",
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen2, yarn": of_family("qwen2", rope_scaling=YARN),
    "qwen3": of_family("qwen3"),
    "qwen3, wide heads": of_family("qwen3", head_dim=32),
    "qwen3, heads of 128 by default": of_family("qwen3", head_dim=None),
    "qwen3, heads of 24": of_family("qwen3", head_dim=24),
    "qwen3, bias": of_family("qwen3", attention_bias=True),
    "qwen3, window and yarn": of_family(
        "qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=1, rope_scaling=YARN
    ),
    "smollm3": of_family("smollm3", num_hidden_layers=5),
    "smollm3, interval": of_family("smollm3", no_rope_layer_interval=2),
    "smollm3, layers": of_family("smollm3", no_rope_layers=[0, 1]),
    "smollm3, heads of 24": of_family("smollm3", no_rope_layers=[0, 1], head_dim=24),
    "smollm3, biases, tied by default": of_family(
        "smollm3", no_rope_layer_interval=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=None
    ),
    "smollm3, window where there is no rope": of_family(
        "smollm3", no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=9
    ),
    "granite": of_family("granite", **GRANITE),
    "granite, multipliers by default": of_family("granite"),
    "granite, tied, biases": of_family(
        "granite", **GRANITE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "phi3": of_family("phi3"),
    "phi3, window": of_family("phi3", sliding_window=9),
    "phi3, half rotated": of_family("phi3", head_dim=None, partial_rotary_factor=0.5),
    "phi3, three quarters rotated": of_family("phi3", head_dim=None, partial_rotary_factor=0.75),
    "phi3, heads of 64, three quarters rotated": of_family(
        "phi3", hidden_size=256, head_dim=None, partial_rotary_factor=0.75
    ),
    "phi3, longrope, all short": of_family(
        "phi3",
        max_position_embeddings=256,
        original_max_position_embeddings=128,
        rope_scaling={"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    ),
    "phi3, longrope, partial": of_family(
        "phi3",
        head_dim=None,
        partial_rotary_factor=0.75,
        max_position_embeddings=256,
        original_max_position_embeddings=128,
        rope_scaling={"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6]},
    ),
}
HF |= GEMMA | NORMS | EXPERTS

# Beside the first seven families one row of each; the others of them are for ci/slow.
LATER = GEMMA | NORMS | EXPERTS
_FIRST = {str(HF[name].get("model_type")): name for name in reversed(LATER)}
SLOW = frozenset(name for name in LATER if name not in _FIRST.values())


def usual_first(names: Iterable[str], *, only: Collection[str] | None = None) -> list[Any]:
    """Return rows as parameters of a test, those in SLOW with that marker; or all of later families but
    ``only``.
    """
    slow = SLOW if only is None else LATER.keys() - set(only)
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


# The rows that llama.cpp's converter can store, under the architecture it stores them as.
GGUF = [
    "yarn",
    "yarn, betas",
    "heads of 24",
    "qwen2",
    "qwen2, tied, one kv head",
    "qwen2, yarn",
    "qwen3",
    "qwen3, wide heads",
    "qwen3, heads of 24",
    "smollm3",
    "granite",
    "granite, tied, biases",
    "phi3",
    "phi3, window",
    "phi3, half rotated",
    "phi3, longrope, all short",
    "phi3, longrope, partial",
    "gemma, tied, one kv head",
    "gemma2, tied",
    "gemma2, caps by default, tied",
    "gemma3",
    "gemma3, tied",
    "gemma3, linear",
    "olmo2",
    "olmo2, bias, tied, one kv head",
    "olmo3",
    "olmo3, yarn where there is no window",
    "olmo3, layer types",
    "glm",
    "glm, all rotated, no bias",
    "glm4",
    "glm4, no bias, heads of 24",
    "apertus",
    "apertus, bias, tied, heads of 24",
    "arcee",
    "arcee, biases, tied",
    "ernie4_5",
    "exaone, tied",
    "exaone4",
    "exaone4, types beside a pattern in letters",
    "ministral3",
    "ministral3, queries as they are",
    "hunyuan",
    "seed_oss, other biases",
    "cohere, tied",
    "cohere2",
    "starcoder2",
    "stablelm",
    "stablelm, parallel, biases",
    "phi",
    "nemotron",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "granitemoe",
    "olmoe",
    "gpt_oss, no scaling",
    "minicpm",
]
