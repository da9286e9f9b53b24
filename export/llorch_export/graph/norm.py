"""RMS normalisation (Zhang and Sennrich 2019), alone or fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from llorch_export.graph.builder import CONTRIB, GraphBuilder


def rms_norm(b: GraphBuilder, x: ir.Value, module: str, *, shape: Sequence[int | str]) -> ir.Value:
    """Append ``x / sqrt(mean(x^2) + eps) * weight``."""
    return b.op(
        "RMSNormalization",
        [x, b.vector(f"{module}.weight")],
        name=module,
        shape=shape,
        attributes={"axis": -1, "epsilon": b.config.rms_norm_eps},
    )


def add_rms_norm(
    b: GraphBuilder,
    residual: ir.Value,
    delta: ir.Value,
    module: str,
    *,
    shape: Sequence[int | str],
    keep_sum: bool,
) -> tuple[ir.Value, ir.Value]:
    """Append ``s = residual + delta`` and its norm; return ``(norm, s)``.

    keep_sum: whether ``s`` is needed later; if not, the returned ``s`` must not be used.
    """
    outputs = [(module, shape)]
    if keep_sum:
        outputs += [("", ()), ("", ()), (f"{module}/residual", shape)]
    values = b.multi(
        "SkipSimplifiedLayerNormalization",
        [delta, residual, b.vector(f"{module}.weight")],
        outputs=outputs,
        attributes={"epsilon": b.config.rms_norm_eps},
        domain=CONTRIB,
    )
    return values[0], values[-1]
