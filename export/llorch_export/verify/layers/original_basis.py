"""The inner values of a transformed model, back in the checkpoint's own basis.

Input is what a graph run showed, the recipe's transforms and the checkpoint; output is the same run with the
residual stream and the values rotated back, as the reference has them. How much ``equalise`` and ``smooth``
scaled a channel was measured on a text that is not here, so those values are named and left out.
What they end in, scores and down projections, is compared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from llorch_export.checkpoint.base import Checkpoint
from llorch_export.transform.basis import Basis, plain_basis, random_basis
from llorch_export.verify.layers.graph import Array, GraphRun
from llorch_export.verify.layers.matching import FINAL_NORM, SCALED_EMBEDDING
from llorch_serve.artifact.manifest import LlamaConfig, Recipe

RESTORED: Final = "turned back"
"""Source of a stage that was observed and brought back into the checkpoint's basis."""

_NORMS: Final = ("input_layernorm", "post_attention_layernorm", FINAL_NORM)
_RESIDUAL: Final = ("/residual", ".o_proj", ".down_proj", ".mlp.experts", ".mlp")


def in_original_basis(graph: GraphRun, recipe: Recipe, checkpoint: Checkpoint) -> GraphRun:
    """Return the run with the rotations of ``rotate`` and ``hadamard`` undone.

    Values that these leave alone are the same objects.
    """
    values = dict(graph.values)
    if "rotate" in recipe.transforms:
        assert recipe.transform_seed is not None, "a rotation has a seed"
        basis = random_basis(checkpoint.config.hidden_size, recipe.transform_seed)
        for name, value in graph.values.items():
            if name.endswith(_NORMS):
                # Its weights went into the matrices that read it.
                weight = checkpoint.tensors[f"{name}.weight"].load()
                values[name] = (basis.restored(value) * weight).astype(np.float32)
            elif name in ("embedding", SCALED_EMBEDDING) or name.endswith(_RESIDUAL):
                values[name] = basis.restored(value).astype(np.float32)
    if "hadamard" in recipe.transforms:
        _restore_values(graph, values, checkpoint.config)
    return replace(graph, values=values)


def _restore_values(graph: GraphRun, values: dict[str, Array], config: LlamaConfig) -> None:
    basis, width = plain_basis(config.head_dim), config.num_key_value_heads * config.head_dim
    for node in graph.attention:
        for name in (node.value, node.heads):
            values[name] = _restored_heads(values[name], basis)
    for name, value in graph.values.items():
        if name.endswith(".qkv_proj"):
            values[name] = np.concatenate(
                [value[..., :-width], _restored_heads(value[..., -width:], basis)], axis=-1
            )


def _restored_heads(value: Array, basis: Basis) -> Array:
    heads = value.reshape(*value.shape[:-1], -1, basis.size)
    return basis.restored(heads).reshape(value.shape).astype(np.float32)


def rescaled(graph: GraphRun, recipe: Recipe, config: LlamaConfig) -> tuple[str, ...]:
    """Return the stages whose channels were scaled by measured factors, in the order of the graph's
    values.
    """
    ends: tuple[str, ...] = ()
    if "smooth" in recipe.transforms:
        ends += (".up_proj", ".product")
    if "equalise" in recipe.transforms:
        ends += (".q_norm", ".k_norm") if config.qk_norm else (".qkv_proj",)
    found = [name for name in graph.values if ends and name.endswith(ends)]
    if "equalise" in recipe.transforms:
        found += [name for node in graph.attention for name in (node.key, f"{node.heads}/query")]
    return tuple(found)
