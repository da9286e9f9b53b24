"""Rotation of the residual stream into another basis (as in QuaRot, Ashkboos et al. 2024): x becomes x Q.

RMS norms do not see a rotation once their weights are part of the matrices that follow: the norm of x Q is
the norm of x, turned. So the embedding becomes E Q; query, key, value, gate and up, and routers of experts,
become (W diag(n)) Q; output and down projections Q^T W, their biases b Q; the head (W diag(n)) Q; and the
norms' weights ones. A tied table becomes two, since only the head has the norm in it. Outliers that lived in
few channels are spread over all, which is what helps quantising.

Memory: rows stream through, but output and down projections need all of their rows for each row of the
result, and are held whole in float32 one at a time: 235 MB for an 8B Llama.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from llorch_export.checkpoint.expert_names import ROUTER, SHARED_GATE, expert_shapes, feed_forward_blocks
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

_ATTENTION_READERS: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION_WRITER: Final = "self_attn.o_proj"


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
        readers, writers = block_ends(config, layer)
        for norm, modules in (
            ("input_layernorm", _ATTENTION_READERS),
            ("post_attention_layernorm", readers),
        ):
            for module in modules:
                if names.weight(module) not in tensors:  # a gate, where the MLP has none
                    continue
                read(names.weight(module), names.weight(norm))
            result[names.weight(norm)] = ones(tensors[names.weight(norm)])
        for module in (_ATTENTION_WRITER, *writers):
            for name in names.both(module, tensors):
                result[name] = rotated_rows(tensors[name], basis)
    return result


def block_ends(config: LlamaConfig, layer: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules of a layer's feed-forward part that read its norm, and those that add to the
    residual; of experts, routers and gates read it too.
    """
    blocks = feed_forward_blocks(config, layer)
    gates = tuple(module for module in (ROUTER, SHARED_GATE) if module in expert_shapes(config))
    readers = tuple(f"{block}.{part}" for block in blocks for part in ("gate_proj", "up_proj"))
    return (*(gates if blocks != ("mlp",) else ()), *readers), tuple(f"{block}.down_proj" for block in blocks)


def untied(config: LlamaConfig, tensors: Tensors) -> tuple[LlamaConfig, Tensors]:
    """Return config and tensors with a head of its own, where head and embedding are one table."""
    if not config.tie_word_embeddings:
        return config, tensors
    head = replace(tensors[EMBEDDING], name=HEAD)
    return msgspec.structs.replace(config, tie_word_embeddings=False), {**tensors, HEAD: head}


def _vector(tensors: Tensors, name: str) -> Vector:
    return functools.cache(lambda: tensors[name].load().astype(np.float64))
