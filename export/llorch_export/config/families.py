"""The decoder families that are a Llama with a twist: one row each.

A row says how a family differs from Llama in its config's keys and defaults, in its tensors and in how GGUF
stores them. Everything downstream (names, graph, reference) follows from the :class:`LlamaConfig` that comes
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from llorch_export.config.experts import (
    BY_EXPERT,
    GRANITE,
    GRANITE_STACKED,
    MIXTRAL,
    STACKED,
    ExpertKeys,
)


@dataclass(frozen=True, slots=True)
class Family:
    """One row. What is not said is as in Llama.

    architecture: ``model_type`` of config.json, and ``general.architecture`` of a GGUF file.
    causal_lm: the class of transformers that ``architectures`` names.
    defaults: what transformers takes absent keys to mean, where Llama's config differs.
    biases: which of ``attention_bias`` and ``mlp_bias`` a GGUF file may have; of config.json
        ``reference_keys.json`` says it.
    windows: whether ``sliding_window`` is refused, holds in every layer, in every layer if
        ``use_sliding_window`` says so, or in those that ``layer_types`` names; where that is absent, in all
        from ``max_window_layers`` on, or by turns up to there.
    qkv_bias: biases on q, k and v only: always, or if the key of that name says so.
    qk_norm: RMS norm of query and key heads.
    multipliers: the config scales embedding, attention, residual and logits.
    no_rope_interval: GGUF files leave every such layer unrotated (config.json says which by itself); 0: none.
    partial_rotary: a leading part of each head may be rotated.
    outer_original_context: ``original_max_position_embeddings`` where config.json has none beside its rope
        settings.
    longrope_names: further names by which the family's config.json means longrope, the only scaling that such
        a family has there.
    fused: q, k, v are stored as one tensor, gate and up as another.
    in_gguf: llama.cpp knows the family under a name of its own, which is ``gguf`` or else the architecture's.
    with_experts: the family of its GGUF files whose layers have experts.
    gguf_in_transformers: transformers reads such files.
    permuted: conversion to GGUF interleaves the two halves of query and key heads.
    fixed: keys that transformers reads for this family alone, with the one value that is supported.
    experts: where its config and files have experts; None: it has none.
    """

    architecture: str
    causal_lm: str
    defaults: Mapping[str, int | float | bool] = field(default_factory=dict)
    biases: frozenset[str] = frozenset()
    windows: Literal["none", "all layers", "all layers if used", "by layer", "by turns"] = "none"
    qkv_bias: bool | str = False
    qk_norm: bool = False
    multipliers: bool = False
    no_rope_interval: int = 0
    partial_rotary: bool = False
    outer_original_context: int | None = None
    longrope_names: frozenset[str] = frozenset()
    fused: bool = False
    in_gguf: bool = True
    gguf: str | None = None
    with_experts: str | None = None
    gguf_in_transformers: bool = True
    permuted: bool = False
    fixed: Mapping[str, object] = field(default_factory=dict)
    experts: ExpertKeys | None = None

    @property
    def gguf_name(self) -> str:
        """The value of ``general.architecture``, which its metadata keys begin with."""
        return self.gguf or self.architecture


_BOTH_BIASES: Final = frozenset({"attention_bias", "mlp_bias"})

FAMILIES: Final[Mapping[str, Family]] = {
    row.architecture: row
    for row in (
        Family("llama", "LlamaForCausalLM", biases=_BOTH_BIASES, permuted=True, with_experts="mixtral"),
        # llama.cpp stores Mistral as llama.
        Family(
            "mistral",
            "MistralForCausalLM",
            defaults={
                "intermediate_size": 14336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
            },
            windows="all layers",
            in_gguf=False,
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            defaults={
                "vocab_size": 151936,
                "intermediate_size": 22016,
                "num_key_value_heads": 32,
                "max_position_embeddings": 32768,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
            windows="by layer",
            qkv_bias=True,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            defaults={
                "vocab_size": 151936,
                "intermediate_size": 22016,
                "num_key_value_heads": 32,
                "head_dim": 128,
                "max_position_embeddings": 32768,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
            biases=frozenset({"attention_bias"}),
            windows="by layer",
            qk_norm=True,
        ),
        Family(
            "smollm3",
            "SmolLM3ForCausalLM",
            defaults={
                "vocab_size": 128256,
                "hidden_size": 2048,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "rope_theta": 2000000.0,
                "tie_word_embeddings": True,
            },
            biases=_BOTH_BIASES,
            windows="by layer",
            no_rope_interval=4,
            gguf_in_transformers=False,
            permuted=True,
        ),
        Family(
            "granite",
            "GraniteForCausalLM",
            biases=_BOTH_BIASES,
            multipliers=True,
            gguf_in_transformers=False,
            permuted=True,
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            defaults={
                "vocab_size": 32064,
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
            windows="all layers",
            partial_rotary=True,
            outer_original_context=4096,
            longrope_names=frozenset({"su", "yarn"}),
            fused=True,
        ),
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
}

SUPPORTED_HF: Final = f"supported model types are {', '.join(FAMILIES)}"
SUPPORTED_GGUF: Final = (
    f"supported architectures are {', '.join(row.gguf_name for row in FAMILIES.values() if row.in_gguf)}"
)

# A checkpoint of a fused family holds these modules instead of their parts, stacked along the outputs.
FUSED_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
