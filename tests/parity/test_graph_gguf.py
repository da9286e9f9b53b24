"""A GGUF file and a folder of the same weights give the same model, rotary factors included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.builders.checkpoints import (
    tiny_config,
    tiny_llama_config,
    tiny_weights,
    write_gguf,
    write_hf_folder,
)
from support.builders.tiny_exports import all_logits, export_tiny, random_ids
from support.oracles import numpy_llama
from tolerances import FP32_LOGITS, SAME_GRAPH_LOGITS

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped kv heads": {},
    "one kv head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 as rope_freqs": {"rope_scaling": LLAMA3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_folder_and_permuted_gguf_give_equal_logits(tmp_path: Path, name: str) -> None:
    overrides = VARIANTS[name]
    folder = export_tiny(write_hf_folder(tmp_path / "model", overrides), tmp_path / "from-folder")
    file = export_tiny(write_gguf(tmp_path / "model.gguf", overrides), tmp_path / "from-gguf")
    ids = random_ids(128)
    found = all_logits(file, ids)
    # GGUF stores the scaling as rounded factors, which llama3's frequencies differ from in the last bit.
    tolerance = FP32_LOGITS if "llama3" in name else SAME_GRAPH_LOGITS
    np.testing.assert_allclose(found, all_logits(folder, ids), atol=tolerance, rtol=0)
    expected = numpy_llama.forward(
        tiny_config(**overrides), tiny_weights(tiny_llama_config(**overrides)), ids
    )
    np.testing.assert_allclose(found, expected, atol=FP32_LOGITS, rtol=0)


@pytest.mark.parametrize("extra_scaling", [None, 2.0])
def test_rope_freqs_are_applied_and_multiply_with_linear_scaling(
    tmp_path: Path, extra_scaling: float | None
) -> None:
    factors = np.linspace(1, 6, 8, dtype=np.float32)
    metadata = (
        {}
        if extra_scaling is None
        else {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": extra_scaling}
    )
    source = write_gguf(tmp_path / "m.gguf", metadata=metadata, extra={"rope_freqs.weight": factors})
    ids = random_ids(128)
    found = all_logits(export_tiny(source, tmp_path / "artifact"), ids)
    weights = tiny_weights(tiny_llama_config())
    expected = numpy_llama.forward(
        tiny_config(), weights, ids, frequency_factors=factors * np.float32(extra_scaling or 1)
    )
    np.testing.assert_allclose(found, expected, atol=FP32_LOGITS, rtol=0)
    without = numpy_llama.forward(tiny_config(), weights, ids)
    assert np.abs(found - without).max() > 100 * FP32_LOGITS
