"""An export from end to end: read, resolve, prepare, build, write, check.

Takes :class:`ExportOptions`; leaves an artifact folder, or nothing.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from llorch_export.adapter.apply import with_adapters
from llorch_export.artifact.companions import (
    including,
    planned,
    with_int8_cache,
    with_prompt_graph,
)
from llorch_export.artifact.description import (
    GRAPH_FILE,
    Progress,
    add_text_files,
    base_manifest,
    checkpoint_fields,
    export_fingerprint,
    fingerprint_source,
    licences,
    source_notices,
    up_to_date,
)
from llorch_export.artifact.place import check_output
from llorch_export.artifact.staged import as_one_graph, with_stages
from llorch_export.artifact.write import ArtifactWriter
from llorch_export.calibration.measurements import CalibrationIds, read_calibration
from llorch_export.checkpoint.base import Checkpoint, LazyTensor
from llorch_export.formats.targets import TARGETS
from llorch_export.graph.check import checked_bytes
from llorch_export.graph.decoder import DecoderGraph
from llorch_export.graph.source_forms import (
    SourceForms,
    packed_notice,
    source_forms,
    source_notice,
    widened_bytes,
)
from llorch_export.graph.weights import DATA_FILE
from llorch_export.graphs import ArtifactGraphs, error_factors
from llorch_export.interop.genai import interop_files
from llorch_export.options import ExportOptions
from llorch_export.recipes.base import base_recipe
from llorch_export.resolved import ResolvedExport, check_source, resolve, with_packed_defaults
from llorch_export.source.open import open_checkpoint
from llorch_export.staged import StagedWriting, cut_into_stages
from llorch_export.transform.prepare import fixed_transforms, prepare
from llorch_export.verify.float_range import probe_activations
from llorch_serve.artifact.folder import MANIFEST_NAME, Artifact, load_artifact
from llorch_serve.artifact.manifest import (
    FixedShapes,
    Manifest,
    Target,
    encode_manifest,
)

PREFILL_FILE = "prefill.onnx"
_OVERHEAD_BYTES = 2**24  # room for graph, tokenizer and manifest when the free space is checked


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What came out. changed: False if ``--if-changed`` found the artifact up to date.

    notices: what a person should know about it, a line each.
    """

    artifact: Artifact
    changed: bool
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Job:
    """What is known of an export before the first weight is read.

    text: what to measure on; None where nothing is. terms: the licence files by name.
    fields: of the manifest, from :func:`checkpoint_fields`.
    """

    checkpoint: Checkpoint
    text: CalibrationIds | None
    terms: Mapping[str, bytes]
    fields: Mapping[str, Any]
    progress: Progress


def export(options: ExportOptions, progress: Progress) -> ExportResult:
    """Export ``options.source`` to ``options.output``.

    Raises ArtifactError, UsageError or ResourceError; then nothing is left behind and an artifact already at
    the output is as it was.
    """
    base = base_recipe(options)  # refuses what cannot be before anything is opened
    force = options.force or options.if_changed
    check_output(options.output, force=force)
    checkpoint = open_checkpoint(options.source, options.embed)
    check_source(base, checkpoint)
    checkpoint = with_adapters(checkpoint, options.lora)
    settled = with_packed_defaults(checkpoint.tensors, options, checkpoint.embedding)
    resolved = resolve(settled, checkpoint.config, checkpoint.embedding)
    text = None
    if resolved.calibration is not None:
        text = read_calibration(resolved.calibration, checkpoint)
        resolved = resolved.with_text(text.text)
    resolved = cut_into_stages(resolved, checkpoint.config, checkpoint.tensors)
    source_print = fingerprint_source(checkpoint, progress)
    terms = licences(checkpoint)
    fields = checkpoint_fields(
        checkpoint,
        context_length=resolved.context_length,
        source_print=source_print,
        export_print=export_fingerprint(source_print, resolved, terms),
    )
    existing = up_to_date(options.output, fields, checkpoint, progress) if options.if_changed else None
    if existing is not None:
        return ExportResult(existing, changed=False, notices=source_notices(checkpoint))
    with ArtifactWriter(options.output, force=force) as writer:
        notices = _make(writer, resolved, _Job(checkpoint, text, terms, fields, progress))
        writer.commit()
    return ExportResult(load_artifact(options.output), changed=True, notices=notices)


def _make(writer: ArtifactWriter, resolved: ResolvedExport, job: _Job) -> tuple[str, ...]:
    """Write everything into the writer's folder and check it; return the notices."""
    checkpoint, text = job.checkpoint, job.text
    if text is not None:  # measuring takes minutes, after which a full disk should be no news
        graph, prompts = planned(
            resolved,
            *fixed_transforms(
                checkpoint.config,
                checkpoint.tensors,
                resolved.recipe,
                embeds=resolved.embedding is not None,
            ),
        )
        prompt_bytes = 0 if prompts is None else prompts.data_bytes
        writer.require_space(graph.data_bytes + prompt_bytes + _OVERHEAD_BYTES)
    prepared = prepare(checkpoint, resolved.recipe, text, job.progress, measure=resolved.measures_inputs)
    if prepared.calibration is not None:
        resolved = resolved.with_peaks(prepared.calibration.peaks())
    with error_factors(prepared, resolved.recipe, text, job.progress) as factors:
        write = _write_stages if resolved.stages else _write_graphs
        graph = write(writer, ArtifactGraphs(resolved, prepared, factors), job)
    written, out_of_range = load_artifact(writer.folder), None
    if resolved.recipe.compute_type == "float16":
        with as_one_graph(writer, written.manifest, graph) as whole:
            out_of_range = probe_activations(whole)
    found = (graph.weight_cast.underflow_notice(), out_of_range, resolved.cache_left_out)
    notices = [*source_notices(checkpoint), *graph.notices]
    notices += (notice for notice in found if notice is not None)
    notices += storage_notices(checkpoint.tensors, resolved)
    return tuple(notices)


