"""Linear layers in whole bytes: signed weights with a scale for each output, unsigned activations with one for each row.

Input is a float32 value and the names of checkpoint tensors; output are nodes and planned initialisers. Every row of
activations is rounded by its own largest magnitude, or all by a constant, so that a row's result does not depend on its
neighbours. The products are whole numbers, added up without rounding whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from llorch_export.formats import Whole
from llorch_export.graph.builder import CONTRIB, FLOAT, ActivationCodes, GraphBuilder
from llorch_export.graph.weights import Arrays
from llorch_export.quantize.channels import LARGEST, quantize_channels
from llorch_export.quantize.layout import Matrix
from llorch_export.static_scales import static_scale
from llorch_serve.errors import ArtifactError

_ZERO_POINT: Final = 128
_SMALLEST_MAGNITUDE: Final = 1e-30
"""Rows below it count as it: an all-zero row then has a scale too, and no scale is so small that it rounds to 0."""
_MOST_INPUTS: Final = (2**31 - 1) // (_ZERO_POINT * LARGEST)
"""More products of two codes than this could exceed the 32 bits that they are added up in."""
# Codes of a transposed matrix held at a time: 128 MiB, more than those of a 70B model take but for its head.
_BAND_ELEMENTS: Final = 2**27


def integer_linear(
    b: GraphBuilder,
    x: ir.Value,
    modules: Sequence[str],
    activations: Whole,
    *,
    name: str,
    lead: Sequence[int | str],
    bias: ir.Value | None,
) -> ir.Value:
    """Append ``y = x W^T + b`` for the stacked ``modules``.

    Raises ArtifactError if the layer has more inputs than its sums can hold.
    """
    weights = [f"{module}.weight" for module in modules]
    out_features, in_features = b.rows(weights), b.tensors[weights[0]].shape[1]
    if in_features > _MOST_INPUTS:
        raise ArtifactError(
            f"{weights[0]} has {in_features} inputs; the runtime adds up at most {_MOST_INPUTS} products of bytes. "
            "Leave out --activations"
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
        make = _row_codes if activations == "row" else _static_codes
        entering = b.activation_codes[x, activations] = make(b, x, modules, (*lead, in_features))
    product = b.op(
        "MatMulIntegerToFloat",
        [entering.codes, codes, entering.scale, scales, _zero_point(b)],
        name=name if bias is None else f"{name}/product",
        shape=shape,
        domain=CONTRIB,
    )
    # The node's own bias input would be multiplied by the rows' scales.
    return product if bias is None else b.op("Add", [product, bias], name=name, shape=shape)


def _row_codes(
    b: GraphBuilder, x: ir.Value, modules: Sequence[str], shape: tuple[int | str, ...]
) -> ActivationCodes:
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
        del band  # else it would live on beside the next one
