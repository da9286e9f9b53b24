"""From options to the recipe of the modules that no rule names.

Needs no model and opens nothing, so that options that cannot be are refused at once.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from llorch_export.calibration.measurements import require_use
from llorch_export.formats.module import uses_static
from llorch_export.formats.targets import BlockForm
from llorch_export.options import ExportOptions
from llorch_export.recipes.conflicts import refuse_conflicts
from llorch_export.recipes.default import quantizer_open
from llorch_export.recipes.kl_limits import default_kl_limit
from llorch_export.recipes.settled import SettledOptions, Storage, settle
from llorch_export.recipes.storage_defaults import (
    DEFAULT_QUANTIZER,
    DEFAULT_SCALE_TYPE,
    ROTATION_SEED,
    TRANSFORMS,
)
from llorch_serve.artifact.manifest import Quantizer, Recipe, ScaleType


def base_recipe(options: ExportOptions) -> Recipe:
    """Return the recipe that the options stand for, without their rules and the hash of their text.

    Ensures: options go together, and the target has what the recipe asks for. Where rules or the model have
    no say, a text is there if the recipe needs one, and only then.
    Raises UsageError if a value is out of range, would have no effect, or is beyond the target.
    """
    settled = settle(options)
    refuse_conflicts(settled)
    recipe = msgspec.structs.replace(
        _stored(settled),
        transforms=tuple(name for name in TRANSFORMS if name in options.transforms),
        transform_seed=ROTATION_SEED if "rotate" in options.transforms else None,
        int8_cache=_int8_cache(settled),
        kl_limit=_kl_limit(settled) if options.kl_limit is None else options.kl_limit,
    )
    if not options.rules and not quantizer_open(options):
        may_measure = uses_static(recipe) or prompts_may_measure(options)
        require_use(recipe, options.calibration, may_measure=may_measure)
    return recipe


def prompts_may_measure(options: ExportOptions) -> bool:
    """Tell whether there is a graph for prompts whose recipe can use a calibration text."""
    if options.prompts is None:
        return False
    forms = {options.prompts.activations, *(rule.activations for rule in options.prompts.rules)}
    return "static" in forms or any(rule.outliers for rule in options.prompts.rules)


def _stored(settled: SettledOptions) -> Recipe:
    """Return the part of the recipe that says how weights are stored."""
    recipe = Recipe(
        precision=settled.precision,
        head_precision=settled.head,
        block_size=None,
        accuracy_level=None,
        kl_limit=_kl_limit(settled),
        compute_type=settled.compute_type,
        activations=settled.activations,
    )
    match settled.storage:
        case Storage.UNQUANTISED | Storage.PER_CHANNEL:
            return recipe
        case Storage.SOURCE | Storage.RULES:
            of_pairs = settled.options.two_bit_accuracy_level
            return msgspec.structs.replace(
                recipe,
                accuracy_level=_accuracy_level(settled),
                two_bit_accuracy_level=msgspec.UNSET if of_pairs is None else of_pairs,
                scale_type=settled.compute_type,
            )
        case Storage.BLOCKS:
            fine = settled.fine_block_size
            return msgspec.structs.replace(
                recipe,
                block_size=settled.block_size,
                fine_block_size=None if fine == settled.block_size else fine,
                accuracy_level=_accuracy_level(settled),
                quantizer=_quantizer(settled),
                scale_type=_scale_type(settled),
            )


def _quantizer(settled: SettledOptions) -> Quantizer | None:
    """Return how blocks get scales. Where all have 8 bits, None is round to nearest, said or not."""
    asked = settled.options.quantizer
    if settled.has_int4:
        return asked or DEFAULT_QUANTIZER
    return "gptq" if asked == "gptq" else None


def _accuracy_level(settled: SettledOptions) -> Literal[0, 4] | None:
    if settled.target.blocks is not BlockForm.NBITS:
        return None
    return 4 if settled.options.accuracy_level is None else settled.options.accuracy_level


def _scale_type(settled: SettledOptions) -> ScaleType:
    if settled.compute_type != "float32":
        return settled.compute_type
    return settled.options.scale_type or DEFAULT_SCALE_TYPE[settled.quantised[0]]


def _int8_cache(settled: SettledOptions) -> bool:
    """Tell whether a graph over an int8 cache is added: if asked for, or by itself to quantised weights."""
    if settled.options.kv_dtype is not None:
        return settled.options.kv_dtype == "int8"
    quantised = settled.storage is Storage.SOURCE or bool(settled.quantised)
    return settled.int8_cache_possible and quantised


def _kl_limit(settled: SettledOptions) -> float:
    return default_kl_limit(
        (settled.precision, *settled.ruled),
        settled.head,
        settled.compute_type,
        per_token=bool(settled.per_channel),
    )
