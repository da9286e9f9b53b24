"""What an artifact's graph makes of constants, in graphs that a stranger made."""

from __future__ import annotations

import itertools

import onnx
from onnx import TensorProto, helper

from llorch_export.inspect.widening import Widening


def graph(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1])
    weight.external_data.add(key="length", value="4")
    return helper.make_model(helper.make_graph(nodes, "g", [], [], [weight]))


def test_a_chain_in_which_each_node_reads_the_one_before_twice_is_followed_once() -> None:
    count = 3000
    names = ["w", *(f"x{index}" for index in range(count))]
    nodes = [helper.make_node("Add", [a, a], [b]) for a, b in itertools.pairwise(names)]
    found = Widening(graph(nodes)).behind(f"x{count - 1}")
    assert [tensor.name for tensor in found] == ["w"]


def test_a_value_that_seems_to_depend_on_itself_is_followed_once() -> None:
    nodes = [helper.make_node("Cast", ["w"], ["x"]), helper.make_node("Cast", ["x"], ["x"])]
    assert Widening(graph(nodes)).behind("x") == []


def test_what_is_behind_a_value_comes_in_the_order_of_inputs() -> None:
    model = graph(
        [helper.make_node("Add", ["levels.1", "v"], ["x"]), helper.make_node("Mul", ["x", "w"], ["y"])]
    )
    for name in ("v", "levels.1"):
        more = model.graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=[1])
        more.external_data.add(key="length", value="4")
    model.graph.initializer.add(name="inside", data_type=TensorProto.FLOAT, dims=[1])
    widening = Widening(model)
    assert [tensor.name for tensor in widening.behind("y")] == ["v", "w"]
    assert widening.behind("inside") == []
    assert [tensor.name for tensor in widening.behind("w")] == ["w"]
