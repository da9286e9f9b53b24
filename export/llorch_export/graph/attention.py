"""Self-attention: packed query, key and value projection, GroupQueryAttention over the KV cache, output projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from llorch_export.graph.builder import CONTRIB, FLOAT, GraphBuilder
from llorch_export.graph.linear import linear
from llorch_serve.manifest import KvLayout


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Graph inputs and tables that all layers share."""

    seqlens_k: ir.Value
    total_sequence_length: ir.Value
    cos: ir.Value
    sin: ir.Value


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's past (graph inputs) and present (graph outputs) keys and values."""

    past: tuple[ir.Value, ir.Value]
    present: tuple[ir.Value, ir.Value]


def cache_values(b: GraphBuilder, kv: KvLayout, layer: int) -> LayerCache:
    """Make the KV cache's graph inputs and outputs of one layer."""

    def pair(pattern: str) -> tuple[ir.Value, ir.Value]:
        shape: tuple[int | str, ...] = ("slots", kv.kv_heads, "capacity", kv.head_dim)
        key, value = (
            ir.Value(
                name=pattern.format(layer=layer, kind=kind), type=ir.TensorType(FLOAT), shape=ir.Shape(shape)
            )
            for kind in ("key", "value")
        )
        return key, value

    return LayerCache(past=pair(kv.past_name), present=pair(kv.present_name))


def attention(
    b: GraphBuilder,
    x: ir.Value,
    prefix: str,
    shared: AttentionInputs,
    cache: LayerCache,
    *,
    lead: Sequence[int | str],
) -> ir.Value:
    """Append everything up to the concatenated heads [*lead, heads * head_dim]; the caller projects them out."""
    c = b.config
    qkv = linear(
        b,
        x,
        [f"{prefix}.{part}_proj" for part in "qkv"],
        name=f"{prefix}.qkv_proj",
        lead=lead,
        bias=c.attention_bias,
    )
    heads = ir.Value(
        name=f"{prefix}.heads",
        type=ir.TensorType(FLOAT),
        shape=ir.Shape([*lead, c.num_attention_heads * c.head_dim]),
    )
    b.tape.op_multi_out(
        "GroupQueryAttention",
        [
            qkv,
            None,
            None,
            *cache.past,
            shared.seqlens_k,
            shared.total_sequence_length,
            shared.cos,
            shared.sin,
        ],
        {
            "num_heads": c.num_attention_heads,
            "kv_num_heads": c.num_key_value_heads,
            "do_rotary": 1,
            "rotary_interleaved": 0,
            "scale": c.head_dim**-0.5,
        },
        outputs=[heads, *cache.present],
        domain=CONTRIB,
        name=f"{prefix}.heads/GroupQueryAttention",
    )
    return heads
