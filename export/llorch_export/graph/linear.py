"""Linear layers ``y = x W^T + b``, in fp32 or with block-quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from llorch_export.graph.builder import CONTRIB, FLOAT, GraphBuilder
from llorch_export.options import BITS
from llorch_export.quantize.layout import Blocks, Matrix, block_count, zero_point_bytes
from llorch_export.quantize.nearest import quantize_nearest
from llorch_export.quantize.search import quantize_search
from llorch_serve.manifest import Precision, Recipe, ScaleType

_FINE_MODULES: Final = ("q_proj", "k_proj", "v_proj", "down_proj")
# Of a transposed matrix held at a time: 128 MiB, more than those of an 8B model take.
_BAND_ELEMENTS: Final = 2**25
_SCALE_TYPES: Final[dict[ScaleType, ir.DataType]] = {"float32": FLOAT, "bfloat16": ir.DataType.BFLOAT16}


def linear(
    b: GraphBuilder, x: ir.Value, modules: Sequence[str], *, name: str, lead: Sequence[int | str], bias: bool
) -> ir.Value:
    """Append the linear layer of ``modules`` (packed along the outputs if several) at the recipe's precision.

    lead: the leading dimensions of ``x`` and of the result.
    """
    weights = [f"{module}.weight" for module in modules]
    out_features, in_features = b.rows(weights), b.tensors[weights[0]].shape[1]
    chunks = b.row_chunks(weights)
    bias_value = None
    if bias:
        biases = [f"{module}.bias" for module in modules]
        bias_chunks = b.row_chunks(biases)
        bias_value = b.weights.stream(
            [(f"{name}.bias", FLOAT, (out_features,))], lambda: ((chunk,) for chunk in bias_chunks())
        )[0]
    shape = (*lead, out_features)
    if b.recipe.precision == "fp32":
        transposed = b.weights.stream(
            [(f"{name}.weight", FLOAT, (in_features, out_features))],
            lambda: ((band,) for band in _transposed(chunks, in_features, out_features)),
        )[0]
        y = b.op(
            "MatMul", [x, transposed], name=name if bias_value is None else f"{name}/product", shape=shape
        )
        return y if bias_value is None else b.op("Add", [y, bias_value], name=name, shape=shape)
    weight = block_weight(
        b,
        name,
        b.recipe.precision,
        out_features,
        in_features,
        chunks,
        block_size=_block_size(b.recipe, modules),
    )
    return matmul_nbits(b, x, weight, name=name, shape=shape, bias=bias_value)


def _transposed(
    chunks: Callable[[], Iterator[Matrix]], in_features: int, out_features: int
) -> Iterator[Matrix]:
    """Give the transpose of a matrix in bands of rows; a matrix of more than one band is read once for each."""
    step = max(1, _BAND_ELEMENTS // out_features)
    for start in range(0, in_features, step):
        stop = min(start + step, in_features)
        band = np.empty((stop - start, out_features), np.float32)
        column = 0
        for chunk in chunks():
            band[:, column : column + chunk.shape[0]] = chunk[:, start:stop].T
            column += chunk.shape[0]
        yield band
        del band  # else it would live on beside the next one


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A planned block-quantised matrix [rows, columns]; ``scales`` are float32 as the operators read them."""

    packed: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    bits: int
    block_size: int
    columns: int


def _block_size(recipe: Recipe, modules: Sequence[str]) -> int:
    """Return the block size of a linear layer; those whose errors weigh most may have their own."""
    assert recipe.block_size is not None, "a quantised recipe has a block size"
    fine = all(module.endswith(_FINE_MODULES) for module in modules)
    return (fine and recipe.fine_block_size) or recipe.block_size


def block_weight(
    b: GraphBuilder,
    name: str,
    precision: Precision,
    rows: int,
    columns: int,
    chunks: Callable[[], Iterator[Matrix]],
    *,
    block_size: int,
) -> BlockWeight:
    """Plan packed values [rows, blocks, bytes], scales [rows, blocks] and, if the recipe has them, zero points.

    chunks: reads the matrix [rows, columns], some rows at a time.
    """
    recipe, bits = b.recipe, BITS[precision]
    blocks = block_count(columns, block_size)
    scales_name = f"{name}.scales" if recipe.scale_type == "float32" else f"{name}.scales.stored"
    specs: list[tuple[str, ir.DataType, tuple[int, ...]]] = [
        (f"{name}.weight", ir.DataType.UINT8, (rows, blocks, block_size * bits // 8)),
        (scales_name, _SCALE_TYPES[recipe.scale_type], (rows, blocks)),
    ]
    if bits == 4 and recipe.quantizer == "affine":
        zeros = zero_point_bytes(columns, block_size, bits)
        specs.append((f"{name}.zero_points", ir.DataType.UINT8, (rows, zeros)))
    packed, scales, *rest = b.weights.stream(
        specs, lambda: (quantised(chunk, recipe, bits, block_size).arrays for chunk in chunks())
    )
    if recipe.scale_type != "float32":
        # Of constants, so the runtime does it once, when it loads the graph.
        scales = b.op(
            "Cast", [scales], name=f"{name}.scales", shape=(rows, blocks), attributes={"to": FLOAT.value}
        )
    return BlockWeight(packed, scales, rest[0] if rest else None, bits, block_size, columns)


def quantised(weight: Matrix, recipe: Recipe, bits: int, block_size: int) -> Blocks:
    """Quantise a matrix, or some rows of one, as the recipe says."""
    if bits == 8 or recipe.quantizer == "nearest":
        return quantize_nearest(weight, bits=bits, block_size=block_size, scale_type=recipe.scale_type)
    return quantize_search(
        weight,
        bits=bits,
        block_size=block_size,
        zero_points=recipe.quantizer == "affine",
        scale_type=recipe.scale_type,
    )


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
    attributes = {
        "K": weight.columns,
        "N": out_features,
        "bits": weight.bits,
        "block_size": weight.block_size,
        "accuracy_level": b.recipe.accuracy_level,
    }
    inputs = [x, weight.packed, weight.scales, weight.zero_points, None, bias]
    while inputs[-1] is None:
        inputs.pop()
    return b.op("MatMulNBits", inputs, name=name, shape=shape, attributes=attributes, domain=CONTRIB)
