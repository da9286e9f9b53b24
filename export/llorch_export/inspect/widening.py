"""What the runtime makes of constants when it opens a graph, seen from the graph alone: nodes of
:mod:`llorch_export.graph.folded`.
"""

from __future__ import annotations

from typing import Final

import onnx

_SHARED_TABLES: Final = ("levels.", "lower.", "upper.", "values.")
"""How the names of tables begin by which many matrices are widened, so that they belong to none of them."""


class Widening:
    """The nodes of a graph whose inputs are all constants, apart from DequantizeLinear.

    weights: the graph's initialisers by name.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._nodes: dict[str, onnx.NodeProto] = {}
        for node in model.graph.node:
            constant = all(name in self.weights or name in self._nodes for name in node.input if name)
            if constant and node.op_type != "DequantizeLinear":
                self._nodes |= dict.fromkeys(node.output, node)

    def makes(self, name: str) -> bool:
        """Tell whether a value depends on constants alone, and is none itself."""
        return name in self._nodes

    def behind(self, name: str) -> list[onnx.TensorProto]:
        """Return what a value's own part of the data file is: initialisers, those inside the graph and shared
        tables apart; nothing for a value that depends on inputs.
        """
        found: dict[str, onnx.TensorProto] = {}
        waiting, seen = [name], {name}
        while waiting:
            value = waiting.pop()
            tensor, node = self.weights.get(value), self._nodes.get(value)
            if tensor is not None:
                if tensor.external_data and not value.startswith(_SHARED_TABLES):
                    found[value] = tensor
            elif node is not None:
                further = [each for each in dict.fromkeys(node.input) if each not in seen]
                seen.update(further)
                waiting += reversed(further)
        return list(found.values())
