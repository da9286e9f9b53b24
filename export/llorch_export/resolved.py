"""One export with everything settled: what is read, built and written follows from it.

:func:`resolve` makes it from :class:`ExportOptions` and a checkpoint's config; ``pipeline.py`` carries it out
and ``preview.py`` describes it. Only what rules choose by a calibration text is filled in later, once the
text has been run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from llorch_export.calibration.measurements import calibrated_parts, measured_moments, require_use
from llorch_export.checkpoint.base import Checkpoint, LazyTensor
from llorch_export.config.embedding import Embedding
from llorch_export.formats.module import uses_static
from llorch_export.formats.precisions import refuse_rules_beyond
from llorch_export.formats.targets import TARGETS
from llorch_export.graph.rope import MAX_TABLE_BYTES, table_bytes
from llorch_export.graph.source_forms import widens_pairs
from llorch_export.options import ExportOptions
from llorch_export.recipes.base import base_recipe, prompts_may_measure
from llorch_export.recipes.default import with_quantizer
from llorch_export.recipes.exact_transforms import refuse_inexact
from llorch_export.recipes.experts import refuse_experts
from llorch_export.recipes.int8_cache import affordable_cache, cache_left_out
from llorch_export.recipes.rules import Choices, Peaks, choices, refuse_choices_without_text, with_rules
from llorch_export.recipes.static_scales import refuse_unknown_scales
from llorch_serve.artifact.manifest import (
    CalibrationText,
    EmbeddingForm,
    Interop,
    LlamaConfig,
    Recipe,
    Target,
)
from llorch_serve.errors import UsageError


@dataclass(frozen=True, slots=True)
class ResolvedExport:
    """What one export makes of one model.

    options: as given, with the quantizer that the model's size settles.
    config: the checkpoint's.
    context_length: positions that the artifact takes, at most those for which one rotary table is right.
    recipe: of the first graph; its rules name modules one by one.
    prompts: of a second graph for prompts alone, with the first one's transforms and compute type; None:
        there is none.
    choices, prompt_choices: what the rules of either recipe may come to, where a text decides; until it is
        measured, the first modules stand for those that it will choose.
    embedding: how the graph turns texts into vectors; None: it gives logits.
    stages: the layers of each graph that runs one after another; none: there is one graph.
    cache_left_out: a notice that there is no graph over an int8 cache, for the model is too large to be
        measured unasked; None: there is nothing to say.
    """

    options: ExportOptions
    config: LlamaConfig
    context_length: int
    recipe: Recipe
    prompts: Recipe | None
    choices: Choices
    prompt_choices: Choices
    cache_left_out: str | None
    embedding: EmbeddingForm | None = None
    stages: tuple[range, ...] = ()

    def __post_init__(self) -> None:
        """Check what all that follows may rely on; :func:`resolve` has refused everything else by name."""
        assert 2 <= self.context_length <= self.config.max_exact_context, "one rotary table is right"
        assert self.calibration is not None or not calibrated_parts(self.recipe), "a text is there if needed"
        assert self.calibration is not None or not (self.choices or self.prompt_choices), "for choices too"
        if self.prompts is not None:
            assert self.target == "cpu", "only the CPU's sessions take a second graph"
            assert self.prompts.compute_type == self.recipe.compute_type, "one cache serves both graphs"
            assert self.prompts.calibration == self.recipe.calibration, "one text serves both graphs"

    @property
    def target(self) -> Target:
        """The runtime that the graphs are for."""
        return self.options.target

    @property
    def interop(self) -> Interop | None:
        """Another runtime that shall load the artifact too."""
        return self.options.interop

    @property
    def calibration(self) -> Path | None:
        """The text to measure on."""
        return self.options.calibration

    @property
    def measures_inputs(self) -> bool:
        """Whether the inputs of the weights that transforms leave are measured for choices or for prompts."""
        static_prompts = self.prompts is not None and uses_static(self.prompts)
        return self.calibration is not None and bool(self.choices or self.prompt_choices or static_prompts)

    def with_text(self, text: CalibrationText) -> ResolvedExport:
        """Return the export with the text's hash in both recipes."""
        return replace(
            self,
            recipe=msgspec.structs.replace(self.recipe, calibration=text),
            prompts=None if self.prompts is None else msgspec.structs.replace(self.prompts, calibration=text),
        )

    def with_peaks(self, peaks: Peaks) -> ResolvedExport:
        """Return the export with the modules that rules choose by what was measured."""
        recipe = msgspec.structs.replace(
            _first_recipe(self.options, self.config, peaks), calibration=self.recipe.calibration
        )
        return replace(self, recipe=recipe, prompts=_prompt_recipe(self.options, recipe, self.config, peaks))


