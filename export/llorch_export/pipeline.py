"""An export from end to end: read, map, build, quantise, write, check."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from llorch_export.artifact.cache_scales import left_out, with_cache
from llorch_export.artifact.companions import (
    planned,
    prompt_plan,
    prompt_recipe,
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
    up_to_date,
)
from llorch_export.artifact.genai import guest_files
from llorch_export.artifact.place import check_output
from llorch_export.artifact.write import ArtifactWriter
from llorch_export.calibration.measurements import (
    CalibrationIds,
    measured_moments,
    read_calibration,
    require_use,
)
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.lora import with_adapter
from llorch_export.formats.module import uses_static
from llorch_export.formats.precisions import refuse_beyond
from llorch_export.formats.targets import TARGETS
from llorch_export.graph.check import checked_bytes
from llorch_export.graph.decoder import DecoderGraph, build_decoder
from llorch_export.graph.front import Interface
from llorch_export.graph.rope import MAX_TABLE_BYTES, table_bytes
from llorch_export.graph.static_scales import check_static
from llorch_export.graph.weights import DATA_FILE, WeightPlan
from llorch_export.options import ExportOptions, Rule
from llorch_export.quantize.feedback import ErrorFactors, error_factor
from llorch_export.recipes.default import with_quantizer
from llorch_export.recipes.resolve import Choices, Peaks, choices, measured_choices, with_rules
from llorch_export.source.open import open_checkpoint
from llorch_export.transform.moments import second_moments
from llorch_export.transform.prepare import Prepared, fixed_transforms, prepare
from llorch_export.verify.float_range import probe_activations
from llorch_serve.artifact.folder import MANIFEST_NAME, Artifact, load_artifact
from llorch_serve.artifact.manifest import (
    FixedShapes,
    LlamaConfig,
    Recipe,
    Target,
    encode_manifest,
)
from llorch_serve.errors import UsageError

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


def export(options: ExportOptions, progress: Progress) -> ExportResult:
    """Export ``options.source`` to ``options.output``.

    Raises ArtifactError, UsageError or ResourceError; then nothing is left behind and an artifact already at
    the output is as it was.
    """
    recipe = options.recipe()
    replace = options.force or options.if_changed
    check_output(options.output, force=replace)
    checkpoint = open_checkpoint(options.source)
    check_source(recipe, checkpoint)
    if options.lora is not None:
        checkpoint = with_adapter(checkpoint, options.lora)
    options = with_quantizer(options, checkpoint.config)
    recipe = resolved_recipe(options, checkpoint.config)
    wants_cache = options.recipe().int8_cache
    chooses, prompts_choose = choosing_rules(options)
    may_measure = uses_static(recipe) or bool(chooses) or options.prompts_may_measure
    require_use(recipe, options.calibration, may_measure=may_measure)
    check_static(recipe, options.calibration)
    context_length = resolve_context(checkpoint.config, options.max_context)
    text = None
    if options.calibration is not None:
        text = read_calibration(options.calibration, checkpoint)
        recipe = msgspec.structs.replace(recipe, calibration=text.text)
    prompts = prompt_recipe(options, recipe, checkpoint.config)
    source_print = fingerprint_source(checkpoint, progress)
    terms = licences(checkpoint)
    export_print = export_fingerprint(
        source_print,
        recipe,
        context_length,
        terms,
        options.interop,
        options.target,
        prompts,
        _choices(options.prompts, checkpoint.config),
        _choices(options, checkpoint.config),
    )
    fields = checkpoint_fields(
        checkpoint, context_length=context_length, source_print=source_print, export_print=export_print
    )
    existing = up_to_date(options.output, fields, progress) if options.if_changed else None
    if existing is not None:
        return ExportResult(existing, changed=False)
    with ArtifactWriter(options.output, force=replace) as writer, contextlib.ExitStack() as measuring:
        if text is not None:  # measuring takes minutes, after which a full disk should be no news
            built, tensors = fixed_transforms(checkpoint.config, checkpoint.tensors, recipe)
            graph, prompt_bytes = planned(built, tensors, recipe, prompts, context_length, options.target)
            writer.require_space(graph.data_bytes + (prompt_bytes or 0) + _OVERHEAD_BYTES)
        static_prompts = text is not None and prompts is not None and uses_static(prompts)
        measure = bool(chooses or prompts_choose) or static_prompts
        prepared = prepare(checkpoint, recipe, text, progress, measure=measure)
        if prepared.calibration is not None:
            peaks = prepared.calibration.peaks()
            recipe = msgspec.structs.replace(
                resolved_recipe(options, checkpoint.config, peaks), calibration=recipe.calibration
            )
            prompts = prompt_recipe(options, recipe, checkpoint.config, peaks)
        factors = measuring.enter_context(_error_factors(prepared, recipe, text, progress))

        def build(
            interface: Interface,
            form: Recipe = recipe,
            weights: WeightPlan | None = None,
            *,
            int8_cache: bool = False,
        ) -> DecoderGraph:
            return build_decoder(
                prepared.config,
                form,
                prepared.tensors,
                context_length=context_length,
                calibration=prepared.calibration,
                error_factors=factors,
                interface=interface,
                target=options.target,
                int8_cache=int8_cache,
                weights=weights,
            )

        graph = build(Interface.LLORCH)
        models = _serialise(graph, options.target)
        guests = guest_files(
            options.interop, checkpoint, graph, context_length, build, in_bytes=recipe.multiplies_bytes
        )
        prompt_graph = None
        if prompts is not None:
            prompt_graph = build(Interface.LLORCH, prompts, prompt_plan(recipe, prompts, graph))
        writer.require_space(
            graph.data_bytes + (prompt_graph.data_bytes if prompt_graph else 0) + _OVERHEAD_BYTES
        )
        writer.add_weights(DATA_FILE, graph.jobs, lambda n: progress("writing weights", n, graph.data_bytes))
        for name, data in models.items():
            writer.add_bytes(name, data)
        add_text_files(writer, checkpoint, terms | guests)
        row = TARGETS[options.target]
        manifest = msgspec.structs.replace(
            base_manifest(
                fields,
                graph,
                recipe,
                writer=writer,
                versions={name: importlib.metadata.version(name) for name in ("onnx-ir", "numpy")},
                min_onnxruntime=row.min_onnxruntime,
            ),
            interop=() if options.interop is None else (options.interop,),
            target=options.target,
            checked_on=row.checked_on,
            chunked_prefill=row.chunked_prefill,
            fixed_shapes=_fixed_shapes(graph),
        )
        if recipe.int8_cache:
            decode = build(Interface.LLORCH, int8_cache=True)
            manifest = with_int8_cache(writer, manifest, decode, text, progress)
        if prompts is not None and prompt_graph is not None:
            manifest = with_prompt_graph(writer, manifest, prompts, prompt_graph, progress)
        writer.add_unlisted(MANIFEST_NAME, encode_manifest(manifest))
        written = load_artifact(writer.folder)
        probed = probe_activations(written) if recipe.compute_type == "float16" else None
        writer.commit()
    uncached = left_out(checkpoint.config) if wants_cache and not recipe.int8_cache else None
    notices = tuple(notice for notice in (graph.narrowing.notice(), probed, uncached) if notice is not None)
    return ExportResult(load_artifact(options.output), changed=True, notices=notices)


def resolved_recipe(options: ExportOptions, config: LlamaConfig, peaks: Peaks | None = None) -> Recipe:
    """Return the first graph's recipe. peaks: see :func:`with_rules`. Raises UsageError if the target cannot
    have it.
    """
    recipe = with_cache(with_rules(options.recipe(), options.rules, config, peaks), options.kv_dtype, config)
    refuse_beyond(options.target, recipe)
    return recipe


def choosing_rules(options: ExportOptions) -> tuple[list[Rule], list[Rule]]:
    """Return the rules of the first graph's recipe and of the one for prompts that choose by a text.

    Raises UsageError where there is no text.
    """
    of_prompts = () if options.prompts is None else options.prompts.rules
    return measured_choices(options.rules, options.calibration), measured_choices(
        of_prompts, options.calibration
    )


def _choices(options: ExportOptions | None, config: LlamaConfig) -> Choices:
    """Return what rules may come to, where that is measured; for no graph, nothing."""
    return () if options is None else choices(options.recipe(), options.rules, config)


@contextlib.contextmanager
def _error_factors(
    prepared: Prepared, recipe: Recipe, text: CalibrationIds | None, progress: Progress
) -> Iterator[ErrorFactors | None]:
    """Give what measures how inputs move together while weights are written; None where the recipe asks for
    none.
    """
    if not measured_moments(recipe):
        yield None
        return
    assert text is not None, "options that measure come with a text"
    with second_moments(prepared.config, prepared.tensors, text.ids, progress, error_factor) as moments:
        yield moments.of


def check_source(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Raise UsageError if the recipe wants blocks that the checkpoint's format does not have."""
    if recipe.precision == "source" and checkpoint.kind != "gguf":
        raise UsageError(
            f"--precision source carries over the quantised blocks of a GGUF file, and {checkpoint.path} is "
            f"a "
            "Hugging Face folder; choose fp32, fp16, bf16, int8 or int4"
        )


