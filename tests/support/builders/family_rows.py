"""Configurations of a family, drawn from what config files say of heads, sizes, ties, biases, rotations and
windows.

Each starts from a row of :data:`.arch_rows.HF`, which has what is the family's own, and is kept if
transformers and this exporter both accept it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from huggingface_hub.errors import StrictDataclassError

from llorch_export.config.families import FAMILIES
from llorch_export.config.hf import config_from_hf
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError
from support.builders.arch_rows import HF
from support.builders.checkpoints import tiny_config
from support.oracles.config_reading import differences, transformers_config

ROWS: Final = 51
_TRIES: Final = 4000
_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
Settings = dict[str, Any]


def _heads(heads: int, key_heads: int, head_dim: int, **more: int) -> Settings:
    found = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head_dim}
    return {**found, **more}


_AXES: Final[tuple[tuple[Settings, ...], ...]] = (
    (
        {},
        _heads(4, 1, 16),
        _heads(4, 4, 16),
        _heads(2, 1, 32),
        _heads(8, 2, 8),
        _heads(4, 2, 24),
        _heads(6, 3, 16, hidden_size=96),
        _heads(4, 2, 32, hidden_size=128),
    ),
    ({}, {"intermediate_size": 64}, {"intermediate_size": 40}, {"intermediate_size": 160}),
    ({}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"num_hidden_layers": 4}),
    ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
    (
        {},
        {"attention_bias": True},
        {"attention_bias": True, "mlp_bias": True},
        {"use_bias": True},
        {"qkv_bias": True},
        {"use_qkv_bias": True},
    ),
    (
        {},
        {},
        {"sliding_window": 9},
        {"sliding_window": 3},
        {"sliding_window": None},
        {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
        {"sliding_window": 9, "sliding_window_pattern": 2},
    ),
    (
        {},
        {},
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.25},
        {"partial_rotary_factor": 1.0},
        {"vocab_size": 500},
    ),
)
_ROPES: Final[tuple[Settings, ...]] = (
    {},
    {},
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    _YARN,
    {**_YARN, "beta_fast": 6.0, "beta_slow": 0.5, "truncate": False},
    {**_YARN, "attention_factor": 1.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)
_THETAS: Final = (10000.0, 500000.0)
_EPSILONS: Final = (2.0**-17, 2.0**-12)


def family_rows(model_type: str) -> list[Settings]:
    """Return ``ROWS`` configurations of a family as overrides of the tiny config, the same in every run."""
    found: dict[str, Settings] = {}
    for row in _drawn(model_type):
        key = json.dumps(row, sort_keys=True)
        if key not in found and _accepted(row):
            found[key] = row
        if len(found) == ROWS:
            break
    return list(found.values())


def _drawn(model_type: str) -> Iterator[Settings]:
    """Draw configurations, of which the first are the rows that the family has."""
    starts = [row for row in HF.values() if row.get("model_type", "llama") == model_type]
    yield from starts
    rng = np.random.default_rng(sum(model_type.encode()))
    family = FAMILIES[model_type]
    for _ in range(_TRIES):
        row = dict(starts[rng.integers(len(starts))])
        for axis in _AXES:
            row |= axis[rng.integers(len(axis))]
        if (
            family.multipliers
        ):  # scores that nothing divides are so far apart that float32 rounds them visibly
            row.setdefault("attention_multiplier", 0.0625)
        row[family.norm_key] = _EPSILONS[rng.integers(2)]
        rope, theta = _ROPES[rng.integers(len(_ROPES))], _THETAS[rng.integers(2)]
        if rope and family.scales_queries:  # transformers cannot run the model without them
            rope = {"original_max_position_embeddings": 32, **rope, "llama_4_scaling_beta": 0.3}
        if rope and rng.integers(2):
            row |= {"rope_parameters": {**rope, "rope_theta": theta}, "rope_theta": None}
            row.pop("rope_scaling", None)
        elif rope:
            row |= {"rope_scaling": rope, "rope_theta": theta}
            row.pop("rope_parameters", None)
        yield row


def _accepted(row: Settings) -> bool:
    """Tell whether both accept a configuration, which they must read alike."""
    data = tiny_config(**row)
    try:
        expected = transformers_config(data)
        found = config_from_hf(data)
    except (ArtifactError, LookupError, TypeError, ValueError, ZeroDivisionError, StrictDataclassError):
        return False
    if _cannot_be_built(found):
        return False
    others = differences(found, expected)
    assert others == [], (row, others)
    return True


def _cannot_be_built(found: LlamaConfig) -> bool:
    """Tell whether transformers takes a config whose model it cannot make: of a rotation of two elements that
    is stretched.
    """
    return found.rotary_dim == 2 and found.rope.kind == "dynamic"
