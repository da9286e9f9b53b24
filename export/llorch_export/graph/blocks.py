"""Weight matrices in blocks: quantised by the recipe, or carried over from a GGUF file.

Input are the names of checkpoint tensors that are stacked along their rows; output are planned initialisers
in MatMulNBits' layout, which GatherBlockQuantized shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_export.checkpoint.base import CHUNK_ELEMENTS
from llorch_export.checkpoint.codes import Codes
from llorch_export.formats.module import ModuleFormat
from llorch_export.formats.precisions import BITS, UNQUANTISED
from llorch_export.graph.builder import GraphBuilder
from llorch_export.graph.folded import widened_blocks
from llorch_export.graph.folded_scales import strips
from llorch_export.graph.folded_values import widened_values
from llorch_export.graph.source_forms import requantised, widths_for
from llorch_export.graph.weights import Arrays, ArraySpec
from llorch_export.quantize.carried import carried
from llorch_export.quantize.feedback import quantize_feedback
from llorch_export.quantize.folded import FoldedForm, FoldedValues
from llorch_export.quantize.half_quadratic import half_quadratic
from llorch_export.quantize.layout import Blocks, Matrix, block_count, pack, zero_point_bytes
from llorch_export.quantize.nearest import quantize_nearest
from llorch_export.quantize.repack import REPACKED_TYPES, BlockForm, common_form, repack
from llorch_export.quantize.search import quantize_blocks, quantize_search
from llorch_export.quantize.threads import in_order
from llorch_serve.artifact.manifest import ScaleType

SCALE_TYPES: Final[dict[ScaleType, ir.DataType]] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A planned matrix [rows, columns]: packed codes [rows, blocks, bytes], scales [rows, blocks] in the
    compute type, zero points if any.

    input_order: column ``j`` of it is for input ``input_order[j]``; None: for input ``j``.
    input_scales: what inputs are multiplied by, before they are brought into order; None: nothing.
    offsets: [groups, rows], what the sum of each group of inputs is multiplied by and added to the product;
        None: nothing.
    rounded_inputs: whether products may round their inputs, as the recipe says.
    """

    packed: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    bits: int
    block_size: int
    columns: int
    input_order: npt.NDArray[np.intp] | None = None
    offsets: ir.Value | None = None
    input_scales: npt.NDArray[np.float32] | None = None
    rounded_inputs: bool = True


def block_weight(
    b: GraphBuilder, name: str, weights: Sequence[str], form: ModuleFormat
) -> BlockWeight | None:
    """Plan the stacked ``weights``; None where they stay whole, as ``form`` or the checkpoint has it."""
    precision = form.precision
    if precision in UNQUANTISED:
        return None
    rows, columns = b.rows(weights), b.tensors[weights[0]].shape[1]
    if precision == "source":
        return _as_the_source(b, name, weights)
    assert form.block_size is not None, "a quantised format has a block size"
    return _plan(
        b,
        name,
        BlockForm(BITS[precision], form.block_size, zero_points=form.zero_points),
        rows,
        columns,
        lambda: quantised_chunks(b, name, weights, form),
        scale_type=form.scale_type,
    )


def _as_the_source(b: GraphBuilder, name: str, weights: Sequence[str]) -> BlockWeight | None:
    """Plan ``weights`` in the blocks or codes that the checkpoint has them in."""
    tensors = [b.tensors[weight] for weight in weights]
    rows, columns = b.rows(weights), tensors[0].shape[1]
    if tensors[0].packed is not None:
        found = b.source_forms.carried(tensors[0])
        if found is None:
            form = requantised(tensors[0])
            assert form.block_size is not None
            blocks = BlockForm(BITS[form.precision], form.block_size, zero_points=False)
            return _plan(
                b,
                name,
                blocks,
                rows,
                columns,
                lambda: quantised_chunks(b, name, weights, form),
                scale_type=form.scale_type,
            )
        codes, carried_as = found
        if isinstance(carried_as, FoldedValues):
            return None
        if isinstance(carried_as, FoldedForm):
            return _folded(b, name, weights, codes, carried_as)
        blocks = carried_as
        planned = _plan(
            b,
            name,
            blocks,
            rows,
            columns,
            lambda: coded_chunks(b, weights, blocks),
            scale_type=codes.scale_type,
        )
        return replace(planned, input_order=codes.input_order, input_scales=codes.input_scales)
    if any(tensor.read_blocks is None or tensor.dtype not in REPACKED_TYPES for tensor in tensors):
        return None
    widths = widths_for(weights[0], b.target)
    carried = common_form((tensor.dtype for tensor in tensors), widths)
    return _plan(
        b, name, carried, rows, columns, lambda: carried_chunks(b, weights, carried), scale_type="float32"
    )


def values_of_levels(b: GraphBuilder, name: str, weights: Sequence[str]) -> ir.Value | None:
    """Plan the stacked ``weights`` as a matrix [rows, columns] of values that are levels in the data file;
    None where the checkpoint has them otherwise.
    """
    found = b.source_forms.carried(b.tensors[weights[0]])
    if found is None or not isinstance(found[1], FoldedValues):
        return None
    return widened_values(b, name, weights, found[1])


