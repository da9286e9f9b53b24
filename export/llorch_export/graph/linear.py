"""Linear layers ``y = x W^T + b``, in fp32 or with block-quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_export.graph.builder import CONTRIB, FLOAT, GraphBuilder
from llorch_export.options import BITS
from llorch_export.quantize import block_count, quantize_blocks
from llorch_serve.manifest import Precision


def linear(
    b: GraphBuilder, x: ir.Value, modules: Sequence[str], *, name: str, lead: Sequence[int | str], bias: bool
) -> ir.Value:
    """Append the linear layer of ``modules`` (packed along the outputs if several) at the recipe's precision.

    lead: the leading dimensions of ``x`` and of the result.
    """
    weights = [f"{module}.weight" for module in modules]
    out_features, in_features = b.rows(weights), b.tensors[weights[0]].shape[1]
    load = b.load_rows(weights)
    bias_value = None
    if bias:
        biases = [f"{module}.bias" for module in modules]
        load_bias = b.load_rows(biases)
        bias_value = b.weights.add([(f"{name}.bias", FLOAT, (out_features,))], lambda: (load_bias(),))[0]
    shape = (*lead, out_features)
    if b.recipe.precision == "fp32":
        weight = b.weights.add(
            [(f"{name}.weight", FLOAT, (in_features, out_features))],
            lambda: (np.ascontiguousarray(load().T),),
        )[0]
        y = b.op("MatMul", [x, weight], name=name if bias_value is None else f"{name}/product", shape=shape)
        return y if bias_value is None else b.op("Add", [y, bias_value], name=name, shape=shape)
    packed, scales = quantised_weight(b, name, b.recipe.precision, out_features, in_features, load)
    return matmul_nbits(
        b,
        x,
        packed,
        scales,
        bits=BITS[b.recipe.precision],
        in_features=in_features,
        name=name,
        shape=shape,
        bias=bias_value,
    )


def quantised_weight(
    b: GraphBuilder,
    name: str,
    precision: Precision,
    rows: int,
    columns: int,
    load: Callable[[], npt.NDArray[np.float32]],
) -> tuple[ir.Value, ir.Value]:
    """Plan packed values [rows, blocks, bytes] and scales [rows, blocks] of one matrix."""
    block_size, bits = _block_size(b), BITS[precision]
    blocks = block_count(columns, block_size)
    packed, scales = b.weights.add(
        [
            (f"{name}.weight", ir.DataType.UINT8, (rows, blocks, block_size * bits // 8)),
            (f"{name}.scales", FLOAT, (rows, blocks)),
        ],
        lambda: quantize_blocks(load(), bits=bits, block_size=block_size),
    )
    return packed, scales


def matmul_nbits(
    b: GraphBuilder,
    x: ir.Value,
    packed: ir.Value,
    scales: ir.Value,
    *,
    bits: int,
    in_features: int,
    name: str,
    shape: Sequence[int | str],
    bias: ir.Value | None = None,
) -> ir.Value:
    """Append a MatMulNBits node over weights made by :func:`quantised_weight`."""
    out_features = shape[-1]
    assert isinstance(out_features, int)
    assert b.recipe.accuracy_level is not None
    attributes = {
        "K": in_features,
        "N": out_features,
        "bits": bits,
        "block_size": _block_size(b),
        "accuracy_level": b.recipe.accuracy_level,
    }
    inputs = [x, packed, scales] if bias is None else [x, packed, scales, None, None, bias]
    return b.op("MatMulNBits", inputs, name=name, shape=shape, attributes=attributes, domain=CONTRIB)


def _block_size(b: GraphBuilder) -> int:
    assert b.recipe.block_size is not None, "a quantised recipe has a block size"
    return b.recipe.block_size
