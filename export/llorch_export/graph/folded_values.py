"""Matrices of float32 values that the runtime makes when it opens a graph, of codes that no blocks hold.

Input are tensors whose values are levels, or whose groups lie along outputs; output are matrices [rows,
columns].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from llorch_export.checkpoint.codes import Codes
from llorch_export.graph.builder import FLOAT, GraphBuilder
from llorch_export.graph.folded_scales import (
    codes_of,
    looked_up,
    repeated,
    reshaped,
    shared_table,
    strips,
    widened_scales,
)
from llorch_export.graph.half_precision import COMPUTE_TYPES
from llorch_export.graph.weights import Arrays, ArraySpec
from llorch_export.quantize.folded import (
    CODES_AT_A_TIME,
    FoldedValues,
    codes_in_bytes,
    level_values,
    levels_in_bytes,
    numbers_in_bytes,
)

_BYTES: Final = ir.DataType.UINT8


def widened_values(b: GraphBuilder, name: str, weights: Sequence[str], how: FoldedValues) -> ir.Value:
    """Plan the stacked ``weights``, all of which have this form, and append what makes a matrix [rows,
    columns] of float32 of them.
    """
    first, rows = codes_of(b, weights[0]), b.rows(weights)
    if how.across:
        return _values_across(b, name, weights, first, how)
    columns, groups = first.columns, first.columns // how.group
    assert first.levels is not None
    each = 8 // how.bits
    specs: list[ArraySpec] = [(f"{name}.levels.{how.bits}", _BYTES, (rows, groups, how.group // each))]
    if first.scale_table is None:
        specs.append((f"{name}.scales.stored", COMPUTE_TYPES[first.scale_type], (rows, first.groups)))

    def produce() -> Iterator[Arrays]:
        for codes, start, stop in strips(b, weights):
            yield levels_in_bytes(codes, how, start, stop)

    numbers, *rest = b.weights.stream(specs, produce)
    table = shared_table(b, "values", level_values(first.levels))
    # Every value on the way is kept until the whole graph is opened, so there are as few as can be.
    shape = (rows, groups, how.group // each, *([each] if each > 1 else []))
    found = looked_up(b, numbers, table, name=f"{name}.values", shape=shape)
    scales = widened_scales(b, name, weights, rest[0] if rest else None)
    scales = repeated(b, name, scales, np.arange(groups) * how.group // first.group)
    factors = reshaped(
        b, scales, (rows, groups, *[1] * (len(shape) - 2)), name=f"{name}.scales.grouped", dtype=FLOAT
    )
    product = b.op("Mul", [found, factors], name=f"{name}.products", shape=shape, dtype=FLOAT)
    return reshaped(b, product, (rows, columns), name=f"{name}.matrix", dtype=FLOAT)


def _values_across(
    b: GraphBuilder, name: str, weights: Sequence[str], codes: Codes, how: FoldedValues
) -> ir.Value:
    """Plan one matrix whose groups lie along outputs, and append what makes values [rows, columns] of it."""
    (weight,), columns = weights, codes.columns
    rows = b.tensors[weight].shape[0]
    shape = (how.across, rows // how.across, columns)
    bits = (2, 1) if how.bits == 3 else (how.bits,)
    specs = [(f"{name}.levels.{width}", _BYTES, (rows, columns * width // 8)) for width in bits]

    def produce() -> Iterator[Arrays]:
        for one, start, stop in strips(b, weights):
            yield codes_in_bytes(one, start, stop)

    stored = b.weights.stream(specs, produce)
    assert codes.zero_type is not None
    zero_type, scale_type = COMPUTE_TYPES[codes.zero_type], COMPUTE_TYPES[codes.scale_type]

    def numbers() -> Iterator[Arrays]:
        step = max(1, CODES_AT_A_TIME // columns)
        for start in range(0, shape[1], step):
            found = codes.read(start, min(start + step, shape[1]))
            assert found.zero_points is not None
            yield found.zero_points.astype(zero_type.numpy()), found.scales.astype(scale_type.numpy())

    planned = b.weights.stream(
        [(f"{name}.zeros.stored", zero_type, shape[1:]), (f"{name}.scales.stored", scale_type, shape[1:])],
        numbers,
    )
    zeros, scales = (
        widened_scales(b, f"{name}.{part}", weights, value)
        for part, value in zip(("zeros", "scales"), planned, strict=True)
    )
    parts = [
        looked_up(
            b,
            reshaped(
                b, value, (*shape[:2], columns * width // 8), name=f"{name}.levels.{width}.cut", dtype=_BYTES
            ),
            shared_table(b, "values", numbers_in_bytes(width, factor)),
            name=f"{name}.values.{width}",
            shape=shape,
        )
        for value, width, factor in zip(stored, bits, (1, 4), strict=False)
    ]
    found = parts[0]
    if len(parts) > 1:
        found = b.op("Add", parts, name=f"{name}.values", shape=shape, dtype=FLOAT)
    apart = b.op("Sub", [found, zeros], name=f"{name}.apart", shape=shape, dtype=FLOAT)
    product = b.op("Mul", [apart, scales], name=f"{name}.products", shape=shape, dtype=FLOAT)
    return reshaped(b, product, (rows, columns), name=f"{name}.matrix", dtype=FLOAT)
