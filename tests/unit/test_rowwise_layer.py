"""A layer in per-channel int8, alone: bit for bit what its definition says, whatever its shape and its
neighbours.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest

from llorch_export.checkpoint.base import LazyTensor
from llorch_export.formats.targets import IR_VERSION, OPSET
from llorch_export.graph import integer
from llorch_export.graph.builder import FLOAT, GraphBuilder
from llorch_export.graph.linear import linear
from llorch_export.options import ExportOptions
from llorch_export.quantize.channels import quantize_channels
from llorch_export.recipes.base import base_recipe
from llorch_serve.artifact.manifest import Activations, Recipe
from llorch_serve.errors import ArtifactError
from llorch_serve.providers import byte_settings
from support.builders.checkpoints import tiny_llama_config
from support.oracles.integer_numpy import Matrix, quarter_product, row_product, weight_codes

WIDTHS = [(64, 96), (70, 9), (577, 33), (3, 1), (1, 5)]


@functools.cache
def recipe(activations: Activations = "row") -> Recipe:
    return base_recipe(ExportOptions(source="", output=Path(), activations=activations))


def build(
    tensors: dict[str, npt.NDArray[np.float32]],
    modules: list[str],
    *,
    bias: bool,
    activations: Activations = "row",
) -> GraphBuilder:
    """Return a builder with one layer of ``modules`` from ``x`` to ``y``."""
    lazy = {
        name: LazyTensor(name, array.shape, "F32", lambda start, stop, array=array: array[start:stop])
        for name, array in tensors.items()
    }
    b = GraphBuilder(tiny_llama_config(), recipe(activations), lazy)
    x = value("x", tensors[f"{modules[0]}.weight"].shape[1])
    linear(b, x, modules, name="y", lead=("batch", "tokens"), bias=bias)
    return b


def value(name: str, width: int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(FLOAT), shape=ir.Shape(("batch", "tokens", width)))


def stored(b: GraphBuilder) -> dict[str, npt.NDArray[np.generic]]:
    """Run the jobs and return what they give, by name."""
    found: dict[str, list[npt.NDArray[np.generic]]] = {}
    for job in b.weights.jobs:
        for arrays in job.chunks():
            for tensor, array in zip(job.tensors, arrays, strict=True):
                found.setdefault(tensor.name, []).append(array.copy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def session(b: GraphBuilder) -> onnxruntime.InferenceSession:
    """Load the builder's nodes, from ``x`` to the last one's output, with the weights inside."""
    data = bytearray(b.weights.total_bytes)
    for job in b.weights.jobs:
        for tensor in job.tensors:
            data[tensor.offset : tensor.offset + tensor.nbytes] = stored(b)[tensor.name].tobytes()
    for weight in b.weights.values:
        place = weight.const_value
        assert isinstance(place, ir.ExternalTensor)
        assert place.offset is not None
        array = np.frombuffer(data, place.dtype.numpy(), int(np.prod(place.shape)), place.offset)
        weight.const_value = ir.tensor(array.reshape(place.shape.numpy()), name=weight.name)
    graph = ir.Graph(
        [b.tape.nodes[0].inputs[0]],  # type: ignore[list-item]  # the first node reads x
        [b.tape.nodes[-1].outputs[0]],
        nodes=b.tape.nodes,
        initializers=[*b.weights.values, *b.tape.initializers],
        opset_imports={"": OPSET, "com.microsoft": 1},
        name="layer",
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    for setting in byte_settings().items():
        options.add_session_config_entry(*setting)
    model = ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(layer: onnxruntime.InferenceSession, x: Matrix) -> Matrix:
    (found,) = layer.run(None, {"x": x})
    result: Matrix = found
    return result


def rows(count: int, width: int) -> Matrix:
    """Return [1, count, width] with what rows can be: zero, tiny, of one outlier, huge, constant, and
    random.
    """
    x = np.random.default_rng(3).standard_normal((1, count, width)).astype(np.float32)
    for index, row in enumerate((0.0, 1e-36, 1e30, 1.0)):
        x[0, index] = x[0, index] * np.float32(row) if row != 1 else 1
    x[0, 4, width // 2] = 1e4
    return x


def weights(outputs: int, inputs: int) -> Matrix:
    weight = np.random.default_rng(4).standard_normal((outputs, inputs)).astype(np.float32)
    if outputs > 1:
        weight[outputs // 2] = 0
    return weight


@pytest.mark.parametrize(("inputs", "outputs"), WIDTHS)
def test_a_layer_is_its_definition_to_the_bit(inputs: int, outputs: int) -> None:
    weight = weights(outputs, inputs)
    layer = session(build({"m.weight": weight}, ["m"], bias=False))
    x = rows(40, inputs)
    np.testing.assert_array_equal(run(layer, x), row_product(x, weight))


@pytest.mark.parametrize(("inputs", "outputs"), WIDTHS)
def test_codes_and_scales_are_those_of_the_definition(inputs: int, outputs: int) -> None:
    weight = weights(outputs, inputs)
    codes, scales = quantize_channels(weight)
    expected, expected_scales = weight_codes(weight)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(scales, expected_scales)
    assert sorted(set(np.abs(codes).max(axis=1).tolist())) == ([127] if outputs == 1 else [0, 127])


def test_a_row_too_small_for_a_scale_is_zero() -> None:
    codes, scales = quantize_channels(np.array([[1e-38, -1e-38], [1, 2]], np.float32))
    assert codes.tolist() == [[0, 0], [64, 127]]
    assert scales[0] == 0


def test_stacked_layers_have_their_biases_added_unscaled() -> None:
    rng = np.random.default_rng(5)
    tensors = {f"{name}.weight": weights(n, 32) for name, n in (("q", 16), ("k", 7), ("v", 8))}
    tensors |= {
        f"{name}.bias": rng.standard_normal(n).astype(np.float32)
        for name, n in (("q", 16), ("k", 7), ("v", 8))
    }
    x = rows(9, 32)
    found = run(session(build(tensors, ["q", "k", "v"], bias=True)), x)
    expected = [row_product(x, tensors[f"{name}.weight"]) + tensors[f"{name}.bias"] for name in "qkv"]
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=-1))


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (580, 33), (4, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_quarters_of_a_row_are_their_definition_to_the_bit(inputs: int, outputs: int, bias: bool) -> None:
    tensors = {"m.weight": weights(outputs, inputs), "m.bias": np.arange(outputs, dtype=np.float32)}
    layer = session(build(tensors, ["m"], bias=bias, activations="quarters"))
    x = rows(40, inputs)
    expected = quarter_product(x, tensors["m.weight"]) + (tensors["m.bias"] if bias else np.float32(0))
    np.testing.assert_array_equal(run(layer, x), expected)


def test_an_outlier_costs_its_own_quarter_alone() -> None:
    weight = np.random.default_rng(6).integers(-127, 128, (96, 64)).astype(np.float32)
    weight[:, 0] = 127  # so that weights are codes already, and activations alone are rounded
    x = rows(40, 64)[:, 10:]
    x[..., 3] = 1e3
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    row, quarters = (
        np.square(run(session(build({"m.weight": weight}, ["m"], bias=False, activations=form)), x) - exact)
        for form in ("row", "quarters")
    )
    assert 2 * quarters.sum() < row.sum()


def test_inputs_that_do_not_come_in_quarters_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"m\.weight has 70 inputs, .* choose activations row"):
        build({"m.weight": weights(9, 70)}, ["m"], bias=False, activations="quarters")


@pytest.mark.parametrize("activations", ["row", "quarters"])
def test_a_row_is_the_same_alone_and_among_up_to_512(activations: Activations) -> None:
    layer = session(build({"m.weight": weights(96, 72)}, ["m"], bias=False, activations=activations))
    x = rows(512, 72)
    full = run(layer, x)
    for start, count in [(0, 1), (4, 1), (511, 1), (0, 2), (3, 3), (5, 8), (17, 33), (100, 255), (1, 511)]:
        np.testing.assert_array_equal(run(layer, x[:, start : start + count]), full[:, start : start + count])
    np.testing.assert_array_equal(run(layer, x.reshape(64, 8, 72)).reshape(full.shape), full)
    np.testing.assert_array_equal(run(layer, x.reshape(512, 1, 72)).reshape(full.shape), full)


def test_layers_that_read_one_value_round_it_once() -> None:
    tensors = {"gate.weight": weights(8, 16), "up.weight": weights(8, 16)}
    b = build(tensors, ["gate"], bias=False)
    x = b.tape.nodes[0].inputs[0]
    assert x is not None
    linear(b, x, ["up"], name="z", lead=("batch", "tokens"), bias=False)
    assert [n.op_type for n in b.tape.nodes].count("QuantizeLinear") == 1
    assert [n.op_type for n in b.tape.nodes].count("MatMulIntegerToFloat") == 2


@pytest.mark.parametrize("elements", [1, 100, 10**6])
def test_bands_of_any_size_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    weight = weights(24, 50)
    monkeypatch.setattr(integer, "_BAND_ELEMENTS", elements)
    found = stored(build({"m.weight": weight}, ["m"], bias=False))
    codes, scales = weight_codes(weight)
    np.testing.assert_array_equal(found["y.weight"], codes.T)
    np.testing.assert_array_equal(found["y.scales"], scales)


def test_more_inputs_than_sums_hold_are_refused() -> None:
    wide = np.broadcast_to(np.float32(1), (1, 132_105))
    with pytest.raises(ArtifactError, match=r"m\.weight has 132105 inputs; .* 132104 products"):
        build({"m.weight": wide}, ["m"], bias=False)


def test_the_widest_layer_sums_without_wrapping() -> None:
    weight = np.ones((2, integer._MOST_INPUTS), np.float32)
    weight[1] = -1
    layer = session(build({"m.weight": weight}, ["m"], bias=False))
    x = np.ones((1, 2, integer._MOST_INPUTS), np.float32)
    x[0, 1] = -1
    np.testing.assert_array_equal(run(layer, x), row_product(x, weight))
