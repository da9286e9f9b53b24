"""What transformers makes of a config.json, and where a :class:`LlamaConfig` says something else."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from llorch_export.checkpoint.names import stored_tensors
from llorch_export.config.families import FAMILIES
from llorch_export.graph.rope import inverse_frequencies
from llorch_serve.artifact.manifest import ExpertsConfig, LlamaConfig

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
LAYERS = 2
"""Layers whose parameters are compared: all of a model's have the same shapes."""


def transformers_config(data: Mapping[str, Any]) -> Any:
    """Return transformers' own config of the content of a config.json. Raises what transformers raises."""
    import transformers

    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    settings = copy.deepcopy(dict(data))  # transformers fills in rope settings where they stand
    return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)


def differences(found: LlamaConfig, expected: Any) -> list[str]:
    """Return each field of ``found`` in which it is not transformers' config ``expected``."""
    pairs = {**_plain(found, expected), **_by_layer(found, expected), **_experts(found, expected)}
    pairs["rotary embedding"] = (True, _same_rotation(found, expected))
    pairs["parameters"] = _parameters(found, expected)
    return [
        f"{name}: {ours!r}, transformers has {theirs!r}"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


def _plain(found: LlamaConfig, expected: Any) -> dict[str, tuple[object, object]]:
    share = expected.hidden_size // expected.num_attention_heads
    pairs: dict[str, tuple[object, object]] = {
        name: (getattr(found, name), getattr(expected, name)) for name in PLAIN
    }
    pairs["architecture"] = (found.architecture, expected.model_type)
    pairs["head_dim"] = (found.head_dim, getattr(expected, "head_dim", None) or share)
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        granite = expected.model_type in _GRANITE
        pairs[name] = (getattr(found, name), getattr(expected, name) if granite else 1.0)
    own = found.head_dim**-0.5 if found.attention_multiplier is None else found.attention_multiplier
    usual = pairs["head_dim"][1] ** -0.5  # type: ignore[operator]
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
    return {
        "experts of a token": (found.experts.per_token, expected.num_experts_per_tok),
        "shares add up to one": (found.experts.normalised, normalised),
    }


def _by_layer(found: LlamaConfig, expected: Any) -> dict[str, tuple[object, object]]:
    layers = range(expected.num_hidden_layers)
    rotates = expected.no_rope_layers if expected.model_type == "smollm3" else [1] * len(layers)
    return {
        "windows": ([found.window(i) for i in layers], [_window(expected, i) for i in layers]),
        "rotates": ([int(found.rotates(i)) for i in layers], list(rotates[: len(layers)])),
    }


def _window(expected: Any, layer: int) -> int | None:
    window: int | None = None
    if expected.model_type in ("mistral", "phi3", "mixtral", "qwen3_moe"):
        window = expected.sliding_window
    elif expected.model_type in ("qwen2", "qwen3", "smollm3", "qwen2_moe"):
        window = expected.sliding_window if expected.layer_types[layer] == "sliding_attention" else None
    return None if window is None or window >= expected.max_position_embeddings else window


def _same_rotation(found: LlamaConfig, expected: Any) -> bool:
    """Tell whether the inverse frequencies are the same, and what cosine and sine are multiplied with."""
    rotary = _classes(expected, "RotaryEmbedding")(copy.deepcopy(expected))
    ours = inverse_frequencies(found.rope, found.head_dim)
    theirs = rotary.inv_freq.numpy()
    if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=1e-6, atol=0):
        return False
    if not math.isclose(found.rope.attention_factor, rotary.attention_scaling, rel_tol=1e-12):
        return False
    exact = found.rope.exact_positions
    kind = rotary.config.rope_parameters["rope_type"]
    if kind == "longrope":
        settings = rotary.config.rope_parameters
        original = settings["original_max_position_embeddings"]
        same = settings["short_factor"] == settings["long_factor"]
        return exact == (None if same else original)
    return exact == (expected.max_position_embeddings if kind == "dynamic" else None)


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
    ours = {name: shape for name, shape in named.items() if _within(name, layers)}
    return dict(sorted(ours.items())), dict(sorted(theirs.items()))


def _within(name: str, layers: int) -> bool:
    return not name.startswith("model.layers.") or int(name.split(".")[2]) < layers


def _classes(expected: Any, suffix: str) -> Any:
    """Return the class of the family's modelling code whose name ends with ``suffix``."""
    import importlib

    kind = expected.model_type
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    return getattr(module, type(expected).__name__.removesuffix("Config") + suffix)
