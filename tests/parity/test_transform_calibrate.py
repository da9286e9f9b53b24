"""What calibration measures is what transformers' own modules see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.source.open import open_checkpoint
from llorch_export.transform import calibrate as module
from llorch_export.transform.calibrate import calibrate
from llorch_export.verify.layers.reference import observe
from llorch_export.verify.reference import Reference
from support.builders.arch_rows import HF
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.tiny_exports import random_ids, silent

pytestmark = pytest.mark.reference

ROWS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen3": HF["qwen3"],
    "smollm3": HF["smollm3, layers"],
    "granite": HF["granite"],
    "phi3": HF["phi3, three quarters rotated"],
    "heads of 24": HF["heads of 24"],
    "gemma2, cap of logits": HF["gemma2"],
}
RELATIVE = 1e-4


@pytest.mark.parametrize("name", ROWS)
def test_statistics_are_those_of_transformers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two windows and a rest, each a context of its own."""
    monkeypatch.setattr(module, "WINDOW", 20)
    checkpoint = open_checkpoint(str(write_hf_folder(tmp_path / "model", ROWS[name])))
    config, ids = checkpoint.config, random_ids(47)
    found = calibrate(config, checkpoint.tensors, ids, silent)
    model = Reference(checkpoint).model
    runs = [observe(model, ids[start : start + 20], config) for start in range(0, len(ids), 20)]
    matrices = {n for n, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    assert set(found.inputs) == (matrices - {"model.embed_tokens.weight"}) | {head}
    for weight, statistics in found.inputs.items():
        seen = np.concatenate([_input(run, weight, head) for run in runs])
        if weight == head:
            seen = seen / config.logits_scaling
        seen = seen.reshape(len(ids), -1)
        np.testing.assert_allclose(statistics.mean_square, (seen**2).mean(axis=0), rtol=RELATIVE)
        np.testing.assert_allclose(statistics.absmax, np.abs(seen).max(axis=0), rtol=RELATIVE)
    for layer in range(config.num_hidden_layers):
        values = np.concatenate([run.attention[layer].value for run in runs], axis=1)
        np.testing.assert_allclose(found.value_absmax[layer], np.abs(values).max(axis=(1, 2)), rtol=RELATIVE)
        keys = np.concatenate([run.attention[layer].key for run in runs], axis=1)
        expected = np.abs(keys)
        if config.rotates(layer):
            half = config.rotary_dim // 2
            first, second = keys[..., :half], keys[..., half : 2 * half]
            expected[..., :half] = expected[..., half : 2 * half] = np.sqrt(first**2 + second**2)
        np.testing.assert_allclose(found.key_norm[layer], expected.max(axis=1), rtol=RELATIVE)


def test_a_gguf_file_measures_the_same(tmp_path: Path) -> None:
    folder = open_checkpoint(str(write_hf_folder(tmp_path / "model")))
    file = open_checkpoint(str(write_gguf(tmp_path / "m.gguf")))
    one, other = (calibrate(c.config, c.tensors, random_ids(40), silent) for c in (folder, file))
    for weight, statistics in one.inputs.items():
        np.testing.assert_allclose(other.inputs[weight].mean_square, statistics.mean_square, rtol=RELATIVE)
    np.testing.assert_allclose(other.key_norm, one.key_norm, rtol=RELATIVE)


def _input(run: Any, weight: str, head: str) -> Any:
    """Return what transformers gave to the module of a weight; of a fused module for its parts."""
    if weight == head:
        return run.inputs["lm_head"] if "lm_head" in run.inputs else run.outputs["model.norm"]
    module_name = weight.removesuffix(".weight")
    parent, _, last = module_name.rpartition(".")
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}.get(last, "gate_up_proj")
    return run.inputs[module_name] if module_name in run.inputs else run.inputs[f"{parent}.{fused}"]
