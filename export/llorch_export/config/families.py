"""The decoder families that are a Llama with a twist: one row each.

A row says how a family differs from Llama in its config's keys and defaults, in its tensors and in how GGUF
stores them. Everything downstream (names, graph, reference) follows from the :class:`LlamaConfig` that comes
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llorch_export.config.family import Family
from llorch_serve.artifact.manifest import Activation, LayerForm

_BOTH_BIASES: Final = frozenset({"attention_bias", "mlp_bias"})
# The first name is what absent keys mean.
_GELU: Final[Mapping[str, Activation]] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
_NORMS_AROUND: Final = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "self_attn.output_norm": "post_attention_layernorm",
    "mlp.output_norm": "post_feedforward_layernorm",
}

FAMILIES: Final[Mapping[str, Family]] = {
    row.architecture: row
    for row in (
        Family("llama", "LlamaForCausalLM", biases=_BOTH_BIASES, permuted=True),
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
        Family(
            "gemma",
            "GemmaForCausalLM",
            defaults={
                "vocab_size": 256000,
                "hidden_size": 3072,
                "intermediate_size": 24576,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "head_dim": 256,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": True,
            },
            biases=frozenset({"attention_bias"}),
            fixed={"use_bidirectional_attention": False},
            # The first files say gelu where they mean the other, and transformers takes it so.
            activations={**_GELU, "gelu": "gelu_tanh"},
            norm_offset=1.0,
            scaled_embedding=True,
            gguf_in_transformers=False,
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            defaults={
                "vocab_size": 256000,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 8192,
                "sliding_window": 4096,
                "tie_word_embeddings": True,
            },
            biases=frozenset({"attention_bias"}),
            windows="pattern",
            window_pattern=2,
            fixed={"use_bidirectional_attention": False},
            form=LayerForm(norm_placement="around"),
            activation_key="hidden_activation",
            activations=_GELU,
            norm_offset=1.0,
            scaled_embedding=True,
            query_scalar=256.0,
            softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            gguf_wide_layers=frozenset({46}),
            stored_names=_NORMS_AROUND,
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            defaults={
                "vocab_size": 262208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
                "rope_theta": 1000000.0,
                "tie_word_embeddings": True,
            },
            biases=frozenset({"attention_bias"}),
            windows="pattern",
            window_pattern=6,
            local_theta=10000.0,
            qk_norm=True,
            # transformers reads the cap of scores and does not apply it.
            fixed={"use_bidirectional_attention": False, "attn_logit_softcapping": 0},
            form=LayerForm(norm_placement="around"),
            activation_key="hidden_activation",
            activations=_GELU,
            norm_offset=1.0,
            scaled_embedding=True,
            query_scalar=256.0,
            softcaps={"final_logit_softcapping": None},
            module="gemma3",
            gguf="gemma3",
            gguf_wide_layers=frozenset({62}),
            stored_names=_NORMS_AROUND,
        ),
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
