"""Queries, keys and values of one layer, ready for attention: projected, normalised and rotated; and token
positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import onnx_ir as ir

from llorch_export.formats.targets import RotaryForm
from llorch_export.graph.builder import CONTRIB, GraphBuilder
from llorch_export.graph.linear import linear
from llorch_export.graph.norm import rms_norm
from llorch_export.graph.rope import table_chunks
from llorch_serve.artifact.manifest import KvLayout, LlamaConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class RotaryInputs:
    """Tables of cosine and sine [positions, rotary_dim / 2] that layers share.

    positions: [batch, tokens], of each token; None where attention itself rotates.
    scales: [batch, tokens, 1], by which queries are multiplied; None: by nothing.
    """

    cos: ir.Value
    sin: ir.Value
    positions: ir.Value | None
    scales: ir.Value | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's past (graph inputs) and present (graph outputs) keys and values."""

    past: tuple[ir.Value, ir.Value]
    present: tuple[ir.Value, ir.Value]


def cache_values(
    b: GraphBuilder, kv: KvLayout, layer: int, *, written: int | str | None = None
) -> LayerCache:
    """Make the KV cache's graph inputs and outputs of one layer, counted from the graph's first.

    written: positions that the outputs hold, where they are not the whole cache.
    """

    def pair(pattern: str, positions: int | str) -> tuple[ir.Value, ir.Value]:
        shape: tuple[int | str, ...] = (b.dims.slots, kv.kv_heads, positions, kv.head_dim)
        key, value = (
            ir.Value(
                name=pattern.format(layer=layer, kind=kind),
                type=ir.TensorType(ir.DataType.INT8 if kv.dtype == "int8" else b.compute),
                shape=ir.Shape(shape),
            )
            for kind in ("key", "value")
        )
        return key, value

    capacity = b.dims.capacity
    return LayerCache(
        past=pair(kv.past_name, capacity),
        present=pair(kv.present_name, capacity if written is None else written),
    )


def rotary_initializers(b: GraphBuilder, context_length: int) -> list[tuple[ir.Value, ir.Value]]:
    """Plan the tables of cosine and sine, [context_length, rotary_dim / 2] each: a pair for each of the
    model's rotations.
    """
    return [
        _rotary_tables(b, rope, prefix, context_length)
        for rope, prefix in zip(b.config.ropes, ("rotary", "rotary.sliding"), strict=False)
    ]


