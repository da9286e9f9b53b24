"""The decoder's layers, one after another: all of them, or those of one stage.

What a layer leaves behind is a :class:`Between`: the residual stream, and what is still to be added to it,
since one operator adds and normalises. A stage hands on both, so that the next one computes the very same
bits. Where norms stand behind the blocks alone, nothing normalises the sum: the stage adds, and hands on
that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llorch_export.graph.attention import AttentionPlan
from llorch_export.graph.builder import GraphBuilder
from llorch_export.graph.experts import experts
from llorch_export.graph.linear import linear
from llorch_export.graph.mlp import mlp
from llorch_export.graph.norm import norm
from llorch_export.graph.residual import FINAL_NORM, Place, block_output, into_residual

Lead = Sequence[int | str]


@dataclass(frozen=True, slots=True)
class Between:
    """What stands between two layers, [*lead, hidden_size] each.

    delta: what is still to be added to ``residual``; None: nothing.
    """

    residual: ir.Value
    delta: ir.Value | None = None


def taken(b: GraphBuilder) -> Between:
    """Return what the stage before hands on, as inputs of the graph."""
    shape = (*b.dims.lead, b.config.hidden_size)
    names = _names(b, b.layers.start)
    return Between(*(b.input(name, b.compute, *shape) for name in names))


def handed_on(b: GraphBuilder, state: Between) -> list[ir.Value]:
    """Append what is left to do before a cut; return the outputs that the next stage takes."""
    layer = b.layers.stop
    assert state.delta is not None, "a layer leaves something to be added"
    values = [state.residual, state.delta]
    if b.config.form.norm_placement == "after":
        values = [_entering(b, state, layer, lead=b.dims.lead)[0]]
    # Nodes keep the names that they have in a graph of all layers.
    for value, name in zip(values, _names(b, layer), strict=True):
        value.name = name
    return values


def _names(b: GraphBuilder, layer: int) -> list[str]:
    """Return the names of what crosses a cut before a layer; they are its own, so that no graph takes and
    gives the same.
    """
    if b.config.form.norm_placement == "after":
        return [f"hidden.{layer}"]
    return [f"residual.{layer}", f"delta.{layer}"]


def through_layers(
    b: GraphBuilder, state: Between, plan: AttentionPlan, logits_indices: ir.Value | None
) -> Between:
    """Append the builder's layers; return what the last of them leaves.

    logits_indices: of the rows that are wanted of the model's last layer; None: all. From that layer's
        attention on, a position matters only if its logits are wanted: the rest is dropped there.
    """
    c, size = b.config, b.config.hidden_size
    lead: Lead = b.dims.lead
    for layer in b.layers:
        prefix = f"model.layers.{layer}"
        normed, residual = _entering(b, state, layer, lead=lead)
        heads = plan.heads(normed, layer, lead=lead)
        if layer == c.num_hidden_layers - 1 and logits_indices is not None:
            heads = _wanted_rows(b, heads, logits_indices, "heads", c.num_attention_heads * c.head_dim)
            residual = _wanted_rows(b, residual, logits_indices, "residual", size)
            if c.form.parallel:
                normed = _wanted_rows(b, normed, logits_indices, "normed", size)
            lead = (b.dims.rows,)
        name = f"{prefix}.self_attn.o_proj"
        output = linear(b, heads, [name], name=name, lead=lead, bias=c.attention_bias)
        output = block_output(b, output, f"{prefix}.self_attn", lead=lead)
        if c.form.parallel:
            delta = block_output(b, _feed_forward(b, normed, layer, lead=lead), f"{prefix}.mlp", lead=lead)
            delta = b.op("Add", [output, delta], name=f"{prefix}.both", shape=(*lead, size))
        else:
            place = Place(f"{prefix}.post_attention_layernorm", f"{prefix}.mlp.input")
            normed, residual = into_residual(b, residual, output, place, lead=lead, keep_sum=True)
            delta = block_output(b, _feed_forward(b, normed, layer, lead=lead), f"{prefix}.mlp", lead=lead)
        state = Between(residual, delta)
    return state


def final_norm(b: GraphBuilder, state: Between, *, lead: Lead) -> ir.Value:
    """Append the last addition and the norm before the head."""
    assert state.delta is not None, "a layer leaves something to be added"
    place = Place(FINAL_NORM, FINAL_NORM)
    return into_residual(b, state.residual, state.delta, place, lead=lead, keep_sum=False)[0]


def _entering(b: GraphBuilder, state: Between, layer: int, *, lead: Lead) -> tuple[ir.Value, ir.Value]:
    """Append what stands before a layer; return what it reads, and the residual stream."""
    place = Place(f"model.layers.{layer}.input_layernorm", f"model.layers.{layer}.input")
    if state.delta is not None:
        return into_residual(b, state.residual, state.delta, place, lead=lead, keep_sum=True)
    if b.config.form.norm_placement == "after":
        return state.residual, state.residual
    return norm(b, state.residual, place.norm, shape=(*lead, b.config.hidden_size)), state.residual


def _wanted_rows(b: GraphBuilder, x: ir.Value, indices: ir.Value, name: str, width: int) -> ir.Value:
    flat_shape = b.constant(f"wanted.{name}.shape", np.array([-1, width], np.int64))
    flat = b.op("Reshape", [x, flat_shape], name=f"wanted.{name}.flat", shape=(b.dims.positions, width))
    return b.op(
        "Gather", [flat, indices], name=f"wanted.{name}", shape=(b.dims.rows, width), attributes={"axis": 0}
    )


def _feed_forward(b: GraphBuilder, x: ir.Value, layer: int, *, lead: Lead) -> ir.Value:
    """Append what a layer has behind its attention: one block, or several experts."""
    name, kind = f"model.layers.{layer}.mlp", b.config.layer_experts(layer)
    return mlp(b, x, name, lead=lead) if kind is None else experts(b, x, name, kind, lead=lead)
