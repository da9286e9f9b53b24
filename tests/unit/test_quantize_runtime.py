"""ONNX Runtime reads our packed blocks as numpy does: MatMulNBits and GatherBlockQuantized, op by op."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from llorch_export.formats.targets import IR_VERSION, OPSET
from llorch_export.quantize.layout import Blocks, block_count
from llorch_export.quantize.nearest import quantize_nearest
from llorch_export.quantize.search import quantize_search
from llorch_export.recipes.storage_defaults import BLOCK_SIZES
from support.oracles.quantised_numpy import dequantise
from tolerances import GATHERED_ROWS, MATMUL_RELATIVE_LEVEL_0, MATMUL_STEP_LEVEL_4

Matrix = npt.NDArray[np.float32]


def run_node(
    op: str,
    inputs: dict[str, npt.NDArray[Any]],
    constants: dict[str, npt.NDArray[Any]],
    order: str,
    **attributes: int,
) -> Matrix:
    """Run one contrib operator; ``order`` names its inputs."""
    node = helper.make_node(op, order.split(), ["y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in inputs.items()
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (result,) = session.run(None, inputs)
    return result


affine_or_not = pytest.mark.parametrize("affine", [False, True], ids=["symmetric", "affine"])


def problem(rows: int, columns: int, out: int) -> tuple[Matrix, Matrix]:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    weight = rng.standard_normal((out, columns)).astype(np.float32)
    return x, weight


def blocks_of(weight: Matrix, *, bits: int, block_size: int, affine: bool) -> Blocks:
    """Quantise; with zero points of all kinds if ``affine``, so the weights are moved off the middle."""
    if not affine:
        return quantize_nearest(weight, bits=bits, block_size=block_size)
    shifted = weight + np.linspace(-1, 1, len(weight), dtype=np.float32)[:, None]
    return quantize_search(shifted, bits=bits, block_size=block_size, zero_points=True)


def constants(blocks: Blocks) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """Return the operators' constants by name, and their order."""
    named = dict(zip("wsz", blocks.arrays, strict=False))
    return named, " ".join(named)


def matmul(x: Matrix, blocks: Blocks, **attributes: int) -> Matrix:
    named, order = constants(blocks)
    shape = {"K": x.shape[1], "N": len(blocks.packed)}
    return run_node("MatMulNBits", {"x": x}, named, f"x {order}", **shape, **attributes)


# 72 and 88 are no multiple of most blocks; 512 holds whole blocks of every size.
@pytest.mark.parametrize("columns", [72, 88, 512])
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
@affine_or_not
def test_matmul_at_level_0_equals_numpy(
    affine: bool, bits: int, block_size: int, rows: int, columns: int
) -> None:
    x, weight = problem(rows, columns, 48)
    quantised = blocks_of(weight, bits=bits, block_size=block_size, affine=affine)
    expected = x.astype(np.float64) @ dequantise(quantised, bits=bits, columns=columns).T.astype(np.float64)
    found = matmul(x, quantised, bits=bits, block_size=block_size, accuracy_level=0)
    limit = MATMUL_RELATIVE_LEVEL_0 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=limit, rtol=0)


@pytest.mark.parametrize("columns", [72, 88, 512])
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
@affine_or_not
def test_matmul_at_level_4_stays_within_its_bound(
    affine: bool, bits: int, block_size: int, rows: int, columns: int
) -> None:
    """Level 4 rounds each block of activations to int8 by its largest magnitude; that bounds every output."""
    x, weight = problem(rows, columns, 48)
    quantised = blocks_of(weight, bits=bits, block_size=block_size, affine=affine)
    wide = dequantise(quantised, bits=bits, columns=columns).astype(np.float64)
    blocks = block_count(columns, block_size)
    room = ((0, 0), (0, blocks * block_size - columns))
    step = np.abs(np.pad(x, room)).reshape(rows, blocks, block_size).max(axis=2) / 127
    mass = np.abs(np.pad(wide, room)).reshape(48, blocks, block_size).sum(axis=2)
    bound = MATMUL_STEP_LEVEL_4 * step.astype(np.float64) @ mass.T
    found = matmul(x, quantised, bits=bits, block_size=block_size, accuracy_level=4)
    error = np.abs(found - x @ wide.T)
    assert (error <= bound).all()
    assert error.max() > 0  # else level 4 did nothing, and this test bounds nothing


@pytest.mark.parametrize("columns", [64, 72, 88, 512])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
@affine_or_not
def test_gathered_rows_equal_numpy(affine: bool, bits: int, block_size: int, columns: int) -> None:
    _, weight = problem(1, columns, 40)
    quantised = blocks_of(weight, bits=bits, block_size=block_size, affine=affine)
    named, order = constants(quantised)
    ids = np.array([[0, 39, 7], [7, 7, 1]], np.int64)
    found = run_node(
        "GatherBlockQuantized",
        {"ids": ids},
        named | {"w": quantised.packed.reshape(40, -1)},
        order.replace("w ", "w ids "),
        bits=bits,
        block_size=block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    expected = dequantise(quantised, bits=bits, columns=columns)[ids]
    np.testing.assert_allclose(found[..., :columns], expected, rtol=GATHERED_ROWS)
    assert not found[..., columns:].any()
