"""The graphs of an artifact run by hand with onnxruntime, stage by stage, over plain numpy buffers.

An artifact of one graph is a chain of one stage, so that the same code runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import KvDtype, Manifest, cache_names
from llorch_serve.artifact.stages import stage_artifacts

Array = npt.NDArray[np.generic]
GraphOf = Callable[[Manifest], str]


def first_graph(manifest: Manifest) -> str:
    """Name the graph that every artifact has."""
    return manifest.graph


def decode_graph(manifest: Manifest) -> str:
    """Name the graph over a KV cache in int8."""
    assert manifest.int8_cache is not None
    return manifest.int8_cache.decode_graph


def prompts_graph(manifest: Manifest) -> str:
    """Name the graph for prompts."""
    assert manifest.prompts is not None
    return manifest.prompts.graph


_TYPES: dict[KvDtype, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "int8": np.int8}


class Chain:
    """One sequence that runs through all stages. Its cache is written in place, as a session's is."""

    def __init__(
        self, artifact: Artifact, capacity: int, graph: GraphOf = first_graph, kv_dtype: KvDtype | None = None
    ) -> None:
        views = [stage.manifest for stage in stage_artifacts(artifact)]
        self._stages = [_Stage(artifact.folder, view, capacity, graph, kv_dtype) for view in views]

    def run(self, ids: Sequence[int], start: int) -> Array:
        """Run tokens at positions ``start`` and on; return the logits of all of them."""
        total = start + len(ids)
        values: dict[str, Array] = {
            "input_ids": np.array([ids], np.int64),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "logits_indices": np.arange(len(ids), dtype=np.int64),
        }
        for stage in self._stages:
            values |= stage.run(values)
        return values["logits"]

    @property
    def cache(self) -> list[Array]:
        """Keys and values of all layers, as the next call finds them."""
        return [buffer for stage in self._stages for buffer in stage.cache.values()]


class _Stage:
    def __init__(
        self, folder: Path, view: Manifest, capacity: int, graph: GraphOf, kv_dtype: KvDtype | None
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(folder / graph(view)), options, providers=["CPUExecutionProvider"]
        )
        kv = view.kv
        shape = (1, kv.kv_heads, capacity, kv.head_dim)
        pairs = [(layer, kind) for layer in range(kv.layers) for kind in ("key", "value")]
        self._names = {
            kv.past_name.format(layer=layer, kind=kind): kv.present_name.format(layer=layer, kind=kind)
            for layer, kind in pairs
        }
        self.cache = {name: np.zeros(shape, _TYPES[kv_dtype or kv.dtype]) for name in self._names}
        cache = cache_names(kv)
        self._inputs = [spec.name for spec in view.inputs if spec.name not in cache]
        self._outputs = [spec.name for spec in view.outputs if spec.name not in cache]
        assert {node.name for node in self._session.get_inputs()} == {*self._inputs, *self._names}
        assert {node.name for node in self._session.get_outputs()} == {*self._outputs, *self._names.values()}

    def run(self, values: dict[str, Array]) -> dict[str, Array]:
        io = self._session.io_binding()
        for name in self._inputs:
            io.bind_cpu_input(name, values[name])
        for past, present in self._names.items():
            buffer = self.cache[past]
            place = ("cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
            io.bind_input(past, *place)
            io.bind_output(present, *place)
        for name in self._outputs:
            io.bind_output(name, "cpu")
        self._session.run_with_iobinding(io)
        found = io.get_outputs()
        order = {node.name: place for place, node in enumerate(self._session.get_outputs())}
        bound = [*self._names.values(), *self._outputs]
        return {name: found[bound.index(name)].numpy() for name in self._outputs if name in order}
