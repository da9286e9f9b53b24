"""LoRA adapters of tiny models in PEFT's format, and what they merge to by the definition."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from llorch_serve.artifact.manifest import LlamaConfig

Factors = dict[str, npt.NDArray[Any]]
SHAPES = {
    "q_proj": ("query", "hidden"),
    "v_proj": ("key_value", "hidden"),
    "down_proj": ("hidden", "intermediate"),
}


def settings(**changes: object) -> dict[str, object]:
    """Return an ``adapter_config.json`` as PEFT 0.21 writes it, with ``changes``."""
    absent = (
        "alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config", "exclude_modules",
        "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config", "megatron_config",
        "modules_to_save", "monteclora_config", "revision", "target_parameters", "trainable_token_indices",
        "use_bdlora", "velora_config",
    )  # fmt: skip
    return {
        **dict.fromkeys(absent),
        "alpha_pattern": {}, "base_model_name_or_path": "somewhere/else", "bias": "none", "ensure_weight_tying": False,
        "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "loftq_config": {}, "lora_alpha": 6,
        "lora_bias": False, "lora_dropout": 0.05, "megatron_core": "megatron.core", "peft_type": "LORA",
        "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4, "rank_pattern": {}, "target_modules": [*SHAPES],
        "task_type": "CAUSAL_LM", "use_dora": False, "use_qalora": False, "use_rslora": False,
        **changes,
    }  # fmt: skip


def write_adapter(
    path: Path,
    config: LlamaConfig,
    *,
    ranks: Mapping[str, int] | None = None,
    layers: Iterable[int] | None = None,
    edit: Callable[[Factors], None] | None = None,
    **changes: object,
) -> Factors:
    """Write an adapter of query, value and down projections; return its factors by module and side (``a``,
    ``b``).

    ranks: rank of the projections that have another one than 4.
    edit: changes the tensors, under their names in the file, before they are written.
    """
    path.mkdir()
    sizes = {
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "query": config.num_attention_heads * config.head_dim,
        "key_value": config.num_key_value_heads * config.head_dim,
    }
    rng, stored, factors = np.random.default_rng(9), {}, {}
    for layer in range(config.num_hidden_layers) if layers is None else layers:
        for projection, (rows, columns) in SHAPES.items():
            rank = (ranks or {}).get(projection, 4)
            block = "mlp" if projection == "down_proj" else "self_attn"
            module = f"model.layers.{layer}.{block}.{projection}"
            a = rng.normal(0, 0.3, (rank, sizes[columns])).astype(np.float32)
            b = rng.normal(0, 0.3, (sizes[rows], rank)).astype(np.float32)
            factors |= {f"{module}.a": a, f"{module}.b": b}
            stored |= {
                f"base_model.model.{module}.lora_A.weight": a,
                f"base_model.model.{module}.lora_B.weight": b,
            }
    if edit is not None:
        edit(stored)
    save_file(stored, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(settings(**changes)))
    return factors
