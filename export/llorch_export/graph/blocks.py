"""Weight matrices in blocks: quantised by the recipe, or carried over from a GGUF file.

Input are the names of checkpoint tensors that are stacked along their rows; output are planned initialisers in
MatMulNBits' layout, which GatherBlockQuantized shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_export.graph.builder import FLOAT, GraphBuilder
from llorch_export.graph.weights import Arrays
from llorch_export.options import BITS
from llorch_export.quantize import block_count, quantize_blocks
from llorch_export.repack import REPACKED_TYPES, BlockForm, common_form, repack
from llorch_serve.manifest import Precision

_CHUNK_ELEMENTS: Final = 2**21  # bytes and temporaries of so many weights are held at a time


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A planned matrix [rows, columns]: packed codes [rows, blocks, bytes], scales and any zero points [rows, blocks]."""

    packed: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    bits: int
    block_size: int
    columns: int


def block_weight(
    b: GraphBuilder, name: str, weights: Sequence[str], precision: Precision
) -> BlockWeight | None:
    """Plan the stacked ``weights``; None where they stay in fp32, as ``precision`` or the checkpoint's types have it."""
    if precision == "fp32":
        return None
    rows, columns = b.rows(weights), b.tensors[weights[0]].shape[1]
    if precision == "source":
        tensors = [b.tensors[weight] for weight in weights]
        if any(tensor.read_blocks is None or tensor.dtype not in REPACKED_TYPES for tensor in tensors):
            return None
        form = common_form(tensor.dtype for tensor in tensors)
        return _plan(b, name, form, rows, columns, lambda: _carried_over(b, weights, form, rows, columns))
    assert b.recipe.block_size is not None, "a quantised recipe has a block size"
    form = BlockForm(BITS[precision], b.recipe.block_size, zero_points=False)
    load = b.load_rows(weights)
    return _plan(
        b,
        name,
        form,
        rows,
        columns,
        lambda: quantize_blocks(load(), bits=form.bits, block_size=form.block_size),
    )


def _plan(
    b: GraphBuilder, name: str, form: BlockForm, rows: int, columns: int, produce: Callable[[], Arrays]
) -> BlockWeight:
    blocks = block_count(columns, form.block_size)
    specs = [
        (f"{name}.weight", ir.DataType.UINT8, (rows, blocks, form.block_size * form.bits // 8)),
        (f"{name}.scales", FLOAT, (rows, blocks)),
    ]
    if form.zero_points:
        specs.append((f"{name}.zero_points", ir.DataType.UINT8, (rows, blocks)))
    packed, scales, *zero_points = b.weights.add(specs, produce)
    return BlockWeight(
        packed, scales, zero_points[0] if zero_points else None, form.bits, form.block_size, columns
    )


def _carried_over(
    b: GraphBuilder, weights: Sequence[str], form: BlockForm, rows: int, columns: int
) -> Arrays:
    """Return packed codes, scales and, if the form has them, zero points of the stacked ``weights``."""
    blocks = columns // form.block_size
    packed = np.empty((rows, blocks, form.block_size * form.bits // 8), np.uint8)
    scales, zero_points = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.uint8)
    place = 0
    for kind, data in _stored_chunks(b, weights):
        part = slice(place, place + len(data))
        packed[part], scales[part], zero_points[part] = repack(kind, data, form)
        place = part.stop
    return (packed, scales, zero_points) if form.zero_points else (packed, scales)


def _stored_chunks(b: GraphBuilder, weights: Sequence[str]) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """Give storage type and stored bytes of some rows at a time."""
    for weight in weights:
        tensor = b.tensors[weight]
        assert tensor.read_blocks is not None, (weight, tensor.dtype)
        rows, columns = tensor.shape
        step = max(1, _CHUNK_ELEMENTS // columns)
        for start in range(0, rows, step):
            yield tensor.dtype, tensor.read_blocks(start, min(start + step, rows))