def _folded(b: GraphBuilder, name: str, weights: Sequence[str], codes: Codes, how: FoldedForm) -> BlockWeight:
    wide = widened_blocks(b, name, weights, how)
    return BlockWeight(
        wide.packed,
        wide.scales,
        wide.zero_points,
        how.form.bits,
        how.form.block_size,
        codes.columns,
        codes.input_order,
        wide.offsets,
        codes.input_scales,
        rounded_inputs=not how.pairs,
    )


def quantised_chunks(
    b: GraphBuilder, name: str, weights: Sequence[str], form: ModuleFormat
) -> Iterator[Arrays]:
    """Give the blocks of some rows of the stacked ``weights`` at a time; they all read the same input."""
    factor = input_error_factor(b, weights, form)

    def checked() -> Iterator[Matrix]:
        for chunk in b.row_chunks(weights)():
            b.weight_cast.check_range(f"{name}.weight", chunk)
            yield chunk

    def blocks(chunk: Matrix) -> Arrays:
        return quantised(chunk, form, factor).arrays

    # Other quantizers than error feedback have threads of their own.
    yield from map(blocks, checked()) if factor is None else in_order(blocks, checked())


def input_error_factor(b: GraphBuilder, weights: Sequence[str], form: ModuleFormat) -> Matrix | None:
    """Return the factor by which ``gptq`` spreads errors over the inputs that all ``weights`` read; None for
    other quantizers.
    """
    if form.quantizer != "gptq":
        return None
    assert b.error_factors is not None, "a recipe with gptq comes with a calibration text"
    return b.error_factors(weights[0])


def quantised(weight: Matrix, form: ModuleFormat, factor: Matrix | None = None) -> Blocks:
    """Quantise a matrix, or some rows of one. factor: of its inputs, for quantizer ``gptq``."""
    assert form.block_size is not None
    bits, block_size, scale_type = BITS[form.precision], form.block_size, form.scale_type
    if form.quantizer in (None, "nearest"):
        return quantize_nearest(weight, bits=bits, block_size=block_size, scale_type=scale_type)
    if form.quantizer == "gptq":
        assert factor is not None
        return quantize_feedback(
            weight,
            factor,
            bits=bits,
            block_size=block_size,
            zero_points=form.zero_points,
            scale_type=scale_type,
        )
    if form.quantizer == "hqq":
        return quantize_blocks(
            weight,
            lambda block: half_quadratic(block, bits, scale_type),
            bits=bits,
            block_size=block_size,
            zero_points=True,
            scale_type=scale_type,
        )
    return quantize_search(
        weight,
        bits=bits,
        block_size=block_size,
        zero_points=form.quantizer == "affine",
        scale_type=scale_type,
    )


def _plan(
    b: GraphBuilder,
    name: str,
    form: BlockForm,
    rows: int,
    columns: int,
    produce: Callable[[], Iterator[Arrays]],
    *,
    scale_type: ScaleType,
) -> BlockWeight:
    blocks = block_count(columns, form.block_size)
    ready = SCALE_TYPES[scale_type] == b.compute
    scales_name = f"{name}.scales" if ready else f"{name}.scales.stored"
    specs: list[ArraySpec] = [
        (f"{name}.weight", ir.DataType.UINT8, (rows, blocks, form.block_size * form.bits // 8)),
        (scales_name, SCALE_TYPES[scale_type], (rows, blocks)),
    ]
    if form.zero_points:
        zeros = zero_point_bytes(columns, form.block_size, form.bits)
        specs.append((f"{name}.zero_points", ir.DataType.UINT8, (rows, zeros)))
    packed, scales, *zero_points = b.weights.stream(specs, produce)
    if not ready:
        # Of constants, so the runtime does it once, when it loads the graph.
        scales = b.op(
            "Cast", [scales], name=f"{name}.scales", shape=(rows, blocks), attributes={"to": b.compute.value}
        )
    return BlockWeight(
        packed, scales, zero_points[0] if zero_points else None, form.bits, form.block_size, columns
    )


def coded_chunks(b: GraphBuilder, weights: Sequence[str], form: BlockForm) -> Iterator[Arrays]:
    """Give packed codes, scales and, if the form has them, zero points of some rows of the stacked
    ``weights`` at a time.
    """
    for codes, start, stop in strips(b, weights):
        yield carried(codes, form, start, stop)


def carried_chunks(b: GraphBuilder, weights: Sequence[str], form: BlockForm) -> Iterator[Arrays]:
    """Give packed codes, scales and, if the form has them, zero points of some rows of the stacked
    ``weights`` at a time.
    """
    for weight in weights:
        tensor = b.tensors[weight]
        assert tensor.read_blocks is not None, (weight, tensor.dtype)
        rows, columns = tensor.shape
        step = max(1, CHUNK_ELEMENTS // columns)
        for start in range(0, rows, step):
            data = tensor.read_blocks(start, min(start + step, rows))
            packed, scales, zero_points = repack(tensor.dtype, data, form)
            yield (packed, scales, pack(zero_points, form.bits)) if form.zero_points else (packed, scales)
