"""The two vocabulary tables: token embedding and output head, stored once where the checkpoint ties them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llorch_export.graph.builder import CONTRIB, GraphBuilder
from llorch_export.graph.linear import matmul_nbits, quantised_weight
from llorch_export.options import BITS
from llorch_export.quantize import block_count

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Table:
    """A planned vocabulary table; ``scales`` is None in fp32."""

    weight: ir.Value
    scales: ir.Value | None


def embed(b: GraphBuilder, input_ids: ir.Value) -> tuple[ir.Value, Table]:
    """Append the embedding lookup; return hidden states [batch, tokens, hidden] and the table, for a tied head."""
    c, precision = b.config, b.recipe.head_precision
    shape = ("batch", "tokens", c.hidden_size)
    table = _table(b, EMBEDDING)
    if table.scales is None:
        return b.op(
            "Gather", [table.weight, input_ids], name="embedding", shape=shape, attributes={"axis": 0}
        ), table
    assert b.recipe.block_size is not None
    padded = block_count(c.hidden_size, b.recipe.block_size) * b.recipe.block_size
    rows = b.weights.alias(table.weight, f"{EMBEDDING}.rows", (c.vocab_size, padded * BITS[precision] // 8))
    hidden = b.op(
        "GatherBlockQuantized",
        [rows, input_ids, table.scales],
        name="embedding" if padded == c.hidden_size else "embedding.padded",
        shape=("batch", "tokens", padded),
        attributes={
            "bits": BITS[precision],
            "block_size": b.recipe.block_size,
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


def head(b: GraphBuilder, x: ir.Value, embedding: Table) -> ir.Value:
    """Append the output head over rows [n, hidden]; returns logits [n, vocabulary]."""
    c, precision = b.config, b.recipe.head_precision
    table = embedding if c.tie_word_embeddings else _table(b, HEAD)
    shape = ("rows", c.vocab_size)
    if table.scales is None:
        # Gemm reads the table as it lies, so a tied one serves lookup and head alike.
        return b.op("Gemm", [x, table.weight], name="logits", shape=shape, attributes={"transB": 1})
    return matmul_nbits(
        b,
        x,
        table.weight,
        table.scales,
        bits=BITS[precision],
        in_features=c.hidden_size,
        name="logits",
        shape=shape,
    )


def _table(b: GraphBuilder, module: str) -> Table:
    c, precision = b.config, b.recipe.head_precision
    if precision == "fp32":
        return Table(b.vector(f"{module}.weight"), None)
    return Table(
        *quantised_weight(
            b, module, precision, c.vocab_size, c.hidden_size, b.row_chunks([f"{module}.weight"])
        )
    )
