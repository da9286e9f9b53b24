"""Where a graph's nodes and weights run, as the runtime recorded it; and the refusal of what runs
elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from llorch_serve.errors import ArtifactError, ProviderError
from llorch_serve.providers import CPU, ProviderShare, placement
from llorch_serve.providers.graph_weights import weights_of_nodes
from llorch_serve.providers.placement import describe_shares

Nodes = dict[str, list[tuple[str, str]]]


def session_with(used: list[str], nodes: Nodes) -> object:
    parts = [
        SimpleNamespace(
            ep_name=name, get_nodes=lambda found=found: [SimpleNamespace(name=n, op_type=o) for n, o in found]
        )
        for name, found in nodes.items()
    ]
    return SimpleNamespace(get_providers=lambda: used, get_provider_graph_assignment_info=lambda: parts)


def three_products(folder: Path, *, outside: bool) -> Path:
    """A file with products a (8 x 4 floats), b and c (2 x 2 floats, shared by both)."""
    weights = {"large": np.ones((8, 4), np.float32), "small": np.ones((2, 2), np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "large"], ["y"], name="a"),
        helper.make_node("MatMul", ["y", "small"], ["z"], name="b"),
        helper.make_node("MatMul", ["z", "small"], ["out"], name="c"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    path = folder / "model.onnx"
    onnx.save(
        helper.make_model(graph),
        str(path),
        save_as_external_data=outside,
        size_threshold=0,
        location="model.onnx.data",
    )
    return path


@pytest.mark.parametrize("outside", [True, False])
def test_weights_are_found_inside_the_file_and_outside(tmp_path: Path, outside: bool) -> None:
    found = weights_of_nodes(three_products(tmp_path, outside=outside))
    assert found == {"a": {"large": 128}, "b": {"small": 16}, "c": {"small": 16}}


def test_what_is_no_graph_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ArtifactError, match=r"model\.onnx cannot be read as ONNX"):
        weights_of_nodes(path)
    with pytest.raises(ArtifactError, match="missing"):
        weights_of_nodes(tmp_path / "missing")


def test_the_shares_of_nodes_and_of_weights_differ(tmp_path: Path) -> None:
    nodes = {CPU: [("a", "MatMul")], "Gpu": [("b", "MatMul"), ("c", "MatMul"), ("later", "Cast")]}
    found = placement(session_with(["Gpu", CPU], nodes), "Gpu", graph=three_products(tmp_path, outside=True))
    assert (found.provider, found.node_share) == ("Gpu", 0.75)
    assert found.shares == (
        ProviderShare("Gpu", 0.75, 16 / 144, (("MatMul", 2), ("Cast", 1))),
        ProviderShare(CPU, 0.25, 128 / 144, (("MatMul", 1),)),
    )
    assert describe_shares(found.shares) == (
        f"75.0% of nodes and 11.1% of weights on Gpu, 25.0% of nodes and 88.9% of weights on {CPU}"
    )


def test_nodes_elsewhere_are_refused_with_their_operators_unless_a_person_accepts_them() -> None:
    nodes: Nodes = {"Gpu": [("a", "MatMul")] * 9, CPU: [("b", "GroupQueryAttention")]}
    session = session_with(["Gpu", CPU], nodes)
    with pytest.raises(ProviderError) as caught:
        placement(session, "Gpu", allow_cpu_nodes=False)
    message = str(caught.value)
    assert "Gpu was asked for and does not run the whole graph" in message
    assert f"{CPU} has 1 GroupQueryAttention (10.0% of nodes" in message
    assert "--allow-cpu-nodes" in message
    assert placement(session, "Gpu", allow_cpu_nodes=True).node_share == 0.9


def test_a_whole_graph_is_accepted() -> None:
    session = session_with(["Gpu", CPU], {"Gpu": [("a", "MatMul")]})
    assert placement(session, "Gpu", allow_cpu_nodes=False).shares[0].weight_share == 1.0


@pytest.mark.parametrize("used", [[CPU], []])
def test_another_provider_than_the_one_asked_for_is_refused(used: list[str]) -> None:
    with pytest.raises(ProviderError, match="Gpu was asked for"):
        placement(session_with(used, {CPU: [("a", "MatMul")]}), "Gpu")


def test_what_is_not_recorded_is_not_claimed() -> None:
    session = session_with(["Gpu", CPU], {})
    with pytest.raises(ProviderError, match="does not record which nodes Gpu runs"):
        placement(session, "Gpu", allow_cpu_nodes=False)
    assert placement(session, "Gpu", allow_cpu_nodes=True).shares == ()
    assert placement(session_with([CPU], {}), CPU, allow_cpu_nodes=False).node_share == 1.0
