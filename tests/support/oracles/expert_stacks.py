"""The values that a graph's stacks of experts stand for, by the operator's definition in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx

from llorch_serve.artifact.folder import Artifact
from support.oracles.quantised_numpy import unpack

Matrices = npt.NDArray[np.float32]


def stacks(artifact: Artifact) -> dict[str, Matrices]:
    """Return the values of each stack of a graph, by name: from the layout's definition, in numpy."""
    model = onnx.load(artifact.folder / "model.onnx")
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    narrow = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    found = {}
    for node in model.graph.node:
        if node.op_type != "QMoE":
            continue
        bits = next(a.i for a in node.attribute if a.name == "expert_weight_bits")
        inputs = [held.get(narrow.get(name, name)) for name in node.input] + [None] * 15
        for first, zeros in ((2, 11), (5, 12)):
            packed, scales, zero_points = inputs[first], inputs[first + 1], inputs[zeros]
            assert packed is not None
            assert scales is not None
            blocks = scales.shape[-1]
            codes = unpack(packed, bits).reshape(*scales.shape, -1)
            middle = np.full(scales.shape, 2 ** (bits - 1))
            if zero_points is not None:
                middle = unpack(zero_points, bits)[..., :blocks]
            values = (codes - middle[..., None]) * scales[..., None].astype(np.float64)
            name = node.input[first].removesuffix(".weight")
            found[name] = values.reshape(*scales.shape[:2], -1).astype(np.float32)
    return found
