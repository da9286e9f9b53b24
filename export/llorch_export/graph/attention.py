"""How a graph attends, in the form that its target can run: what it takes as inputs, and each layer's heads.

:func:`attention_plan` chooses the form; :class:`GroupQuery` is the one most targets have: GroupQueryAttention
over a cache that grows in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import onnx_ir as ir

from llorch_export.formats.targets import AttentionForm
from llorch_export.graph.attention_primitive import Primitive
from llorch_export.graph.attention_standard import Standard
from llorch_export.graph.builder import CONTRIB, GraphBuilder
from llorch_export.graph.front import Front
from llorch_export.graph.qkv import (
    LayerCache,
    Projected,
    attention_prefix,
    cache_values,
    projected,
    rotary_inputs,
    rotates_inside,
    scales_queries,
    score_scale,
    separate_heads,
    token_positions,
)
from llorch_serve.artifact.manifest import KvLayout


class AttentionPlan(Protocol):
    """One form of attention in one graph."""

    @property
    def inputs(self) -> tuple[ir.Value, ...]:
        """The graph's inputs that it needs in addition to token ids, wanted rows and the past."""

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """Past and present of each layer."""

    def heads(self, x: ir.Value, layer: int, *, lead: Sequence[int | str]) -> ir.Value:
        """Append a layer's projection and attention; return its heads side by side, [*lead, heads *
        head_dim].
        """


def attention_plan(b: GraphBuilder, kv: KvLayout, front: Front, *, context_length: int) -> AttentionPlan:
    """Start attention in the target's form: inputs, tables and cache; no layer yet."""
    return _FORMS[b.target.attention](b, kv, front, context_length=context_length)


class GroupQuery:
    """GroupQueryAttention. Inputs: each row's total length minus one, and the largest total length, unless
    the front has them.
    """

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
        positions = None
        if not rotates_inside(b) or scales_queries(b, context_length):
            padded = front.lengths is not None
            positions, _ = token_positions(b, front.by_token, self._lengths[0], padded=padded)
        self._rotary = rotary_inputs(b, context_length, positions)
        self.caches = tuple(cache_values(b, kv, layer) for layer in range(kv.layers))
        self._has_past = front.has_past
        self._scales = [_cache_scales(b, kv, layer) for layer in range(kv.layers)]

    def heads(self, x: ir.Value, layer: int, *, lead: Sequence[int | str]) -> ir.Value:
        """Append a layer's projection and attention."""
        b, c, prefix = self._b, self._b.config, attention_prefix(layer)
        query_key_value: Projected = projected(b, x, layer, lead=lead)
        rotary = self._rotary[c.rope_index(layer)]
        inside = c.rotates(layer) and rotates_inside(b)
        outside = c.rotates(layer) and not inside
        if c.qk_norm or outside or not b.target.packed_qkv or rotary.scales is not None:
            query_key_value = separate_heads(b, query_key_value, layer, rotary, lead=lead, rotate=outside)
        heads = ir.Value(
            name=f"{prefix}.heads",
            type=ir.TensorType(b.compute),
            shape=ir.Shape([*lead, c.num_attention_heads * c.head_dim]),
        )
        here = b.layers.index(layer)
        window, cache, scales = c.window(layer), self.caches[here], self._scales[here]
        tables = (rotary.cos, rotary.sin) if inside else ()
        softcap = c.form.attention_softcap
        sinks = b.vector(f"{prefix}.sinks") if c.form.sinks else None
        # Behind the tables: positions and a bias, which no family has.
        more = [*tables, *[None] * (4 - len(tables)), sinks, *scales]
        while more and more[-1] is None:
            more.pop()
        b.tape.op_multi_out(
            "GroupQueryAttention",
            [
                *query_key_value,
                *(cache.past if self._has_past else (None, None)),
                *self._lengths,
                *more,
            ],
            {
                "num_heads": c.num_attention_heads,
                "kv_num_heads": c.num_key_value_heads,
                "do_rotary": int(inside),
                "rotary_interleaved": 0,
                "scale": score_scale(c),
                **({} if window is None else {"local_window_size": window}),
                **({} if softcap is None else {"softcap": softcap}),
                **(_INT8_CACHE if scales else {}),
            },
            outputs=[heads, *cache.present],
            domain=CONTRIB,
            name=f"{prefix}.heads/GroupQueryAttention",
        )
        return heads


_INT8_CACHE: Final[dict[str, int | str]] = {
    "k_quant_type": "PER_CHANNEL",
    "v_quant_type": "PER_CHANNEL",
    "kv_cache_bit_width": 8,
}


def _cache_scales(b: GraphBuilder, kv: KvLayout, layer: int) -> tuple[ir.Value, ...]:
    """Return the scales of a layer's keys and values over an int8 cache, [kv_heads * head_dim] each; none
    over another.

    They lie in a file of their own, [layers, 2, kv_heads, head_dim], which the worker reads too.
    """
    if kv.dtype != "int8":
        return ()
    count = kv.kv_heads * kv.head_dim
    return tuple(
        b.weights.elsewhere(
            f"{attention_prefix(layer)}.{kind}_scale",
            np.dtype(np.float32),
            (count,),
            file=b.scales_file,
            offset=(2 * layer + index) * count * 4,
        )
        for index, kind in enumerate(("key", "value"))
    )


_FORMS: Final[Mapping[AttentionForm, Callable[..., AttentionPlan]]] = {
    AttentionForm.GROUP_QUERY: GroupQuery,
    AttentionForm.STANDARD: Standard,
    AttentionForm.PRIMITIVE: Primitive,
}
