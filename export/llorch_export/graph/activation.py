"""Activations of the feed-forward block, each in the operators that the target has.

SiLU is ``x sigmoid(x)``; GELU (Hendrycks and Gimpel 2016) ``x Phi(x)``, or with tanh in the place of the
normal distribution; relu2 the square of what is positive (So et al. 2021); xIELU (Huang and Schlag 2024)
``beta x`` and, of positive x, ``a_p x^2``, of others ``a_n (exp(min(x, eps)) - 1 - x)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.names import XIELU
from llorch_export.graph.builder import CONTRIB, GraphBuilder
from llorch_export.graph.weights import Arrays
from llorch_serve.errors import ArtifactError

Floats = npt.NDArray[np.float64]


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
        case "xielu":
            return _xielu(b, x, prefix, shape)


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


def _xielu(b: GraphBuilder, x: ir.Value, prefix: str, shape: Sequence[int | str]) -> ir.Value:
    """Append xIELU with the factors of the MLP named ``prefix``."""
    positive_factor, negative_factor, beta, eps = _xielu_factors(b, prefix)
    name = f"{prefix}.act"
    positive = b.op("Relu", [x], name=f"{name}/positive", shape=shape)
    square = b.op("Mul", [positive, positive], name=f"{name}/square", shape=shape)
    above = b.op("Mul", [square, positive_factor], name=f"{name}/above", shape=shape)
    low = b.op("Min", [x, eps], name=f"{name}/low", shape=shape)
    curve = b.op("Elu", [low], name=f"{name}/curve", shape=shape)  # exp - 1, as eps is negative
    bent = b.op("Sub", [curve, x], name=f"{name}/bent", shape=shape)
    below = b.op("Mul", [bent, negative_factor], name=f"{name}/below", shape=shape)
    zero = b.shared_factor("xielu.zero", 0.0)
    is_above = b.op("Greater", [x, zero], name=f"{name}/is_above", shape=shape, dtype=ir.DataType.BOOL)
    part = b.op("Where", [is_above, above, below], name=f"{name}/part", shape=shape)
    line = b.op("Mul", [x, beta], name=f"{name}/line", shape=shape)
    return b.op("Add", [part, line], name=name, shape=shape)


def _xielu_factors(b: GraphBuilder, prefix: str) -> list[ir.Value]:
    """Plan the factors [1] of positive and of other values, beta and eps.

    Raises ArtifactError, once weights are written, if eps is not negative.
    """
    alpha_p, alpha_n, beta, eps = (b.tensors[f"{prefix}.{name}"] for name in XIELU)

    def softplus(tensor: LazyTensor) -> Floats:
        return np.logaddexp(0, tensor.load().astype(np.float64))

    def produced() -> Iterator[Arrays]:
        if not (limit := eps.load())[0] < 0:
            raise ArtifactError(
                f"{eps.name} is {limit[0]:g}, expected a negative number; the weights are damaged, fetch "
                "them again"
            )
        line = beta.load()
        factors = (softplus(alpha_p), line.astype(np.float64) + softplus(alpha_n), line, limit)
        yield tuple(b.weight_cast.cast(alpha_p.name, factor.astype(np.float32)) for factor in factors)

    names = ("alpha_p", "alpha_n", "beta", "eps")
    return b.weights.stream([(f"{prefix}.act.{name}", b.compute, (1,)) for name in names], produced)
