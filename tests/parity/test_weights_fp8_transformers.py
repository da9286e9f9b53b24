"""fp8 checkpoints give the weights that transformers dequantises them to, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llorch_export.source.open import open_checkpoint
from support.builders.checkpoints import write_hf_folder
from support.builders.raw_safetensors import KINDS, load, save

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("blocks", [True, False])
def test_the_weights_are_those_of_transformers(tmp_path: Path, blocks: bool) -> None:
    import torch
    import transformers

    folder = write_hf_folder(
        tmp_path / "m", {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}, seed=2
    )
    rng, stored = np.random.default_rng(1), {}
    for name, value in load(folder / "model.safetensors").items():
        stored[name] = value
        if "_proj.weight" in name:
            stored[name] = (value * 100).astype(KINDS["F8_E4M3"])
            grid = (value.shape[0] // 128, value.shape[1] // 128) if blocks else ()
            scale = rng.uniform(0.005, 0.02, grid)
            stored[name.replace(".weight", ".weight_scale_inv")] = np.asarray(scale, np.float32)
    save(folder / "model.safetensors", stored)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128] if blocks else None,
        "dequantize": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model.state_dict()
    tensors = open_checkpoint(str(folder)).tensors
    assert {tensor.dtype for tensor in tensors.values()} == {"F32", "F8_E4M3"}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.load(), expected[name].numpy(), err_msg=name)
