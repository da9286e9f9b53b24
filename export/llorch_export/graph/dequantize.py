"""Weights in blocks in ONNX's own form: DequantizeLinear before MatMul, and after Gather for the embedding.

Codes lie as the product reads them, ``[inputs, outputs]`` with blocks along the inputs, because that is the
one arrangement that onnxruntime itself recognises and runs as MatMulNBits. Where all zero points are the
middle of the range, codes are stored signed, which needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_export.formats.module import ModuleFormat
from llorch_export.formats.precisions import BITS
from llorch_export.formats.targets import BlockForm
from llorch_export.graph.blocks import SCALE_TYPES, input_error_factor, quantised
from llorch_export.graph.builder import GraphBuilder
from llorch_export.graph.weights import Arrays
from llorch_export.quantize.layout import SCALE_DTYPES, Bytes, Matrix, block_count
from llorch_serve.errors import ArtifactError

_BAND_ELEMENTS: Final = 2**25  # of codes held at a time: 32 MiB


def dequantizes(b: GraphBuilder, form: ModuleFormat) -> bool:
    """Tell whether weights of this format are stored in this form."""
    return form.precision in BITS and b.target.blocks is BlockForm.DEQUANTIZE


def dequantized_matrix(b: GraphBuilder, name: str, weights: Sequence[str], form: ModuleFormat) -> ir.Value:
    """Append the matrix [inputs, outputs] of the stacked ``weights``, dequantised.

    Raises ArtifactError if its codes cannot be packed.
    """
    outputs, inputs = b.rows(weights), b.tensors[weights[0]].shape[1]
    bits, block_size = BITS[form.precision], form.block_size
    assert block_size is not None, "a quantised format has a block size"
    if bits == 4 and outputs % 2:
        raise ArtifactError(
            f"{name} has {outputs} outputs; 4-bit codes of this target are stored in pairs, so export at int8"
        )
    affine = form.zero_points
    blocks = block_count(inputs, block_size)
    codes_type = ir.DataType.INT8 if bits == 8 else ir.DataType.UINT4 if affine else ir.DataType.INT4
    scales_name, scale_type = f"{name}.scales.stored", SCALE_TYPES[form.scale_type]
    if scale_type == b.compute:
        scales_name = f"{name}.scales"
    codes_shape, stored = (inputs, outputs), (inputs, outputs * bits // 8)
    specs = [
        (f"{name}.codes", ir.DataType.INT8 if bits == 8 else ir.DataType.UINT8, stored),
        (scales_name, scale_type, (blocks, outputs)),
    ]
    if affine:
        specs.append((f"{name}.zero_points", ir.DataType.UINT8, (blocks, outputs * bits // 8)))
    codes, scales, *zero_points = b.weights.stream(
        specs, lambda: _bands(b, name, weights, inputs, outputs, form)
    )
    if bits == 4:
        codes = b.weights.reinterpret(codes, codes_type, codes_shape)
        zero_points = [b.weights.reinterpret(z, codes_type, (blocks, outputs)) for z in zero_points]
    if scale_type != b.compute:
        scales = b.op(
            "Cast",
            [scales],
            name=f"{name}.scales",
            shape=(blocks, outputs),
            attributes={"to": b.compute.value},
        )
    return b.op(
        "DequantizeLinear",
        [codes, scales, *zero_points],
        name=f"{name}.weight",
        shape=(inputs, outputs),
        attributes={"axis": 0, "block_size": block_size},
    )


def dequantized_rows(
    b: GraphBuilder, weight: str, indices: ir.Value, form: ModuleFormat, *, name: str
) -> ir.Value:
    """Append the rows of an 8-bit table [rows, columns] that ``indices`` [batch, tokens] names,
    dequantised.
    """
    rows, columns = b.tensors[weight].shape
    block_size = form.block_size
    assert block_size is not None, "a quantised format has a block size"
    blocks = block_count(columns, block_size)
    chunks = b.row_chunks([weight])

    def produce() -> Iterator[Arrays]:
        factor = input_error_factor(b, [weight], form)  # of the head's input, where it is the same table
        for chunk in chunks():
            b.weight_cast.check_range(weight, chunk)
            found = quantised(chunk, form, factor)
            codes = found.packed.reshape(len(chunk), -1)[:, :columns]
            yield _signed(codes), found.scales

    scale_type = SCALE_TYPES[form.scale_type]
    table, scales = b.weights.stream(
        [
            (f"{weight}.codes", ir.DataType.INT8, (rows, columns)),
            (f"{weight}.scales", scale_type, (rows, blocks)),
        ],
        produce,
    )
    found, factors = (
        b.op(
            "Gather",
            [value, indices],
            name=f"{name}/{part}",
            shape=(*b.dims.lead, width),
            attributes={"axis": 0},
            dtype=kind,
        )
        for value, part, width, kind in (
            (table, "codes", columns, ir.DataType.INT8),
            (scales, "scales.stored", blocks, scale_type),
        )
    )
    if scale_type != b.compute:
        factors = b.op(
            "Cast",
            [factors],
            name=f"{name}/scales",
            shape=(*b.dims.lead, blocks),
            attributes={"to": b.compute.value},
        )
    return b.op(
        "DequantizeLinear",
        [found, factors],
        name=name,
        shape=(*b.dims.lead, columns),
        attributes={"axis": 2, "block_size": block_size},
    )


def _bands(
    b: GraphBuilder,
    name: str,
    weights: Sequence[str],
    inputs: int,
    outputs: int,
    form: ModuleFormat,
) -> Iterator[Arrays]:
    """Give codes, scales and, if the quantiser has them, zero points of whole blocks of inputs at a time.

    A matrix of more than one band is read once for each.
    """
    chunks, bits, block_size = b.row_chunks(weights), BITS[form.precision], form.block_size
    assert block_size is not None, "a quantised format has a block size"
    factor = input_error_factor(b, weights, form)
    step = max(1, _BAND_ELEMENTS // (outputs * block_size)) * block_size
    for start in range(0, inputs, step):
        stop = min(start + step, inputs)
        blocks = block_count(stop - start, block_size)
        codes = np.empty((stop - start, outputs), np.uint8)
        scales = np.empty((blocks, outputs), SCALE_DTYPES[form.scale_type])
        zeros: Bytes | None = None
        column = 0
        for chunk in chunks():
            b.weight_cast.check_range(f"{name}.weight", chunk)
            columns = slice(column, column := column + len(chunk))
            band = _quantised_band(chunk, form, factor, start, stop)
            codes[:, columns], scales[:, columns] = band[0].T, band[1].T
            if band[2] is not None:
                zeros = np.empty((blocks, outputs), np.uint8) if zeros is None else zeros
                zeros[:, columns] = band[2].T
        if bits == 8:
            yield _signed(codes), scales
        elif zeros is None:
            yield _packed(codes ^ np.uint8(8)), scales
        else:
            yield _packed(codes), scales, _packed(zeros)


def _quantised_band(
    chunk: Matrix, form: ModuleFormat, factor: Matrix | None, start: int, stop: int
) -> tuple[Bytes, npt.NDArray[np.generic], Bytes | None]:
    """Return codes, scales and zero points, if any, of the columns ``start`` to ``stop``, whole blocks, one
    row for each of ``chunk``.

    With a factor a column's code depends on all columns before it, so the others are quantised too.
    """
    assert form.block_size is not None
    bits = BITS[form.precision]
    first = 0 if factor is None else start
    taken = np.ascontiguousarray(chunk[:, start:stop]) if factor is None else chunk
    found = quantised(taken, form, factor)
    columns = slice(first, first + stop - start)
    blocks = slice(first // form.block_size, block_count(first + stop - start, form.block_size))
    zeros = None if found.zero_points is None else _unpacked(found.zero_points, bits)[:, blocks]
    codes = _unpacked(found.packed.reshape(len(chunk), -1), bits)[:, columns]
    return codes, found.scales[:, blocks], zeros


def _signed(codes: Bytes) -> npt.NDArray[np.int8]:
    """Return codes around 128 as codes around 0."""
    return (codes ^ np.uint8(0x80)).view(np.int8)


def _unpacked(packed: Bytes, bits: int) -> Bytes:
    """Return [rows, codes] from [rows, bytes]."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _packed(codes: Bytes) -> Bytes:
    """Return nibbles [rows, even] in pairs, the lower one first."""
    pairs: Bytes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return pairs
