"""Activations of the feed-forward block, each in the operators that the target has.

SiLU is ``x sigmoid(x)``; GELU (Hendrycks and Gimpel 2016) ``x Phi(x)``, or with tanh in the place of the
normal distribution; relu2 the square of what is positive (So et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from llorch_export.graph.builder import CONTRIB, GraphBuilder


def activated(b: GraphBuilder, x: ir.Value, prefix: str, shape: Sequence[int | str]) -> ir.Value:
    """Append the model's activation of ``x``, in the MLP named ``prefix``."""
    match b.config.form.activation:
        case "silu":
            return _silu(b, x, f"{prefix}.silu", shape)
        case "gelu_tanh":
            return _gelu(b, x, f"{prefix}.act", shape, "tanh")
        case "gelu":
            return _gelu(b, x, f"{prefix}.act", shape, "none")
        case "relu2":
            positive = b.op("Relu", [x], name=f"{prefix}.act/positive", shape=shape)
            return b.op("Mul", [positive, positive], name=f"{prefix}.act", shape=shape)


def _silu(b: GraphBuilder, x: ir.Value, name: str, shape: Sequence[int | str]) -> ir.Value:
    if not b.target.fused_silu:
        share = b.op("Sigmoid", [x], name=f"{name}/share", shape=shape)
        return b.op("Mul", [x, share], name=name, shape=shape)
    # QuickGelu with alpha 1 is x * sigmoid(x): SiLU in one node, with a kernel in every release.
    return b.op("QuickGelu", [x], name=name, shape=shape, attributes={"alpha": 1.0}, domain=CONTRIB)


def _gelu(b: GraphBuilder, x: ir.Value, name: str, shape: Sequence[int | str], form: str) -> ir.Value:
    """Append GELU. form: as the operator's attribute has it."""
    if b.target.gelu:
        return b.op("Gelu", [x], name=name, shape=shape, attributes={"approximate": form})

    def times(left: ir.Value, right: ir.Value, part: str) -> ir.Value:
        return b.op("Mul", [left, right], name=f"{name}/{part}", shape=shape)

    if form == "none":
        scaled = times(x, b.shared_factor("gelu.root", math.sqrt(0.5)), "scaled")
        curve = b.op("Erf", [scaled], name=f"{name}/curve", shape=shape)
    else:
        cube = times(times(x, x, "square"), x, "cube")
        bent = times(cube, b.shared_factor("gelu.bend", 0.044715), "bent")
        total = b.op("Add", [x, bent], name=f"{name}/total", shape=shape)
        scaled = times(total, b.shared_factor("gelu.slope", math.sqrt(2 / math.pi)), "scaled")
        curve = b.op("Tanh", [scaled], name=f"{name}/curve", shape=shape)
    share = b.op("Add", [curve, b.shared_factor("gelu.one", 1.0)], name=f"{name}/share", shape=shape)
    half = times(x, b.shared_factor("gelu.half", 0.5), "half")
    return b.op("Mul", [half, share], name=name, shape=shape)
