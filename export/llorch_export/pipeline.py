"""An export from end to end: read, map, build, quantise, write, check."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.base import Checkpoint, LazyTensor
from llorch_export.checkpoint.folder import MAX_TEXT_BYTES, ModelFolder
from llorch_export.checkpoint.lora import merged_tensors, with_adapter
from llorch_export.checkpoint.names import expected_tensors
from llorch_export.checkpoint.source import fingerprint, open_checkpoint, open_config
from llorch_export.formats import uses_static
from llorch_export.genai import guest_files
from llorch_export.graph.check import checked_bytes
from llorch_export.graph.decoder import MIN_ONNXRUNTIME, DecoderGraph, build_decoder
from llorch_export.graph.front import Interface
from llorch_export.graph.weights import DATA_FILE
from llorch_export.options import ExportOptions
from llorch_export.quantize.feedback import SecondMoments
from llorch_export.recipes.resolve import with_rules
from llorch_export.static_scales import check_static
from llorch_export.transform.calibration import (
    CalibrationIds,
    measured_moments,
    read_calibration,
    require_use,
)
from llorch_export.transform.moments import second_moments
from llorch_export.transform.prepare import Prepared, fixed_transforms, prepare
from llorch_export.write import ArtifactWriter, check_output
from llorch_serve.artifact import MANIFEST_NAME, Artifact, load_artifact
from llorch_serve.errors import ArtifactError, NewerSchemaError, UsageError
from llorch_serve.manifest import (
    SCHEMA_VERSION,
    Interop,
    LlamaConfig,
    Manifest,
    Recipe,
    SourceInfo,
    encode_manifest,
)

GRAPH_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
GRAPH_REVISION = 2  # raised when the same source and recipe give another graph
_OVERHEAD_BYTES = 2**24  # room for graph, tokenizer and manifest when the free space is checked


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What came out. changed: False if ``--if-changed`` found the artifact up to date."""

    artifact: Artifact
    changed: bool


Progress = Callable[[str, int, int], None]
"""Told (phase, bytes done since the last call, total bytes of the phase)."""


def export(options: ExportOptions, progress: Progress) -> ExportResult:
    """Export ``options.source`` to ``options.output``.

    Raises ArtifactError, UsageError or ResourceError; then nothing is left behind and an artifact already at the
    output is as it was.
    """
    recipe = options.recipe()
    replace = options.force or options.if_changed
    check_output(options.output, force=replace)
    checkpoint = open_checkpoint(options.source)
    _check_source(recipe, checkpoint)
    if options.lora is not None:
        checkpoint = with_adapter(checkpoint, options.lora)
    recipe = with_rules(recipe, options.rules, checkpoint.config)
    require_use(recipe, options.calibration, may_measure=uses_static(recipe))
    check_static(recipe, options.calibration)
    context_length = resolve_context(checkpoint.config, options.max_context)
    text = None
    if options.calibration is not None:
        text = read_calibration(options.calibration, checkpoint)
        recipe = msgspec.structs.replace(recipe, calibration=text.text)
    source_print = fingerprint_source(checkpoint, progress)
    terms = licences(checkpoint)
    export_print = export_fingerprint(source_print, recipe, context_length, terms, options.interop)
    existing = loadable(options.output) if options.if_changed else None
    if existing is not None and existing.manifest.fingerprint == export_print:
        return ExportResult(existing, changed=False)
    prepared = prepare(checkpoint, recipe, text, progress)
    with (
        _moments(prepared, recipe, text, progress) as moments,
        ArtifactWriter(options.output, force=replace) as writer,
    ):

        def build(interface: Interface) -> DecoderGraph:
            return build_decoder(
                prepared.config,
                recipe,
                prepared.tensors,
                context_length=context_length,
                calibration=prepared.calibration,
                moments=moments,
                interface=interface,
            )

        graph = build(Interface.LLORCH)
        guests = guest_files(options.interop, checkpoint, graph, context_length, build)
        writer.require_space(graph.data_bytes + _OVERHEAD_BYTES)
        writer.add_weights(DATA_FILE, graph.jobs, lambda n: progress("writing weights", n, graph.data_bytes))
        writer.add_bytes(GRAPH_FILE, checked_bytes(graph.model))
        add_text_files(writer, checkpoint, terms | guests)
        manifest = _manifest(checkpoint, graph, recipe, context_length, source_print, export_print, writer)
        if options.interop is not None:
            manifest = msgspec.structs.replace(manifest, interop=(options.interop,))
        writer.add_unlisted(MANIFEST_NAME, encode_manifest(manifest))
        load_artifact(writer.folder)
        writer.commit()
    return ExportResult(load_artifact(options.output), changed=True)


@contextlib.contextmanager
def _moments(
    prepared: Prepared, recipe: Recipe, text: CalibrationIds | None, progress: Progress
) -> Iterator[SecondMoments | None]:
    """Give what measures second moments while weights are written; None where the recipe asks for none."""
    if not measured_moments(recipe):
        yield None
        return
    assert text is not None, "options that measure come with a text"
    with second_moments(prepared.config, prepared.tensors, text.ids, progress) as moments:
        yield moments.of


def loadable(output: Path) -> Artifact | None:
    """Return the artifact at ``output``; None if there is none, or a damaged one, which is then made anew.

    Raises NewerSchemaError for one that a newer llorch made: it is not damaged, and this llorch cannot judge it.
    """
    try:
        return load_artifact(output)
    except NewerSchemaError:
        raise
    except ArtifactError:
        return None


