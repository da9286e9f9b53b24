"""The shipped graph with its inner values as outputs.

Reads the artifact's model file; the changed copy exists in memory only. The runtime maps the artifact's own
data file, so no weight is copied. What comes out is every float value by its name, and for each attention
node what it read and wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError

from llorch_export.verify.layers.feeds import prompt_feeds
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import cache_names
from llorch_serve.artifact.stages import stage_artifacts
from llorch_serve.errors import ArtifactError, ProviderError
from llorch_serve.providers import CPU, byte_settings, import_runtime, require_arithmetic

Array = npt.NDArray[np.float32]
_BEFORE_SOFTMAX = 1  # GroupQueryAttention's qk_output
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class AttentionNode:
    """Names of one GroupQueryAttention node's values, and its attributes.

    query: the input that holds queries, alone or packed before keys and values. tables: rotary cosine and
        sine, or
    None where the node does not rotate. scores: the added output, before softmax.
    """

    layer: int
    query: str
    heads: str
    key: str
    value: str
    scores: str
    tables: tuple[str, str] | None
    num_heads: int


@dataclass(frozen=True, slots=True)
class GraphRun:
    """Values by name in the order of the nodes, the attention nodes that made some of them, and their tables.

    half_precision: the values that the graph itself has in half precision.
    """

    values: Mapping[str, Array]
    attention: Sequence[AttentionNode]
    tables: Mapping[str, Array]
    half_precision: frozenset[str] = frozenset()


def read_graph(artifact: Artifact) -> onnx.ModelProto:
    """Read the model file of an artifact of one graph, or of one stage, without its weights. What a stage
    hands on, and the keys and values that it writes, get the names that they have in a graph of all layers.

    Raises ArtifactError if it is not an ONNX model.
    """
    model = read_model(artifact.prompt_graph_path)
    names = _own_names(model)
    for node in model.graph.node:
        for values in (node.input, node.output):
            for place, name in enumerate(values):
                values[place] = names.get(name, name)
    for output in model.graph.output:
        output.name = names.get(output.name, output.name)
    return model


def read_model(path: Path) -> onnx.ModelProto:
    """Read a model file as it is, without its weights. Raises ArtifactError if it is not an ONNX model."""
    try:
        return onnx.load_model(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ArtifactError(f"{path} is not an ONNX model ({error}); export the model again") from error


_HANDED_ON = re.compile(r"(residual|delta|hidden)\.\d+")


def _own_names(model: onnx.ModelProto) -> dict[str, str]:
    """Return names by those that are the stage's: of what it hands on, what its node says, or for the sum
    that a norm gives beside; of keys and values, with the number of their layer in the model.
    """
    found: dict[str, str] = {}
    for node in model.graph.node:
        layer = layer_of(node.name)
        if node.op_type == "GroupQueryAttention" and layer is not None:
            found |= {name: re.sub(r"\d+", str(layer), name) for name in node.output[1:3]}
        for place, name in enumerate(node.output):
            if _HANDED_ON.fullmatch(name):
                own = node.name.removesuffix(f"/{node.op_type}")
                found[name] = own if place == 0 else f"{own}/residual"
    return found


def layer_of(name: str) -> int | None:
    """Return the layer that a value's name says it belongs to."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def run_observed(
    artifact: Artifact, token_ids: Sequence[int], *, threads: int, optimised: bool = True
) -> GraphRun:
    """Run a whole prompt from position 0, through all stages, and return every inner value, in float32.

    optimised: False runs the nodes as they stand, in half the memory where half-precision weights have to be
        widened.

    Raises ArtifactError if the graph cannot be read, ProviderError if the runtime refuses it.
    """
    require_arithmetic(CPU, (artifact.manifest.recipe.compute_type,))
    runs: list[GraphRun] = []
    given: Mapping[str, npt.NDArray[np.generic]] = {}
    for stage in stage_artifacts(artifact):
        run, given = _run_stage(stage, token_ids, given, threads=threads, optimised=optimised)
        runs.append(run)
    return GraphRun(
        values={name: value for run in runs for name, value in run.values.items()},
        half_precision=frozenset().union(*(run.half_precision for run in runs)),
        attention=[node for run in runs for node in run.attention],
        tables={name: table for run in runs for name, table in run.tables.items()},
    )


