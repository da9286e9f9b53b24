"""From the hidden states of texts to one vector for each: what stands before and behind the layers of a graph
that embeds texts.

Inputs: ``input_ids`` [batch, tokens], each text from position 0 with padding behind it; ``seqlens_k``
[batch], each text's length minus one; ``total_sequence_length``, the largest length. Output: ``embeddings``
[batch, hidden_size], float32. There is no KV cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from llorch_export.checkpoint.names import HEAD
from llorch_export.graph.builder import FLOAT, GraphBuilder
from llorch_export.graph.front import Front
from llorch_serve.artifact.manifest import EmbeddingForm

OUTPUT: Final = "embeddings"
_SMALLEST_NORM: Final = 1e-12
"""Vectors that are shorter are divided by this, as torch.nn.functional.normalize does it."""

_INT64: Final = ir.DataType.INT64
_INT32: Final = ir.DataType.INT32


def embedding_front(b: GraphBuilder, form: EmbeddingForm) -> Front:
    """Return the front of texts from their first token on. Where the last token's state is the text's, the
    others are dropped in the last layer.
    """
    input_ids = b.input("input_ids", _INT64, *b.dims.lead)
    lengths = (
        b.input("seqlens_k", _INT32, b.dims.batch),
        b.input("total_sequence_length", _INT32),
    )
    last = _last_tokens(b, input_ids, lengths[0]) if form.pooling == "last" else None
    return Front(
        leading=(input_ids, *lengths),
        trailing=(),
        input_ids=input_ids,
        by_token=input_ids,
        logits_indices=last,
        lengths=lengths,
        has_past=False,
    )


def pooled(b: GraphBuilder, normed: ir.Value, front: Front, form: EmbeddingForm) -> ir.Value:
    """Append one vector for each text.

    normed: what the final norm gives, [batch, hidden_size] of the last tokens, or else [batch, tokens,
        hidden_size].
    """
    assert front.lengths is not None, "an embedding's front has them"
    shape = (b.dims.batch, b.config.hidden_size)
    vector = (
        _widened(b, normed, shape) if form.pooling == "last" else _mean(b, normed, front, front.lengths[0])
    )
    if "rotate" in b.recipe.transforms:
        vector = _turned_back(b, vector, shape)
    if not form.normalised:
        vector.name = OUTPUT
        return vector
    axis = b.constant("pooling.features", np.array([1], np.int64))
    least = b.constant("pooling.least", np.array(_SMALLEST_NORM, np.float32))
    length = b.op("ReduceL2", [vector, axis], name="pooling.norm", shape=(b.dims.batch, 1), dtype=FLOAT)
    length = b.op("Max", [length, least], name="pooling.divisor", shape=(b.dims.batch, 1), dtype=FLOAT)
    return b.op("Div", [vector, length], name=OUTPUT, shape=shape, dtype=FLOAT)


def _last_tokens(b: GraphBuilder, input_ids: ir.Value, seqlens_k: ir.Value) -> ir.Value:
    """Append where each text's last token lies in the flattened [batch * tokens]; [batch]."""
    zero, one = (b.constant(f"pooling.{n}", np.array(v, np.int64)) for n, v in (("zero", 0), ("one", 1)))
    shape = b.op("Shape", [input_ids], name="pooling.shape", shape=(2,), dtype=_INT64)
    batch, tokens = (
        b.op("Gather", [shape, place], name=f"pooling.{name}", shape=(), dtype=_INT64)
        for name, place in (("batch", zero), ("tokens", one))
    )
    rows = b.op("Range", [zero, batch, one], name="pooling.rows", shape=("batch",), dtype=_INT64)
    starts = b.op("Mul", [rows, tokens], name="pooling.starts", shape=("batch",), dtype=_INT64)
    last = b.op(
        "Cast",
        [seqlens_k],
        name="pooling.last",
        shape=("batch",),
        attributes={"to": int(_INT64)},
        dtype=_INT64,
    )
    return b.op("Add", [starts, last], name="pooling.indices", shape=("batch",), dtype=_INT64)


def _mean(b: GraphBuilder, normed: ir.Value, front: Front, seqlens_k: ir.Value) -> ir.Value:
    """Append the mean over each text's own tokens; [batch, hidden_size], float32.

    What attention makes of padding may be any number, so it is replaced and not multiplied by zero.
    """
    batch, tokens, size = *b.dims.lead, b.config.hidden_size
    zero, one = (b.constant(f"pooling.{n}", np.array(v, np.int32)) for n, v in (("zero", 0), ("one", 1)))
    place = b.constant("pooling.place", np.array(1, np.int64))
    column_axis = b.constant("pooling.column_axis", np.array([1], np.int64))
    feature_axis = b.constant("pooling.feature_axis", np.array([2], np.int64))
    length = b.op("Add", [seqlens_k, one], name="pooling.lengths", shape=(batch,), dtype=_INT32)
    column = b.op("Unsqueeze", [length, column_axis], name="pooling.column", shape=(batch, 1), dtype=_INT32)
    ids_shape = b.op("Shape", [front.by_token], name="pooling.shape", shape=(2,), dtype=_INT64)
    count = b.op("Gather", [ids_shape, place], name="pooling.count", shape=(), dtype=_INT64)
    count = b.op(
        "Cast", [count], name="pooling.tokens", shape=(), attributes={"to": int(_INT32)}, dtype=_INT32
    )
    positions = b.op("Range", [zero, count, one], name="pooling.positions", shape=(tokens,), dtype=_INT32)
    real = b.op(
        "Less", [positions, column], name="pooling.real", shape=(batch, tokens), dtype=ir.DataType.BOOL
    )
    real = b.op(
        "Unsqueeze",
        [real, feature_axis],
        name="pooling.mask",
        shape=(batch, tokens, 1),
        dtype=ir.DataType.BOOL,
    )
    nothing = b.constant("pooling.nothing", np.array(0, np.float32))
    wide = _widened(b, normed, (batch, tokens, size))
    kept = b.op("Where", [real, wide, nothing], name="pooling.kept", shape=(batch, tokens, size), dtype=FLOAT)
    total = b.op(
        "ReduceSum",
        [kept, column_axis],
        name="pooling.sum",
        shape=(batch, size),
        attributes={"keepdims": 0},
        dtype=FLOAT,
    )
    divisor = b.op(
        "Cast",
        [column],
        name="pooling.counts",
        shape=(batch, 1),
        attributes={"to": FLOAT.value},
        dtype=FLOAT,
    )
    return b.op("Div", [total, divisor], name="pooling.mean", shape=(batch, size), dtype=FLOAT)


def _turned_back(b: GraphBuilder, vector: ir.Value, shape: tuple[int | str, ...]) -> ir.Value:
    """Append the product that brings a vector out of the rotated basis: the head's tensor, which stands for
    the identity before the rotation and has the final norm's weights in it.
    """
    matrix = b.vector(HEAD)
    if matrix.dtype != FLOAT:
        matrix = b.op(
            "Cast",
            [matrix],
            name="pooling.basis",
            shape=b.tensors[HEAD].shape,
            attributes={"to": FLOAT.value},
            dtype=FLOAT,
        )
    return b.op(
        "Gemm", [vector, matrix], name="pooling.turned", shape=shape, attributes={"transB": 1}, dtype=FLOAT
    )


def _widened(b: GraphBuilder, x: ir.Value, shape: tuple[int | str, ...]) -> ir.Value:
    if x.dtype == FLOAT:
        return x
    return b.op("Cast", [x], name="pooling.wide", shape=shape, attributes={"to": FLOAT.value}, dtype=FLOAT)
