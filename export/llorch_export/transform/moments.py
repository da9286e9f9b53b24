"""Second moments of what goes into linear layers: the mean of ``x x^T`` over a text, for the quantiser with
error feedback.

Input are a checkpoint's tensors, as transforms have left them, and token ids; output is a square matrix for
each layer's input, or what is made of it, when a weight is about to be quantised. All of them together would
not fit into memory: those of some layers are measured in one run over the text, and the text is run again
when the next are asked for. A run stops after the last layer that is measured. As in :mod:`.calibrate` the
decoder's fp32 weights lie in a temporary folder meanwhile.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from threadpoolctl import threadpool_limits

from llorch_export.artifact.write import ArtifactWriter
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.graph.builder import FLOAT
from llorch_export.graph.decoder import DecoderGraph, build_decoder
from llorch_export.graph.weights import DATA_FILE
from llorch_export.transform.calibrate import FP32, LINEAR, WINDOW, open_probed, weights_read_by, windows
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError
from llorch_serve.providers import usable_cpus

_BUDGET: Final = 2**30
"""Bytes of moments that one run measures; a single layer's may exceed it. The runtime holds a second copy."""

_ELEMENTS_AT_ONCE: Final = 2**24
"""Of the matrices that are turned at the same time; turning one takes a copy of it in float64."""

Progress = Callable[[str, int, int], None]
Moment = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Input:
    """The input of linear layers: its value's name in the graph, its size, and the weights multiplied with
    it.
    """

    value: str
    size: int
    weights: tuple[str, ...]


