"""Checkpoints of every family for tests of weight transforms, with weights uneven enough that each has
something to do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llorch_serve.artifact.manifest import TransformName
from support.builders.arch_rows import HF
from support.builders.checkpoints import Weights

MEASURED = ("equalise", "smooth")
ALL: tuple[TransformName, ...] = ("rotate", "hadamard", "equalise", "smooth")
TEXT = "The quick brown fox jumps over the lazy dog while seventeen engineers measure latency. " * 3
BIASES = {"attention_bias": True, "mlp_bias": True}

EACH: dict[str, dict[str, Any]] = {"llama": {}, "biases, tied": {**BIASES, "tie_word_embeddings": True}}
"""Rows for which every pass is tried alone."""

TOGETHER: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases, tied": {**BIASES, "tie_word_embeddings": True},
    "odd sizes": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "intermediate_size": 88,
    },
    **{
        name: HF[name]
        for name in (
            "heads of 40, one kv head",
            "yarn, attention factor",
            "mistral, window",
            "qwen2_moe, one layer without",
            "qwen2",
            "qwen2, tied, one kv head",
            "qwen3",
            "qwen3, heads of 24",
            "smollm3, layers",
            "smollm3, biases, tied by default",
            "granite, tied, biases",
            "phi3",
            "phi3, three quarters rotated",
            "gemma, tied, one kv head",
            "gemma2",
            "gemma3",
            "olmo2",
            "exaone4",
            "arcee, biases, tied",
            "glm",
            "hunyuan, alpha",
            "cohere",
            "phi",
        )
    },
}


def uneven(weights: Weights) -> None:
    """Make channels of keys, of the residual stream and of the feed-forward block of very different size."""
    rng = np.random.default_rng(5)
    for name, value in weights.items():
        if name.endswith(("k_proj.weight", "up_proj.weight")):
            value *= np.exp(rng.normal(size=(len(value), 1))).astype(np.float32)
            value /= np.sqrt((value**2).mean() * value.shape[1])
        if name.endswith("layernorm.weight"):
            value[::7] *= 4
