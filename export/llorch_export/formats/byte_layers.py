"""Where layers in whole bytes can be had: what asks for them, and the targets, types and precisions that have
none.

Takes what flags and rules say of activations; raises before a source is opened.
"""

from __future__ import annotations

from collections.abc import Sequence

from llorch_export.formats.module import whole
from llorch_export.formats.targets import TARGETS
from llorch_serve.artifact.manifest import Activations, ComputeType, Precision, Target
from llorch_serve.errors import UsageError


def byte_layers(settings: Sequence[tuple[str, Activations | None]]) -> tuple[str, ...]:
    """Return the settings, given as (where it is said, what), that round activations by whole rows, as errors
    name them.
    """
    return tuple(f"{where} {value}" for where, value in settings if whole(value) is not None)


def refuse_target(asked: Sequence[str], target: Target) -> None:
    """Raise UsageError if the target multiplies no bytes with bytes, and something in ``asked`` wants it
    to.
    """
    if asked and not TARGETS[target].byte_layers:
        able = " or ".join(f"--target {name}" for name, row in TARGETS.items() if row.byte_layers)
        raise UsageError(
            f"{asked[0]} with --target {target}: layers in whole bytes are made for {able} alone; --target "
            f"{target} "
            "takes activations block, which is the default. Leave one of them out"
        )


def recipe_activations(
    activations: Activations | None, precision: Precision, fine_block_size: int | None
) -> Activations | None:
    """Return the form for the recipe; None for blocks, which is what recipes said before there was a choice.

    Raises UsageError where the linear layers are not int8, or have a block size of their own.
    """
    form = whole(activations)
    if form is None:
        return None
    if precision != "int8":
        raise UsageError(
            f"--activations {form} multiplies bytes with bytes, which takes --precision int8 and not "
            f"{precision}; leave it "
            "out or choose int8"
        )
    if fine_block_size is not None:
        raise UsageError(
            f"--fine-block-size {fine_block_size} has no effect with --activations {form}, where a weight's "
            f"blocks are its "
            "whole rows; leave it out"
        )
    return form


def refuse_type(asked: Sequence[str], compute_type: ComputeType) -> None:
    """Raise UsageError if the graph computes in a type that the runtime's product of bytes cannot give."""
    if asked and compute_type != "float32":
        raise UsageError(
            f"{asked[0]} with {compute_type}: the runtime's product of bytes gives float32; leave out the "
            f"setting or "
            f"what asks for {compute_type} (--compute-type, fp16, bf16)"
        )
