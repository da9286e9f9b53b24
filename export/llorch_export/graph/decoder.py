"""The whole decoder: from token ids and the KV cache to logits of the rows that are asked for.

Inputs: ``input_ids`` [batch, tokens]; ``seqlens_k`` [batch], each row's total length minus one; ``total_sequence_length``,
the largest total length; ``logits_indices`` [rows], positions in the flattened [batch * tokens]; and past keys and
values. Outputs: ``logits`` [rows, vocabulary] and present keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llorch_export.checkpoint.base import LazyTensor
from llorch_export.graph.attention import (
    AttentionInputs,
    LayerCache,
    attention,
    cache_values,
    rotates_inside,
    token_positions,
)
from llorch_export.graph.builder import FLOAT, GraphBuilder
from llorch_export.graph.embedding import embed, head
from llorch_export.graph.linear import linear
from llorch_export.graph.mlp import mlp
from llorch_export.graph.norm import add_rms_norm, rms_norm
from llorch_export.graph.rope import rotary_tables
from llorch_export.graph.weights import WeightJob
from llorch_export.transform.calibration import Calibration
from llorch_serve.errors import ArtifactError
from llorch_serve.manifest import KvLayout, LlamaConfig, Recipe, TensorSpec

OPSET = 23  # the first with RMSNormalization
IR_VERSION = 11  # the one of opset 23
MIN_ONNXRUNTIME = "1.24"


@dataclass(frozen=True, slots=True)
class DecoderGraph:
    """A graph whose weights are planned but not yet read.

    jobs: what to write to the data file, in order; data_bytes: its final size.
    """

    model: ir.Model
    jobs: tuple[WeightJob, ...]
    data_bytes: int
    kv: KvLayout
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def build_decoder(
    config: LlamaConfig,
    recipe: Recipe,
    tensors: Mapping[str, LazyTensor],
    *,
    context_length: int,
    calibration: Calibration | None = None,
) -> DecoderGraph:
    """Build the graph; reads no weight.

    calibration: what was measured on ``tensors``, where the recipe calls for it.

    Raises ArtifactError if the runtime's kernels cannot run the shapes.
    """
    _check_shapes(config)
    b = GraphBuilder(config, recipe, tensors, calibration)
    kv = KvLayout(
        layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim
    )
    input_ids = _input("input_ids", ir.DataType.INT64, "batch", "tokens")
    seqlens_k = _input("seqlens_k", ir.DataType.INT32, "batch")
    total = _input("total_sequence_length", ir.DataType.INT32)
    logits_indices = _input("logits_indices", ir.DataType.INT64, "rows")
    table_shape = (context_length, config.rotary_dim // 2)
    cos, sin = b.weights.add(
        [("rotary.cos", FLOAT, table_shape), ("rotary.sin", FLOAT, table_shape)],
        lambda: rotary_tables(config.rope, config.head_dim, context_length),
    )
    positions = None if rotates_inside(config) else token_positions(b, input_ids, seqlens_k)
    shared = AttentionInputs(seqlens_k, total, cos, sin, positions)
    caches = [cache_values(b, kv, layer) for layer in range(config.num_hidden_layers)]
    hidden, table = embed(b, input_ids)
    hidden = _scaled(b, hidden, config.embedding_multiplier, "embedding/scaled")
    rows = _layers(b, hidden, shared, caches, logits_indices)
    # Scaling the rows before the head is linear in the logits, and much narrower than they are.
    rows = _scaled(b, rows, 1 / config.logits_scaling, "model.norm/scaled")
    logits = head(b, rows, table)
    inputs = [input_ids, seqlens_k, total, logits_indices, *(v for cache in caches for v in cache.past)]
    outputs = [logits, *(v for cache in caches for v in cache.present)]
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=b.tape.nodes,
        initializers=[*b.weights.values, *b.tape.initializers],
        opset_imports={"": OPSET, "com.microsoft": 1},
        name="decoder",
    )
    return DecoderGraph(
        model=ir.Model(graph, ir_version=IR_VERSION, producer_name="llorch"),
        jobs=tuple(b.weights.jobs),
        data_bytes=b.weights.total_bytes,
        kv=kv,
        inputs=tuple(_spec(value) for value in inputs),
        outputs=tuple(_spec(value) for value in outputs),
    )


def _layers(
    b: GraphBuilder,
    hidden: ir.Value,
    shared: AttentionInputs,
    caches: list[LayerCache],
    logits_indices: ir.Value,
) -> ir.Value:
    """Append all layers and the final norm; returns [rows, hidden].

    From the last layer's attention on, a position matters only if its logits are wanted: the rest is dropped there.
    """
    size = b.config.hidden_size
    lead: tuple[int | str, ...] = ("batch", "tokens")
    normed = rms_norm(b, hidden, "model.layers.0.input_layernorm", shape=(*lead, size))
    residual, last = hidden, len(caches) - 1
    for layer, cache in enumerate(caches):
        prefix = f"model.layers.{layer}"
        heads = attention(b, normed, layer, shared, cache, lead=lead)
        if layer == last:
            heads = _wanted_rows(
                b, heads, logits_indices, "heads", b.config.num_attention_heads * b.config.head_dim
            )
            residual = _wanted_rows(b, residual, logits_indices, "residual", size)
            lead = ("rows",)
        projected = linear(
            b,
            heads,
            [f"{prefix}.self_attn.o_proj"],
            name=f"{prefix}.self_attn.o_proj",
            lead=lead,
            bias=b.config.attention_bias,
        )
        shape = (*lead, size)
        projected = _scaled(b, projected, b.config.residual_multiplier, f"{prefix}.self_attn/scaled")
        normed, residual = add_rms_norm(
            b, residual, projected, f"{prefix}.post_attention_layernorm", shape=shape, keep_sum=True
        )
        delta = mlp(b, normed, f"{prefix}.mlp", lead=lead)
        delta = _scaled(b, delta, b.config.residual_multiplier, f"{prefix}.mlp/scaled")
        following = "model.norm" if layer == last else f"model.layers.{layer + 1}.input_layernorm"
        normed, residual = add_rms_norm(b, residual, delta, following, shape=shape, keep_sum=layer != last)
    return normed


def _wanted_rows(b: GraphBuilder, x: ir.Value, indices: ir.Value, name: str, width: int) -> ir.Value:
    flat_shape = b.constant(f"wanted.{name}.shape", np.array([-1, width], np.int64))
    flat = b.op("Reshape", [x, flat_shape], name=f"wanted.{name}.flat", shape=("positions", width))
    return b.op(
        "Gather", [flat, indices], name=f"wanted.{name}", shape=("rows", width), attributes={"axis": 0}
    )


def _scaled(b: GraphBuilder, x: ir.Value, factor: float, name: str) -> ir.Value:
    """Append the product of ``x`` and a constant; ``x`` itself if that is one."""
    if factor == 1:
        return x
    assert x.shape is not None
    shape = [d if isinstance(d, int) else str(d.value) for d in x.shape]
    return b.op(
        "Mul", [x, b.constant(f"{name}/factor", np.array(factor, np.float32))], name=name, shape=shape
    )


def _check_shapes(config: LlamaConfig) -> None:
    if config.head_dim % 8:
        raise ArtifactError(
            f"head_dim is {config.head_dim}; the runtime's attention takes heads whose size is a multiple of 8, "
            "so this model cannot be exported"
        )


def _input(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


_DTYPES = {ir.DataType.FLOAT: "float32", ir.DataType.INT32: "int32", ir.DataType.INT64: "int64"}


def _spec(value: ir.Value) -> TensorSpec:
    assert value.name is not None
    assert value.shape is not None
    assert value.dtype is not None
    shape = tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)
    return TensorSpec(name=value.name, dtype=_DTYPES[value.dtype], shape=shape)  # type: ignore[arg-type]  # a table of literals
