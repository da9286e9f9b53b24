"""Every kind of adapter computes what PEFT computes with it, unmerged, and merges to PEFT's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.adapter.apply import with_adapters
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.source.open import open_checkpoint
from support.builders.checkpoints import of_family, write_hf_folder
from support.builders.tiny_exports import all_logits, export_tiny, random_ids
from support.oracles.peft_adapters import adapted_model, logits, make_adapter, merged_weights
from tolerances import FP32_LOGITS

pytestmark = pytest.mark.reference

QV = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIED = {"tie_word_embeddings": True}
PHI3 = of_family("phi3")
QWEN2 = of_family("qwen2")
# Checkpoint, settings of PEFT, and whether PEFT's merge is what its forward pass computes.
MERGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all modules": ({}, {"target_modules": ALL}),
    "rslora": ({}, {"target_modules": QV, "use_rslora": True}),
    "fan_in_fan_out": ({}, {"target_modules": QV, "fan_in_fan_out": True}),
    "all-linear": ({}, {"target_modules": "all-linear"}),
    "expression": ({}, {"target_modules": r"model\.layers\.[\d]+\.(?:self_attn|mlp)\.(?:(?:q|up)_proj)"}),
    "excluded": ({}, {"target_modules": ALL, "exclude_modules": ["o_proj", "0.mlp.up_proj"]}),
    "excluded by expression": ({}, {"target_modules": ALL, "exclude_modules": r".*\.1\.mlp.*"}),
    "layers": ({}, {"target_modules": ALL, "layers_to_transform": 1, "layers_pattern": "layers"}),
    "patterns": (
        {},
        {
            "target_modules": ALL,
            "rank_pattern": {r"^model\.layers\.0\..*q_proj": 2, "(?:k|v)_proj": 6, "down_proj": 1},
            "alpha_pattern": {r"layers\.[1-9]\.mlp\.(up|gate)_proj": 3, "o_proj": 9},
        },
    ),
    "dora": ({}, {"target_modules": ALL, "use_dora": True}),
    "dora, rslora, patterns": (
        {},
        {"target_modules": ALL, "use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    ),
    "dora on the embedding": ({}, {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "embedding and head": ({}, {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "biases": (QWEN2, {"target_modules": QV, "bias": "all"}),
    "biases of the adapted": (QWEN2, {"target_modules": QV, "bias": "lora_only"}),
    "lora_bias": (QWEN2, {"target_modules": QV, "lora_bias": True}),
    "biases, where there are none": ({}, {"target_modules": QV, "bias": "all"}),
    "saved tables": ({}, {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved norms": ({}, {"target_modules": QV, "modules_to_save": ["norm"]}),
    "saved block": ({}, {"target_modules": QV, "modules_to_save": ["1.mlp"]}),
    "tokens": ({}, {"target_modules": QV, "trainable_token_indices": [5, 2, 77]}),
    "tokens by module": (
        {},
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [5], "lm_head": [2, 77]}},
    ),
    "tied, tokens": (TIED, {"target_modules": QV, "trainable_token_indices": [5, 2, 77]}),
    "tied, all of both saved": (TIED, {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied, head saved": (TIED, {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "tied, embedding saved": (TIED, {"target_modules": QV, "modules_to_save": ["embed_tokens"]}),
    "tied, saved and kept": (
        TIED,
        {"target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "fused": (PHI3, {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "fused, all-linear": (PHI3, {"target_modules": "all-linear"}),
    "fused, dora": (PHI3, {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}),
    "gaussian": ({}, {"target_modules": QV, "init_lora_weights": "gaussian"}),
    "orthogonal": ({}, {"target_modules": QV, "init_lora_weights": "orthogonal"}),
}
# PEFT's merge of these fails, or changes both of two tied tables, which its forward pass does not.
UNMERGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora_bias without biases": ({}, {"target_modules": QV, "lora_bias": True}),
    "lora_bias of all": ({}, {"target_modules": ALL, "lora_bias": True}),
    "fused, lora_bias": (PHI3, {"target_modules": ["qkv_proj", "gate_up_proj"], "lora_bias": True}),
    "tied, embedding": (TIED, {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied, head": (TIED, {"target_modules": ["lm_head", "q_proj"]}),
    "tied, both": (TIED, {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied, different tokens": (
        TIED,
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [5], "lm_head": [2, 77]}},
    ),
    "tied, adapted and kept": (
        TIED,
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    ),
}
IDS = [5, 2, 77, *random_ids(29)]


@pytest.mark.parametrize("name", [*MERGED, *UNMERGED])
def test_an_adapter_computes_what_peft_computes(tmp_path: Path, name: str) -> None:
    overrides, settings = (MERGED | UNMERGED)[name]
    folder, path = write_hf_folder(tmp_path / "model", overrides), tmp_path / "lora"
    make_adapter(folder, path, **{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings})
    model = adapted_model(folder, path)
    expected = logits(model, IDS)
    artifact = export_tiny(folder, tmp_path / "out", lora=(AdapterChoice(path),))
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=FP32_LOGITS, rtol=0)
    if name in MERGED:
        tensors = with_adapters(open_checkpoint(str(folder)), (AdapterChoice(path),)).tensors
        weights = merged_weights(model)
        for key, tensor in tensors.items():
            if key in weights:
                np.testing.assert_array_almost_equal_nulp(tensor.load(), weights[key].astype(np.float32), 1)
