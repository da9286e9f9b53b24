"""Attention in operators that every runtime has, at fixed sizes: for targets whose compiler must know every
shape.

The past is always full, ``[1, kv_heads, context, head_dim]``, and the new tokens' keys and values stand
beside it, so scores are ``[tokens, context + tokens]``. A bias made by the caller hides empty positions of
the past, tokens to come, and padding. The graph's outputs are the new keys and values alone, which the caller
writes into the past.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from llorch_export.graph.attention_standard import by_head, side_by_side
from llorch_export.graph.builder import GraphBuilder
from llorch_export.graph.front import Front
from llorch_export.graph.norm import rms_norm
from llorch_export.graph.qkv import (
    attention_prefix,
    cache_values,
    projected,
    rotary_inputs,
    score_scale,
    separate_heads,
)
from llorch_export.graph.softcap import softcapped
from llorch_serve.artifact.manifest import KvLayout

BIAS = "attention_bias"
WINDOW_BIAS = "window_bias"


class Primitive:
    """MatMul and Softmax. Inputs: positions of the tokens, and the bias of the scores, another for layers
    with a window.
    """

    def __init__(self, b: GraphBuilder, kv: KvLayout, front: Front, *, context_length: int) -> None:
        assert front.lengths is None, "positions and biases are inputs of this form"
        self._b = b
        tokens = b.dims.tokens
        assert isinstance(tokens, int), "shapes are fixed"
        self._tokens, self._seen = tokens, context_length + tokens
        positions = b.input("position_ids", ir.DataType.INT64, b.dims.batch, tokens)
        layers = range(kv.layers)
        names = [
            *([BIAS] if any(b.config.window(i) is None for i in layers) else []),
            *([WINDOW_BIAS] if any(b.config.window(i) is not None for i in layers) else []),
        ]
        self._biases = {name: b.input(name, b.compute, 1, 1, tokens, self._seen) for name in names}
        self.inputs = (positions, *self._biases.values())
        self._rotary = rotary_inputs(b, context_length, positions)
        self._turns = [
            tuple(self._of_tokens(table, positions) for table in (rotary.cos, rotary.sin))
            for rotary in self._rotary
        ]
        self.caches = tuple(cache_values(b, kv, layer, written=tokens) for layer in layers)

    def _of_tokens(self, table: ir.Value, positions: ir.Value) -> ir.Value:
        """Append the rows of a rotary table at the tokens' positions, [1, 1, tokens, rotary_dim / 2]."""
        b, tokens, half = self._b, self._tokens, self._b.config.rotary_dim // 2
        name = f"{table.name}.tokens"
        rows = b.op(
            "Gather",
            [table, positions],
            name=f"{name}/rows",
            shape=(1, tokens, half),
            attributes={"axis": 0},
        )
        shape = b.shared_constant("rotary.shape", np.array([1, 1, tokens, half], np.int64))
        return b.op("Reshape", [rows, shape], name=name, shape=(1, 1, tokens, half))

    def heads(self, x: ir.Value, layer: int, *, lead: Sequence[int | str]) -> ir.Value:
        """Append a layer's projection and attention."""
        b, c, prefix = self._b, self._b.config, attention_prefix(layer)
        qkv = projected(b, x, layer, lead=lead)
        rotary = c.rope_index(layer)
        parts = separate_heads(b, qkv, layer, self._rotary[rotary], lead=lead, rotate=None)
        query, key, value = (
            by_head(b, part, f"{prefix}.{name}", lead=lead) for part, name in zip(parts, "qkv", strict=True)
        )
        new_key, new_value = self.caches[layer].present
        if c.rotates(layer):
            query = self._rotate(query, f"{prefix}.q_rotated", None, rotary)
            late = c.qk_norm and c.form.qk_norm_after_rope
            key = self._rotate(key, f"{prefix}.k_rotated", None if late else new_key, rotary)
            if late:
                query, key = (
                    rms_norm(b, heads, f"{prefix}.{part}_norm", shape=heads.shape)  # type: ignore[arg-type]  # fixed
                    for heads, part in ((query, "q"), (key, "k"))
                )
                self._named(key, new_key)
        else:
            self._named(key, new_key)
        self._named(value, new_value)
        keys, values = (
            b.op(
                "Concat",
                [past, new],
                name=f"{new.name}/seen",
                shape=(1, c.num_key_value_heads, self._seen, c.head_dim),
                attributes={"axis": 2},
            )
            for past, new in zip(self.caches[layer].past, (new_key, new_value), strict=True)
        )
        by = self._attend(query, keys, values, layer)
        return side_by_side(b, by, f"{prefix}.heads", lead=lead)

    def _attend(self, query: ir.Value, keys: ir.Value, values: ir.Value, layer: int) -> ir.Value:
        """Append softmax(q k^T scale + bias) v; returns [1, heads, tokens, head_dim].

        Heads that share keys are stacked as rows of one product, [kv_heads, group * tokens, ...].
        """
        b, c, name = self._b, self._b.config, attention_prefix(layer)
        kv_heads, group = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads
        tokens, seen, dim = self._tokens, self._seen, c.head_dim
        scaled = b.op(
            "Mul",
            [query, b.shared_factor("scores.scale", score_scale(c))],
            name=f"{name}.q_scaled",
            shape=(1, c.num_attention_heads, tokens, dim),
        )
        stacked = self._reshape(scaled, "scores.stack", (kv_heads, group * tokens, dim), f"{name}.q_stacked")
        turned = b.op(
            "Transpose",
            [self._reshape(keys, "scores.keys", (kv_heads, seen, dim), f"{name}.k_seen")],
            name=f"{name}.k_turned",
            shape=(kv_heads, dim, seen),
            attributes={"perm": (0, 2, 1)},
        )
        scores = b.op(
            "MatMul", [stacked, turned], name=f"{name}.products", shape=(kv_heads, group * tokens, seen)
        )
        apart = self._reshape(scores, "scores.apart", (kv_heads, group, tokens, seen), f"{name}.scores")
        if (cap := c.form.attention_softcap) is not None:
            apart = softcapped(b, apart, cap, f"{name}.scores/capped", (kv_heads, group, tokens, seen))
        bias = self._biases[BIAS if c.window(layer) is None else WINDOW_BIAS]
        biased = b.op("Add", [apart, bias], name=f"{name}.biased", shape=(kv_heads, group, tokens, seen))
        shares = b.op(
            "Softmax",
            [biased],
            name=f"{name}.shares",
            shape=(kv_heads, group, tokens, seen),
            attributes={"axis": -1},
        )
        rows = self._reshape(shares, "scores.rows", (kv_heads, group * tokens, seen), f"{name}.shares/rows")
        seen_values = self._reshape(values, "scores.values", (kv_heads, seen, dim), f"{name}.v_seen")
        found = b.op(
            "MatMul", [rows, seen_values], name=f"{name}.found", shape=(kv_heads, group * tokens, dim)
        )
        return self._reshape(
            found, "scores.heads", (1, c.num_attention_heads, tokens, dim), f"{name}.heads/by_head"
        )

    def _rotate(self, x: ir.Value, name: str, output: ir.Value | None, rotary: int) -> ir.Value:
        """Append the rotation of the leading elements of ``x`` [1, heads, tokens, head_dim], to ``output`` if
        given. rotary: which of the model's rotations.
        """
        cos, sin = self._turns[rotary]
        b, c = self._b, self._b.config
        assert x.shape is not None
        heads = int(x.shape[1])  # type: ignore[arg-type]  # shapes are fixed
        half, rest = c.rotary_dim // 2, c.head_dim - c.rotary_dim
        widths = [half, half, *([rest] if rest else [])]
        sizes = b.shared_constant("rotary.sizes", np.array(widths, np.int64))

        def shaped(width: int) -> tuple[int, int, int, int]:
            return (1, heads, self._tokens, width)

        first, second, *kept = b.multi(
            "Split",
            [x, sizes],
            outputs=[(f"{name}/part.{i}", shaped(width)) for i, width in enumerate(widths)],
            attributes={"axis": -1},
        )

        def turned(op: str, left: ir.Value, right: ir.Value, part: str) -> ir.Value:
            products = [
                b.op("Mul", [value, table], name=f"{name}/{part}.{label}", shape=shaped(half))
                for value, table, label in ((left, cos, "cos"), (right, sin, "sin"))
            ]
            return b.op(op, products, name=f"{name}/{part}", shape=shaped(half))

        pieces = [turned("Sub", first, second, "first"), turned("Add", second, first, "second"), *kept]
        result = output or ir.Value(
            name=name, type=ir.TensorType(b.compute), shape=ir.Shape(shaped(c.head_dim))
        )
        b.tape.op_multi_out("Concat", pieces, {"axis": -1}, outputs=[result], name=f"{result.name}/Concat")
        return result

    def _named(self, x: ir.Value, output: ir.Value) -> None:
        """Append ``x`` as the graph output ``output``."""
        assert x.shape is not None
        shape = self._b.shared_constant("heads.as_they_are", np.array([0, 0, 0, 0], np.int64))
        self._b.tape.op_multi_out("Reshape", [x, shape], {}, outputs=[output], name=f"{output.name}/Reshape")

    def _reshape(self, x: ir.Value, constant: str, shape: tuple[int, ...], name: str) -> ir.Value:
        target = self._b.shared_constant(constant, np.array(shape, np.int64))
        return self._b.op("Reshape", [x, target], name=name, shape=shape)