class Moments:
    """Gives the second moments of a weight's inputs; weights are best asked for in the decoder's order.

    turn: made of each matrix once it is measured, and kept in its place.
    """

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, LazyTensor],
        ids: Sequence[int],
        folder: Path,
        progress: Progress,
        turn: Callable[[Moment], Moment] | None,
    ) -> None:
        self._config, self._tensors, self._ids = config, tensors, ids
        self._folder, self._progress, self._turn = folder, progress, turn
        self._inputs = _inputs(self._graph(), config)
        self._at = {weight: n for n, found in enumerate(self._inputs) for weight in found.weights}
        self._held: dict[str, Moment] = {}

    def of(self, weight: str) -> Moment:
        """Return the mean of ``x x^T`` [K, K] over the inputs ``x`` of the layer whose weight this is, turned
        if so asked.

        Raises ArtifactError if a value is not finite, ProviderError if the runtime refuses the graph.
        """
        first = self._at[weight]
        if self._inputs[first].value not in self._held:
            self._held = {}  # before the next are measured, so that one group is held at a time
            self._held = self._turned(self._measured(self._group(first)))
        return self._held[self._inputs[first].value]

    def _group(self, first: int) -> list[_Input]:
        group: list[_Input] = []
        used = 0
        for found in self._inputs[first:]:
            used += 4 * found.size**2
            if group and used > _BUDGET:
                break
            group.append(found)
        return group

    def _graph(self) -> DecoderGraph:
        return build_decoder(
            self._config, FP32, self._tensors, context_length=min(WINDOW, self._config.max_exact_context)
        )

    def _turned(self, found: dict[str, Moment]) -> dict[str, Moment]:
        """Turn every matrix, several at a time if they are small."""
        if self._turn is None:
            return found
        largest = max(moment.size for moment in found.values())
        threads = max(1, min(usable_cpus(), _ELEMENTS_AT_ONCE // largest))
        turn = self._turn

        def replace(name: str) -> None:
            found[name] = turn(found[name])  # so that what was measured is freed at once

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(replace, list(found)):
                pass  # asks for each result, so that an error is raised here
        return found

    def _measured(self, group: Sequence[_Input]) -> dict[str, Moment]:
        graph = self._graph()
        names = _add_products(graph, group)
        run = open_probed(graph, self._folder)
        sums = {found.value: np.zeros((found.size, found.size), np.float32) for found in group}
        phase = (
            f"measuring inputs {self._at[group[0].weights[0]] + 1} to {self._at[group[-1].weights[0]] + 1}"
        )
        window = min(WINDOW, self._config.max_exact_context)
        for piece in windows(self._ids, window, lambda _, n, total: self._progress(phase, n, total)):
            products = run(piece)
            for value, name in names.items():
                sums[value] += products[name]
        for found in group:
            total = sums[found.value]
            total /= np.float32(len(self._ids))
            if not np.isfinite(total).all():
                raise ArtifactError(
                    f"calibration: what goes through {found.weights[0]} is not finite in fp32; is the "
                    f"checkpoint damaged?"
                )
        return sums


@contextlib.contextmanager
def second_moments(
    config: LlamaConfig,
    tensors: Mapping[str, LazyTensor],
    ids: Sequence[int],
    progress: Progress,
    turn: Callable[[Moment], Moment] | None = None,
) -> Iterator[Moments]:
    """Write the decoder's weights in fp32 to a temporary folder, and measure on them until the context is
    left.

    Meanwhile numpy multiplies matrices in one thread: the threads here are enough, and its own would wait for
    each other on a busy machine, and make the last bits depend on their number.
    turn: see :class:`Moments`; called from several threads.
    Raises ResourceError if the folder has no room.
    """
    graph = build_decoder(config, FP32, tensors, context_length=min(WINDOW, config.max_exact_context))
    with (
        tempfile.TemporaryDirectory(prefix="llorch-moments-") as folder,
        ArtifactWriter(Path(folder) / "decoder", force=False) as writer,
        threadpool_limits(1, user_api="blas"),
    ):
        writer.require_space(graph.data_bytes)
        writer.add_weights(DATA_FILE, graph.jobs, lambda n: progress("preparing", n, graph.data_bytes))
        yield Moments(config, tensors, ids, writer.folder, progress, turn)


def _inputs(graph: DecoderGraph, config: LlamaConfig) -> list[_Input]:
    """Return the inputs of the graph's linear layers, in the order of use."""
    found: dict[str, _Input] = {}
    for node in graph.model.graph:
        if node.op_type in LINEAR:
            value = node.inputs[0]
            assert value is not None
            assert value.name is not None
            assert value.shape is not None
            size = value.shape[-1]
            assert isinstance(size, int)
            known = found.get(value.name)
            weights = (*(known.weights if known else ()), *weights_read_by(node, config))
            found[value.name] = _Input(value.name, size, weights)
    return list(found.values())


def _add_products(graph: DecoderGraph, group: Sequence[_Input]) -> dict[str, str]:
    """Make the sums of ``x x^T`` of a group the graph's only outputs; return their names by the inputs'
    values.
    """
    model = graph.model.graph
    values = {output.name: output for node in model for output in node.outputs}
    outputs: dict[str, ir.Value] = {}
    for found in group:
        shape = ir.Value(
            name=f"{found.value}/rows",
            const_value=ir.tensor(np.array([-1, found.size], np.int64), name=f"{found.value}/rows"),
        )
        shape.type, shape.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([2])
        model.register_initializer(shape)
        rows = _append(model, "Reshape", [values[found.value], shape], f"{found.value}/flat", {})
        outputs[found.value] = _append(model, "Gemm", [rows, rows], f"{found.value}/moments", {"transA": 1})
        outputs[found.value].shape = ir.Shape([found.size, found.size])
    model.outputs.clear()
    model.outputs.extend(outputs.values())
    RemoveUnusedNodesPass()(graph.model)
    return {value: output.name or "" for value, output in outputs.items()}


def _append(
    model: ir.Graph, op: str, inputs: Sequence[ir.Value], name: str, attributes: Mapping[str, int]
) -> ir.Value:
    output = ir.Value(name=name, type=ir.TensorType(FLOAT))
    model.append(ir.node(op, inputs, attributes, outputs=[output], name=f"{name}/{op}"))
    return output
