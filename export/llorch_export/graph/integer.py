"""Linear layers in per-channel int8: signed weights with a scale for each output, unsigned activations with
one for each row.

Input is a float32 value and the names of checkpoint tensors; output are nodes and planned initialisers. Every
row of activations, or every quarter of one, is rounded by its own largest magnitude, or all by a constant, so
that a row's result does not depend on its neighbours. The products are whole numbers, added up without
rounding whatever the number of rows; those of a row's quarters are then added in float32, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from llorch_export.formats.module import QUARTERS, PerChannelActivations
from llorch_export.graph.builder import CONTRIB, FLOAT, ActivationCodes, GraphBuilder
from llorch_export.graph.static_scales import static_scale
from llorch_export.graph.weights import Arrays
from llorch_export.quantize.channels import LARGEST, quantize_channels
from llorch_export.quantize.layout import Matrix
from llorch_serve.errors import ArtifactError

_ZERO_POINT: Final = 128
_SMALLEST_MAGNITUDE: Final = 1e-30
"""Rows below it count as it: an all-zero row then has a scale too, and no scale is so small that it rounds to
0.
"""
_MOST_INPUTS: Final = (2**31 - 1) // (_ZERO_POINT * LARGEST)
"""More products of two codes than this could exceed the 32 bits that they are added up in."""
# Codes of a transposed matrix held at a time: 128 MiB, more than those of a 70B model take but for its head.
_BAND_ELEMENTS: Final = 2**27


def integer_linear(
    b: GraphBuilder,
    x: ir.Value,
    modules: Sequence[str],
    activations: PerChannelActivations,
    *,
    name: str,
    lead: Sequence[int | str],
    bias: ir.Value | None,
) -> ir.Value:
    """Append ``y = x W^T + b`` for the stacked ``modules``.

    Raises ArtifactError if the layer has more inputs than its sums can hold, or inputs that quarters cannot
    share.
    """
    weights = [f"{module}.weight" for module in modules]
    out_features, in_features = b.rows(weights), b.tensors[weights[0]].shape[1]
    if in_features > _MOST_INPUTS:
        raise ArtifactError(
            f"{weights[0]} has {in_features} inputs; the runtime adds up at most {_MOST_INPUTS} products of "
            "int8. Leave out --activations"
        )
    if activations == "quarters" and in_features % QUARTERS:
        raise ArtifactError(
            f"{weights[0]} has {in_features} inputs, which do not come in quarters of the same size; choose "
            f"activations row"
        )
    chunks = b.row_chunks(weights)
    codes, scales = b.weights.stream(
        [
            (f"{name}.weight", ir.DataType.INT8, (in_features, out_features)),
            (f"{name}.scales", FLOAT, (out_features,)),
        ],
        lambda: _transposed(chunks, in_features, out_features),
    )
    shape = (*lead, out_features)
    entering = b.activation_codes.get((x, activations))
    if entering is None:
        entering = b.activation_codes[x, activations] = _codes(
            b, x, modules, activations, (*lead, in_features)
        )
    product_name = name if bias is None else f"{name}/product"
    if activations == "quarters":
        product = _sum_of_parts(b, entering, codes, scales, product_name, lead, out_features)
    else:
        product = _product(b, entering[0], codes, scales, product_name, shape)
    # The node's own bias input would be multiplied by the rows' scales.
    return product if bias is None else b.op("Add", [product, bias], name=name, shape=shape)


def _product(
    b: GraphBuilder,
    entering: ActivationCodes,
    codes: ir.Value,
    scales: ir.Value,
    name: str,
    shape: tuple[int | str, ...],
) -> ir.Value:
    return b.op(
        "MatMulIntegerToFloat",
        [entering.codes, codes, entering.scale, scales, _zero_point(b)],
        name=name,
        shape=shape,
        domain=CONTRIB,
    )


def _sum_of_parts(
    b: GraphBuilder,
    entering: Sequence[ActivationCodes],
    codes: ir.Value,
    scales: ir.Value,
    name: str,
    lead: Sequence[int | str],
    out_features: int,
) -> ir.Value:
    """Append the products of a row's parts, each [..., 1, outputs], and their sum [..., outputs]."""
    parts = b.weights.split(codes, len(entering))
    shape = (*lead, 1, out_features)
    products = [
        _product(b, one, part, scales, f"{name}/part.{index}", shape)
        for index, (one, part) in enumerate(zip(entering, parts, strict=True))
    ]
    total = b.op("Sum", products, name=f"{name}/parts", shape=shape)
    rows = _form(b, len(lead), out_features)
    return b.op("Reshape", [total, rows], name=name, shape=(*lead, out_features))


def _codes(
    b: GraphBuilder,
    x: ir.Value,
    modules: Sequence[str],
    activations: PerChannelActivations,
    shape: tuple[int | str, ...],
) -> tuple[ActivationCodes, ...]:
    if activations == "static":
        return (_static_codes(b, x, modules, shape),)
    if activations == "row":
        return (_row_codes(b, x, shape),)
    return _quarter_codes(b, x, shape)


