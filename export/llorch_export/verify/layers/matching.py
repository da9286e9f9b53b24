"""Which of the reference's values a value of the graph stands for.

The graph names its values after the checkpoint's modules, so the list of stages follows the graph: a value
with a module's name is that module's output, and a few suffixes say the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from llorch_export.verify.layers.graph import Array, AttentionNode, GraphRun, layer_of
from llorch_export.verify.layers.reference import ReferenceRun
from llorch_export.verify.layers.stages import Kind

SCALED_EMBEDDING: Final = "embedding/scaled"
_INPUT: Final = ".input"  # of a block that no norm stands before
FINAL_NORM: Final = "model.norm"
_RESIDUAL: Final = "/residual"
_KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), Kind.QKV),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "silu", "act", "product"), Kind.SWIGLU),
    **dict.fromkeys(("gate", "shared_expert_gate"), Kind.ROUTER),
    **dict.fromkeys(("experts", "mlp"), Kind.EXPERTS),
    **dict.fromkeys(("embedding", SCALED_EMBEDDING), Kind.EMBEDDING),
    "logits": Kind.LOGITS,
}

Pair = tuple[str, Kind, int | None, str, Array, Array]
"""Name, kind, layer, source, the reference's array and the graph's."""


def pairs(graph: GraphRun, reference: ReferenceRun, head_dim: int) -> Iterator[Pair]:
    """Yield every value of the graph that the reference has too, in the order of computation.

    Logits are left out: those of the graph as it is shipped are compared, not of this copy.
    """
    attention = {node.heads: node for node in graph.attention}
    inside = {name for node in graph.attention for name in (node.key, node.value, node.scores)}
    for name, value in graph.values.items():
        if name in attention:
            yield from _attention(attention[name], graph, reference, head_dim)
        elif name == "embedding" and SCALED_EMBEDDING in graph.values and _scales_itself(reference):
            continue
        elif name not in inside and name != "logits":
            expected = counterpart(name, reference)
            if expected is not None and expected.size == value.size:
                yield (
                    name,
                    _kind(name),
                    _layer(name, reference),
                    "observed",
                    expected,
                    value.reshape(expected.shape),
                )


def _scales_itself(reference: ReferenceRun) -> bool:
    """Tell whether the reference's embedding is scaled by its own module."""
    return np.array_equal(reference.outputs["model.embed_tokens"], reference.inputs["model.layers.0"])


def unmatched(graph: GraphRun, compared: set[str]) -> tuple[str, ...]:
    """Return the graph's values that no comparison has covered."""
    return tuple(name for name in graph.values if name not in compared and name != "logits")


def counterpart(name: str, reference: ReferenceRun) -> Array | None:
    """Return the reference's array for a value's name, or None if it computes no such thing."""
    inputs, outputs = reference.inputs, reference.outputs
    if name in outputs:
        return outputs[name]
    if name == SCALED_EMBEDDING:
        return inputs.get("model.layers.0")
    if name == "embedding":
        return outputs.get("model.embed_tokens")
    if name.endswith(_INPUT):
        return inputs.get(name.removesuffix(_INPUT))
    if name.endswith(_RESIDUAL):
        return inputs.get(name.removesuffix(_RESIDUAL))
    parent, _, last = name.rpartition(".")
    if last == "qkv_proj":
        parts = [outputs.get(f"{parent}.{part}_proj") for part in "qkv"]
        return None if any(part is None for part in parts) else np.concatenate(parts, axis=-1)  # type: ignore[arg-type]  # checked
    if last in ("gate_proj", "up_proj") and f"{parent}.gate_up_proj" in outputs:
        return np.split(outputs[f"{parent}.gate_up_proj"], 2, axis=-1)[last == "up_proj"]
    if last in ("silu", "act"):
        gated = any(f"{parent}.{gate}" in outputs for gate in ("gate_proj", "gate_up_proj"))
        return outputs.get(f"{parent}.act_fn") if gated else inputs.get(f"{parent}.down_proj")
    return inputs.get(f"{parent}.down_proj") if last == "product" else None


def _attention(
    node: AttentionNode, graph: GraphRun, reference: ReferenceRun, head_dim: int
) -> Iterator[Pair]:
    trace = reference.attention.get(node.layer)
    if trace is None:
        return
    layer, values = node.layer, graph.values
    query, origin = _heads(values[node.query], node.num_heads, head_dim), "observed"
    if node.tables is not None:  # the node rotates inside, and shows keys only
        origin = "recomputed"
        query = rotate(query, *(graph.tables[name] for name in node.tables))
    yield node.key, Kind.ROPE, layer, "observed", trace.key, values[node.key][0]
    yield f"{node.heads}/query", Kind.ROPE, layer, origin, trace.query, query
    yield node.value, Kind.QKV, layer, "observed", trace.value, values[node.value][0]
    seen = trace.seen[None]
    yield (
        node.scores,
        Kind.SCORES,
        layer,
        "observed",
        np.where(seen, trace.scores, 0),
        np.where(seen, values[node.scores][0], 0),
    )
    mixed = reference.inputs.get(f"{node.heads.rpartition('.')[0]}.o_proj")
    if mixed is not None:
        yield node.heads, Kind.ATTENTION, layer, "observed", mixed, values[node.heads].reshape(mixed.shape)


def _heads(packed: Array, count: int, head_dim: int) -> Array:
    """Return the leading heads of a projection [1, tokens, width] as [heads, tokens, head_dim]."""
    flat = packed.reshape(-1, packed.shape[-1])[:, : count * head_dim]
    return flat.reshape(len(flat), count, head_dim).swapaxes(0, 1)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate [heads, tokens, head_dim] by tables [positions, rotated / 2]; pairs lie half of the rotated part
    apart.
    """
    tokens, half = x.shape[1], cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:tokens], sin[:tokens]
    return np.concatenate([first * c - second * s, second * c + first * s, rest], axis=-1)


def _kind(name: str) -> Kind:
    if name.endswith(_RESIDUAL):
        module = name.removesuffix(_RESIDUAL)
        return Kind.BLOCK if module == FINAL_NORM or module.endswith("input_layernorm") else Kind.RESIDUAL
    if name.endswith(_INPUT):
        return Kind.RESIDUAL if name.endswith(f".mlp{_INPUT}") else Kind.BLOCK
    if name == FINAL_NORM:
        return Kind.FINAL_NORM
    if name.endswith(".output_norm"):
        return Kind.PROJECTION  # as far off as the projection that it normalises
    last = name.rpartition(".")[2]
    return _KINDS.get(last, Kind.NORM if last.endswith("norm") else Kind.PROJECTION)


def _layer(name: str, reference: ReferenceRun) -> int | None:
    """Return a value's layer; the sum before a layer's first norm is the block before it."""
    layer = layer_of(name)
    if _kind(name) is not Kind.BLOCK:
        return layer
    return (len(reference.attention) if layer is None else layer) - 1
