"""``--via optimum`` from end to end: stage, trace, take over, describe, check."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.source import open_checkpoint
from llorch_export.graph.targets import MIN_ONNXRUNTIME
from llorch_export.graph.weights import DATA_FILE
from llorch_export.optimum.graph import TracedGraph, take_graph
from llorch_export.optimum.interpreter import Optimum, run_optimum
from llorch_export.optimum.staging import check_exportable, stage
from llorch_export.options import ExportOptions
from llorch_export.pipeline import (
    GRAPH_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    ExportResult,
    Progress,
    add_text_files,
    fingerprint_source,
    licences,
    loadable,
    resolve_context,
)
from llorch_export.write import ArtifactWriter, check_output
from llorch_serve.artifact import MANIFEST_NAME, load_artifact
from llorch_serve.errors import UsageError
from llorch_serve.manifest import SCHEMA_VERSION, Manifest, Recipe, SourceInfo, encode_manifest


def export_via_optimum(options: ExportOptions, optimum: Optimum, progress: Progress) -> ExportResult:
    """Export ``options.source`` to ``options.output`` as the graph that Optimum traces, in fp32.

    Raises ArtifactError, UsageError or ResourceError; then nothing is left behind and an artifact already at the
    output is as it was.
    """
    recipe = _recipe(options)
    replace = options.force or options.if_changed
    check_output(options.output, force=replace)
    checkpoint = open_checkpoint(options.source)
    check_exportable(checkpoint)
    context_length = resolve_context(checkpoint.config, options.max_context)
    source_print = fingerprint_source(checkpoint, progress)
    terms = licences(checkpoint)
    parts = [source_print, "optimum", dict(optimum.versions), context_length, sorted(terms.items())]
    export_print = hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
    existing = loadable(options.output) if options.if_changed else None
    if existing is not None and existing.manifest.fingerprint == export_print:
        return ExportResult(existing, changed=False)
    with ArtifactWriter(options.output, force=replace) as writer:
        writer.require_space(2 * _weight_bytes(checkpoint))  # Optimum's file and ours
        graph = _trace(checkpoint, optimum, writer.folder)
        for name in (GRAPH_FILE, DATA_FILE):
            total = (writer.folder / name).stat().st_size
            writer.add_written(name, lambda n, total=total: progress("hashing the graph", n, total))  # type: ignore[misc]  # mypy cannot infer defaults of lambdas
        add_text_files(writer, checkpoint, terms)
        manifest = _manifest(
            checkpoint, graph, recipe, context_length, source_print, export_print, optimum.versions, writer
        )
        writer.add_unlisted(MANIFEST_NAME, encode_manifest(manifest))
        load_artifact(writer.folder)
        writer.commit()
    return ExportResult(load_artifact(options.output), changed=True)


def _recipe(options: ExportOptions) -> Recipe:
    for flag, value in (("--lora", options.lora), ("--interop", options.interop)):
        if value is not None:
            raise UsageError(
                f"{flag} {value} has no effect with --via optimum, whose graph is Optimum's; leave one of them out"
            )
    recipe = options.recipe()
    if recipe.precision != "fp32":
        raise UsageError(
            f"--precision {recipe.precision} cannot be had with --via optimum, which traces the model in fp32; leave one "
            "of them out"
        )
    return recipe


def _weight_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of all weights in float32; a tied table is written twice."""
    config = checkpoint.config
    tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    return 4 * (tied + sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()))


def _trace(checkpoint: Checkpoint, optimum: Optimum, folder: Path) -> TracedGraph:
    """Run Optimum; leave the graph and its data file in ``folder``, and nothing else."""
    with (
        tempfile.TemporaryDirectory(prefix="llorch-") as staged,
        tempfile.TemporaryDirectory(prefix=".optimum.", dir=folder) as work,
    ):
        stage(checkpoint, Path(staged))
        traced = Path(work) / "traced"
        run_optimum(optimum, Path(staged), traced)
        return take_graph(traced, folder / GRAPH_FILE, checkpoint.config)


def _manifest(
    checkpoint: Checkpoint,
    graph: TracedGraph,
    recipe: Recipe,
    context_length: int,
    source_print: str,
    export_print: str,
    versions: Mapping[str, str],
    writer: ArtifactWriter,
) -> Manifest:
    text = checkpoint.tokenizer
    return Manifest(
        schema_version=SCHEMA_VERSION,
        model_id=checkpoint.name,
        fingerprint=export_print,
        model=checkpoint.config,
        recipe=recipe,
        graph=GRAPH_FILE,
        tokenizer=TOKENIZER_FILE,
        chat_template=None if text.chat_template is None else TEMPLATE_FILE,
        inputs=graph.inputs,
        outputs=graph.outputs,
        kv=graph.kv,
        context_length=context_length,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        stop_token_ids=text.stop_token_ids,
        generation=text.generation,
        source=SourceInfo(kind=checkpoint.kind, name=checkpoint.path.name, fingerprint=source_print),
        files=tuple(sorted(writer.entries, key=lambda entry: entry.path)),
        versions={"llorch": importlib.metadata.version("llorch"), **versions},
        min_onnxruntime=MIN_ONNXRUNTIME,
        layout="optimum",
    )
