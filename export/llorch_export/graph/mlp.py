"""The feed-forward block: SwiGLU (Shazeer 2020), ``down(silu(gate(x)) * up(x))``."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from llorch_export.graph.builder import CONTRIB, GraphBuilder
from llorch_export.graph.linear import linear


def mlp(b: GraphBuilder, x: ir.Value, prefix: str, *, lead: Sequence[int | str]) -> ir.Value:
    """Append the block of the layer named ``prefix``."""
    bias = b.config.mlp_bias
    shape = (*lead, b.rows([f"{prefix}.gate_proj.weight"]))
    gate = linear(b, x, [f"{prefix}.gate_proj"], name=f"{prefix}.gate_proj", lead=lead, bias=bias)
    up = linear(b, x, [f"{prefix}.up_proj"], name=f"{prefix}.up_proj", lead=lead, bias=bias)
    activated = _silu(b, gate, prefix, shape)
    product = b.op("Mul", [activated, up], name=f"{prefix}.product", shape=shape)
    return linear(b, product, [f"{prefix}.down_proj"], name=f"{prefix}.down_proj", lead=lead, bias=bias)


def _silu(b: GraphBuilder, gate: ir.Value, prefix: str, shape: Sequence[int | str]) -> ir.Value:
    if not b.target.fused_silu:
        share = b.op("Sigmoid", [gate], name=f"{prefix}.silu/share", shape=shape)
        return b.op("Mul", [gate, share], name=f"{prefix}.silu", shape=shape)
    # QuickGelu with alpha 1 is x * sigmoid(x): SiLU in one node, with a kernel in every release.
    return b.op(
        "QuickGelu", [gate], name=f"{prefix}.silu", shape=shape, attributes={"alpha": 1.0}, domain=CONTRIB
    )
