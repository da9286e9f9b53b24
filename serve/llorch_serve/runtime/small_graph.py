"""Graphs of a few operators, made here and run where the logits are.

They are written with the runtime's own messages, as serving needs no onnx.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llorch_serve.errors import ProviderError
from llorch_serve.providers import ActiveProvider, placement
from llorch_serve.providers.onnx_messages import model_class
from llorch_serve.runtime.graph_loading import runtime_options

FLOAT32: Final = 1
INT64: Final = 7
FLOAT64: Final = 11
_INT: Final = 2  # a kind of attributes
# A kernel without an upper bound is taken for the version of the operator that it was written for alone, and
# CUDA's ReduceMax is of 18: in a later opset the operator is of 20, and the CPU would get it.
_OPSET: Final = 18


class SmallGraph:
    """An ONNX graph that is being written."""

    def __init__(self, name: str) -> None:
        self._model = model_class()(ir_version=10)
        self._model.opset_import.add(domain="", version=_OPSET)
        self._graph = self._model.graph
        self._graph.name = name

    def constant(self, name: str, value: npt.NDArray[Any]) -> None:
        """Add a constant of float32 or int64."""
        element = INT64 if value.dtype == np.int64 else FLOAT32
        self._graph.initializer.add(dims=value.shape, data_type=element, name=name, raw_data=value.tobytes())

    def node(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: int) -> None:
        """Add a node, named as its first output."""
        node = self._graph.node.add(op_type=operator, name=outputs[0])
        node.input.extend(inputs)
        node.output.extend(outputs)
        for key, number in attributes.items():
            node.attribute.add(name=key, i=number, type=_INT)

    def takes(self, name: str, element: int, shape: Sequence[int | None]) -> None:
        """Declare an input. shape: None: any size."""
        _declare(self._graph.input, name, element, shape)

    def gives(self, name: str, element: int, shape: Sequence[int | None]) -> None:
        """Declare an output. shape: None: any size."""
        _declare(self._graph.output, name, element, shape)

    def serialised(self) -> bytes:
        """Return the model as onnxruntime takes it."""
        return bytes(self._model.SerializeToString())


def _declare(values: Any, name: str, element: int, shape: Sequence[int | None]) -> None:
    value = values.add(name=name)
    value.type.tensor_type.elem_type = element
    for size in shape:
        value.type.tensor_type.shape.dim.add(dim_value=size)


@contextlib.contextmanager
def open_small(runtime: Any, provider: ActiveProvider, model: bytes, fault: str) -> Iterator[Any]:
    """Load a graph on a provider, all of whose nodes are to run there; give onnxruntime's session, to be
    tried.

    fault: what is said of the provider where this or the trial fails. Raises ProviderError then.
    """
    options = runtime_options(runtime, 1)
    try:
        session = runtime.InferenceSession(model, sess_options=options, **provider.add_to(options))
        placement(session, provider.runtime_name, allow_cpu_nodes=False)
        yield session
    except ProviderError:
        raise
    except Exception as error:  # the runtime's own classes of errors share no narrower base
        said = " ".join(str(error).split())[:300]
        raise ProviderError(f"{provider.runtime_name} {fault}: {said}") from error
