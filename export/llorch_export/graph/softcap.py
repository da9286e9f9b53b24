"""Soft limits of scores and logits: ``cap * tanh(x / cap)`` (Gemma 2, Rivière et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from llorch_export.graph.builder import GraphBuilder


def softcapped(b: GraphBuilder, x: ir.Value, cap: float, name: str, shape: Sequence[int | str]) -> ir.Value:
    """Append the limit of ``x``; the result is called ``name``."""
    share = b.op(
        "Mul", [x, b.shared_factor(f"softcap.{cap:g}.share", 1 / cap)], name=f"{name}/share", shape=shape
    )
    curve = b.op("Tanh", [share], name=f"{name}/curve", shape=shape)
    return b.op("Mul", [curve, b.shared_factor(f"softcap.{cap:g}", cap)], name=name, shape=shape)
