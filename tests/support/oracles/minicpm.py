"""MiniCPM by its definition, which transformers has no code for: a Llama whose weights hold the scales.

The embedding is multiplied by ``scale_emb``, what each block adds by ``scale_depth`` over the root of the
number of layers, and the last hidden state divided by ``hidden_size / dim_model_base`` (Hu et al. 2024).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

SCALES = ("scale_emb", "scale_depth", "dim_model_base")


def is_minicpm(folder: Path) -> bool:
    """Tell whether a folder holds such a model."""
    return bool(_config(folder)["model_type"] == "minicpm")


def as_llama(folder: Path) -> Path:
    """Write the same model as a Llama into a folder beside this one, and return it."""
    config, weights = _config(folder), load_file(folder / "model.safetensors")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if config.get("tie_word_embeddings", True):
        weights[head] = weights[embedding].copy()
    weights[embedding] = weights[embedding] * config["scale_emb"]
    weights[head] = weights[head] / (config["hidden_size"] / config["dim_model_base"])
    depth = config["scale_depth"] / math.sqrt(config["num_hidden_layers"])
    for name in weights:
        if name.rpartition(".")[0].endswith((".o_proj", ".down_proj")):
            weights[name] = weights[name] * depth
    llama = folder.with_name(f"{folder.name}-as-llama")
    llama.mkdir()
    save_file(
        {name: value.astype(np.float32) for name, value in weights.items()}, llama / "model.safetensors"
    )
    rest = {key: value for key, value in config.items() if key not in SCALES}
    changed = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    (llama / "config.json").write_text(json.dumps({**rest, **changed}))
    return llama


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
