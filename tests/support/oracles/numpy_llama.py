"""A Llama forward pass from its definition, in numpy and float64: an oracle that shares no code with the
exporter.

Input is the content of a ``config.json`` and weights under Hugging Face's names; output are the logits of
every position. It holds for shapes that transformers refuses to build.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def forward(
    config: Mapping[str, Any],
    weights: Mapping[str, npt.NDArray[np.float32]],
    token_ids: Sequence[int],
    *,
    frequency_factors: npt.NDArray[np.float32] | None = None,
    multiply: Callable[[Array, str], Array] | None = None,
) -> Array:
    """Return logits [tokens, vocabulary].

    multiply: gives ``x W^T`` of a module in another way than float64's.
    frequency_factors: divides the rotary frequencies pair by pair, as GGUF's ``rope_freqs.weight`` does.
    """
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    frequencies = inverse_frequencies(config, head_dim)
    if frequency_factors is not None:
        frequencies = frequencies / frequency_factors
    angles = np.arange(len(token_ids))[:, None] * frequencies

    def linear(x: Array, module: str) -> Array:
        product = x @ w[f"{module}.weight"].T if multiply is None else multiply(x, module)
        return product + w.get(f"{module}.bias", 0.0)

    def norm(x: Array, module: str) -> Array:
        scale = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config["rms_norm_eps"])
        return x * scale * w[f"{module}.weight"]

    def rotate(x: Array) -> Array:  # [tokens, heads, head_dim]; pairs are half a head apart
        pairs = x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]
        turned = pairs * np.exp(1j * angles)[:, None, :]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = w["model.embed_tokens.weight"][list(token_ids)]
    tokens = len(token_ids)
    future = np.triu(np.full((tokens, tokens), -np.inf), k=1)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        normed = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (
            linear(normed, f"{prefix}.self_attn.{part}_proj").reshape(tokens, count, head_dim)
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = rotate(q), rotate(k)
        mixed = np.empty_like(q)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / math.sqrt(head_dim) + future
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed[:, head] = scores / scores.sum(axis=-1, keepdims=True) @ v[:, shared]
        x = x + linear(mixed.reshape(tokens, heads * head_dim), f"{prefix}.self_attn.o_proj")
        normed = norm(x, f"{prefix}.post_attention_layernorm")
        gate = linear(normed, f"{prefix}.mlp.gate_proj")
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(normed, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj"
        )
    head_name = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return linear(norm(x, "model.norm"), head_name)


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> Array:
    """Return the angle per position of each rotary pair, with the scaling that the config asks for."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
    inverse = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        return inverse / rope["factor"]
    if kind == "llama3":
        return np.array([_llama3(f, rope) for f in inverse])
    assert kind == "default"
    return inverse


def _llama3(frequency: float, rope: Mapping[str, Any]) -> float:
    """How many turns a pair makes over the original context decides how far its frequency is stretched."""
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return kept * frequency + (1 - kept) * frequency / rope["factor"]
