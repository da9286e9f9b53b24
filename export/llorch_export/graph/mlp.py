"""The feed-forward block: ``down(act(gate(x)) * up(x))``, which is SwiGLU (Shazeer 2020) where act is SiLU;
where the model has no gate, ``down(act(up(x)))``.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from llorch_export.graph.activation import activated
from llorch_export.graph.builder import GraphBuilder
from llorch_export.graph.linear import linear


def mlp(b: GraphBuilder, x: ir.Value, prefix: str, *, lead: Sequence[int | str]) -> ir.Value:
    """Append the block of the layer named ``prefix``."""
    bias = b.config.mlp_bias
    shape = (*lead, b.rows([f"{prefix}.up_proj.weight"]))

    def projected(part: str, value: ir.Value) -> ir.Value:
        name = f"{prefix}.{part}_proj"
        return linear(b, value, [name], name=name, lead=lead, bias=bias)

    if not b.config.form.gated:
        return projected("down", activated(b, projected("up", x), prefix, shape))
    gate, up = projected("gate", x), projected("up", x)
    product = b.op("Mul", [activated(b, gate, prefix, shape), up], name=f"{prefix}.product", shape=shape)
    return projected("down", product)