def preview(options: ExportOptions) -> dict[str, object]:
    """Describe the export without reading a weight: tensors and shapes of the checkpoint, graph inputs, sizes.

    Needs only the GGUF header or config.json; at precision source a whole GGUF file. Raises as :func:`export` does.
    """
    recipe = options.recipe()
    tensors: Mapping[str, LazyTensor]
    if recipe.precision == "source":
        # What the graph holds depends on the type of every tensor, so config.json would not do.
        checkpoint = open_checkpoint(options.source)
        _check_source(recipe, checkpoint)
        config, tensors = checkpoint.config, checkpoint.tensors
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
    else:
        config = open_config(options.source)
        shapes = expected_tensors(config)
        tensors = {name: LazyTensor(name, shape, "", _unread) for name, shape in shapes.items()}
    recipe = with_rules(recipe, options.rules, config)
    require_use(recipe, options.calibration, may_measure=uses_static(recipe))
    check_static(recipe, options.calibration)
    context_length = resolve_context(config, options.max_context)
    if options.lora is not None:
        tensors = merged_tensors(tensors, options.lora)
    built, tensors = fixed_transforms(config, tensors, recipe)
    graph = build_decoder(built, recipe, tensors, context_length=context_length)
    return {
        "config": config,
        "recipe": recipe,
        "context_length": context_length,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "data_bytes": graph.data_bytes,
        "kv_bytes_per_token": graph.kv.bytes_per_token,
        "tensors": [{"name": name, "shape": list(shape)} for name, shape in shapes.items()],
        "inputs": [
            {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype} for spec in graph.inputs
        ],
    }


def _check_source(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Raise UsageError if the recipe wants blocks that the checkpoint's format does not have."""
    if recipe.precision == "source" and checkpoint.kind != "gguf":
        raise UsageError(
            f"--precision source carries over the quantised blocks of a GGUF file, and {checkpoint.path} is a "
            "Hugging Face folder; choose fp32, int8 or int4"
        )


def _unread(_start: int, _stop: int) -> npt.NDArray[np.float32]:
    raise AssertionError("a preview reads no weights")


def resolve_context(config: LlamaConfig, max_context: int | None) -> int:
    """Return the artifact's context length: by default the longest that is exact.

    Raises UsageError beyond what the model was trained for, and beyond where one rotary table is right.
    """
    if max_context is None:
        return config.max_exact_context
    if not 2 <= max_context <= config.max_position_embeddings:
        raise UsageError(
            f"--max-context is {max_context}; this model takes 2 to {config.max_position_embeddings}"
        )
    if max_context > config.max_exact_context:
        raise UsageError(
            f"--max-context is {max_context}; the model's rotary type {config.rope.kind} rotates every position "
            f"otherwise in sequences beyond {config.max_exact_context}, which no fixed table reproduces. "
            f"Use --max-context {config.max_exact_context} or less"
        )
    return max_context


def export_fingerprint(
    source_print: str,
    recipe: Recipe,
    context_length: int,
    terms: Mapping[str, bytes],
    interop: Interop | None = None,
) -> str:
    """Return the SHA-256 that names this export: same source, licence files, recipe and graph revision, same value."""
    parts = [source_print, recipe, context_length, GRAPH_REVISION, sorted(terms.items())]
    extra = [] if interop is None else [interop]  # so that plain exports keep the names they had
    return hashlib.sha256(msgspec.json.encode([*parts, *extra])).hexdigest()


def fingerprint_source(checkpoint: Checkpoint, progress: Progress) -> str:
    """Return the SHA-256 of a checkpoint's content, and tell ``progress`` of the reading."""
    files = (*checkpoint.content_files, *(checkpoint.adapter.content_files if checkpoint.adapter else ()))
    total = sum(path.stat().st_size for path in files)
    return fingerprint(checkpoint, lambda n: progress("reading source", n, total))


def licences(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the content of the licence files by name. Raises ArtifactError if one is of absurd size."""
    found = {}
    for path in checkpoint.licence_files:
        content = ModelFolder(path.parent).read_bytes(path.name, limit=MAX_TEXT_BYTES)
        if content is not None:
            found[path.name] = content
    return found


def add_text_files(writer: ArtifactWriter, checkpoint: Checkpoint, terms: Mapping[str, bytes]) -> None:
    """Write tokenizer and template, and the files in ``terms`` by name."""
    writer.add_bytes(TOKENIZER_FILE, checkpoint.tokenizer.tokenizer_json)
    if checkpoint.tokenizer.chat_template is not None:
        writer.add_bytes(TEMPLATE_FILE, checkpoint.tokenizer.chat_template.encode())
    for name, content in terms.items():
        writer.add_bytes(name, content)


def _manifest(
    checkpoint: Checkpoint,
    graph: DecoderGraph,
    recipe: Recipe,
    context_length: int,
    source_print: str,
    export_print: str,
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
        source=SourceInfo(
            kind=checkpoint.kind,
            name=checkpoint.path.name,
            fingerprint=source_print,
            adapter=checkpoint.adapter.name if checkpoint.adapter else None,
        ),
        files=tuple(sorted(writer.entries, key=lambda entry: entry.path)),
        versions={name: importlib.metadata.version(name) for name in ("llorch", "onnx-ir", "numpy")},
        min_onnxruntime=MIN_ONNXRUNTIME,
    )
