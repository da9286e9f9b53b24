"""Scales that the runtime widens when it opens a graph, and the nodes that look constants up in tables.

Input are tensors whose file has scales in bytes or in half precision; output are scales in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_export.checkpoint.codes import Codes, ScaleTable
from llorch_export.graph.builder import FLOAT, GraphBuilder
from llorch_export.quantize.folded import CODES_AT_A_TIME, scale_bytes

_INDEX: Final = ir.DataType.INT32
_BYTES: Final = ir.DataType.UINT8


def widened_scales(b: GraphBuilder, name: str, weights: Sequence[str], stored: ir.Value | None) -> ir.Value:
    """Append the scales [rows, groups] of the stacked ``weights`` in float32. stored: as they are; None: they
    are bytes.
    """
    groups = codes_of(b, weights[0]).groups
    if stored is not None:
        if stored.dtype == FLOAT:
            return stored
        assert stored.shape is not None
        return b.op(
            "Cast",
            [stored],
            name=f"{name}.scales.wide",
            shape=[int(size) for size in stored.shape.numpy()],
            attributes={"to": FLOAT.value},
            dtype=FLOAT,
        )
    parts = [_scales_of_bytes(b, weight) for weight in weights]
    if len(parts) == 1:
        return parts[0]
    return b.op(
        "Concat",
        parts,
        name=f"{name}.scales.stacked",
        shape=(b.rows(weights), groups),
        attributes={"axis": 0},
        dtype=FLOAT,
    )


def repeated(b: GraphBuilder, name: str, scales: ir.Value, group_of: npt.NDArray[np.intp]) -> ir.Value:
    """Append scales [rows, blocks] of those of groups [rows, groups]. group_of: the group of each block."""
    assert scales.shape is not None
    rows, groups = (int(size) for size in scales.shape.numpy())
    if np.array_equal(group_of, np.arange(groups)):
        return scales
    order = b.shared_constant(named("groups", group_of), group_of.astype(np.int32))
    return b.op(
        "Gather",
        [scales, order],
        name=f"{name}.scales.repeated",
        shape=(rows, len(group_of)),
        attributes={"axis": 1},
        dtype=FLOAT,
    )


def _scales_of_bytes(b: GraphBuilder, weight: str) -> ir.Value:
    """Plan the bytes of one matrix's scales, and append what makes scales [rows, groups] of them."""
    codes, rows = codes_of(b, weight), b.tensors[weight].shape[0]
    table = codes.scale_table
    assert table is not None
    module = weight.removesuffix(".weight")
    shape = (rows, codes.groups) if table.factors is None else (len(table.factors), table.block)
    (stored,) = b.weights.add(
        [(f"{module}.scales.bytes", _BYTES, shape)], lambda: (scale_bytes(codes, rows),)
    )
    (values,) = b.weights.add([(f"{module}.scales.values", FLOAT, (256,))], lambda: (table.values(),))
    found = looked_up(b, stored, values, name=f"{module}.scales.found", shape=shape)
    return found if table.factors is None else _with_factors(b, module, found, table, rows, codes.groups)


def _with_factors(
    b: GraphBuilder, module: str, found: ir.Value, table: ScaleTable, rows: int, groups: int
) -> ir.Value:
    """Append factors and offset of scales [blocks of scales, scales of a block]; return [rows, groups]."""
    assert table.factors is not None
    column, shape = table.factors[:, None], (len(table.factors), table.block)
    (factors,) = b.weights.add([(f"{module}.scales.factors", FLOAT, column.shape)], lambda: (column,))
    product = b.op("Mul", [found, factors], name=f"{module}.scales.products", shape=shape, dtype=FLOAT)
    offset = b.constant(f"{module}.scales.offset", np.array(table.offset, np.float32))
    scales = b.op("Add", [product, offset], name=f"{module}.scales.moved", shape=shape, dtype=FLOAT)
    count = shape[0] * shape[1]
    scales = reshaped(b, scales, (count,), name=f"{module}.scales.flat", dtype=FLOAT)
    if count != rows * groups:
        ends = [
            b.shared_constant(f"scales.cut.{value}", np.array([value], np.int64))
            for value in (0, rows * groups, 0)
        ]
        scales = b.op(
            "Slice", [scales, *ends], name=f"{module}.scales.cut", shape=(rows * groups,), dtype=FLOAT
        )
    return reshaped(b, scales, (rows, groups), name=f"{module}.scales.whole", dtype=FLOAT)


def looked_up(
    b: GraphBuilder, numbers: ir.Value, table: ir.Value, *, name: str, shape: tuple[int, ...]
) -> ir.Value:
    """Append the lookup of all ``numbers`` in a table, brought into this shape."""
    assert numbers.shape is not None
    assert table.shape is not None
    sizes, each = [int(size) for size in numbers.shape.numpy()], [int(s) for s in table.shape.numpy()[1:]]
    kind = table.dtype
    assert kind is not None
    index = b.op(
        "Cast", [numbers], name=f"{name}.index", shape=sizes, attributes={"to": _INDEX.value}, dtype=_INDEX
    )
    plain = (*sizes, *each) == shape
    found = b.op(
        "Gather",
        [table, index],
        name=name if plain else f"{name}.apart",
        shape=(*sizes, *each),
        attributes={"axis": 0},
        dtype=kind,
    )
    return found if plain else reshaped(b, found, shape, name=name, dtype=kind)


def reshaped(
    b: GraphBuilder, value: ir.Value, shape: tuple[int, ...], *, name: str, dtype: ir.DataType
) -> ir.Value:
    """Append a value in another shape."""
    sizes = np.array(shape, np.int64)
    target = b.shared_constant(f"shape.{'.'.join(map(str, shape))}", sizes)
    return b.op("Reshape", [value, target], name=name, shape=shape, dtype=dtype)


def named(kind: str, array: npt.NDArray[np.generic]) -> str:
    """Return a name that tells arrays apart by what they hold."""
    return f"{kind}.{hashlib.sha256(array.tobytes()).hexdigest()[:12]}"


def codes_of(b: GraphBuilder, weight: str) -> Codes:
    """Return the codes of a packed matrix."""
    codes = b.tensors[weight].codes
    assert codes is not None, weight
    return codes


def shared_table(b: GraphBuilder, kind: str, table: npt.NDArray[np.generic]) -> ir.Value:
    """Return a table of the data file that all who look the same up share."""
    return b.shared_weight(named(kind, table), table)


def strips(b: GraphBuilder, weights: Sequence[str]) -> Iterator[tuple[Codes, int, int]]:
    """Give some rows of the stacked ``weights`` at a time: whose codes they are, from which row to which."""
    for weight in weights:
        codes, rows = codes_of(b, weight), b.tensors[weight].shape[0]
        step = max(1, CODES_AT_A_TIME // codes.columns)
        for start in range(0, rows, step):
            yield codes, start, min(start + step, rows)
