"""Rotation of the residual stream into another basis (as in QuaRot, Ashkboos et al. 2024): x becomes x Q.

RMS norms do not see a rotation once their weights are part of the matrices that follow: the norm of x Q is
the norm of x, turned. So the embedding becomes E Q; query, key, value, gate and up become (W diag(n)) Q;
output and down projections Q^T W, their biases b Q; the head (W diag(n)) Q; and the norms' weights ones. A
tied table becomes two, since only the head has the norm in it. Outliers that lived in few channels are spread
over all, which is what helps quantising.

Memory: rows stream through, but output and down projections need all of their rows for each row of the
result, and are held whole in float32 one at a time: 235 MB for an 8B Llama.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from llorch_export.checkpoint.names import EMBEDDING, FINAL_NORM, HEAD
from llorch_export.transform.basis import random_basis
from llorch_export.transform.lazy import (
    LayerNames,
    Tensors,
    Vector,
    ones,
    rotated_columns,
    rotated_rows,
    scaled_columns,
)
from llorch_serve.artifact.manifest import LlamaConfig

_READERS: Final = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_WRITERS: Final = ("self_attn.o_proj", "mlp.down_proj")


def rotate(config: LlamaConfig, tensors: Tensors, seed: int) -> Tensors:
    """Return the tensors of the same model in the basis that ``seed`` names; for the config of
    :func:`untied`.

    Raises ArtifactError if there is no such basis of the hidden size.
    """
    basis = random_basis(config.hidden_size, seed)
    result = dict(tensors)

    def read(weight: str, norm: str) -> None:
        result[weight] = rotated_columns(scaled_columns(result[weight], _vector(tensors, norm)), basis)

    read(HEAD, FINAL_NORM)
    result[FINAL_NORM] = ones(tensors[FINAL_NORM])
    result[EMBEDDING] = rotated_columns(tensors[EMBEDDING], basis)
    for layer in range(config.num_hidden_layers):
        names = LayerNames(layer)
        for norm, modules in _READERS.items():
            for module in modules:
                if names.weight(module) not in tensors:  # a gate, where the MLP has none
                    continue
                read(names.weight(module), names.weight(norm))
            result[names.weight(norm)] = ones(tensors[names.weight(norm)])
        for module in _WRITERS:
            for name in names.both(module, tensors):
                result[name] = rotated_rows(tensors[name], basis)
    return result


def untied(config: LlamaConfig, tensors: Tensors) -> tuple[LlamaConfig, Tensors]:
    """Return config and tensors with a head of its own, where head and embedding are one table."""
    if not config.tie_word_embeddings:
        return config, tensors
    head = replace(tensors[EMBEDDING], name=HEAD)
    return msgspec.structs.replace(config, tie_word_embeddings=False), {**tensors, HEAD: head}


def _vector(tensors: Tensors, name: str) -> Vector:
    return functools.cache(lambda: tensors[name].load().astype(np.float64))
