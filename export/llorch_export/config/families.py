"""The decoder families that are a Llama with a twist: one row each.

A row says how a family differs from Llama in its config's keys and defaults, in its tensors and in how GGUF
stores them. Everything downstream (names, graph, reference) follows from the :class:`LlamaConfig` that comes
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llorch_export.config.families_blocks import BLOCKS
from llorch_export.config.families_experts import EXPERTS
from llorch_export.config.families_gemma import GEMMA
from llorch_export.config.families_layer_norm import LAYER_NORM
from llorch_export.config.families_plain import PLAIN
from llorch_export.config.family import Family

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
            fused=("self_attn.qkv_proj", "mlp.gate_up_proj"),
        ),
        *GEMMA,
        *BLOCKS,
        *PLAIN,
        *LAYER_NORM,
        *EXPERTS,
    )
}
FAMILIES_IN_GGUF: Final[Mapping[str, Family]] = {
    row.gguf_name: row for row in FAMILIES.values() if row.in_gguf
}

SUPPORTED_HF: Final = f"supported model types are {', '.join(FAMILIES)}"
SUPPORTED_GGUF: Final = f"supported architectures are {', '.join(FAMILIES_IN_GGUF)}"

# A checkpoint of a fused family holds these modules instead of their parts, stacked along the outputs.
FUSED_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
