"""Rows of the Gemma families: norms of 1 + w around blocks, scaled embeddings, soft limits, two rotations."""

from __future__ import annotations

from typing import Final

from llorch_export.config.family import GELU, Family
from llorch_serve.artifact.manifest import LayerForm

_NORMS_AROUND: Final = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "self_attn.output_norm": "post_attention_layernorm",
    "mlp.output_norm": "post_feedforward_layernorm",
}

GEMMA: Final = (
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
        activations={**GELU, "gelu": "gelu_tanh"},
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
        activations=GELU,
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
        fixed={"use_bidirectional_attention": False},
        inert=frozenset({"attn_logit_softcapping"}),
        form=LayerForm(norm_placement="around"),
        activation_key="hidden_activation",
        activations=GELU,
        norm_offset=1.0,
        scaled_embedding=True,
        query_scalar=256.0,
        softcaps={"final_logit_softcapping": None},
        module="gemma3",
        gguf="gemma3",
        gguf_window_if_stated=True,
        gguf_wide_layers=frozenset({62}),
        stored_names=_NORMS_AROUND,
    ),
)