def _run_stage(
    stage: Artifact,
    token_ids: Sequence[int],
    given: Mapping[str, npt.NDArray[np.generic]],
    *,
    threads: int,
    optimised: bool,
) -> tuple[GraphRun, Mapping[str, npt.NDArray[np.generic]]]:
    """Run one graph; return what it has shown, and what it hands on. given: what it takes from another."""
    model = read_graph(stage)
    nodes = _expose(model)
    session = _session(stage, model, threads=threads, optimised=optimised)
    try:
        names = [output.name for output in session.get_outputs()]
        inputs = [value.name for value in session.get_inputs()]
        found = session.run(names, {**prompt_feeds(stage.manifest, inputs, token_ids), **given})
    except Exception as error:  # onnxruntime has many kinds, without a base of their own
        raise _not_run(stage, error) from error
    by_name: dict[str, Array] = {
        name: array.astype(np.float32, copy=False) for name, array in zip(names, found, strict=True)
    }
    order = [name for node in model.graph.node for name in node.output if name in by_name]
    tables = {name for node in nodes for name in node.tables or ()}
    run = GraphRun(
        values={name: by_name[name] for name in order},
        half_precision=frozenset(
            name for name, array in zip(names, found, strict=True) if array.dtype.itemsize == 2
        ),
        attention=nodes,
        tables={name: _initializer(model, stage.folder, name) for name in sorted(tables)},
    )
    shown = dict(zip(names, found, strict=True))
    cache = cache_names(stage.manifest.kv)
    outputs = (spec.name for spec in stage.manifest.outputs if spec.name not in cache)
    # The graph's own outputs come first, under other names and in the manifest's order.
    return run, {name: shown[own] for name, own in zip(outputs, names, strict=False)}


def _session(stage: Artifact, model: onnx.ModelProto, *, threads: int, optimised: bool) -> Any:
    """Load a changed copy of a stage's graph. Raises ProviderError if the runtime refuses it."""
    runtime = import_runtime(stage.manifest.min_onnxruntime)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if stage.manifest.recipe.multiplies_bytes:
        for setting in byte_settings().items():
            options.add_session_config_entry(*setting)
    if not optimised:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # The data file is found here, as if the model had been loaded from the folder.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(stage.folder.resolve())
    )
    try:
        return runtime.InferenceSession(model.SerializeToString(), options, providers=[CPU])
    except Exception as error:  # as above
        raise _not_run(stage, error) from error


def _not_run(stage: Artifact, error: Exception) -> ProviderError:
    text = " ".join(str(error).split())[:300]
    return ProviderError(
        f"the runtime does not run {stage.prompt_graph_path} with its inner values as outputs: {text}"
    )


def _expose(model: onnx.ModelProto) -> list[AttentionNode]:
    """Make every float value an output; the graph's own outputs stay where they are."""
    graph = model.graph
    floats = {
        value.name: value.type.tensor_type.elem_type
        for value in graph.value_info
        if value.type.tensor_type.elem_type in _FLOATS
    }
    attention: list[AttentionNode] = []
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            attention.append(_expose_attention(node, len(attention)))
            floats[attention[-1].scores] = floats.get(node.output[0], onnx.TensorProto.FLOAT)
        elif node.op_type == "SkipSimplifiedLayerNormalization":
            _expose_sum(node)
            floats[node.output[3]] = floats.get(node.output[0], onnx.TensorProto.FLOAT)
    known = {output.name for output in graph.output}
    for name, kind in floats.items():
        if name not in known:
            graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    return attention


def _expose_sum(node: onnx.NodeProto) -> None:
    """Ask for the sum that is normalised, where the graph leaves it out because nothing reads it."""
    outputs = [*node.output, *[""] * (4 - len(node.output))]
    outputs[3] = outputs[3] or f"{outputs[0]}/residual"
    del node.output[:]
    node.output.extend(outputs)


def _expose_attention(node: onnx.NodeProto, index: int) -> AttentionNode:
    attributes: dict[str, Any] = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    heads, key, value = node.output[:3]
    scores = f"{heads}/scores"
    del node.output[:]
    node.output.extend([heads, key, value, scores])
    node.attribute.append(onnx.helper.make_attribute("qk_output", _BEFORE_SOFTMAX))
    layer = layer_of(heads)
    return AttentionNode(
        layer=index if layer is None else layer,
        query=node.input[0],
        heads=heads,
        key=key,
        value=value,
        scores=scores,
        tables=(node.input[7], node.input[8]) if attributes.get("do_rotary") else None,
        num_heads=attributes["num_heads"],
    )


def _initializer(model: onnx.ModelProto, folder: Path, name: str) -> Array:
    """Read a float table of the data file. Raises ArtifactError if it is not there."""
    for tensor in model.graph.initializer:
        if tensor.name == name:
            place = {entry.key: entry.value for entry in tensor.external_data}
            shape = tuple(tensor.dims)
            stored: npt.NDArray[np.generic] = np.fromfile(
                folder / Path(place["location"]).name,
                onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type),
                count=int(np.prod(shape)),
                offset=int(place.get("offset", "0")),
            )
            return stored.reshape(shape).astype(np.float32)
    raise ArtifactError(f"{folder}: the graph has no initializer {name}; export the model again")
