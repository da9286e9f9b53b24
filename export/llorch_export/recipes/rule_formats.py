"""What a rule makes of one module: the recipe's format, with what the rule says instead.

Raises UsageError for settings that mean nothing to the module, named by the rule's label.
"""

from __future__ import annotations

from llorch_export.formats.module import (
    EMBEDDING,
    HEAD,
    NOT_MEASURED,
    ModuleFormat,
    PerChannelActivations,
    block_quantizer,
    default_format,
    is_expert,
    per_channel,
)
from llorch_export.formats.precisions import BITS
from llorch_export.options import Rule
from llorch_export.recipes.storage_defaults import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_QUANTIZER,
    DEFAULT_SCALE_TYPE,
    EIGHT_BIT_QUANTIZERS,
)
from llorch_serve.artifact.manifest import Precision, Quantizer, Recipe
from llorch_serve.errors import UsageError


def ruled_format(recipe: Recipe, rule: Rule, module: str, *, shared_table: bool) -> ModuleFormat:
    """Return what a rule makes of a module; what it leaves open is the recipe's, where that speaks of the
    same precision.

    shared_table: the head is the embedding's table, from which rows are taken.
    """
    looked_up = module == EMBEDDING or (shared_table and module == HEAD)
    default = default_format(recipe, module)
    precision = rule.precision or default.precision
    if precision == "source":
        raise UsageError(f"{rule.label}: precision source is for the whole model; choose fp32, int8 or int4")
    activations = _activations(rule, default, module, precision, looked_up=looked_up)
    if activations is not None:
        _refuse_block_settings(
            rule,
            f"with activations {activations}, where a weight's blocks are its whole rows; leave it out, or "
            f"set activations = "
            '"block"',
        )
        return ModuleFormat("int8", None, None, "float32", activations)
    if precision not in BITS:
        _refuse_block_settings(rule, f"at precision {precision}; leave it out")
        return ModuleFormat(precision, None, None, "float32")
    if precision == "int8" and rule.quantizer not in (None, *EIGHT_BIT_QUANTIZERS):
        raise UsageError(
            f"{rule.label}: quantizer {rule.quantizer} is for 4 bits, and the rule gives {module} 8; choose "
            f"{' or '.join(EIGHT_BIT_QUANTIZERS)}, or leave it out"
        )
    same = precision == default.precision
    half = recipe.compute_type != "float32"
    if half and rule.scale_type not in (None, recipe.compute_type):
        raise UsageError(
            f"{rule.label}: scale_type {rule.scale_type} has no effect where the graph computes in "
            f"{recipe.compute_type}, "
            "which scales are then rounded to; leave it out"
        )
    own = recipe.scale_type if half or recipe.block_size is not None else DEFAULT_SCALE_TYPE[precision]
    return ModuleFormat(
        precision,
        rule.block_size
        or (same and (default.block_size or recipe.block_size))
        or DEFAULT_BLOCK_SIZE[precision],
        _quantizer(recipe, rule, module, precision),
        rule.scale_type or own,
    )


def _quantizer(recipe: Recipe, rule: Rule, module: str, precision: Precision) -> Quantizer | None:
    """Return how the module's blocks get scales; of 8 bits, None is round to nearest."""
    if precision == "int8":
        found = rule.quantizer or block_quantizer(recipe, precision)
        return "gptq" if found == "gptq" and not is_expert(module) else None
    found = rule.quantizer or recipe.quantizer or DEFAULT_QUANTIZER
    return NOT_MEASURED if found == "gptq" and is_expert(module) else found


def _refuse_block_settings(rule: Rule, why: str) -> None:
    for key, value in (
        ("block_size", rule.block_size),
        ("quantizer", rule.quantizer),
        ("scale_type", rule.scale_type),
    ):
        if value is not None:
            raise UsageError(f"{rule.label}: {key} has no effect {why}")


def _activations(
    rule: Rule, default: ModuleFormat, module: str, precision: Precision, *, looked_up: bool
) -> PerChannelActivations | None:
    """Return how the module's input is rounded, if its weights have one scale for each output channel.

    Raises UsageError where that cannot be.
    """
    if rule.activations is None:
        return default.activations if precision == "int8" else None
    if precision != "int8":
        raise UsageError(
            f"{rule.label}: activations {rule.activations} is for int8, and {module} has precision "
            f"{precision}; leave out what "
            'gives it that, or say precision = "int8" in a rule of your own'
        )
    if rule.activations != "block" and is_expert(module):
        raise UsageError(
            f"{rule.label}: activations {rule.activations} is for matrices with a node of their own, and "
            f"{module} is one of several experts, which take blocks; leave them out of the rule's modules"
        )
    if rule.activations != "block" and looked_up:
        shared = ", and this model's head is the same table; a rotation (--transform rotate) makes two of it"
        raise UsageError(
            f"{rule.label}: activations {rule.activations} is for matrices that are only multiplied with; "
            f"{EMBEDDING} is looked up, "
            f"which takes blocks{shared if module == HEAD else ''}"
        )
    return per_channel(rule.activations)
