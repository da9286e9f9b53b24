"""The fp32 graph computes what transformers and a numpy forward compute, for every shape that Llamas come
in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llorch_serve.runtime.session import DecoderSession
from support.builders.checkpoints import tiny_config, tiny_llama_config, tiny_weights, write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids
from support.oracles import numpy_llama
from tolerances import FP32_LOGITS, NUMPY_LOGITS, STEPWISE_LOGITS

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as many kv heads as heads": {"num_key_value_heads": 4},
    "grouped kv heads": {"num_key_value_heads": 2},
    "one kv head": {"num_key_value_heads": 1},
    "8 heads, 2 kv": {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "8 heads, 1 kv": {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    "heads wider than hidden": {"head_dim": 32},
    "hidden is no multiple of heads": {"hidden_size": 56, "num_attention_heads": 6, "head_dim": 16},
    "intermediate is no multiple of 16": {"intermediate_size": 88},
    "one layer": {"num_hidden_layers": 1},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "all biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "theta": {"rope_theta": 500000.0},
    "theta nested only": {
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    },
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 by rope_type": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3 by type": {"rope_scaling": {"type": "llama3", **LLAMA3}},
    "large epsilon": {"rms_norm_eps": 0.5},
    "tiny epsilon": {"rms_norm_eps": 1e-12},
}
REFUSED_BY_TRANSFORMERS = {"hidden is no multiple of heads"}
TOKENS = 128  # all positions; field reports ask for 0-40 and 100-127


class Case:
    """A variant: its folder, its session and its logits from numpy."""

    def __init__(self, folder: Path, overrides: dict[str, Any]) -> None:
        self.folder = write_hf_folder(folder / "model", overrides)
        self.artifact = export_tiny(self.folder, folder / "artifact")
        self.ids = random_ids(TOKENS)
        self.session: DecoderSession = open_tiny(self.artifact)
        weights = tiny_weights(tiny_llama_config(**overrides))
        self.numpy = numpy_llama.forward(tiny_config(**overrides), weights, self.ids)

    def full(self) -> npt.NDArray[np.float32]:
        return self.session.prefill(0, self.ids, 0, range(TOKENS)).copy()


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def case(variant: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("case"), VARIANTS[variant])


def transformers_logits(folder: Path, ids: list[int]) -> npt.NDArray[np.float32]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model.eval()(torch.tensor([ids])).logits[0].numpy()
    return logits


def test_logits_equal_a_numpy_forward(case: Case) -> None:
    np.testing.assert_allclose(case.full(), case.numpy, atol=FP32_LOGITS, rtol=0)


@pytest.mark.reference
def test_logits_equal_transformers(case: Case, variant: str) -> None:
    if variant in REFUSED_BY_TRANSFORMERS:
        with pytest.raises(Exception, match="not a multiple of the number of attention heads"):
            transformers_logits(case.folder, case.ids)
        return
    expected = transformers_logits(case.folder, case.ids)
    np.testing.assert_allclose(case.full(), expected, atol=FP32_LOGITS, rtol=0)
    np.testing.assert_allclose(expected, case.numpy, atol=NUMPY_LOGITS, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_in_chunks_equals_prefill_at_once(case: Case, chunk: int) -> None:
    full = case.full()
    for start in range(0, TOKENS, chunk):
        part = case.ids[start : start + chunk]
        found = case.session.prefill(1, part, start, range(len(part)))
        np.testing.assert_allclose(
            found, full[start : start + len(part)], atol=STEPWISE_LOGITS, rtol=0, err_msg=f"at {start}"
        )


def test_decode_step_by_step_equals_the_full_forward(case: Case) -> None:
    """Two slots of different length decode together; each must see only its own past."""
    ids, session = case.ids, case.session
    full = case.full()
    # Slot 1 is five tokens behind slot 0 throughout, and slot 0 starts after a prefill.
    session.prefill(0, ids[:20], 0)
    session.prefill(1, ids[:15], 0)
    for position in range(20, TOKENS):
        found = session.decode([ids[position], ids[position - 5]], [position + 1, position - 4])
        np.testing.assert_allclose(found[0], full[position], atol=STEPWISE_LOGITS, rtol=0)
        np.testing.assert_allclose(found[1], full[position - 5], atol=STEPWISE_LOGITS, rtol=0)


@pytest.mark.parametrize("wanted", [[0], [127], [3, 3, 90], [100, 2, 50], []])
def test_only_wanted_rows_are_computed_in_the_order_asked_for(case: Case, wanted: list[int]) -> None:
    full = case.full()
    found = case.session.prefill(0, case.ids, 0, wanted)
    assert found.shape == (len(wanted), 512)
    np.testing.assert_allclose(found, full[wanted], atol=STEPWISE_LOGITS, rtol=0)


def test_variants_differ_from_each_other(tmp_path: Path) -> None:
    """Guards the table above: an override that changes nothing would test nothing."""
    ids = random_ids(TOKENS)
    weights = tiny_weights(tiny_llama_config())
    plain = numpy_llama.forward(tiny_config(), weights, ids)
    for name in ("theta nested only", "linear", "llama3 by type", "large epsilon", "theta"):
        other = numpy_llama.forward(tiny_config(**VARIANTS[name]), weights, ids)
        assert np.abs(other - plain).max() > 100 * FP32_LOGITS, name


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_sources_are_widened_exactly(tmp_path: Path, dtype: str) -> None:
    rounded: dict[str, npt.NDArray[np.float32]] = {}

    def edit(weights: dict[str, npt.NDArray[np.float32]]) -> None:
        import ml_dtypes

        kind = np.float16 if dtype == "F16" else ml_dtypes.bfloat16
        rounded.update({name: value.astype(kind).astype(np.float32) for name, value in weights.items()})

    folder = write_hf_folder(tmp_path / "model", dtype=dtype, edit=edit)
    ids = random_ids(40)
    found = open_tiny(export_tiny(folder, tmp_path / "artifact")).prefill(0, ids, 0, range(40))
    np.testing.assert_allclose(
        found, numpy_llama.forward(tiny_config(), rounded, ids), atol=FP32_LOGITS, rtol=0
    )
