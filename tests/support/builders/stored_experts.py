"""Experts as files keep them: each in tensors of its own under a family's names, or all of a layer in one."""

from __future__ import annotations

import re
from typing import Final

import numpy as np
import numpy.typing as npt

Weights = dict[str, npt.NDArray[np.float32]]

_EXPERT: Final = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(\d+)\.(\w+)\.weight")
_ANY_OF_EXPERT: Final = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(\d+)\.(\w+)\.(weight|bias)")
_MIXTRAL: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def with_stored_experts(weights: Weights, model_type: str, *, stacked: bool) -> Weights:
    """Return the weights under the names of a family's files, from those of one matrix an expert."""
    if not any(map(_EXPERT.fullmatch, weights)):
        return weights
    if model_type == "gpt_oss":
        return _turned(weights)
    result = _in_one(weights) if model_type == "granitemoe" or stacked else dict(weights)
    if model_type == "mixtral" and not stacked:
        return {_mixtral_name(name): value for name, value in result.items()}
    if model_type != "granitemoe":
        return result
    changed = _GRANITE_STACKED if stacked else _GRANITE
    return {_replaced(name, changed): value for name, value in result.items()}


_GRANITE: Final = {
    "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "mlp.gate.weight": "block_sparse_moe.router.layer.weight",
}
_GRANITE_STACKED: Final = {
    "mlp.experts.": "block_sparse_moe.experts.",
    "mlp.gate.weight": "block_sparse_moe.router.weight",
}


def _in_one(weights: Weights) -> Weights:
    """Return the weights with one tensor [experts, rows, columns] for gate and up, and one for down."""
    stacks: dict[str, dict[str, list[npt.NDArray[np.float32]]]] = {}
    result: Weights = {}
    for name, value in weights.items():
        found = _EXPERT.fullmatch(name)
        if found is None:
            result[name] = value
        else:
            stacks.setdefault(found[1], {}).setdefault(found[3], []).append(value)
    for prefix, parts in stacks.items():
        both = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        result[f"{prefix}mlp.experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in both])
        result[f"{prefix}mlp.experts.down_proj"] = np.stack(parts["down_proj"])
    return result


def _turned(weights: Weights) -> Weights:
    """Return the weights with stacks [experts, in, out] and their biases, gate and up by turns."""
    result: Weights = {}
    for name, value in experts_by_turns(weights).items():
        result[name] = np.ascontiguousarray(value.swapaxes(1, 2)) if value.ndim == 3 else value
    return result


def experts_by_turns(weights: Weights) -> Weights:
    """Return the weights with stacks [experts, out, in] and their biases, gate and up by turns."""
    stacks: dict[str, list[npt.NDArray[np.float32]]] = {}
    result: Weights = {}
    for name, value in weights.items():
        found = _ANY_OF_EXPERT.fullmatch(name)
        if found is None:
            result[name.replace(".mlp.gate.", ".mlp.router.")] = value
        else:
            ending = "" if found[4] == "weight" else "_bias"
            stacks.setdefault(f"{found[1]}mlp.experts.{found[3]}{ending}", []).append(value)
    for name, values in stacks.items():
        if "gate_proj" in name:
            pairs = zip(values, stacks[name.replace("gate_proj", "up_proj")], strict=True)
            both = [np.stack(pair, axis=1).reshape(-1, *pair[0].shape[1:]) for pair in pairs]
            result[name.replace("gate_proj", "gate_up_proj")] = np.stack(both)
        elif "down_proj" in name:
            result[name] = np.stack(values)
    return result


def with_gguf_experts(weights: Weights) -> Weights:
    """Return the weights as a GGUF file has them: gate, up and down of all experts, and a gate of one row
    as a vector.
    """
    stacks: dict[str, list[npt.NDArray[np.float32]]] = {}
    result: Weights = {}
    for name, value in weights.items():
        found = _ANY_OF_EXPERT.fullmatch(name)
        if found is not None:
            stacks.setdefault(f"{found[1]}mlp.experts.{found[3]}.{found[4]}", []).append(value)
        else:
            result[name] = value[0] if name.endswith("shared_expert_gate.weight") else value
    return result | {name: np.stack(values) for name, values in stacks.items()}


def _mixtral_name(name: str) -> str:
    for part, letter in _MIXTRAL.items():
        if ".experts." in name:
            name = name.replace(f".{part}.", f".{letter}.")
    return name.replace(".mlp.", ".block_sparse_moe.")


def _replaced(name: str, changed: dict[str, str]) -> str:
    for old, new in changed.items():
        name = name.replace(old, new)
    return name