def resolve_context(config: LlamaConfig, max_context: int | None) -> int:
    """Return the artifact's context length: by default the longest that is exact.

    Raises UsageError beyond what the model was trained for, beyond where one rotary table is right, and
    beyond where the tables have a bearable size.
    """
    context_length = config.max_exact_context if max_context is None else max_context
    if not 2 <= context_length <= config.max_position_embeddings:
        raise UsageError(
            f"--max-context is {max_context}; this model takes 2 to {config.max_position_embeddings}"
        )
    if context_length > config.max_exact_context:
        raise UsageError(
            f"--max-context is {max_context}; the model's rotary type {config.rope.kind} rotates every "
            f"position "
            f"otherwise in sequences beyond {config.max_exact_context}, which no fixed table reproduces. "
            f"Use --max-context {config.max_exact_context} or less"
        )
    needed = table_bytes(config, context_length)
    if needed > MAX_TABLE_BYTES:
        raise UsageError(
            f"a context of {context_length} positions takes rotary tables of {needed / 2**20:.0f} MiB, "
            f"expected at most "
            f"{MAX_TABLE_BYTES // 2**20}; use --max-context {context_length * MAX_TABLE_BYTES // needed} or "
            f"less"
        )
    return context_length


def _serialise(graph: DecoderGraph, target: Target) -> dict[str, bytes]:
    """Return the checked models' bytes by file name."""
    models = {GRAPH_FILE: graph.model, **({} if graph.prefill is None else {PREFILL_FILE: graph.prefill})}
    return {name: checked_bytes(model, target) for name, model in models.items()}


def _fixed_shapes(graph: DecoderGraph) -> FixedShapes | None:
    if graph.prefill_tokens is None:
        return None
    return FixedShapes(prefill_graph=PREFILL_FILE, prefill_tokens=graph.prefill_tokens)
