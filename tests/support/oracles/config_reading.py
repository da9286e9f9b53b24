"""What transformers makes of a config.json, and where a :class:`LlamaConfig` says something else."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from llorch_export.checkpoint.names import stored_tensors
from llorch_export.config.families import FAMILIES
from llorch_export.graph.rope import inverse_frequencies
from llorch_serve.artifact.manifest import ExpertsConfig, LlamaConfig, RopeConfig

PLAIN = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Fields of the same name and meaning in both."""
_GRANITE = ("granite", "granitemoe")
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
    "xielu": "xielu",
}
LAYERS = 2
"""Layers whose parameters are compared: all of a model's have the same shapes."""


def transformers_config(data: Mapping[str, Any]) -> Any:
    """Return transformers' own config of the content of a config.json. Raises what transformers raises."""
    import transformers

    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    settings = copy.deepcopy(dict(data))  # transformers fills in rope settings where they stand
    model_type = settings.pop("model_type")
    if model_type == "minicpm":
        return _minicpm_config(settings)
    return transformers.AutoConfig.for_model(model_type, **settings)


def _minicpm_config(settings: dict[str, Any]) -> Any:
    """Return Granite's config with the meaning of MiniCPM's keys, which transformers does not know."""
    import transformers

    settings.setdefault("tie_word_embeddings", True)
    found = transformers.AutoConfig.for_model("granite", **settings)
    found.embedding_multiplier = settings["scale_emb"]
    found.residual_multiplier = settings["scale_depth"] / math.sqrt(found.num_hidden_layers)
    found.logits_scaling = found.hidden_size / settings["dim_model_base"]
    share = found.hidden_size // found.num_attention_heads
    found.attention_multiplier = (settings.get("head_dim") or share) ** -0.5
    return found


