"""An artifact's further graphs: over a KV cache in int8, and with weights of its own for prompts.

Once the pipeline has written the first graph with its weights and made a manifest, these functions add files
and return the manifest that lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from llorch_export.artifact.cache_scales import Scales, calibration_texts, measure_scales
from llorch_export.artifact.description import Progress, listed
from llorch_export.artifact.write import ArtifactWriter
from llorch_export.calibration.measurements import CalibrationIds
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.formats.targets import MIN_ONNXRUNTIME_INT8_CACHE
from llorch_export.graph.check import checked_bytes
from llorch_export.graph.decoder import DecoderGraph, build_decoder, build_embedder
from llorch_export.graph.lowest_runtime import later
from llorch_export.graph.weights import DATA_FILE, SCALES_FILE, Part, WeightPlan
from llorch_export.resolved import ResolvedExport
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import (
    Int8Cache,
    LlamaConfig,
    Manifest,
    PromptGraph,
    Recipe,
)

DECODE_FILE: Final = "decode.onnx"
PROMPTS_FILE: Final = "prompts.onnx"
PROMPTS_DATA: Final = "prompts.onnx.data"


def with_prompt_graph(
    writer: ArtifactWriter, manifest: Manifest, recipe: Recipe, graph: DecoderGraph, progress: Progress
) -> Manifest:
    """Add the graph for prompts, built over :func:`prompt_plan`, with those of its weights that the first
    graph has not.
    """
    assert (graph.inputs, graph.outputs) == (manifest.inputs, manifest.outputs), "one cache serves both"
    writer.add_weights(
        PROMPTS_DATA, graph.jobs, lambda n: progress("writing weights for prompts", n, graph.data_bytes)
    )
    writer.add_bytes(PROMPTS_FILE, checked_bytes(graph.model, manifest.target))
    prompts = PromptGraph(graph=PROMPTS_FILE, data=PROMPTS_DATA, recipe=recipe)
    return msgspec.structs.replace(manifest, files=listed(writer), prompts=prompts)


def including(first: DecoderGraph, prompts: DecoderGraph) -> DecoderGraph:
    """Return the first graph of an artifact with what is to be known of both: notices, and the lowest
    onnxruntime.
    """
    return replace(
        first,
        notices=tuple(dict.fromkeys((*first.notices, *prompts.notices))),
        min_onnxruntime=later(first.min_onnxruntime, prompts.min_onnxruntime),
    )


def planned(
    resolved: ResolvedExport, config: LlamaConfig, tensors: Mapping[str, LazyTensor]
) -> tuple[DecoderGraph, DecoderGraph | None]:
    """Return the first graph, of all layers, as it is before anything is measured, and the graph for prompts,
    which has jobs for the weights that it adds. Reads no weights.

    config, tensors: as the transforms that measure nothing leave them.
    """
    if resolved.embedding is not None:
        length = resolved.context_length
        return build_embedder(
            config, resolved.recipe, tensors, resolved.embedding, context_length=length
        ), None
    build = functools.partial(
        build_decoder,
        config,
        tensors=tensors,
        context_length=resolved.context_length,
        target=resolved.target,
    )
    graph = build(recipe=resolved.recipe)
    if resolved.prompts is None:
        return graph, None
    plan = prompt_plan(resolved.recipe, resolved.prompts, graph)
    prompts = build(recipe=resolved.prompts, part=Part(plan))
    return including(graph, prompts), prompts


def prompt_plan(first: Recipe, prompts: Recipe, graph: DecoderGraph) -> WeightPlan:
    """Return an empty plan for the weights that the graph for prompts does not share with ``graph``."""
    return WeightPlan(PROMPTS_DATA, {DATA_FILE: graph.jobs} if share_weights(first, prompts) else None)


def share_weights(first: Recipe, other: Recipe) -> bool:
    """Tell whether arrays are the same in both recipes where names, types and shapes agree.

    Those say nothing of how 4-bit weights were found, or of a GGUF file's own blocks.
    """
    plain = "source" not in (first.precision, first.head_precision)
    quantizers = {rule.quantizer for recipe in (first, other) for rule in recipe.rules}
    return plain and {first.quantizer, other.quantizer, None, *quantizers} == {None}


def with_int8_cache(
    writer: ArtifactWriter,
    manifest: Manifest,
    decode: DecoderGraph,
    text: CalibrationIds | None,
    progress: Progress,
) -> Manifest:
    """Add the graph over a KV cache in int8 with its scales, measured on the artifact as it is."""
    scales = measured_scales(Artifact(writer.folder, manifest), text, progress)
    writer.add_bytes(SCALES_FILE, scales.astype("<f4").tobytes())
    writer.add_bytes(DECODE_FILE, checked_bytes(decode.model, manifest.target))
    int8_cache = int8_form(DECODE_FILE, SCALES_FILE, text)
    return msgspec.structs.replace(manifest, files=listed(writer), int8_cache=int8_cache)


def measured_scales(artifact: Artifact, text: CalibrationIds | None, progress: Progress) -> Scales:
    """Return the scales of a KV cache in int8, [layers, 2 (keys, values), kv_heads, head_dim]."""
    texts = calibration_texts(artifact, None if text is None else text.ids)
    total = sum(map(len, texts))
    return measure_scales(artifact, texts, lambda n: progress("measuring the KV cache", n, total))


def int8_form(decode_graph: str, scales: str, text: CalibrationIds | None) -> Int8Cache:
    """Return what the manifest says of a KV cache in int8."""
    return Int8Cache(
        decode_graph=decode_graph,
        scales=scales,
        measured_on=None if text is None else text.text,
        min_onnxruntime=MIN_ONNXRUNTIME_INT8_CACHE,
    )