def storage_notices(tensors: Mapping[str, LazyTensor], resolved: ResolvedExport) -> tuple[str, ...]:
    """Return what a person should know of how packed matrices are stored, a line each."""
    if resolved.recipe.precision == "source":
        prompts = resolved.prompts
        anew = prompts is not None and prompts.precision != "source"
        more = "; the graph for prompts has them anew, by its own recipe" if anew else ""
        return (source_notice(tensors, TARGETS[resolved.target], resolved.recipe) + more,)
    notice = packed_notice(tensors, adapted=bool(resolved.options.lora))
    return () if notice is None else (notice,)


def _write_graphs(writer: ArtifactWriter, graphs: ArtifactGraphs, job: _Job) -> DecoderGraph:
    """Write all graphs with their weights, the text files and the manifest; return the first graph."""
    resolved, progress = graphs.resolved, job.progress
    graph = graphs.first()
    models = _serialise(graph, resolved.target)
    shared = interop_files(job.checkpoint, graph, graphs, per_channel_int8=resolved.recipe.multiplies_bytes)
    for_prompts = graphs.for_prompts(graph)
    if for_prompts is not None:
        graph = including(graph, for_prompts)
    prompt_bytes = for_prompts.data_bytes if for_prompts else 0
    writer.require_space(graph.data_bytes + prompt_bytes + _OVERHEAD_BYTES)
    writer.add_weights(DATA_FILE, graph.jobs, lambda n: progress("writing weights", n, graph.data_bytes))
    for name, data in models.items():
        writer.add_bytes(name, data)
    add_text_files(writer, job.checkpoint, {**job.terms, **shared})
    manifest = _manifest(writer, resolved, graph, job)
    if resolved.recipe.int8_cache:
        manifest = with_int8_cache(writer, manifest, graphs.over_int8_cache(), job.text, progress)
    if resolved.prompts is not None and for_prompts is not None:
        manifest = with_prompt_graph(writer, manifest, resolved.prompts, for_prompts, progress)
    writer.add_unlisted(MANIFEST_NAME, encode_manifest(manifest))
    return graph


def _write_stages(writer: ArtifactWriter, graphs: ArtifactGraphs, job: _Job) -> DecoderGraph:
    """Do as :func:`_write_graphs` does for graphs in stages; return one graph of all layers over their files,
    with what is to be known of them.
    """
    staged = StagedWriting(writer, graphs, graphs.staged())
    writer.require_space(staged.data_bytes + _OVERHEAD_BYTES)
    whole, stages = staged.write(job.progress)
    add_text_files(writer, job.checkpoint, job.terms)
    manifest = staged.completed(
        with_stages(_manifest(writer, graphs.resolved, whole, job), stages), whole, job.text, job.progress
    )
    writer.add_unlisted(MANIFEST_NAME, encode_manifest(manifest))
    return whole


def _manifest(writer: ArtifactWriter, resolved: ResolvedExport, graph: DecoderGraph, job: _Job) -> Manifest:
    """Return the manifest of an artifact that has its first graph, and no other yet."""
    row = TARGETS[resolved.target]
    return msgspec.structs.replace(
        base_manifest(
            job.fields,
            graph,
            resolved.recipe,
            writer=writer,
            versions={name: importlib.metadata.version(name) for name in ("onnx-ir", "numpy")},
            min_onnxruntime=graph.min_onnxruntime,
        ),
        interop=() if resolved.interop is None else (resolved.interop,),
        target=resolved.target,
        checked_on=row.checked_on,
        chunked_prefill=row.chunked_prefill,
        fixed_shapes=_fixed_shapes(graph),
        **_packed_fields(resolved, job.checkpoint),
        embedding=resolved.embedding or msgspec.UNSET,
    )


def _packed_fields(resolved: ResolvedExport, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of a manifest that packed weights add."""
    tensors = checkpoint.tensors
    if resolved.recipe.precision != "source" or all(tensor.packed is None for tensor in tensors.values()):
        return {}
    forms = SourceForms(tensors, TARGETS[resolved.target], resolved.recipe)
    return {
        "source_forms": source_forms(tensors, forms),
        "widened_bytes": widened_bytes(tensors, forms) or msgspec.UNSET,
    }


def _serialise(graph: DecoderGraph, target: Target) -> dict[str, bytes]:
    """Return the checked models' bytes by file name."""
    models = {GRAPH_FILE: graph.model, **({} if graph.prefill is None else {PREFILL_FILE: graph.prefill})}
    return {name: checked_bytes(model, target) for name, model in models.items()}


def _fixed_shapes(graph: DecoderGraph) -> FixedShapes | None:
    if graph.prefill_tokens is None:
        return None
    return FixedShapes(prefill_graph=PREFILL_FILE, prefill_tokens=graph.prefill_tokens)
