"""Every spelling of a setting that transformers takes is read as transformers reads it, in every family.

Where only one of the two accepts a file there is nothing to compare; the tests count that both mostly do.
"""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError

from llorch_export.config.families import FAMILIES
from llorch_export.config.hf import config_from_hf
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import of_family, tiny_config
from support.oracles.config_reading import differences, transformers_config

YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0}
LONGROPE = {"short_factor": [1, *[1.5] * 7], "long_factor": [2.0] * 8}
ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"type": "default"},
    {"rope_type": "default", "factor": 1.0, "mrope_section": [2, 3, 3]},
    {"type": "linear", "factor": 4},
    {"rope_type": "linear", "type": "linear", "factor": 2.5, "beta": 1},
    {"type": "dynamic", "factor": 2},
    {"type": "yarn", **YARN},
    {"rope_type": "yarn", **YARN, "finetuned": True},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", **YARN, "factor": None},
    {"rope_type": "yarn", **YARN, "mscale": 1, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", **YARN, "mscale": 0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {"rope_type": "yarn", **YARN, "truncate": None},
    {"rope_type": "yarn", **YARN, "mscale": None, "beta_fast": None, "attention_factor": None},
    {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
    {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", **LONGROPE, "factor": 8},
    {"rope_type": "longrope", **LONGROPE, "attention_factor": 1.5},
    {"type": "su", **LONGROPE},
)
OTHERS: tuple[dict[str, Any], ...] = (
    {"sliding_window": None},
    {"sliding_window": 16},
    {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 16, "use_sliding_window": False},
    {"sliding_window": 1000, "use_sliding_window": True},
    {"layer_types": ["full_attention", "full_attention"]},
    {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 8},
    {"num_key_value_heads": None},
    {"num_key_value_heads": 1},
    {"head_dim": 32},
    {"hidden_act": "swish"},
    {"rope_theta": 500000},
    {"tie_word_embeddings": True},
    {"attention_bias": True, "mlp_bias": True},
    {"attention_bias": True, "qkv_bias": True},
    {"max_position_embeddings": 64, "original_max_position_embeddings": 32},
    {"torch_dtype": "float16", "dtype": "bfloat16"},
    {"logits_scaling": 4, "attention_multiplier": 0.5, "residual_multiplier": 0.25},
    {"no_rope_layers": [1, 0], "no_rope_layer_interval": 1},
    {"architectures": None, "model_max_length": 77, "use_mrope": False, "num_experts": 0},
)

# transformers takes their config without a number of key heads, and cannot make the model.
NEED_KEY_HEADS = ("glm", "nemotron", "qwen2_moe")
# How many spellings of rotary settings are refused: flat ones where kinds of layers have their own, old ones
# beside the new key that the family must have, and factors for all of a head of which a part is rotated.
REFUSED_ROPES = {"gemma3_text": 23, "olmo3": 23, "ministral3": 2} | dict.fromkeys(
    ("glm", "glm4", "stablelm", "phi", "nemotron"), 8
)


def compared(data: dict[str, Any]) -> bool | None:
    """Tell whether both accept the file, which they must read alike; None if only transformers does."""
    try:
        expected = transformers_config(data)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, StrictDataclassError):
        return False
    if data["model_type"] in NEED_KEY_HEADS and data["num_key_value_heads"] is None:
        return False
    try:
        found = config_from_hf(data)
    except ArtifactError:
        return None
    assert differences(found, expected) == [], data
    return True


@pytest.mark.reference
@pytest.mark.parametrize("model_type", FAMILIES)
def test_rotary_settings_are_read_alike_wherever_and_however_they_are_written(model_type: str) -> None:
    data = tiny_config(**of_family(model_type))
    results = []
    for rope in ROPES:
        kind = rope.get("rope_type", rope.get("type", "default"))
        rest = {key: value for key, value in rope.items() if key not in ("type", "rope_type")}
        results.append(compared({**data, "rope_scaling": rope or None}))
        new = {key: value for key, value in data.items() if key != "rope_theta"}
        results.append(compared({**new, "rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **rest}}))
    refused = REFUSED_ROPES.get(model_type, 2)
    assert results.count(None) <= refused
    assert results.count(True) >= (8 if model_type == "phi3" else 36 - refused)


@pytest.mark.reference
@pytest.mark.parametrize("model_type", FAMILIES)
def test_other_settings_are_read_alike(model_type: str) -> None:
    data = tiny_config(**of_family(model_type))
    if model_type == "smollm3":
        data["no_rope_layers"] = [0, 1]
    results = [compared({**data, **other}) for other in OTHERS]
    # Windows, multipliers and activations that the family has not; a base beside the lack of its settings.
    assert results.count(None) <= (9 if model_type == "apertus" else 8)
    assert results.count(True) >= 11
