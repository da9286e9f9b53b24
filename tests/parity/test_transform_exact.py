"""Transforms leave the model as it was: fp32 logits of a transformed artifact against transformers on the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arch_rows import HF
from checkpoints import Weights, write_gguf, write_hf_folder
from llorch_export.checkpoint.source import open_checkpoint
from llorch_export.reference import Reference
from tiny_exports import all_logits, export_tiny, random_ids
from tolerances import FP32_LOGITS

pytestmark = pytest.mark.reference

MEASURED = ("equalise", "smooth")
ALL = ("rotate", "hadamard", "equalise", "smooth")
TEXT = "The quick brown fox jumps over the lazy dog while seventeen engineers measure latency. " * 3
BIASES = {"attention_bias": True, "mlp_bias": True}

EACH: dict[str, dict[str, Any]] = {"llama": {}, "biases, tied": {**BIASES, "tie_word_embeddings": True}}
"""Rows for which every pass is tried alone."""

TOGETHER: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases, tied": {**BIASES, "tie_word_embeddings": True},
    "odd sizes": {
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "intermediate_size": 88,
    },
    **{
        name: HF[name]
        for name in (
            "heads of 40, one kv head",
            "yarn, attention factor",
            "mistral, window",
            "qwen2",
            "qwen2, tied, one kv head",
            "qwen3",
            "qwen3, heads of 24",
            "smollm3, layers",
            "smollm3, biases, tied by default",
            "granite, tied, biases",
            "phi3",
            "phi3, three quarters rotated",
        )
    },
}


def uneven(weights: Weights) -> None:
    """Make channels of keys, of the residual stream and of the feed-forward block of very different size."""
    rng = np.random.default_rng(5)
    for name, value in weights.items():
        if name.endswith(("k_proj.weight", "up_proj.weight")):
            value *= np.exp(rng.normal(size=(len(value), 1))).astype(np.float32)
            value /= np.sqrt((value**2).mean() * value.shape[1])
        if name.endswith("layernorm.weight"):
            value[::7] *= 4


def check(tmp_path: Path, overrides: dict[str, Any], transforms: tuple[str, ...]) -> None:
    source = write_hf_folder(tmp_path / "model", overrides, edit=uneven)
    (tmp_path / "text.txt").write_text(TEXT)
    calibration = tmp_path / "text.txt" if set(transforms) & set(MEASURED) else None
    artifact = export_tiny(source, tmp_path / "out", transforms=transforms, calibration=calibration)
    ids = random_ids(60)
    expected = Reference(open_checkpoint(str(source))).logits(ids)
    np.testing.assert_allclose(all_logits(artifact, ids), expected, atol=FP32_LOGITS, rtol=0)
    plain = export_tiny(source, tmp_path / "plain")
    assert (tmp_path / "plain" / "model.onnx.data").read_bytes() != (
        artifact.folder / "model.onnx.data"
    ).read_bytes(), "the transform must have done something"
    assert plain.manifest.fingerprint != artifact.manifest.fingerprint


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("transform", ALL)
def test_each_transform_alone_is_exact(tmp_path: Path, name: str, transform: str) -> None:
    check(tmp_path, EACH[name], (transform,))


@pytest.mark.parametrize("name", TOGETHER)
def test_all_transforms_together_are_exact(tmp_path: Path, name: str) -> None:
    check(tmp_path, TOGETHER[name], ALL)


def test_a_gguf_file_is_transformed_to_the_same_model(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", edit=uneven)
    (tmp_path / "text.txt").write_text(TEXT)
    artifact = export_tiny(source, tmp_path / "out", transforms=ALL, calibration=tmp_path / "text.txt")
    ids = random_ids(60)
    expected = Reference(open_checkpoint(str(source))).logits(ids)
    np.testing.assert_allclose(all_logits(artifact, ids), expected, atol=FP32_LOGITS, rtol=0)
