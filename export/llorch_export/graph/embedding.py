"""The two vocabulary tables: token embedding and output head, stored once where the checkpoint ties them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from llorch_export.formats.module import EMBEDDING, HEAD, ModuleFormat
from llorch_export.graph.blocks import BlockWeight, block_weight, values_of_levels
from llorch_export.graph.builder import CONTRIB, FLOAT, GraphBuilder
from llorch_export.graph.dequantize import dequantized_matrix, dequantized_rows, dequantizes
from llorch_export.graph.integer import integer_linear
from llorch_export.graph.linear import matmul, matmul_nbits
from llorch_export.graph.softcap import softcapped
from llorch_export.quantize.layout import block_count

NARROW_LOGITS = "logits/narrow"  # before they are widened, where the graph computes in half precision
UNCAPPED_LOGITS = "logits/uncapped"

Table = ir.Value | BlockWeight
"""A planned vocabulary table: in blocks, or a matrix of the compute type."""


def embed(b: GraphBuilder, input_ids: ir.Value) -> tuple[ir.Value, Table | None]:
    """Append the embedding lookup; return hidden states [batch, tokens, hidden] and the table, for a tied
    head.

    The table is None where the target stores lookup and product in different arrangements.
    """
    c = b.config
    form = _form(b, EMBEDDING)
    if dequantizes(b, form):
        return dequantized_rows(b, f"{EMBEDDING}.weight", input_ids, form, name="embedding"), None
    shape = (*b.dims.lead, c.hidden_size)
    table = _table(b, EMBEDDING)
    if isinstance(table, ir.Value):
        return _lookup(b, table, input_ids, shape), table
    padded = block_count(c.hidden_size, table.block_size) * table.block_size
    rows = b.weights.alias(table.packed, f"{EMBEDDING}.rows", (c.vocab_size, padded * table.bits // 8))
    zero_points = [] if table.zero_points is None else [table.zero_points]
    hidden = b.op(
        "GatherBlockQuantized",
        [rows, input_ids, table.scales, *zero_points],
        name="embedding" if padded == c.hidden_size else "embedding.padded",
        shape=(*b.dims.lead, padded),
        attributes={
            "bits": table.bits,
            "block_size": table.block_size,
            "gather_axis": 0,
            "quantize_axis": 1,
        },
        domain=CONTRIB,
    )
    if padded != c.hidden_size:
        bounds = [
            b.constant(f"embedding.{n}", np.array([v], np.int64))
            for n, v in (("start", 0), ("end", c.hidden_size), ("axis", 2))
        ]
        hidden = b.op("Slice", [hidden, *bounds], name="embedding", shape=shape)
    return hidden, table


def tied_table(b: GraphBuilder) -> Table | None:
    """Plan the table that :func:`embed` returns, for the head of a graph without a lookup; None where it
    returns none, or the head has a table of its own.
    """
    tied = b.config.tie_word_embeddings and not dequantizes(b, b.formats.of(EMBEDDING))
    return _table(b, EMBEDDING) if tied else None


def _lookup(b: GraphBuilder, table: ir.Value, input_ids: ir.Value, shape: tuple[int | str, ...]) -> ir.Value:
    """Append the lookup in a table of the compute type, or of a narrower one."""
    if table.dtype == b.compute:
        return b.op("Gather", [table, input_ids], name="embedding", shape=shape, attributes={"axis": 0})
    rows = b.op(
        "Gather",
        [table, input_ids],
        name="embedding/narrow",
        shape=shape,
        attributes={"axis": 0},
        dtype=table.dtype,
    )
    return b.widened(rows, name="embedding", shape=shape)


def head(b: GraphBuilder, x: ir.Value, embedding: Table | None) -> ir.Value:
    """Append the output head over rows [n, hidden]; returns logits [n, vocabulary], float32."""
    shape, cap = (b.dims.rows, b.config.vocab_size), b.config.form.logits_softcap
    name = "logits" if b.compute == FLOAT else NARROW_LOGITS
    raw = name if cap is None else UNCAPPED_LOGITS
    if b.config.form.head_bias:
        product = _product(b, x, embedding, name=f"{raw}/product")
        narrow = b.op("Add", [product, b.vector(f"{HEAD}.bias")], name=raw, shape=shape)
    else:
        narrow = _product(b, x, embedding, name=raw)
    if cap is not None:
        narrow = softcapped(b, narrow, cap, name, shape)
    if b.compute == FLOAT:
        return narrow
    return b.op("Cast", [narrow], name="logits", shape=shape, attributes={"to": FLOAT.value}, dtype=FLOAT)


def _product(b: GraphBuilder, x: ir.Value, embedding: Table | None, *, name: str) -> ir.Value:
    c = b.config
    shape = (b.dims.rows, c.vocab_size)
    source = EMBEDDING if c.tie_word_embeddings else HEAD
    form = b.formats.of(source)
    if dequantizes(b, form):
        matrix = dequantized_matrix(b, HEAD, [f"{source}.weight"], form)
        return matmul(b, x, matrix, name=name, shape=shape)
    if form.activations is not None:
        return integer_linear(b, x, [HEAD], form.activations, name=name, lead=(b.dims.rows,), bias=None)
    table = embedding if c.tie_word_embeddings and embedding is not None else _table(b, HEAD)
    if isinstance(table, ir.Value):
        if table.dtype != b.compute:
            table = b.widened(table, name=f"{source}.weight/widened", shape=(c.vocab_size, c.hidden_size))
        # Gemm reads the table as it lies, so a tied one serves lookup and head alike.
        return b.op("Gemm", [x, table], name=name, shape=shape, attributes={"transB": 1})
    return matmul_nbits(b, x, table, name=name, shape=shape)


def _form(b: GraphBuilder, module: str) -> ModuleFormat:
    """Return a table's format; rows that are only looked up have no input whose columns move together."""
    form = b.formats.of(module)
    if form.quantizer == "gptq" and module == EMBEDDING and not b.config.tie_word_embeddings:
        return replace(form, quantizer="affine" if form.precision == "int4" else None)
    return form


def _table(b: GraphBuilder, module: str) -> Table:
    weight, form = f"{module}.weight", _form(b, module)
    found = block_weight(b, module, [weight], form)
    if found is not None:
        return found
    if form.precision == "source" and (values := values_of_levels(b, module, [weight])) is not None:
        return values
    narrow = form.precision == "source" and b.tensors[weight].narrow_type is not None
    return b.narrow_matrix(weight) if narrow else b.vector(weight)
