"""GPTQ checkpoints: exact values, and codes that reach the graph as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.source.open import open_checkpoint
from support.builders.packed_checkpoints import write_gptq
from support.builders.tiny_exports import all_logits, export_tiny, random_ids
from support.oracles import numpy_llama
from tolerances import QUANTISED_LOGITS_LEVEL_0

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
TIED = SHAPE | {"tie_word_embeddings": True}
BIASED = SHAPE | {"attention_bias": True, "mlp_bias": True}
IDS = random_ids(40)
ROWS: dict[str, dict[str, Any]] = {
    "4 bits": {},
    "8 bits": {"bits": 8},
    "2 bits": {"bits": 2},
    "3 bits": {"bits": 3},
    "3 bits, version 2, affine": {"bits": 3, "version": 2, "symmetric": False},
    "affine": {"symmetric": False, "version": 2},
    "affine 2 bits, order": {"bits": 2, "symmetric": False, "version": 2, "order": True},
    "affine 8 bits": {"bits": 8, "symmetric": False, "version": 2},
    "order": {"order": True},
    "order, groups of 128": {"order": True, "group": 128},
    "one group": {"group": -1},
    "one group, affine": {"group": -1, "symmetric": False, "version": 2},
    "a short last group": {"group": 128},  # 192 inputs of the down projection
    "order, a short last group": {"group": 128, "order": True},
    "groups of 64, bfloat16": {"group": 64, "scales": "bfloat16"},
    "groups of 96": {"group": 96},
    "head is plain": {"skip": ("lm_head",)},
    "some are plain": {"skip": ("lm_head", "layers.1.self_attn.k_proj", "down_proj")},
}


@pytest.mark.parametrize("settings", ROWS.values(), ids=ROWS)
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, settings: dict[str, Any]) -> None:
    packed = write_gptq(tmp_path / "m", BIASED, **settings)
    tensors = open_checkpoint(str(packed.folder)).tensors
    for name, value in packed.values.items():
        np.testing.assert_array_equal(tensors[name].load(), value, err_msg=name)
    artifact = export_tiny(packed.folder, tmp_path / "a", precision="source", accuracy_level=0)
    expected = numpy_llama.forward(packed.config, packed.values, IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)