def _rotary_tables(
    b: GraphBuilder, rope: RopeConfig, prefix: str, context_length: int
) -> tuple[ir.Value, ir.Value]:
    head_dim, shape = b.config.head_dim, (context_length, b.config.rotary_dim // 2)
    dtype = b.compute.numpy()
    cos, sin = b.weights.stream(
        [(f"{prefix}.cos", b.compute, shape), (f"{prefix}.sin", b.compute, shape)],
        lambda: (
            (cos.astype(dtype, copy=False), sin.astype(dtype, copy=False))
            for cos, sin in table_chunks(rope, head_dim, context_length)
        ),
    )
    return cos, sin


def rotary_inputs(b: GraphBuilder, context_length: int, positions: ir.Value | None) -> list[RotaryInputs]:
    """Plan the tables of each of the model's rotations, and append the scales of queries.

    positions: of the tokens; None where attention itself rotates and :func:`scales_queries` says no.
    """
    tables = rotary_initializers(b, context_length)
    scales = [
        None if positions is None else _query_scales(b, rope, positions, context_length)
        for rope in b.config.ropes
    ]
    return [RotaryInputs(cos, sin, positions, each) for (cos, sin), each in zip(tables, scales, strict=True)]


def scales_queries(b: GraphBuilder, context_length: int) -> bool:
    """Tell whether queries of some layer are multiplied by something within ``context_length`` tokens."""
    return any(_changes(rope, context_length) for rope in b.config.ropes)


def _changes(rope: RopeConfig, context_length: int) -> bool:
    return rope.query_scale is not msgspec.UNSET and rope.query_scale.positions < context_length


def _query_scales(
    b: GraphBuilder, rope: RopeConfig, positions: ir.Value, context_length: int
) -> ir.Value | None:
    """Append what queries at ``positions`` are multiplied by, [batch, tokens, 1]; None if by 1."""
    scale = rope.query_scale
    if scale is msgspec.UNSET or not _changes(rope, context_length):
        return None
    turns = np.arange(context_length) // scale.positions
    values = (1 + scale.beta * np.log1p(turns.astype(np.float64))).reshape(-1, 1)
    (table,) = b.weights.add(
        [("query_scale", b.compute, values.shape)], lambda: (values.astype(b.compute.numpy()),)
    )
    shape = (*b.dims.lead, 1)
    return b.op("Gather", [table, positions], name="query_scale.tokens", shape=shape, attributes={"axis": 0})


def rotates_inside(b: GraphBuilder) -> bool:
    """Tell whether GroupQueryAttention itself can rotate heads of this size: in whole multiples of 16
    elements, and with nothing after it.
    """
    c = b.config
    if c.qk_norm and c.form.qk_norm_after_rope:
        return False
    return b.target.rotary_inside and c.head_dim % 16 == 0 and c.rotary_dim % 16 == 0


Projected = tuple[ir.Value, ir.Value | None, ir.Value | None]
"""Query, key and value [*lead, heads * head_dim]; or all three side by side in the first, and None."""


def projected(b: GraphBuilder, x: ir.Value, layer: int, *, lead: Sequence[int | str]) -> Projected:
    """Append the projections: one packed product, or three where they are stored differently."""
    c, prefix = b.config, attention_prefix(layer)
    bias = c.attention_bias or c.qkv_bias
    modules = [f"{prefix}.{part}_proj" for part in "qkv"]
    if _stored_alike(b, modules):
        return linear(b, x, modules, name=f"{prefix}.qkv_proj", lead=lead, bias=bias), None, None
    query, key, value = (linear(b, x, [module], name=module, lead=lead, bias=bias) for module in modules)
    return query, key, value


def _stored_alike(b: GraphBuilder, modules: Sequence[str]) -> bool:
    formats = {b.formats.of(module) for module in modules}
    if len(formats) > 1:
        return False
    tensors = [b.tensors[f"{module}.weight"] for module in modules]
    return formats.pop().precision != "source" or b.source_forms.alike(tensors)


def attention_prefix(layer: int) -> str:
    """Return the name of a layer's attention module."""
    return f"model.layers.{layer}.self_attn"


def score_scale(config: LlamaConfig) -> float:
    """Return what attention scores are multiplied by."""
    return config.head_dim**-0.5 if config.attention_multiplier is None else config.attention_multiplier


def separate_heads(
    b: GraphBuilder,
    qkv: Projected,
    layer: int,
    rotary: RotaryInputs,
    *,
    lead: Sequence[int | str],
    rotate: bool | None,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Append the split of heads that are packed; return query, key and value [*lead, heads * head_dim],
    normalised as the model has it.

    rotate: whether query and key are rotated here; None: the caller does it, and norms after it. Scales of
        queries are taken in here, since a rotation does not change them.
    """
    prefix = attention_prefix(layer)
    query, key, value = qkv
    if key is None or value is None:
        query, key, value = _split_heads(b, query, prefix, lead=lead)
    late = b.config.form.qk_norm_after_rope
    if b.config.qk_norm and not late:
        query, key = _normed(b, query, key, prefix, lead=lead)
    if rotate:
        query, key = (
            _rotate(b, v, f"{prefix}.{part}_rotated", rotary, lead=lead)
            for v, part in ((query, "q"), (key, "k"))
        )
    if b.config.qk_norm and late and rotate is not None:
        query, key = _normed(b, query, key, prefix, lead=lead)
    if rotary.scales is not None:
        query = b.op("Mul", [query, rotary.scales], name=f"{prefix}.q_by_position", shape=_dims(query))
    return query, key, value


def _dims(value: ir.Value) -> list[int | str]:
    assert value.shape is not None
    return [d if isinstance(d, int) else str(d.value) for d in value.shape]


def _normed(
    b: GraphBuilder, query: ir.Value, key: ir.Value, prefix: str, *, lead: Sequence[int | str]
) -> tuple[ir.Value, ir.Value]:
    """Append the norms of query and key [*lead, heads * head_dim]: of each head, or of all together."""
    c = b.config
    if c.form.qk_norm_over == "head":
        return (
            _norm_heads(b, query, f"{prefix}.q_norm", lead=lead),
            _norm_heads(b, key, f"{prefix}.k_norm", lead=lead),
        )
    return (
        rms_norm(b, query, f"{prefix}.q_norm", shape=(*lead, c.num_attention_heads * c.head_dim)),
        rms_norm(b, key, f"{prefix}.k_norm", shape=(*lead, c.num_key_value_heads * c.head_dim)),
    )


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
    split, packed = (
        b.shared_constant(f"heads.{name}", np.array([*[0] * len(lead), *sizes], np.int64))
        for name, sizes in (("apart", (-1, head_dim)), ("together", (-1,)))
    )
    shape = (*lead, width // head_dim, head_dim)
    heads = b.op("Reshape", [x, split], name=f"{module}/heads", shape=shape)
    normed = rms_norm(b, heads, module, shape=shape)
    return b.op("Reshape", [normed, packed], name=f"{module}/packed", shape=(*lead, width))


def _rotate(
    b: GraphBuilder, x: ir.Value, name: str, rotary: RotaryInputs, *, lead: Sequence[int | str]
) -> ir.Value:
    """Append rotary embedding of ``x`` [*lead, heads * head_dim] at the tokens' own positions."""
    assert rotary.positions is not None
    width = x.shape[-1]  # type: ignore[index]  # set by _split_heads
    assert isinstance(width, int)
    contrib = b.target.rotary is RotaryForm.CONTRIB
    return b.op(
        "RotaryEmbedding",
        [x, rotary.positions, rotary.cos, rotary.sin]
        if contrib
        else [x, rotary.cos, rotary.sin, rotary.positions],
        name=name,
        shape=(*lead, width),
        attributes={"num_heads": width // b.config.head_dim, "rotary_embedding_dim": b.config.rotary_dim},
        domain=CONTRIB if contrib else "",
    )


def token_positions(
    b: GraphBuilder, by_token: ir.Value, seqlens_k: ir.Value, *, padded: bool = False
) -> tuple[ir.Value, ir.Value]:
    """Append each token's position [batch, tokens], and each row's first one [batch].

    The last token's is ``seqlens_k``, the others' count up to it.
    by_token: [batch, tokens, ...].
    padded: prompts may have padding behind them; then the first token's is 0 where they would count from
        below.
    """
    one, zero, axis = (
        b.constant(f"positions.{n}", np.array(v, np.int64))
        for n, v in (("one", 1), ("zero", 0), ("axis", [1]))
    )
    kind = ir.DataType.INT64
    assert by_token.shape is not None
    rank = len(by_token.shape)
    shape = b.op("Shape", [by_token], name="positions.shape", shape=(rank,), dtype=kind)
    tokens = b.op(
        "Gather", [shape, one], name="positions.tokens", shape=(), attributes={"axis": 0}, dtype=kind
    )
    offsets = b.op("Range", [zero, tokens, one], name="positions.offsets", shape=("tokens",), dtype=kind)
    last = b.op(
        "Cast", [seqlens_k], name="positions.last", shape=("batch",), attributes={"to": int(kind)}, dtype=kind
    )
    before = b.op("Sub", [tokens, one], name="positions.before", shape=(), dtype=kind)
    first = b.op("Sub", [last, before], name="positions.first", shape=("batch",), dtype=kind)
    if padded:
        first = b.op("Max", [first, zero], name="positions.start", shape=("batch",), dtype=kind)
    column = b.op("Unsqueeze", [first, axis], name="positions.column", shape=("batch", 1), dtype=kind)
    positions = b.op("Add", [column, offsets], name="positions", shape=("batch", "tokens"), dtype=kind)
    return positions, first
