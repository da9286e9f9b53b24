"""ONNX Runtime reads our packed blocks as numpy does: MatMulNBits and GatherBlockQuantized, op by op."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from llorch_export.graph.decoder import IR_VERSION, OPSET
from llorch_export.options import BLOCK_SIZES
from llorch_export.quantize import block_count, quantize_blocks
from quantised_numpy import dequantise
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


def problem(rows: int, columns: int, out: int) -> tuple[Matrix, Matrix]:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    weight = rng.standard_normal((out, columns)).astype(np.float32)
    return x, weight


def matmul(x: Matrix, packed: npt.NDArray[np.uint8], scales: Matrix, **attributes: int) -> Matrix:
    return run_node(
        "MatMulNBits",
        {"x": x},
        {"w": packed, "s": scales},
        "x w s",
        K=x.shape[1],
        N=len(packed),
        **attributes,
    )


# 72 and 88 are no multiple of most blocks; 512 holds whole blocks of every size.
@pytest.mark.parametrize("columns", [72, 88, 512])
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_at_level_0_equals_numpy(bits: int, block_size: int, rows: int, columns: int) -> None:
    x, weight = problem(rows, columns, 48)
    packed, scales = quantize_blocks(weight, bits=bits, block_size=block_size)
    expected = x.astype(np.float64) @ dequantise(packed, scales, bits=bits, columns=columns).T.astype(
        np.float64
    )
    found = matmul(x, packed, scales, bits=bits, block_size=block_size, accuracy_level=0)
    limit = MATMUL_RELATIVE_LEVEL_0 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=limit, rtol=0)


@pytest.mark.parametrize("columns", [72, 88, 512])
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_at_level_4_stays_within_its_bound(
    bits: int, block_size: int, rows: int, columns: int
) -> None:
    """Level 4 rounds each block of activations to int8 by its largest magnitude; that bounds every output."""
    x, weight = problem(rows, columns, 48)
    packed, scales = quantize_blocks(weight, bits=bits, block_size=block_size)
    wide = dequantise(packed, scales, bits=bits, columns=columns).astype(np.float64)
    blocks = block_count(columns, block_size)
    room = ((0, 0), (0, blocks * block_size - columns))
    step = np.abs(np.pad(x, room)).reshape(rows, blocks, block_size).max(axis=2) / 127
    mass = np.abs(np.pad(wide, room)).reshape(48, blocks, block_size).sum(axis=2)
    bound = MATMUL_STEP_LEVEL_4 * step.astype(np.float64) @ mass.T
    found = matmul(x, packed, scales, bits=bits, block_size=block_size, accuracy_level=4)
    error = np.abs(found - x @ wide.T)
    assert (error <= bound).all()
    assert error.max() > 0  # else level 4 did nothing, and this test bounds nothing


@pytest.mark.parametrize("columns", [64, 72, 88, 512])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
def test_gathered_rows_equal_numpy(bits: int, block_size: int, columns: int) -> None:
    _, weight = problem(1, columns, 40)
    packed, scales = quantize_blocks(weight, bits=bits, block_size=block_size)
    ids = np.array([[0, 39, 7], [7, 7, 1]], np.int64)
    found = run_node(
        "GatherBlockQuantized",
        {"ids": ids},
        {"w": packed.reshape(40, -1), "s": scales},
        "w ids s",
        bits=bits,
        block_size=block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    expected = dequantise(packed, scales, bits=bits, columns=columns)[ids]
    np.testing.assert_allclose(found[..., :columns], expected, rtol=GATHERED_ROWS)
    assert not found[..., columns:].any()
