"""The config of a checkpoint in transformers' own terms, for the reference model of a GGUF file.

transformers reads a GGUF file's weights, but of its metadata only the basic shapes; what else the file says
(head size, biases, rotary scaling, windows, multipliers) is handed over here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from llorch_export.config.families import FAMILIES
from llorch_export.config.family import Family
from llorch_export.config.layer_form import LOGITS_CAP, SCORES_CAP
from llorch_export.graph.qkv import score_scale
from llorch_serve.artifact.manifest import ExpertsConfig, LlamaConfig, RopeConfig

# Rotary types that transformers knows; "factors" is GGUF's own and is applied to the finished model.
_OWN_SCALING = ("default", "factors")


def hf_settings(config: LlamaConfig) -> dict[str, Any]:
    """Return the content of a ``config.json`` for the config, ``model_type`` included."""
    family = FAMILIES[config.architecture]
    settings: dict[str, Any] = {
        "model_type": family.reference or config.architecture,
        "rope_parameters": _rope_parameters(config.rope, config.head_dim),
        # transformers' defaults for some families lie beyond a small vocabulary; unused for computing logits.
        "pad_token_id": None,
    }
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "sliding_window",
    ):
        settings[key] = getattr(config, key)
    if family.no_rope_interval:
        layers = range(config.num_hidden_layers)
        settings["no_rope_layers"] = [int(config.rotates(layer)) for layer in layers]
    if family.multipliers or family.depth_scaled:
        scale = config.attention_multiplier
        settings |= {
            "embedding_multiplier": config.embedding_multiplier,
            "residual_multiplier": config.residual_multiplier,
            "logits_scaling": config.logits_scaling,
            "attention_multiplier": config.head_dim**-0.5 if scale is None else scale,
        }
    experts = config.experts
    if family.experts is not None and isinstance(experts, ExpertsConfig):
        settings |= {
            family.experts.counts[0]: experts.count,
            family.experts.width: experts.intermediate_size,
            "num_experts_per_tok": experts.per_token,
            "norm_topk_prob": experts.normalised,
            "shared_expert_intermediate_size": experts.shared_intermediate_size or 0,
        }
        if experts.clamped is not msgspec.UNSET:
            settings |= {"swiglu_alpha": experts.clamped.alpha, "swiglu_limit": experts.clamped.limit}
    settings |= _form_settings(config, family)
    if family.partial_rotary and config.rope.rotary_dim is None:
        settings["rope_parameters"]["partial_rotary_factor"] = 1.0  # absent, it is a family's own
    if family.scales_queries:
        by_place = config.rope.query_scale
        beta = 0.0 if by_place is msgspec.UNSET else by_place.beta
        settings["rope_parameters"]["llama_4_scaling_beta"] = beta
    if family.outer_original_context is not None and config.rope.original_max_position_embeddings is not None:
        settings["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    return settings


def _form_settings(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Return how layers are built, as far as the family has keys for it."""
    settings: dict[str, Any] = {}
    form, layers = config.form, range(config.num_hidden_layers)
    if form.activation != "silu":
        names = {activation: name for name, activation in reversed(list(family.activations.items()))}
        settings[family.activation_key] = names[form.activation]
    if family.query_scalar is not None:
        settings["query_pre_attn_scalar"] = round(score_scale(config) ** -2)
    caps = {SCORES_CAP: form.attention_softcap, LOGITS_CAP: form.logits_softcap}
    settings |= {key: caps[key] for key in family.softcaps}
    if family.windows == "pattern":
        kinds = ("full_attention", "sliding_attention")
        settings["layer_types"] = [kinds[config.window(layer) is not None] for layer in layers]
    if form.sliding_rope is not None:
        settings["rope_parameters"] = {
            "full_attention": _rope_parameters(config.rope, config.head_dim),
            "sliding_attention": _rope_parameters(form.sliding_rope, config.head_dim),
        }
    return settings


def _rope_parameters(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind in _OWN_SCALING:
        parameters["rope_type"] = "default"
    if rope.rotary_dim is not None:
        parameters["partial_rotary_factor"] = rope.rotary_dim / head_dim
    if rope.kind in ("linear", "yarn", "dynamic", "llama3"):
        parameters["factor"] = rope.factor
    if rope.kind in ("yarn", "longrope", "llama3"):
        parameters["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.kind in ("yarn", "longrope"):
        parameters["attention_factor"] = rope.attention_factor
    if rope.kind == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.kind == "longrope":
        assert rope.short_factor is not None
        assert rope.long_factor is not None
        parameters |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    return parameters