def differences(found: LlamaConfig, expected: Any) -> list[str]:
    """Return each field of ``found`` in which it is not transformers' config ``expected``."""
    pairs = {**_plain(found, expected), **_by_layer(found, expected), **_experts(found, expected)}
    pairs["rotary embedding"] = (True, _same_rotation(found, expected))
    pairs["parameters"] = _parameters(found, expected)
    pairs["query scale"] = _query_scale(found, expected)
    return [
        f"{name}: {ours!r}, transformers has {theirs!r}"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


def _plain(found: LlamaConfig, expected: Any) -> dict[str, tuple[object, object]]:
    share = expected.hidden_size // expected.num_attention_heads
    family, kind = FAMILIES[found.architecture], expected.model_type
    names = {"rms_norm_eps": family.norm_key}
    pairs: dict[str, tuple[object, object]] = {
        name: (getattr(found, name), getattr(expected, names.get(name, name))) for name in PLAIN
    }
    if expected.num_key_value_heads is None:
        pairs["num_key_value_heads"] = (found.num_key_value_heads, expected.num_attention_heads)
    pairs["architecture"] = (family.reference or found.architecture, expected.model_type)
    pairs["head_dim"] = (found.head_dim, getattr(expected, "head_dim", None) or share)
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        pairs[name] = (getattr(found, name), getattr(expected, name) if kind in _GRANITE else 1.0)
    if kind.startswith("gemma"):
        pairs["embedding_multiplier"] = (found.embedding_multiplier, expected.hidden_size**0.5)
    if kind.startswith("cohere"):
        pairs["logits_scaling"] = (found.logits_scaling, 1 / expected.logit_scale)
    pairs["activation"] = (found.form.activation, ACTIVATIONS[getattr(expected, family.activation_key)])
    # Gemma3Attention keeps the cap of scores and gives it to none of its kernels.
    scores = None if kind == "gemma3_text" else getattr(expected, "attn_logit_softcapping", None)
    theirs = (scores, getattr(expected, "final_logit_softcapping", None))
    pairs["caps"] = ((found.form.attention_softcap, found.form.logits_softcap), theirs)
    own = found.head_dim**-0.5 if found.attention_multiplier is None else found.attention_multiplier
    scalar = getattr(expected, "query_pre_attn_scalar", pairs["head_dim"][1])
    usual = scalar**-0.5
    pairs["attention_multiplier"] = (
        own,
        expected.attention_multiplier if expected.model_type in _GRANITE else usual,
    )
    return pairs


def _experts(found: LlamaConfig, expected: Any) -> dict[str, tuple[object, object]]:
    """Compare what shapes of parameters do not show: how many experts a token takes, and their shares."""
    if not isinstance(found.experts, ExpertsConfig):
        return {}
    normalised = getattr(expected, "norm_topk_prob", True)
    clamped = found.experts.clamped
    ours = None if clamped is msgspec.UNSET else (clamped.alpha, clamped.limit)
    gpt_oss = expected.model_type == "gpt_oss"
    return {
        "gate": (ours, (expected.swiglu_alpha, expected.swiglu_limit) if gpt_oss else None),
        "experts of a token": (found.experts.per_token, expected.num_experts_per_tok),
        "shares add up to one": (found.experts.normalised, normalised),
    }


def _by_layer(found: LlamaConfig, expected: Any) -> dict[str, tuple[object, object]]:
    layers = range(expected.num_hidden_layers)
    rotates = expected.no_rope_layers if expected.model_type == "smollm3" else [1] * len(layers)
    if expected.model_type in ("exaone4", "cohere2") and expected.sliding_window is not None:
        rotates = [int(kind == "sliding_attention") for kind in expected.layer_types]
    return {
        "windows": ([found.window(i) for i in layers], [window_of(expected, i) for i in layers]),
        "rotates": ([int(found.rotates(i)) for i in layers], list(rotates[: len(layers)])),
    }


def window_of(expected: Any, layer: int) -> int | None:
    """Return how many tokens a layer sees by transformers' config; None: all."""
    window: int | None = None
    if expected.model_type in ("mistral", "ministral3", "phi3", "starcoder2", "mixtral", "qwen3_moe"):
        window = expected.sliding_window
    elif "sliding_attention" in (types := getattr(expected, "layer_types", None) or ()):
        window = expected.sliding_window if types[layer] == "sliding_attention" else None
    # Layers that rotate in their own way keep a window that hides nothing.
    by_kind = "rope_theta" not in expected.rope_parameters
    hides_nothing = window is not None and window >= expected.max_position_embeddings and not by_kind
    return None if hides_nothing else window


def _query_scale(found: LlamaConfig, expected: Any) -> tuple[object, object]:
    ours, rope = found.rope.query_scale, expected.rope_parameters
    beta = rope.get("llama_4_scaling_beta") if expected.model_type == "ministral3" else None
    theirs = (beta, rope.get("original_max_position_embeddings")) if beta else None
    return (None if ours is msgspec.UNSET else (ours.beta, ours.positions)), theirs


def _same_rotation(found: LlamaConfig, expected: Any) -> bool:
    """Tell whether the inverse frequencies are the same, and what cosine and sine are multiplied with."""
    rotary = _classes(expected, "RotaryEmbedding")(copy.deepcopy(expected))
    if len(found.ropes) == 1:
        return _same_rope(found, found.rope, expected, rotary, "", rotary.config.rope_parameters)
    settings = rotary.config.rope_parameters
    return all(
        _same_rope(found, rope, expected, rotary, f"{kind}_", settings[kind])
        for rope, kind in zip(found.ropes, ("full_attention", "sliding_attention"), strict=True)
        if kind in expected.layer_types
    )


def _same_rope(
    found: LlamaConfig, rope: RopeConfig, expected: Any, rotary: Any, prefix: str, settings: Any
) -> bool:
    ours = inverse_frequencies(rope, found.head_dim)
    theirs = getattr(rotary, f"{prefix}inv_freq").numpy()
    if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=1e-6, atol=0):
        return False
    if not math.isclose(rope.attention_factor, getattr(rotary, f"{prefix}attention_scaling"), rel_tol=1e-12):
        return False
    exact, kind = rope.exact_positions, settings["rope_type"]
    if kind == "longrope":
        original = settings["original_max_position_embeddings"]
        same = settings["short_factor"] == settings["long_factor"]
        return exact == (None if same else original)
    dynamic = kind == "dynamic" and not settings.get("alpha")
    return exact == (expected.max_position_embeddings if dynamic else None)


def _parameters(found: LlamaConfig, expected: Any) -> tuple[object, object]:
    import torch

    layers = min(LAYERS, expected.num_hidden_layers)
    small = copy.deepcopy(expected)
    small.num_hidden_layers = layers
    with torch.device("meta"):
        model = _classes(expected, "ForCausalLM")(small)
    theirs = {name: tuple(value.shape) for name, value in model.named_parameters()}
    keys = FAMILIES[found.architecture].experts
    named = stored_tensors(found, keys.names[0] if keys and found.experts else None)
    buffers = (".act_fn.beta", ".act_fn.eps")
    ours = {
        name: shape for name, shape in named.items() if _within(name, layers) and not name.endswith(buffers)
    }
    return dict(sorted(ours.items())), dict(sorted(theirs.items()))


def _within(name: str, layers: int) -> bool:
    return not name.startswith("model.layers.") or int(name.split(".")[2]) < layers


def _classes(expected: Any, suffix: str) -> Any:
    """Return the class of the family's modelling code whose name ends with ``suffix``."""
    import importlib

    family = FAMILIES[expected.model_type]
    kind = family.module or family.architecture
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    return getattr(module, family.causal_lm.removesuffix("ForCausalLM") + suffix)
