"""How a graph attends, in the form that its target can run: what it takes as inputs, and each layer's heads.

:func:`attention_plan` chooses the form; :class:`GroupQuery` is the one most targets have: GroupQueryAttention over a
cache that grows in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import onnx_ir as ir

from llorch_export.graph.attention_primitive import Primitive
from llorch_export.graph.attention_standard import Standard
from llorch_export.graph.builder import CONTRIB, GraphBuilder
from llorch_export.graph.front import Front
from llorch_export.graph.heads import (
    LayerCache,
    Projected,
    RotaryInputs,
    attention_prefix,
    cache_values,
    projected,
    rotary_initializers,
    rotates_inside,
    score_scale,
    separate_heads,
    token_positions,
)
from llorch_export.graph.targets import AttentionForm
from llorch_serve.manifest import KvLayout


class AttentionPlan(Protocol):
    """One form of attention in one graph."""

    @property
    def inputs(self) -> tuple[ir.Value, ...]:
        """The graph's inputs that it needs beside token ids, wanted rows and the past."""

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """Past and present of each layer."""

    def heads(self, x: ir.Value, layer: int, *, lead: Sequence[int | str]) -> ir.Value:
        """Append a layer's projection and attention; return its heads side by side, [*lead, heads * head_dim]."""


def attention_plan(b: GraphBuilder, kv: KvLayout, front: Front, *, context_length: int) -> AttentionPlan:
    """Start attention in the target's form: inputs, tables and cache; no layer yet."""
    return _FORMS[b.target.attention](b, kv, front, context_length=context_length)


class GroupQuery:
    """GroupQueryAttention. Inputs: each row's total length minus one, and the largest total length, unless the front has them."""

    def __init__(self, b: GraphBuilder, kv: KvLayout, front: Front, *, context_length: int) -> None:
        self._b = b
        self.inputs: tuple[ir.Value, ...] = ()
        if front.lengths is None:
            self._lengths = (
                b.input("seqlens_k", ir.DataType.INT32, b.dims.batch),
                b.input("total_sequence_length", ir.DataType.INT32),
            )
            self.inputs = self._lengths
        else:
            self._lengths = front.lengths
        cos, sin = rotary_initializers(b, context_length)
        positions = None
        if not rotates_inside(b):
            padded = front.lengths is not None
            positions, _ = token_positions(b, front.input_ids, self._lengths[0], padded=padded)
        self._rotary = RotaryInputs(cos, sin, positions)
        self.caches = tuple(cache_values(b, kv, layer) for layer in range(kv.layers))

    def heads(self, x: ir.Value, layer: int, *, lead: Sequence[int | str]) -> ir.Value:
        """Append a layer's projection and attention."""
        b, c, prefix = self._b, self._b.config, attention_prefix(layer)
        query_key_value: Projected = projected(b, x, layer, lead=lead)
        inside = c.rotates(layer) and rotates_inside(b)
        outside = c.rotates(layer) and not inside
        if c.qk_norm or outside or not b.target.packed_qkv:
            query_key_value = separate_heads(
                b, query_key_value, layer, self._rotary, lead=lead, rotate=outside
            )
        heads = ir.Value(
            name=f"{prefix}.heads",
            type=ir.TensorType(b.compute),
            shape=ir.Shape([*lead, c.num_attention_heads * c.head_dim]),
        )
        window, cache = c.window(layer), self.caches[layer]
        b.tape.op_multi_out(
            "GroupQueryAttention",
            [
                *query_key_value,
                *cache.past,
                *self._lengths,
                *((self._rotary.cos, self._rotary.sin) if inside else ()),
            ],
            {
                "num_heads": c.num_attention_heads,
                "kv_num_heads": c.num_key_value_heads,
                "do_rotary": int(inside),
                "rotary_interleaved": 0,
                "scale": score_scale(c),
                **({} if window is None else {"local_window_size": window}),
            },
            outputs=[heads, *cache.present],
            domain=CONTRIB,
            name=f"{prefix}.heads/GroupQueryAttention",
        )
        return heads


_FORMS: Final[Mapping[AttentionForm, Callable[..., AttentionPlan]]] = {
    AttentionForm.GROUP_QUERY: GroupQuery,
    AttentionForm.STANDARD: Standard,
    AttentionForm.PRIMITIVE: Primitive,
}
