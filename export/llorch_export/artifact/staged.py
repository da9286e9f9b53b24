"""An artifact of several graphs that run one after another: their files, and what the manifest says of them.

Each stage has a data file of its own, so that a device reads no other's weights; a table that is embedding
and head at once is a file beside them, which both ends read. What the exporter itself has to run, to measure
it, is one graph of all layers over the same files (:func:`as_one_graph`), which is not kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from llorch_export.artifact.description import GRAPH_FILE, Progress
from llorch_export.artifact.write import ArtifactWriter
from llorch_export.graph.check import checked_bytes
from llorch_export.graph.decoder import DecoderGraph
from llorch_export.graph.half_precision import WeightCast
from llorch_export.graph.lowest_runtime import later
from llorch_export.graph.weights import WeightJob
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import (
    PLAIN_SCHEMA_VERSION,
    SCHEMA_VERSION,
    Manifest,
    Stage,
    Target,
    TensorSpec,
    cache_names,
)

TABLE_FILE: Final = "table.onnx.data"


@dataclass(frozen=True, slots=True)
class StageNames:
    """The files of one stage."""

    graph: str
    data: str
    decode_graph: str
    scales: str
    prompts_graph: str
    prompts_data: str

    @classmethod
    def of(cls, number: int) -> StageNames:
        """Return the names of the stage with this number, from 0."""
        stage = f"stage{number}"
        return cls(
            graph=f"{stage}.onnx",
            data=f"{stage}.onnx.data",
            decode_graph=f"{stage}_decode.onnx",
            scales=f"{stage}_kv_scales.bin",
            prompts_graph=f"{stage}_prompts.onnx",
            prompts_data=f"{stage}_prompts.onnx.data",
        )


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """The graphs of one stage. decode: over a KV cache in int8. prompts: for prompts; None: there is none."""

    layers: range
    names: StageNames
    first: DecoderGraph
    decode: DecoderGraph | None
    prompts: DecoderGraph | None


@dataclass(frozen=True, slots=True)
class StagedGraphs:
    """All graphs of an artifact in stages.

    table: jobs of the table that both ends read; nothing where they read two. table_cast: what rounding it
    has cost.
    """

    stages: tuple[StageGraphs, ...]
    table: tuple[WeightJob, ...]
    table_cast: WeightCast

    @property
    def jobs(self) -> Mapping[str, Sequence[WeightJob]]:
        """What fills each data file of the first graphs."""
        table = {TABLE_FILE: self.table} if self.table else {}
        return {**table, **{stage.names.data: stage.first.jobs for stage in self.stages}}

    @property
    def prompt_jobs(self) -> Mapping[str, Sequence[WeightJob]]:
        """What fills each data file of the graphs for prompts."""
        return {s.names.prompts_data: s.prompts.jobs for s in self.stages if s.prompts is not None}

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(map(file_bytes, (*self.jobs.values(), *self.prompt_jobs.values())))

    def described(self, whole: DecoderGraph) -> DecoderGraph:
        """Return the graph of all layers with what is to be known of the stages once their weights are
        written: notices, what rounding has cost, and the lowest onnxruntime.
        """
        graphs = [g for s in self.stages for g in (s.first, s.decode, s.prompts) if g is not None]
        cast = WeightCast(whole.weight_cast.compute_type)
        for each in (self.table_cast, *(stage.first.weight_cast for stage in self.stages)):
            cast.flushed.update(each.flushed)
        return replace(
            whole,
            notices=tuple(dict.fromkeys(notice for graph in graphs for notice in graph.notices)),
            min_onnxruntime=later(*(graph.min_onnxruntime for graph in graphs)),
            weight_cast=cast,
        )


def file_bytes(jobs: Sequence[WeightJob]) -> int:
    """Return how long the data file of some jobs becomes."""
    return max((tensor.offset + tensor.nbytes for job in jobs for tensor in job.tensors), default=0)


def write_stages(
    writer: ArtifactWriter, graphs: StagedGraphs, target: Target, progress: Progress
) -> tuple[Stage, ...]:
    """Write graphs and weights of all stages; return what the manifest says of them, without the scales of a
    KV cache in int8, which are still to be measured.
    """
    models = {name: checked_bytes(model, target) for name, model in _models(graphs)}
    for jobs, phase in (
        (graphs.jobs, "writing weights"),
        (graphs.prompt_jobs, "writing weights for prompts"),
    ):
        total = sum(map(file_bytes, jobs.values()))
        told = functools.partial(_told, progress, phase, total)
        for name, of_file in jobs.items():
            writer.add_weights(name, tuple(of_file), told)
    for name, data in models.items():
        writer.add_bytes(name, data)
    before = (frozenset[str](), *map(_given, graphs.stages))
    return tuple(map(_stage, graphs.stages, before))


def _told(progress: Progress, phase: str, total: int, done: int) -> None:
    progress(phase, done, total)


def _models(graphs: StagedGraphs) -> Iterator[tuple[str, ir.Model]]:
    for stage in graphs.stages:
        names = stage.names
        yield names.graph, stage.first.model
        if stage.decode is not None:
            yield names.decode_graph, stage.decode.model
        if stage.prompts is not None:
            yield names.prompts_graph, stage.prompts.model


def _stage(stage: StageGraphs, given: frozenset[str]) -> Stage:
    """Return what the manifest says of a stage. given: names of what the stage before hands on."""
    first, names = stage.first, stage.names
    graphs = [graph for graph in (first, stage.decode, stage.prompts) if graph is not None]
    assert len({_signature(graph) for graph in graphs}) == 1, "they differ in the type of the cache alone"
    own = {names.data, names.scales, names.prompts_data}
    return Stage(
        first_layer=stage.layers.start,
        end_layer=stage.layers.stop,
        graph=names.graph,
        data=names.data,
        shared_data=tuple(sorted({file for graph in graphs for file in _data_files(graph)} - own)),
        inputs=first.inputs,
        outputs=first.outputs,
        takes=tuple(spec.name for spec in first.inputs if spec.name in given),
        decode_graph=msgspec.UNSET if stage.decode is None else names.decode_graph,
        scales=msgspec.UNSET if stage.decode is None else names.scales,
        prompts_graph=msgspec.UNSET if stage.prompts is None else names.prompts_graph,
        prompts_data=msgspec.UNSET if stage.prompts is None else names.prompts_data,
    )


def _given(stage: StageGraphs) -> frozenset[str]:
    return frozenset(spec.name for spec in stage.first.outputs) - cache_names(stage.first.kv)


def _signature(graph: DecoderGraph) -> tuple[TensorSpec, ...]:
    """Return inputs and outputs, those of the KV cache as if it were of one type."""
    cache = cache_names(graph.kv)
    return tuple(
        msgspec.structs.replace(spec, dtype="float32") if spec.name in cache else spec
        for spec in (*graph.inputs, *graph.outputs)
    )


def _data_files(graph: DecoderGraph) -> set[str]:
    tensors = (value.const_value for value in graph.model.graph.initializers.values())
    return {str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}


def with_stages(manifest: Manifest, stages: tuple[Stage, ...]) -> Manifest:
    """Return the manifest of an artifact that consists of ``stages``."""
    return msgspec.structs.replace(
        manifest, schema_version=SCHEMA_VERSION, graph=stages[0].graph, stages=stages
    )


@contextlib.contextmanager
def as_one_graph(writer: ArtifactWriter, manifest: Manifest, whole: DecoderGraph) -> Iterator[Artifact]:
    """Give the artifact as one graph over the data files of its stages, to be run and then forgotten; itself
    where it has no stages.

    whole: all layers, over those files.
    """
    if manifest.stages is msgspec.UNSET:
        yield Artifact(writer.folder, manifest)
        return
    path = writer.folder / GRAPH_FILE
    writer.add_unlisted(GRAPH_FILE, checked_bytes(whole.model, manifest.target))
    plain = msgspec.structs.replace(
        manifest,
        schema_version=PLAIN_SCHEMA_VERSION,
        graph=GRAPH_FILE,
        int8_cache=None,
        prompts=None,
        stages=msgspec.UNSET,
    )
    try:
        yield Artifact(writer.folder, plain)
    finally:
        path.unlink()


def add_scales(writer: ArtifactWriter, stages: StagedGraphs, scales: npt.NDArray[np.float32]) -> None:
    """Write the scales of a KV cache in int8, [layers, ...], each stage's into a file of its own."""
    for stage in stages.stages:
        writer.add_bytes(
            stage.names.scales, scales[stage.layers.start : stage.layers.stop].astype("<f4").tobytes()
        )