def resolve(
    options: ExportOptions, config: LlamaConfig, embedding: Embedding | None = None
) -> ResolvedExport:
    """Settle ``options`` for the model of ``config``. Reads no weight.

    embedding: how its texts become vectors, as ``options`` or files beside it say.
    Ensures: the rules fit the model and the target, a text is there if something is measured on one and only
    then, and the context is one that the model has.
    Raises UsageError if that cannot be.
    """
    if embedding is not None:
        options = _for_embedding(options, embedding, config)
    refuse_inexact(options.transforms, config)
    refuse_experts(options, config)
    options = with_quantizer(options, config)
    recipe = _first_recipe(options, config)
    of_prompts = () if options.prompts is None else options.prompts.rules
    refuse_choices_without_text((*options.rules, *of_prompts), options.calibration)
    own_choices = choices(base_recipe(options), options.rules, config)
    may_measure = uses_static(recipe) or bool(own_choices) or prompts_may_measure(options)
    require_use(recipe, options.calibration, may_measure=may_measure)
    refuse_unknown_scales(recipe, options.calibration)
    context_length = resolve_context(config, options.max_context)
    left_out = base_recipe(options).int8_cache and not recipe.int8_cache
    return ResolvedExport(
        options=options,
        config=config,
        context_length=context_length,
        recipe=recipe,
        prompts=_prompt_recipe(options, recipe, config),
        choices=own_choices,
        prompt_choices=()
        if options.prompts is None
        else choices(base_recipe(options.prompts), options.prompts.rules, config),
        cache_left_out=cache_left_out(config) if left_out else None,
        embedding=None if embedding is None else embedding.form,
    )


def _for_embedding(options: ExportOptions, embedding: Embedding, config: LlamaConfig) -> ExportOptions:
    """Return the options with what files beside the checkpoint say where the options leave it open.

    Raises UsageError for options that do not go with a graph that embeds texts.
    """
    length = options.max_context
    if length is None and embedding.max_tokens is not None:
        length = min(embedding.max_tokens, config.max_exact_context)
    options = replace(options, embed=embedding.form.pooling, max_context=length)
    base_recipe(options)
    return options


def _first_recipe(options: ExportOptions, config: LlamaConfig, peaks: Peaks | None = None) -> Recipe:
    """Return the first graph's recipe. peaks: see :func:`with_rules`. Raises UsageError if the target cannot
    have it.
    """
    recipe = with_rules(base_recipe(options), options.rules, config, peaks)
    recipe = affordable_cache(recipe, options.kv_dtype, config)
    refuse_rules_beyond(options.target, recipe)
    return recipe


def _prompt_recipe(
    options: ExportOptions, first: Recipe, config: LlamaConfig, peaks: Peaks | None = None
) -> Recipe | None:
    """Return the recipe of the graph for prompts; None if there is none.

    first: the first graph's. peaks: see :func:`with_rules`. Raises UsageError if the two do not go together.
    """
    if options.prompts is None:
        return None
    found = with_rules(base_recipe(options.prompts), options.prompts.rules, config, peaks)
    refuse_rules_beyond(options.target, found)
    refuse_unknown_scales(found, options.calibration)
    if found.precision == "source" != first.precision:
        raise UsageError(
            f"--prefill-recipe has precision source, and the other graph {first.precision}: the checkpoint's "
            "codes are kept for answers first; choose --precision source, or another precision for prompts"
        )
    if found.compute_type != first.compute_type:
        raise UsageError(
            f"--prefill-recipe computes in {found.compute_type} and the other graph in "
            f"{first.compute_type}; they share a cache"
        )
    if measured_moments(found) and not measured_moments(first):
        raise UsageError(
            "--prefill-recipe finds weights by gptq, and no weight of the first graph is found by it; "
            "choose another quantizer there"
        )
    return msgspec.structs.replace(found, calibration=first.calibration)


def check_source(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Raise UsageError if the recipe wants blocks or codes that the checkpoint does not have."""
    if recipe.precision != "source" or checkpoint.kind == "gguf":
        return
    if all(tensor.packed is None for tensor in checkpoint.tensors.values()):
        raise UsageError(
            f"--precision source carries over the quantised blocks of a GGUF file or the codes of packed "
            f"weights, and {checkpoint.path} is a Hugging Face folder of plain weights; choose fp32, fp16, "
            "bf16, int8 or int4"
        )


def with_packed_defaults(
    tensors: Mapping[str, LazyTensor], options: ExportOptions, embedding: Embedding | None
) -> ExportOptions:
    """Return ``options`` as they are where packed weights are kept and nobody has asked for anything else:
    with a cache that is not quantised, as rounding keys and values would cost as much again as all else, and
    without rounding the inputs of codes of 2 bits, of which little would be left.

    embedding: how texts become vectors, for which there is no cache.
    """
    recipe = base_recipe(options)
    if recipe.precision != "source" or all(tensor.packed is None for tensor in tensors.values()):
        return options
    if embedding is None and options.kv_dtype is None:
        options = replace(options, kv_dtype=recipe.compute_type)
    options = _without_rounding_pairs(tensors, options, recipe)
    if options.prompts is not None and options.prompts.precision == "source":
        return replace(options, prompts=_without_rounding_pairs(tensors, options.prompts, recipe))
    return options


def _without_rounding_pairs(
    tensors: Mapping[str, LazyTensor], options: ExportOptions, recipe: Recipe
) -> ExportOptions:
    """Return the options of one graph for codes of 2 bits, if there are any that are widened."""
    unrounded = msgspec.structs.replace(recipe, two_bit_accuracy_level=0)
    if options.accuracy_level is None and widens_pairs(tensors, TARGETS[options.target], unrounded):
        return replace(options, two_bit_accuracy_level=0)
    return options


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
