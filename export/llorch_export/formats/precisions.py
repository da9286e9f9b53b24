"""Precisions: the bits of their codes, the types that they mean, and which of them a target takes."""

from __future__ import annotations

from typing import Final

from llorch_export.formats.module import EMBEDDING, HEAD
from llorch_export.formats.targets import TARGETS, Capabilities
from llorch_serve.artifact.manifest import ComputeType, Precision, Recipe, Target
from llorch_serve.errors import UsageError

BITS: Final[dict[Precision, int]] = {"int8": 8, "int4": 4}
HALF_TYPES: Final[dict[Precision, ComputeType]] = {"fp16": "float16", "bf16": "bfloat16"}
UNQUANTISED: Final[tuple[Precision, ...]] = ("fp32", *HALF_TYPES)
"""Precisions whose weights are stored one by one, in the type that the graph computes in."""


def half_precisions(compute_type: ComputeType) -> list[Precision]:
    """Return the precision that rounds all activations to a type, if it is one of half precision."""
    return [precision for precision, kind in HALF_TYPES.items() if kind == compute_type]


def unquantised(compute_type: ComputeType) -> Precision:
    """Return the precision whose weights are stored in a type."""
    return next((p for p, kind in HALF_TYPES.items() if kind == compute_type), "fp32")


def refuse_rules_beyond(target: Target, recipe: Recipe) -> None:
    """Raise UsageError if the target cannot have what a rule stores; the message lists what it can have."""
    row = TARGETS[target]
    for rule in recipe.rules:
        for module in rule.modules:
            choices = target_precisions(
                row, row.table_bits if module in (EMBEDDING, HEAD) else row.linear_bits
            )
            if rule.precision not in choices:
                raise UsageError(
                    f"a rule stores {module} at {rule.precision}; --target {target} takes "
                    f"{', '.join(choices)} there"
                )


def target_precisions(row: Capabilities, widths: tuple[int, ...]) -> list[Precision]:
    """Return the precisions that a target with these code widths takes."""
    plain = [unquantised(kind) for kind in row.compute_types]
    blocks = [precision for precision, bits in BITS.items() if bits in widths]
    carried: list[Precision] = ["source"] if row.carries_blocks else []
    return [*plain, *blocks, *carried]
