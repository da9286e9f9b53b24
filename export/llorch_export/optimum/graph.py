"""Optimum's graph on its way into an artifact: its inputs and outputs checked, its weights moved to a data
file.

Input is the model file that Optimum wrote; output is the same graph with its initialisers in
``model.onnx.data``, where the runtime maps them instead of copying them, and the description for the
manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx_ir as ir

from llorch_export.graph.weights import DATA_FILE
from llorch_serve.artifact.manifest import KvLayout, LlamaConfig, TensorSpec
from llorch_serve.errors import ArtifactError

_EXPECTED: Final = "expected a decoder with input_ids, attention_mask, position_ids and a growing cache"


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """What the manifest says of the graph."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kv: KvLayout


def take_graph(traced: Path, target: Path, config: LlamaConfig) -> TracedGraph:
    """Read the folder ``traced`` and write ``target`` with its data file next to it.

    Raises ArtifactError if Optimum wrote something else than a decoder of this config.
    """
    path = traced / "model.onnx"
    if not path.is_file():
        found = ", ".join(sorted(entry.name for entry in traced.glob("*"))) or "nothing"
        raise ArtifactError(f"Optimum wrote {found}, expected model.onnx; use optimum-onnx 0.1 or later")
    model = ir.load(path)
    kv = KvLayout(
        layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim
    )
    graph = TracedGraph(
        tuple(_spec(value) for value in model.graph.inputs),
        tuple(_spec(value) for value in model.graph.outputs),
        kv,
    )
    names = [
        pattern.format(layer=layer, kind=kind)
        for pattern in (kv.past_name, kv.present_name)
        for layer in range(kv.layers)
        for kind in ("key", "value")
    ]
    past, present = names[: 2 * kv.layers], names[2 * kv.layers :]
    _check(graph.inputs, {"input_ids", "attention_mask", "position_ids", *past})
    _check(graph.outputs, {"logits", *present})
    _check_sizes(graph, config)
    ir.save(model, target, external_data=DATA_FILE)
    return graph


def _check(specs: Sequence[TensorSpec], expected: set[str]) -> None:
    odd = sorted({spec.name for spec in specs} ^ expected)
    if odd:
        raise ArtifactError(
            f"Optimum's graph has inputs or outputs too many or too few: {', '.join(odd[:5])}; {_EXPECTED}"
        )


def _check_sizes(graph: TracedGraph, config: LlamaConfig) -> None:
    heads = (config.num_key_value_heads, config.head_dim)
    for spec in (*graph.inputs, *graph.outputs):
        cached = len(spec.shape) == 4
        sizes = (spec.shape[1], spec.shape[3]) if cached else spec.shape[-1:]
        wanted = heads if cached else (config.vocab_size,) if spec.name == "logits" else sizes
        if any(isinstance(size, int) and size != want for size, want in zip(sizes, wanted, strict=True)):
            raise ArtifactError(
                f"Optimum's graph has {spec.name} of shape {list(spec.shape)}, expected {list(wanted)} in "
                f"it as the "
                "config says; export without --via"
            )


_DTYPES: Final = {ir.DataType.FLOAT: "float32", ir.DataType.INT64: "int64"}


def _spec(value: ir.Value) -> TensorSpec:
    if value.name is None or value.shape is None or value.dtype not in _DTYPES:
        raise ArtifactError(f"Optimum's graph has {value.name} of type {value.dtype}; {_EXPECTED}")
    shape = tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)
    return TensorSpec(name=value.name, dtype=_DTYPES[value.dtype], shape=shape)  # type: ignore[arg-type]  # a table of literals
