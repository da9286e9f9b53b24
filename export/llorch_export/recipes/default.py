"""What a model gets where nobody says how its weights are stored, or by which quantizer 4-bit ones are found.

Takes a model's config, and the options of an export; both defaults are the best that was measured
(docs/precision.md) among what is affordable without being asked.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Final

from llorch_export.calibration.measurements import BUNDLED_TEXT
from llorch_export.checkpoint.names import parameters
from llorch_export.options import ExportOptions, Rule
from llorch_export.recipes.exact_transforms import why_inexact
from llorch_export.source.open import open_settings
from llorch_serve.artifact.manifest import LlamaConfig

MOST_MEASURED: Final = 500_000_000
"""Parameters of models that are measured in fp32 without being asked; that takes four bytes of memory and
disk for each.
"""

MOST_WHOLE: Final = 1_000_000_000
"""Parameters of models that embed texts in fp32 without being asked; that too takes four bytes for each."""

_STORAGE: Final = (
    "precision",
    "head_precision",
    "block_size",
    "fine_block_size",
    "quantizer",
    "scale_type",
    "accuracy_level",
    "compute_type",
    "activations",
    "target",
    "interop",
    "transforms",
)
"""Options that say how weights are stored, or what the default recipes cannot be combined with."""


def default_recipe(config: LlamaConfig, *, embeds: bool = False) -> str:
    """Return the recipe for the CPU of a model of this size and form.

    embeds: its graph gives vectors. In int8 some short text loses more than one in a hundred of its cosine,
        whichever weights are kept, and int8 saves a fifth to a quarter of the time (docs/embeddings.md).
    """
    if embeds:
        return "fp32" if parameters(config) <= MOST_WHOLE else "int8"
    if why_inexact("rotate", config) is not None:
        return "int8"
    if why_inexact("smooth", config) is not None or config.experts:
        return "cpu"
    return "cpu-calibrated" if parameters(config) <= MOST_MEASURED else "cpu"


def unasked_recipe(options: ExportOptions) -> str | None:
    """Return the recipe of an export whose options leave open how weights are stored; None where any of them
    says so.

    Raises ArtifactError or HubError if the source's settings cannot be read.
    """
    said = {field.name for field in fields(options) if getattr(options, field.name) != field.default}
    if not said.isdisjoint(_STORAGE):
        return None
    settings = open_settings(options.source, options.embed)
    return default_recipe(settings.config, embeds=settings.embedding is not None)


def quantizer_open(options: ExportOptions) -> bool:
    """Tell whether there are 4-bit weights by no stated quantizer, so that the model's size decides."""
    return options.quantizer is None and (
        "int4" in (options.precision, options.head_precision) or any(map(_is_open, options.rules))
    )


def with_quantizer(options: ExportOptions, config: LlamaConfig) -> ExportOptions:
    """Return ``options`` with error feedback for 4-bit weights whose quantizer nobody chose, if the model is
    small enough.

    It measures on the text that the options have, or else on the bundled one. Larger models keep the search,
    which needs none, and so do those with experts, whose inputs are not measured.
    """
    if not quantizer_open(options) or parameters(config) > MOST_MEASURED or config.experts:
        return options
    return replace(
        options,
        quantizer="gptq" if "int4" in (options.precision, options.head_precision) else None,
        rules=tuple(replace(rule, quantizer="gptq") if _is_open(rule) else rule for rule in options.rules),
        calibration=options.calibration or BUNDLED_TEXT,
    )


def _is_open(rule: Rule) -> bool:
    return rule.precision == "int4" and rule.quantizer is None
