"""Linear layers ``y = x W^T + b``: with weights in the compute type, in blocks, or in per-channel
int8 (``integer.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_export.graph.blocks import BlockWeight, block_weight, values_of_levels
from llorch_export.graph.builder import CONTRIB, GraphBuilder
from llorch_export.graph.dequantize import dequantized_matrix, dequantizes
from llorch_export.graph.folded import offset_sums
from llorch_export.graph.half_precision import COMPUTE_TYPES
from llorch_export.graph.integer import integer_linear
from llorch_export.graph.weights import Arrays
from llorch_export.quantize.layout import Matrix
from llorch_serve.artifact.manifest import ScaleType

# Of a transposed matrix held at a time: 128 MiB, more than those of an 8B model take.
_BAND_ELEMENTS: Final = 2**25


def linear(
    b: GraphBuilder, x: ir.Value, modules: Sequence[str], *, name: str, lead: Sequence[int | str], bias: bool
) -> ir.Value:
    """Append the linear layer of ``modules`` (packed along the outputs if several) in their format, which is
    one.

    lead: the leading dimensions of ``x`` and of the result.
    """
    weights = [f"{module}.weight" for module in modules]
    out_features = b.rows(weights)
    bias_value = None
    if bias:
        biases = [f"{module}.bias" for module in modules]
        bias_chunks = b.row_chunks(biases)
        bias_value = b.weights.stream(
            [(f"{name}.bias", b.compute, (out_features,))],
            lambda: ((b.weight_cast.cast(f"{name}.bias", chunk),) for chunk in bias_chunks()),
        )[0]
    shape = (*lead, out_features)
    form = b.formats.of(modules[0])
    assert all(b.formats.of(module) == form for module in modules), modules
    if form.activations is not None:
        return integer_linear(b, x, modules, form.activations, name=name, lead=lead, bias=bias_value)
    if dequantizes(b, form):
        matrix = dequantized_matrix(b, name, weights, form)
        return matmul(b, x, matrix, name=name, shape=shape, bias=bias_value)
    weight = block_weight(b, name, weights, form)
    if weight is not None:
        return matmul_nbits(b, x, weight, name=name, shape=shape, bias=bias_value)
    if form.precision == "source" and (values := values_of_levels(b, name, weights)) is not None:
        size = (b.tensors[weights[0]].shape[1], out_features)
        turned = b.op("Transpose", [values], name=f"{name}.weight", shape=size, attributes={"perm": [1, 0]})
        return matmul(b, x, turned, name=name, shape=shape, bias=bias_value)
    narrow = b.tensors[weights[0]].narrow_type if form.precision == "source" else None
    return matmul(b, x, _whole(b, name, weights, narrow), name=name, shape=shape, bias=bias_value)


def whole_linear(b: GraphBuilder, x: ir.Value, module: str, *, lead: Sequence[int | str]) -> ir.Value:
    """Append the linear layer of a module whose weights are in the compute type, whatever the recipe; with
    its bias, if the checkpoint has one.
    """
    weights, name = [f"{module}.weight"], f"{module}.bias"
    bias = b.vector(name) if name in b.tensors else None
    return matmul(b, x, _whole(b, module, weights), name=module, shape=(*lead, b.rows(weights)), bias=bias)


def _whole(b: GraphBuilder, name: str, weights: Sequence[str], narrow: ScaleType | None = None) -> ir.Value:
    """Plan the stacked ``weights`` in the compute type, [inputs, outputs], stored in the type ``narrow`` if
    that is given.
    """
    shape = (b.tensors[weights[0]].shape[1], b.rows(weights))
    chunks = b.row_chunks(weights)
    dtype = b.compute if narrow is None else COMPUTE_TYPES[narrow]

    def produce() -> Iterator[Arrays]:
        for band in _transposed(chunks, *shape):
            whole = b.weight_cast.cast(f"{name}.weight", band) if dtype == b.compute else band
            yield (whole.astype(dtype.numpy(), copy=False),)

    if dtype == b.compute:
        return b.weights.stream([(f"{name}.weight", dtype, shape)], produce)[0]
    stored = b.weights.stream([(f"{name}.weight.stored", dtype, shape)], produce)[0]
    return b.widened(stored, name=f"{name}.weight", shape=shape)


def matmul(
    b: GraphBuilder,
    x: ir.Value,
    matrix: ir.Value,
    *,
    name: str,
    shape: Sequence[int | str],
    bias: ir.Value | None = None,
) -> ir.Value:
    """Append the product with a matrix [inputs, outputs], and the bias if there is one."""
    y = b.op("MatMul", [x, matrix], name=name if bias is None else f"{name}/product", shape=shape)
    return y if bias is None else b.op("Add", [y, bias], name=name, shape=shape)


def _transposed(
    chunks: Callable[[], Iterator[Matrix]], in_features: int, out_features: int
) -> Iterator[Matrix]:
    """Give the transpose of a matrix in bands of rows; a matrix of more than one band is read once for
    each.
    """
    step = max(1, _BAND_ELEMENTS // out_features)
    for start in range(0, in_features, step):
        stop = min(start + step, in_features)
        band = np.empty((stop - start, out_features), np.float32)
        column = 0
        for chunk in chunks():
            band[:, column : column + chunk.shape[0]] = chunk[:, start:stop].T
            column += chunk.shape[0]
        yield band
        del band  # else it would live on while the next one is made


def matmul_nbits(
    b: GraphBuilder,
    x: ir.Value,
    weight: BlockWeight,
    *,
    name: str,
    shape: Sequence[int | str],
    bias: ir.Value | None = None,
) -> ir.Value:
    """Append a MatMulNBits node over a planned weight."""
    out_features = shape[-1]
    assert isinstance(out_features, int)
    assert b.recipe.accuracy_level is not None
    if weight.input_scales is not None:
        x = _scaled(b, x, weight.input_scales, name=name)
    if weight.input_order is not None:
        x = _reordered(b, x, weight.input_order, name=name)
    attributes = {
        "K": weight.columns,
        "N": out_features,
        "bits": weight.bits,
        "block_size": weight.block_size,
        "accuracy_level": b.recipe.accuracy_level if weight.rounded_inputs else 0,
    }
    inputs = [x, weight.packed, weight.scales, weight.zero_points, None, bias]
    while inputs[-1] is None:
        inputs.pop()
    if weight.offsets is None:
        return b.op("MatMulNBits", inputs, name=name, shape=shape, attributes=attributes, domain=CONTRIB)
    product = b.op(
        "MatMulNBits", inputs, name=f"{name}/product", shape=shape, attributes=attributes, domain=CONTRIB
    )
    added = offset_sums(b, x, weight.offsets, weight.columns, name=name, shape=shape)
    return b.op("Add", [product, added], name=name, shape=shape)


def _reordered(b: GraphBuilder, x: ir.Value, order: npt.NDArray[np.intp], *, name: str) -> ir.Value:
    """Append what brings the last dimension of ``x`` into ``order``: once for all that read it so."""

    def make() -> ir.Value:
        specs = [(f"{name}.input_order", ir.DataType.INT32, order.shape)]
        indices = b.weights.add(specs, lambda: (order.astype(np.int32),))[0]
        attributes = {"axis": -1}
        return b.op("Gather", [x, indices], name=f"{name}/reordered", shape=_sizes(x), attributes=attributes)

    return b.shared_value(("input_order", x, order.tobytes()), make)


def _scaled(b: GraphBuilder, x: ir.Value, factors: npt.NDArray[np.float32], *, name: str) -> ir.Value:
    """Append what multiplies the last dimension of ``x`` by ``factors``: once for all that read it so."""

    def make() -> ir.Value:
        stored = f"{name}.input_scales"
        specs = [(stored, b.compute, factors.shape)]
        values = b.weights.add(specs, lambda: (b.weight_cast.cast(stored, factors),))[0]
        return b.op("Mul", [x, values], name=f"{name}/scaled", shape=_sizes(x))

    return b.shared_value(("input_scales", x, factors.tobytes()), make)


def _sizes(x: ir.Value) -> list[int | str]:
    assert x.shape is not None
    return [size if isinstance(size, int) else str(size.value) for size in x.shape]
