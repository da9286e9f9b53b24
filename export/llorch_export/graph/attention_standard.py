"""Attention in ONNX's own operators: TensorScatter writes new keys and values into the cache, Attention reads
all of it.

A mask hides what a token must not see: positions after its own, whatever lies there, and what its window has
left behind. It is made in the graph from ``seqlens_k``, once for each window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from llorch_export.graph.builder import GraphBuilder
from llorch_export.graph.front import Front
from llorch_export.graph.qkv import (
    attention_prefix,
    cache_values,
    projected,
    rotary_inputs,
    score_scale,
    separate_heads,
    token_positions,
)
from llorch_serve.artifact.manifest import KvLayout

_BOOL, _INT64 = ir.DataType.BOOL, ir.DataType.INT64


class Standard:
    """Attention of opset 24. Input: each row's total length minus one."""

    def __init__(self, b: GraphBuilder, kv: KvLayout, front: Front, *, context_length: int) -> None:
        assert front.lengths is None, "the lengths are inputs of this form"
        self._b = b
        (seqlens_k,) = self.inputs = (b.input("seqlens_k", ir.DataType.INT32, b.dims.batch),)
        positions, self._first = token_positions(b, front.by_token, seqlens_k)
        self._rotary = rotary_inputs(b, context_length, positions)
        self.caches = tuple(cache_values(b, kv, layer) for layer in range(kv.layers))
        axes, self._last = (
            b.constant(f"mask.{name}", np.array(value, np.int64))
            for name, value in (("axes", [1, 3]), ("last", [2]))
        )
        self._rows = b.op(
            "Unsqueeze",
            [positions, axes],
            name="mask.rows",
            shape=(b.dims.batch, 1, b.dims.tokens, 1),
            dtype=_INT64,
        )
        self._columns = self._cache_positions()
        self._visible: dict[int | None, ir.Value] = {}

    def heads(self, x: ir.Value, layer: int, *, lead: Sequence[int | str]) -> ir.Value:
        """Append a layer's projection and attention."""
        b, c, prefix = self._b, self._b.config, attention_prefix(layer)
        qkv = projected(b, x, layer, lead=lead)
        rotary = self._rotary[c.rope_index(layer)]
        parts = separate_heads(b, qkv, layer, rotary, lead=lead, rotate=c.rotates(layer))
        query, *new = (
            by_head(b, value, f"{prefix}.{part}", lead=lead) for value, part in zip(parts, "qkv", strict=True)
        )
        cache = self.caches[b.layers.index(layer)]
        for past, update, present in zip(cache.past, new, cache.present, strict=True):
            b.tape.op_multi_out(
                "TensorScatter",
                [past, update, self._first],
                {"axis": -2},
                outputs=[present],
                name=f"{present.name}/TensorScatter",
            )
        mask, softcap = self._mask(c.window(layer)), c.form.attention_softcap
        by = b.op(
            "Attention",
            [query, *cache.present, mask],
            name=f"{prefix}.heads/by_head",
            shape=(lead[0], c.num_attention_heads, lead[1], c.head_dim),
            attributes={"scale": score_scale(c), **({} if softcap is None else {"softcap": softcap})},
        )
        return side_by_side(b, by, f"{prefix}.heads", lead=lead)

    def _cache_positions(self) -> ir.Value:
        """Append 0, 1, ... capacity - 1."""
        b = self._b
        past = self.caches[0].past[0]
        zero, one = (b.constant(f"mask.{n}", np.array(v, np.int64)) for n, v in (("zero", 0), ("one", 1)))
        axis = b.constant("mask.axis", np.array(2, np.int64))
        shape = b.op("Shape", [past], name="mask.shape", shape=(4,), dtype=_INT64)
        capacity = b.op(
            "Gather", [shape, axis], name="mask.capacity", shape=(), attributes={"axis": 0}, dtype=_INT64
        )
        return b.op(
            "Range", [zero, capacity, one], name="mask.columns", shape=(b.dims.capacity,), dtype=_INT64
        )

    def _mask(self, window: int | None) -> ir.Value:
        """Return the mask [batch, 1, tokens, capacity] of layers with this window, appended at its first
        use.
        """
        if window not in self._visible:
            b, shape = self._b, (self._b.dims.batch, 1, self._b.dims.tokens, self._b.dims.capacity)
            if window is None:
                self._visible[None] = b.op(
                    "LessOrEqual", [self._columns, self._rows], name="mask", shape=shape, dtype=_BOOL
                )
            else:
                name = f"mask.window.{window}"
                width = b.constant(f"{name}.width", np.array(window, np.int64))
                edge = b.op(
                    "Sub", [self._rows, width], name=f"{name}.edge", shape=(*shape[:3], 1), dtype=_INT64
                )
                inside = b.op(
                    "Greater", [self._columns, edge], name=f"{name}.inside", shape=shape, dtype=_BOOL
                )
                self._visible[window] = b.op(
                    "And", [self._mask(None), inside], name=name, shape=shape, dtype=_BOOL
                )
        return self._visible[window]


def by_head(b: GraphBuilder, x: ir.Value, name: str, *, lead: Sequence[int | str]) -> ir.Value:
    """Append the turn of [batch, tokens, heads * head_dim] to [batch, heads, tokens, head_dim]."""
    width, head_dim = x.shape[-1], b.config.head_dim  # type: ignore[index]  # set by separate_heads
    assert isinstance(width, int)
    apart = b.shared_constant("heads.apart", np.array([0, 0, -1, head_dim], np.int64))
    heads = width // head_dim
    split = b.op("Reshape", [x, apart], name=f"{name}/apart", shape=(*lead, heads, head_dim))
    return b.op(
        "Transpose",
        [split],
        name=f"{name}/by_head",
        shape=(lead[0], heads, lead[1], head_dim),
        attributes={"perm": (0, 2, 1, 3)},
    )


def side_by_side(b: GraphBuilder, x: ir.Value, name: str, *, lead: Sequence[int | str]) -> ir.Value:
    """Append the turn back, from [batch, heads, tokens, head_dim] to [batch, tokens, heads * head_dim]."""
    c = b.config
    together = b.shared_constant("heads.together", np.array([0, 0, -1], np.int64))
    turned = b.op(
        "Transpose",
        [x],
        name=f"{name}/by_token",
        shape=(*lead, c.num_attention_heads, c.head_dim),
        attributes={"perm": (0, 2, 1, 3)},
    )
    return b.op("Reshape", [turned, together], name=name, shape=(*lead, c.num_attention_heads * c.head_dim))
