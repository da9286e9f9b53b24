"""Nodes that widen codes and scales of the data file, all of whose inputs are constants.

The runtime runs them once, when it opens the graph, and keeps what comes out (constant folding, which is on
unless a session turns all optimisation off; then they run in every step, which is slow and gives the same).
Input are tensors and a form from :mod:`llorch_export.quantize.folded`; output is what the products read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from llorch_export.checkpoint.codes import Codes, Levels
from llorch_export.graph.builder import FLOAT, GraphBuilder
from llorch_export.graph.folded_scales import (
    codes_of,
    looked_up,
    repeated,
    shared_table,
    strips,
    widened_scales,
)
from llorch_export.graph.half_precision import COMPUTE_TYPES
from llorch_export.graph.weights import Arrays, ArraySpec
from llorch_export.quantize.folded import (
    FoldedForm,
    folded,
    level_codes,
    lower_plane,
    two_bit_words,
    upper_plane,
)
from llorch_export.quantize.layout import block_count, zero_point_bytes

_BYTES: Final = ir.DataType.UINT8


@dataclass(frozen=True, slots=True)
class Widened:
    """What MatMulNBits takes: codes [rows, blocks, bytes], scales [rows, blocks], zero points if any.

    offsets: what the sum of each group of inputs is multiplied by and added, [groups, rows]; None: nothing.
    """

    packed: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    offsets: ir.Value | None


def widened_blocks(b: GraphBuilder, name: str, weights: Sequence[str], how: FoldedForm) -> Widened:
    """Plan the stacked ``weights``, all of which have this form, and append what widens them."""
    first, rows = codes_of(b, weights[0]), b.rows(weights)
    blocks = block_count(first.columns, how.form.block_size)
    specs = [*_code_specs(name, rows, blocks, how)]
    if first.scale_table is None:
        specs.append((f"{name}.scales.stored", COMPUTE_TYPES[first.scale_type], (rows, first.groups)))
    if first.zero_type is not None:
        specs.append((f"{name}.zeros.stored", COMPUTE_TYPES[first.zero_type], (rows, first.groups)))
    elif how.form.zero_points:
        zeros = zero_point_bytes(first.columns, how.form.block_size, how.form.bits)
        specs.append((f"{name}.zero_points", _BYTES, (rows, zeros)))

    def produce() -> Iterator[Arrays]:
        for codes, start, stop in strips(b, weights):
            yield folded(codes, how, start, stop)

    stored = b.weights.stream(specs, produce)
    shape = (rows, blocks, how.form.block_size * how.form.bits // 8)
    packed = _packed(b, name, stored, how, first.levels, shape)
    rest = stored[2 if how.planes else 1 :]
    scales = widened_scales(b, name, weights, rest.pop(0) if first.scale_table is None else None)
    offsets = _offsets(b, name, rest.pop(0), scales, first) if how.offsets else None
    group_of = np.arange(blocks) * how.form.block_size // first.group
    scales = repeated(b, name, scales, group_of)
    return Widened(packed, scales, rest.pop(0) if rest else None, offsets)


def offset_sums(
    b: GraphBuilder, x: ir.Value, offsets: ir.Value, columns: int, *, name: str, shape: Sequence[int | str]
) -> ir.Value:
    """Append what offsets [groups, rows] add to the product of ``x`` [*lead, columns] with a matrix."""
    assert offsets.shape is not None
    groups, lead = int(offsets.shape[0]), shape[:-1]  # type: ignore[arg-type]  # planned, so it is a number
    cut = b.shared_constant(
        f"sums.{len(lead)}.{groups}.{columns}",
        np.array([*[0] * len(lead), groups, columns // groups], np.int64),
    )
    axis = b.shared_constant("sums.axis", np.array([-1], np.int64))
    sums = b.shared_value(
        ("sums", x, groups),
        lambda: b.op(
            "ReduceSum",
            [
                b.op("Reshape", [x, cut], name=f"{name}/grouped", shape=(*lead, groups, columns // groups)),
                axis,
            ],
            name=f"{name}/sums",
            shape=(*lead, groups),
            attributes={"keepdims": 0},
        ),
    )
    return b.op("MatMul", [sums, offsets], name=f"{name}/offsets", shape=shape)


def _code_specs(name: str, rows: int, blocks: int, how: FoldedForm) -> Iterator[ArraySpec]:
    size, word = how.form.block_size, ir.DataType.UINT16
    if how.levels:
        yield f"{name}.levels", word, (rows, blocks, size // 4)
    elif how.pairs:
        yield f"{name}.pairs", word, (rows, blocks, size // 8)
    elif how.planes:
        yield f"{name}.lower", word, (rows, blocks, size // 8)
        yield f"{name}.upper", word, (rows, blocks, size // 16)
    else:
        yield f"{name}.weight", _BYTES, (rows, blocks, size * how.form.bits // 8)


def _packed(
    b: GraphBuilder,
    name: str,
    stored: Sequence[ir.Value],
    how: FoldedForm,
    levels: Levels | None,
    shape: tuple[int, ...],
) -> ir.Value:
    """Append what makes packed codes of this shape of those that are stored."""
    if how.levels:
        assert levels is not None
        table = shared_table(b, "levels", level_codes(levels))
        return looked_up(b, stored[0], table, name=f"{name}.weight", shape=shape)
    symmetric = not how.form.zero_points
    if how.pairs:
        table = shared_table(b, "pairs", two_bit_words(symmetric=symmetric))
        return looked_up(b, stored[0], table, name=f"{name}.weight", shape=shape)
    if not how.planes:
        return stored[0]
    lower, upper = (
        looked_up(b, plane, shared_table(b, kind, table), name=f"{name}.weight.{kind}", shape=shape)
        for plane, kind, table in (
            (stored[0], "lower", lower_plane()),
            (stored[1], "upper", upper_plane(symmetric=symmetric)),
        )
    )
    return b.op("BitwiseOr", [lower, upper], name=f"{name}.weight", shape=shape, dtype=_BYTES)


def _offsets(b: GraphBuilder, name: str, stored: ir.Value, scales: ir.Value, codes: Codes) -> ir.Value:
    """Append what zero points that are no whole numbers add for each input of a group: [groups, rows]."""
    assert stored.shape is not None
    shape = tuple(int(size) for size in stored.shape.numpy())
    zeros = stored
    if stored.dtype != FLOAT:
        zeros = b.op(
            "Cast", [stored], name=f"{name}.zeros", shape=shape, attributes={"to": FLOAT.value}, dtype=FLOAT
        )
    added = zeros if codes.zero_kind == "added" else _around_the_middle(b, name, zeros, scales, codes)
    return b.op(
        "Transpose",
        [added],
        name=f"{name}.offsets",
        shape=shape[::-1],
        attributes={"perm": [1, 0]},
        dtype=FLOAT,
    )


def _around_the_middle(
    b: GraphBuilder, name: str, zeros: ir.Value, scales: ir.Value, codes: Codes
) -> ir.Value:
    """Append what is added for each input where the product takes codes less their middle: [rows, groups]."""
    shape = tuple(int(size) for size in zeros.shape.numpy())  # type: ignore[union-attr]  # planned
    middle = b.shared_constant(f"middle.{codes.bits}", np.array(2 ** (codes.bits - 1), np.float32))

    def op(kind: str, inputs: list[ir.Value], part: str) -> ir.Value:
        return b.op(kind, inputs, name=f"{name}.{part}", shape=shape, dtype=FLOAT)

    if codes.zero_kind == "points":
        return op("Mul", [op("Sub", [middle, zeros], "zeros.apart"), scales], "offsets.rows")
    return op("Sub", [op("Mul", [middle, scales], "middle.scaled"), zeros], "offsets.rows")