def _quarter_codes(b: GraphBuilder, x: ir.Value, shape: tuple[int | str, ...]) -> tuple[ActivationCodes, ...]:
    """Append the rounding of each quarter of a row of ``x`` by its own largest magnitude; codes are [..., 1,
    inputs / 4].
    """
    *lead, inputs = shape
    assert isinstance(inputs, int)
    width = inputs // QUARTERS
    form = _form(b, len(lead), QUARTERS, width)
    split = b.op("Reshape", [x, form], name=f"{x.name}/quarters", shape=(*lead, QUARTERS, width))
    rounded = _row_codes(b, split, (*lead, QUARTERS, width))
    parts = [
        b.multi(
            "Split",
            [value],
            outputs=[(f"{value.name}.{part}", (*lead, 1, last)) for part in range(QUARTERS)],
            attributes={"axis": len(lead), "num_outputs": QUARTERS},
            dtype=kind,
        )
        for value, last, kind in (
            (rounded.codes, width, ir.DataType.UINT8),
            (rounded.scale, 1, FLOAT),
        )
    ]
    return tuple(ActivationCodes(codes, scale) for codes, scale in zip(*parts, strict=True))


def _form(b: GraphBuilder, kept: int, *sizes: int) -> ir.Value:
    """Return the shape of a Reshape that keeps the first ``kept`` dimensions and gives the rest anew."""
    name = ".".join(str(size) for size in (kept, *sizes))
    return b.shared_constant(f"quarters.form.{name}", np.array([0] * kept + list(sizes), np.int64))


def _row_codes(b: GraphBuilder, x: ir.Value, shape: tuple[int | str, ...]) -> ActivationCodes:
    """Append the rounding of each row of ``x`` by the row's own largest magnitude."""
    column = (*shape[:-1], 1)
    axis = b.shared_constant("rows.axis", np.array([-1], np.int64))
    smallest = b.shared_constant("rows.smallest", np.array(_SMALLEST_MAGNITUDE, np.float32))
    step = b.shared_constant("rows.step", np.array(1 / LARGEST, np.float32))
    one = b.shared_constant("rows.one", np.array(1, np.float32))
    magnitudes = b.op("Abs", [x], name=f"{x.name}/magnitudes", shape=shape)
    largest = b.op("ReduceMax", [magnitudes, axis], name=f"{x.name}/largest", shape=column)
    guarded = b.op("Max", [largest, smallest], name=f"{x.name}/range", shape=column)
    scale = b.op("Mul", [guarded, step], name=f"{x.name}/scale", shape=column)
    ratio = b.op("Div", [x, scale], name=f"{x.name}/ratio", shape=shape)
    # QuantizeLinear takes no scale for each row, but rounds and shifts in one pass.
    return ActivationCodes(_rounded(b, ratio, one, f"{x.name}/row_codes", shape), scale)


def _static_codes(
    b: GraphBuilder, x: ir.Value, modules: Sequence[str], shape: tuple[int | str, ...]
) -> ActivationCodes:
    """Append the rounding of ``x`` by a constant; what lies beyond its 127 steps is cut."""
    scale = b.constant(f"{x.name}/static_scale", np.array(static_scale(b.calibration, modules), np.float32))
    return ActivationCodes(_rounded(b, x, scale, f"{x.name}/static_codes", shape), scale)


def _rounded(
    b: GraphBuilder, x: ir.Value, scale: ir.Value, name: str, shape: tuple[int | str, ...]
) -> ir.Value:
    """Append ``x / scale`` rounded to the nearest of -128 to 127, plus 128."""
    return b.op("QuantizeLinear", [x, scale, _zero_point(b)], name=name, shape=shape, dtype=ir.DataType.UINT8)


def _zero_point(b: GraphBuilder) -> ir.Value:
    return b.shared_constant("activations.zero_point", np.array(_ZERO_POINT, np.uint8))


def _transposed(
    chunks: Callable[[], Iterator[Matrix]], in_features: int, out_features: int
) -> Iterator[Arrays]:
    """Give codes [inputs, outputs] in bands of rows, and all scales [outputs] with the first band.

    A matrix of more than one band is read and quantised once for each.
    """
    step = max(1, _BAND_ELEMENTS // out_features)
    for start in range(0, in_features, step):
        stop = min(start + step, in_features)
        band = np.empty((stop - start, out_features), np.int8)
        scales = np.empty(out_features, np.float32)
        output = 0
        for chunk in chunks():
            rows = slice(output, output + len(chunk))
            codes, scales[rows] = quantize_channels(chunk)
            band[:, rows] = codes[:, start:stop].T
            output = rows.stop
        yield band, scales if start == 0 else scales[:0]
        del band  # else it would live on while the next one is made
