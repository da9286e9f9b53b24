"""Self-attention: packed query, key and value projection, GroupQueryAttention over the KV cache, output projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llorch_export.graph.builder import CONTRIB, FLOAT, GraphBuilder
from llorch_export.graph.linear import linear
from llorch_export.graph.norm import rms_norm
from llorch_serve.manifest import KvLayout, LlamaConfig


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Graph inputs and tables that all layers share.

    positions: [batch, tokens], of each token; only where the runtime's attention cannot rotate heads of this size.
    """

    seqlens_k: ir.Value
    total_sequence_length: ir.Value
    cos: ir.Value
    sin: ir.Value
    positions: ir.Value | None


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


def rotates_inside(config: LlamaConfig) -> bool:
    """Tell whether GroupQueryAttention itself can rotate heads of this size: in whole multiples of 16 elements."""
    return config.head_dim % 16 == 0 and config.rotary_dim % 16 == 0


def attention(
    b: GraphBuilder,
    x: ir.Value,
    layer: int,
    shared: AttentionInputs,
    cache: LayerCache,
    *,
    lead: Sequence[int | str],
) -> ir.Value:
    """Append everything up to the concatenated heads [*lead, heads * head_dim]; the caller projects them out."""
    c, prefix = b.config, f"model.layers.{layer}.self_attn"
    inside = c.rotates(layer) and rotates_inside(c)
    outside = c.rotates(layer) and not inside
    query_key_value = _projected(b, x, prefix, lead=lead)
    if c.qk_norm or outside:
        query, key, value = query_key_value
        if key is None or value is None:
            query, key, value = _split_heads(b, query, prefix, lead=lead)
        if c.qk_norm:
            query, key = (
                _norm_heads(b, v, f"{prefix}.{part}_norm", lead=lead)
                for v, part in ((query, "q"), (key, "k"))
            )
        if outside:
            query, key = (
                _rotate(b, v, f"{prefix}.{part}_rotated", shared, lead=lead)
                for v, part in ((query, "q"), (key, "k"))
            )
        query_key_value = (query, key, value)
    heads = ir.Value(
        name=f"{prefix}.heads",
        type=ir.TensorType(FLOAT),
        shape=ir.Shape([*lead, c.num_attention_heads * c.head_dim]),
    )
    window = c.window(layer)
    b.tape.op_multi_out(
        "GroupQueryAttention",
        [
            *query_key_value,
            *cache.past,
            shared.seqlens_k,
            shared.total_sequence_length,
            *((shared.cos, shared.sin) if inside else ()),
        ],
        {
            "num_heads": c.num_attention_heads,
            "kv_num_heads": c.num_key_value_heads,
            "do_rotary": int(inside),
            "rotary_interleaved": 0,
            "scale": c.head_dim**-0.5 if c.attention_multiplier is None else c.attention_multiplier,
            **({} if window is None else {"local_window_size": window}),
        },
        outputs=[heads, *cache.present],
        domain=CONTRIB,
        name=f"{prefix}.heads/GroupQueryAttention",
    )
    return heads


def _projected(
    b: GraphBuilder, x: ir.Value, prefix: str, *, lead: Sequence[int | str]
) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
    """Append the projections: one packed matmul (then key and value are None), or three where their formats differ."""
    bias = b.config.attention_bias or b.config.qkv_bias
    modules = [f"{prefix}.{part}_proj" for part in "qkv"]
    if len({b.formats.of(module) for module in modules}) == 1:
        return linear(b, x, modules, name=f"{prefix}.qkv_proj", lead=lead, bias=bias), None, None
    query, key, value = (linear(b, x, [module], name=module, lead=lead, bias=bias) for module in modules)
    return query, key, value


def _split_heads(b: GraphBuilder, qkv: ir.Value, prefix: str, *, lead: Sequence[int | str]) -> list[ir.Value]:
    """Append the split of packed q, k, v into [*lead, heads * head_dim] each."""
    c = b.config
    widths = [n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)]
    sizes = b.shared_constant("qkv.sizes", np.array(widths, np.int64))
    outputs = [(f"{prefix}.{part}", (*lead, width)) for part, width in zip("qkv", widths, strict=True)]
    return b.multi("Split", [qkv, sizes], outputs=outputs, attributes={"axis": -1})


def _norm_heads(b: GraphBuilder, x: ir.Value, module: str, *, lead: Sequence[int | str]) -> ir.Value:
    """Append an RMS norm over each head of ``x`` [*lead, heads * head_dim]."""
    width, head_dim = x.shape[-1], b.config.head_dim  # type: ignore[index]  # set by _split_heads
    assert isinstance(width, int)
    apart, together = (
        b.shared_constant(f"heads.{name}", np.array([*[0] * len(lead), *sizes], np.int64))
        for name, sizes in (("apart", (-1, head_dim)), ("together", (-1,)))
    )
    shape = (*lead, width // head_dim, head_dim)
    heads = b.op("Reshape", [x, apart], name=f"{module}/heads", shape=shape)
    normed = rms_norm(b, heads, module, shape=shape)
    return b.op("Reshape", [normed, together], name=f"{module}/packed", shape=(*lead, width))


def _rotate(
    b: GraphBuilder, x: ir.Value, name: str, shared: AttentionInputs, *, lead: Sequence[int | str]
) -> ir.Value:
    """Append rotary embedding of ``x`` [*lead, heads * head_dim] at the tokens' own positions."""
    assert shared.positions is not None
    width = x.shape[-1]  # type: ignore[index]  # set by _split_heads
    assert isinstance(width, int)
    attributes = {"num_heads": width // b.config.head_dim, "rotary_embedding_dim": b.config.rotary_dim}
    return b.op(
        "RotaryEmbedding",
        [x, shared.cos, shared.sin, shared.positions],
        name=name,
        shape=(*lead, width),
        attributes=attributes,
    )


def token_positions(b: GraphBuilder, input_ids: ir.Value, seqlens_k: ir.Value) -> ir.Value:
    """Append each token's position [batch, tokens]: the last one's is ``seqlens_k``, the others' count up to it."""
    one, zero, axis = (
        b.constant(f"positions.{n}", np.array(v, np.int64))
        for n, v in (("one", 1), ("zero", 0), ("axis", [1]))
    )
    kind = ir.DataType.INT64
    shape = b.op("Shape", [input_ids], name="positions.shape", shape=(2,), dtype=kind)
    tokens = b.op(
        "Gather", [shape, one], name="positions.tokens", shape=(), attributes={"axis": 0}, dtype=kind
    )
    offsets = b.op("Range", [zero, tokens, one], name="positions.offsets", shape=("tokens",), dtype=kind)
    last = b.op(
        "Cast", [seqlens_k], name="positions.last", shape=("batch",), attributes={"to": int(kind)}, dtype=kind
    )
    before = b.op("Sub", [tokens, one], name="positions.before", shape=(), dtype=kind)
    first = b.op("Sub", [last, before], name="positions.first", shape=("batch",), dtype=kind)
    column = b.op("Unsqueeze", [first, axis], name="positions.column", shape=("batch", 1), dtype=kind)
    return b.op("Add", [column, offsets], name="positions", shape=("batch", "tokens"), dtype=kind)
