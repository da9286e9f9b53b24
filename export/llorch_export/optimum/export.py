"""``--via optimum`` from end to end: stage, trace, take over, describe, check."""

from __future__ import annotations

import hashlib
import math
import tempfile
from pathlib import Path

import msgspec

from llorch_export.artifact.description import (
    GRAPH_FILE,
    Progress,
    add_text_files,
    base_manifest,
    checkpoint_fields,
    fingerprint_source,
    licences,
    source_notices,
    up_to_date,
)
from llorch_export.artifact.place import check_output
from llorch_export.artifact.write import ArtifactWriter
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.formats.targets import MIN_ONNXRUNTIME
from llorch_export.graph.weights import DATA_FILE
from llorch_export.optimum.graph import TracedGraph, take_graph
from llorch_export.optimum.interpreter import Optimum, run_optimum
from llorch_export.optimum.staging import check_exportable, stage
from llorch_export.options import ExportOptions
from llorch_export.pipeline import ExportResult
from llorch_export.recipes.base import base_recipe
from llorch_export.resolved import resolve_context
from llorch_export.source.open import open_checkpoint
from llorch_serve.artifact.folder import MANIFEST_NAME, load_artifact
from llorch_serve.artifact.manifest import Recipe, encode_manifest
from llorch_serve.errors import UsageError


def export_via_optimum(options: ExportOptions, optimum: Optimum, progress: Progress) -> ExportResult:
    """Export ``options.source`` to ``options.output`` as the graph that Optimum traces, in fp32.

    Raises ArtifactError, UsageError or ResourceError; then nothing is left behind and an artifact already at
    the output is as it was.
    """
    recipe = _recipe(options)
    replace = options.force or options.if_changed
    check_output(options.output, force=replace)
    checkpoint = open_checkpoint(options.source, "none")
    check_exportable(checkpoint)
    context_length = resolve_context(checkpoint.config, options.max_context)
    source_print = fingerprint_source(checkpoint, progress)
    terms = licences(checkpoint)
    parts = [source_print, "optimum", dict(optimum.versions), context_length, sorted(terms.items())]
    export_print = hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
    fields = checkpoint_fields(
        checkpoint, context_length=context_length, source_print=source_print, export_print=export_print
    )
    existing = up_to_date(options.output, fields, checkpoint, progress) if options.if_changed else None
    if existing is not None:
        return ExportResult(existing, changed=False, notices=source_notices(checkpoint))
    with ArtifactWriter(options.output, force=replace) as writer:
        writer.require_space(2 * _weight_bytes(checkpoint))  # Optimum's file and ours
        graph = _trace(checkpoint, optimum, writer.folder)
        for name in (GRAPH_FILE, DATA_FILE):
            total = (writer.folder / name).stat().st_size
            writer.add_written(name, lambda n, total=total: progress("hashing the graph", n, total))  # type: ignore[misc]  # mypy cannot infer defaults of lambdas
        add_text_files(writer, checkpoint, terms)
        manifest = msgspec.structs.replace(
            base_manifest(
                fields,
                graph,
                recipe,
                writer=writer,
                versions=optimum.versions,
                min_onnxruntime=MIN_ONNXRUNTIME,
            ),
            layout="optimum",
        )
        writer.add_unlisted(MANIFEST_NAME, encode_manifest(manifest))
        load_artifact(writer.folder)
        writer.commit()
    return ExportResult(load_artifact(options.output), changed=True, notices=source_notices(checkpoint))


def _recipe(options: ExportOptions) -> Recipe:
    """Return the recipe of Optimum's graph: fp32 and nothing else. Raises UsageError for options that ask for
    more.
    """
    for flag, value in (
        ("--lora", options.lora[0].path if options.lora else None),
        ("--interop", options.interop),
        ("--calibration", options.calibration),
        ("--activations", options.activations),
        ("--transform", ",".join(options.transforms) or None),
        ("--recipe", f"({options.rules[0].label})" if options.rules else None),
        ("--head-precision", None if options.head_precision == "fp32" else options.head_precision),
        ("--kv-dtype", None if options.kv_dtype == "float32" else options.kv_dtype),
    ):
        if value is not None:
            raise UsageError(
                f"{flag} {value} has no effect with --via optimum, whose graph is Optimum's; leave one of "
                f"them out"
            )
    recipe = base_recipe(options)
    if recipe.precision != "fp32":
        raise UsageError(
            f"--precision {recipe.precision} cannot be had with --via optimum, which traces the model in "
            f"fp32; leave one "
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
