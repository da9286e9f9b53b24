"""What each device needs that runs one stage of an artifact: for ``llorch inspect``.

Weights and KV cache are known from the manifest. Activations are added up over the graph's nodes, at the size
of the largest call that a session makes of a prompt.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import KV_BYTES, Manifest, TensorSpec, cache_names
from llorch_serve.artifact.stages import stage_manifest
from llorch_serve.config import DEFAULT_PREFILL_CHUNK
from llorch_serve.errors import ArtifactError

if TYPE_CHECKING:
    import onnx

MOST_SCORE_BYTES: Final = 2**28
"""Attention takes the kernel that holds all scores of a call at once only up to this many bytes."""


@dataclass(frozen=True, slots=True)
class StageContents:
    """One stage. Sizes are in bytes.

    layers: the first, and the one behind the last. files: that the device needs, without the tokenizer.
    weight_bytes: of all its graphs. kv_bytes_per_token: of its layers. kv_bytes: of one sequence as long as
        the context. activation_bytes: at most, in a call with ``tokens`` tokens of a prompt; None where the
        onnx package is not installed. taken_bytes_per_token: that cross from the stage before.
    """

    layers: tuple[int, int]
    files: tuple[str, ...]
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    activation_bytes: int | None
    tokens: int
    taken_bytes_per_token: int


def stage_contents(artifact: Artifact) -> tuple[StageContents, ...]:
    """Describe the stages of an artifact; nothing where it is one graph.

    Raises ArtifactError if a graph cannot be read.
    """
    manifest = artifact.manifest
    sizes = {entry.path: entry.bytes for entry in manifest.files}
    tokens = min(DEFAULT_PREFILL_CHUNK, manifest.context_length)
    found = []
    for stage in manifest.stages or ():
        view = stage_manifest(manifest, stage)
        read = {stage.data, *stage.shared_data, *(() if view.prompts is None else (view.prompts.data,))}
        kv = msgspec.structs.replace(view.kv, dtype=view.kv_dtypes[0])
        taken = (spec for spec in stage.inputs if spec.name in stage.takes)
        found.append(
            StageContents(
                layers=(stage.first_layer, stage.end_layer),
                files=tuple(sorted(stage.files)),
                weight_bytes=sum(sizes[name] for name in read) + (stage.widened_bytes or 0),
                kv_bytes_per_token=kv.bytes_per_token,
                kv_bytes=kv.bytes_per_token * manifest.context_length,
                activation_bytes=_activations(Artifact(artifact.folder, view), tokens),
                tokens=tokens,
                taken_bytes_per_token=sum(map(_bytes_per_token, taken)),
            )
        )
    return tuple(found)


def _bytes_per_token(spec: TensorSpec) -> int:
    assert spec.dtype in KV_BYTES, "hidden states are of a type that a graph computes in"
    width = spec.shape[-1]
    assert isinstance(width, int), "which is the model's"
    return width * KV_BYTES[spec.dtype]


def _activations(view: Artifact, tokens: int) -> int | None:
    """Return the most bytes that values of a call take together, of whichever graph takes prompts."""
    if importlib.util.find_spec("onnx") is None:
        return None
    from llorch_export.verify.layers.graph import read_model

    manifest = view.manifest
    name = manifest.graph if manifest.prompts is None else manifest.prompts.graph
    model = read_model(view.folder / name)
    scores = 4 * manifest.model.num_attention_heads * tokens * manifest.context_length
    return _most_at_once(model, manifest, tokens) + (scores if scores <= MOST_SCORE_BYTES else 0)


def _most_at_once(model: onnx.ModelProto, manifest: Manifest, tokens: int) -> int:
    """Return the bytes of the values that live at once, as nodes run in their order; the KV cache apart."""
    graph = model.graph
    sizes = dict(_sizes(model, manifest, tokens))
    last = {name: place for place, node in enumerate(graph.node) for name in node.input}
    last |= {output.name: len(graph.node) for output in graph.output}
    live = {value.name: sizes[value.name] for value in graph.input if value.name in sizes}
    most = now = sum(live.values())
    for place, node in enumerate(graph.node):
        made = {name: sizes[name] for name in node.output if name in sizes}
        live |= made
        now += sum(made.values())
        most = max(most, now)
        for name in {*node.input, *node.output}:
            if name in live and last.get(name, place) <= place:
                now -= live.pop(name)
    return most


def _sizes(model: onnx.ModelProto, manifest: Manifest, tokens: int) -> Iterator[tuple[str, int]]:
    """Give the bytes of each value that depends on a call's inputs, of one sequence and one row of logits."""
    from onnx import TensorProto
    from onnx.helper import tensor_dtype_to_np_dtype

    from llorch_export.inspect.widening import Widening

    graph, widening, cache = model.graph, Widening(model), cache_names(manifest.kv)
    chosen = {"tokens": tokens, "positions": tokens, "capacity": manifest.context_length}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.name in cache or widening.makes(value.name) or value.name in widening.weights:
            continue
        of = value.type.tensor_type
        if of.elem_type not in TensorProto.DataType.values() or of.elem_type == TensorProto.UNDEFINED:
            raise ArtifactError(
                f"a graph of {manifest.model_id[:100]}: {value.name[:100]!r} has no type that ONNX knows "
                f"({of.elem_type}); export the model again"
            )
        shape = (d.dim_value if d.HasField("dim_value") else chosen.get(d.dim_param, 1) for d in of.shape.dim)
        yield value.name, math.prod(shape) * tensor_dtype_to_np_dtype(of.elem_type).itemsize
