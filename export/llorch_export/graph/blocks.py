"""Weight matrices in blocks: quantised by the recipe, or carried over from a GGUF file.

Input are the names of checkpoint tensors that are stacked along their rows; output are planned initialisers in
MatMulNBits' layout, which GatherBlockQuantized shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from llorch_export.checkpoint.base import CHUNK_ELEMENTS
from llorch_export.graph.builder import FLOAT, GraphBuilder
from llorch_export.graph.weights import Arrays
from llorch_export.options import BITS
from llorch_export.quantize import block_count, quantize_blocks
from llorch_export.repack import REPACKED_TYPES, BlockForm, common_form, repack
from llorch_serve.manifest import Precision


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
        return _plan(b, name, form, rows, columns, lambda: _carried_over(b, weights, form))
    assert b.recipe.block_size is not None, "a quantised recipe has a block size"
    form = BlockForm(BITS[precision], b.recipe.block_size, zero_points=False)
    chunks = b.row_chunks(weights)
    return _plan(
        b,
        name,
        form,
        rows,
        columns,
        lambda: (quantize_blocks(chunk, bits=form.bits, block_size=form.block_size) for chunk in chunks()),
    )


def _plan(
    b: GraphBuilder,
    name: str,
    form: BlockForm,
    rows: int,
    columns: int,
    produce: Callable[[], Iterator[Arrays]],
) -> BlockWeight:
    blocks = block_count(columns, form.block_size)
    specs = [
        (f"{name}.weight", ir.DataType.UINT8, (rows, blocks, form.block_size * form.bits // 8)),
        (f"{name}.scales", FLOAT, (rows, blocks)),
    ]
    if form.zero_points:
        specs.append((f"{name}.zero_points", ir.DataType.UINT8, (rows, blocks)))
    packed, scales, *zero_points = b.weights.stream(specs, produce)
    return BlockWeight(
        packed, scales, zero_points[0] if zero_points else None, form.bits, form.block_size, columns
    )


def _carried_over(b: GraphBuilder, weights: Sequence[str], form: BlockForm) -> Iterator[Arrays]:
    """Give packed codes, scales and, if the form has them, zero points of some rows of the stacked ``weights`` at a time."""
    for weight in weights:
        tensor = b.tensors[weight]
        assert tensor.read_blocks is not None, (weight, tensor.dtype)
        rows, columns = tensor.shape
        step = max(1, CHUNK_ELEMENTS // columns)
        for start in range(0, rows, step):
            data = tensor.read_blocks(start, min(start + step, rows))
            yield repack(tensor.dtype, data, form)[: 3 if form.zero_points else 2]
