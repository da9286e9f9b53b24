"""Rows of families whose blocks have norms elsewhere, or whose MLP or heads are built otherwise."""

from __future__ import annotations

from typing import Final

from llorch_export.config.family import Family
from llorch_serve.artifact.manifest import LayerForm

_BOTH_BIASES: Final = frozenset({"attention_bias", "mlp_bias"})
_NORMS_AFTER: Final = {
    "self_attn.output_norm": "post_attention_layernorm",
    "mlp.output_norm": "post_feedforward_layernorm",
}
_GLM: Final = {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}

BLOCKS: Final = (
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5},
        biases=frozenset({"attention_bias"}),
        qk_norm=True,
        form=LayerForm(norm_placement="after", qk_norm_over="row"),
        gguf_in_transformers=False,
        with_windows="olmo3",
        stored_names=_NORMS_AFTER,
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        defaults={
            "vocab_size": 50304,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "rope_theta": 500000.0,
        },
        biases=frozenset({"attention_bias"}),
        windows="pattern",
        window_pattern=4,
        local_theta=500000.0,
        local_key="",
        qk_norm=True,
        form=LayerForm(norm_placement="after", qk_norm_over="row"),
        # llama.cpp stores both generations under one name.
        in_gguf=False,
        gguf="olmo2",
        gguf_in_transformers=False,
        stored_names=_NORMS_AFTER,
    ),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        defaults={
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        windows="pattern",
        window_pattern=4,
        null_window_is_none=True,
        rotates_in_windows="if any",
        qk_norm=True,
        form=LayerForm(norm_placement="after"),
        gguf_in_transformers=False,
        gguf_window_if_stated=True,
        stored_names=_NORMS_AFTER,
    ),
    Family(
        "glm",
        "GlmForCausalLM",
        defaults=_GLM,
        qkv_bias="attention_bias",
        partial_rotary=True,
        interleaved=True,
        fused=("mlp.gate_up_proj",),
        gguf="chatglm",
        gguf_in_transformers=False,
    ),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        defaults=_GLM,
        qkv_bias="attention_bias",
        partial_rotary=True,
        interleaved=True,
        fused=("mlp.gate_up_proj",),
        form=LayerForm(norm_placement="around"),
        gguf_in_transformers=False,
        stored_names={
            "self_attn.output_norm": "post_self_attn_layernorm",
            "mlp.output_norm": "post_mlp_layernorm",
        },
    ),
    Family(
        "arcee",
        "ArceeForCausalLM",
        defaults={
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        biases=_BOTH_BIASES,
        form=LayerForm(gated=False),
        activations={"relu2": "relu2"},
        gguf_in_transformers=False,
        permuted=True,
    ),
    Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        defaults={"vocab_size": 290943, "rms_norm_eps": 1e-5},
        biases=frozenset({"attention_bias"}),
        qk_norm=True,
        fixed={"use_qk_norm": True},
        form=LayerForm(qk_norm_after_rope=True),
        alpha=True,
        gguf="hunyuan-dense",
        gguf_in_transformers=False,
        stored_names={
            "self_attn.q_norm": "self_attn.query_layernorm",
            "self_attn.k_norm": "self_attn.key_layernorm",
        },
    ),
    Family(
        "apertus",
        "ApertusForCausalLM",
        defaults={
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12000000.0,
        },
        biases=frozenset({"attention_bias"}),
        qk_norm=True,
        form=LayerForm(gated=False),
        activations={"xielu": "xielu"},
        usual_rope={
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        gguf_in_transformers=False,
        stored_names={
            "input_layernorm": "attention_layernorm",
            "post_attention_layernorm": "feedforward_layernorm",
        },
    ),
)
