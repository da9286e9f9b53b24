"""Normalisation, alone or with the residual addition before it: by the root mean square (Zhang and Sennrich
2019), or by mean and variance (Ba et al. 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from llorch_export.formats.targets import NormForm
from llorch_export.graph.builder import CONTRIB, FLOAT, GraphBuilder


def norm(b: GraphBuilder, x: ir.Value, module: str, *, shape: Sequence[int | str]) -> ir.Value:
    """Append the norm that the model has in its layers."""
    if b.config.form.norm == "rms":
        return rms_norm(b, x, module, shape=shape)
    bias = [b.vector(f"{module}.bias")] if b.config.form.norm_bias else []
    return b.op(
        "LayerNormalization",
        [x, b.vector(f"{module}.weight"), *bias],
        name=module,
        shape=shape,
        attributes={"axis": -1, "epsilon": b.config.rms_norm_eps},
    )


def rms_norm(b: GraphBuilder, x: ir.Value, module: str, *, shape: Sequence[int | str]) -> ir.Value:
    """Append ``x / sqrt(mean(x^2) + eps) * weight``."""
    if b.target.norm is NormForm.PRIMITIVE:
        return _primitive(b, x, module, shape=shape)
    return b.op(
        "RMSNormalization",
        [x, b.vector(f"{module}.weight")],
        name=module,
        shape=shape,
        attributes={"axis": -1, "epsilon": b.config.rms_norm_eps},
    )


def add_norm(
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
    if not b.target.fused_skip_norm or b.config.form.norm != "rms":
        total = b.op("Add", [delta, residual], name=f"{module}/residual", shape=shape)
        return norm(b, total, module, shape=shape), total
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


def _primitive(b: GraphBuilder, x: ir.Value, module: str, *, shape: Sequence[int | str]) -> ir.Value:
    """Append the norm operator by operator, in float32: squares of a residual stream overflow float16."""
    one = (*shape[:-1], 1)
    wide = _cast(b, x, FLOAT, f"{module}/wide", shape)
    square = b.op("Mul", [wide, wide], name=f"{module}/square", shape=shape, dtype=FLOAT)
    axes = b.shared_constant("norm.axes", np.array([-1], np.int64))
    mean = b.op("ReduceMean", [square, axes], name=f"{module}/mean", shape=one, dtype=FLOAT)
    epsilon = b.shared_constant("norm.epsilon", np.array(b.config.rms_norm_eps, np.float32))
    shifted = b.op("Add", [mean, epsilon], name=f"{module}/shifted", shape=one, dtype=FLOAT)
    root = b.op("Sqrt", [shifted], name=f"{module}/root", shape=one, dtype=FLOAT)
    normed = b.op("Div", [wide, root], name=f"{module}/normed", shape=shape, dtype=FLOAT)
    narrow = _cast(b, normed, b.compute, f"{module}/narrow", shape)
    return b.op("Mul", [narrow, b.vector(f"{module}.weight")], name=module, shape=shape)


def _cast(b: GraphBuilder, x: ir.Value, to: ir.DataType, name: str, shape: Sequence[int | str]) -> ir.Value:
    if x.dtype == to:
        return x
    return b.op("Cast", [x], name=name, shape=shape, attributes={"to": to.value}, dtype=to)
