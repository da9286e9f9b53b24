"""How weights are stored where neither a flag nor a recipe says so: the values that were measured to be best.

The measurements are in docs/precision.md.
"""

from __future__ import annotations

from typing import Final

from llorch_export.formats.precisions import BITS, unquantised
from llorch_export.formats.targets import TARGETS
from llorch_serve.artifact.manifest import (
    ComputeType,
    Precision,
    Quantizer,
    ScaleType,
    Target,
    TransformName,
)

BLOCK_SIZES: Final = (16, 32, 64, 128, 256)

ROTATION_SEED: Final = 0
"""Of the rotation's signs. Another one gives another rounding error of the same size."""

TRANSFORMS: Final[tuple[TransformName, ...]] = ("equalise", "smooth", "hadamard", "rotate")
"""In the order they are made. They commute, so the order that they are named in does not matter."""

DEFAULT_BLOCK_SIZE: Final[dict[Precision, int]] = {"int8": 32, "int4": 64}
"""Block 32 costs no speed against 64 at 8 bits and gives the lower divergence."""

DEFAULT_FINE_BLOCK_SIZE: Final = 32
"""Of int4. Errors of the query, key, value and down projections weigh most: finer blocks there and coarser
ones elsewhere give the lower divergence at the same size.
"""

DEFAULT_HEAD: Final[dict[Precision, Precision]] = {
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int8",
    "source": "source",
}
"""A 4-bit head makes small models repeat themselves, so int4 keeps an 8-bit one unless asked."""

DEFAULT_QUANTIZER: Final[Quantizer] = "affine"
"""Of what is not measured on a text. Zero points cost an eighth of a bit at block 32 and no speed, and take a
fifth off the divergence.
"""

EIGHT_BIT_QUANTIZERS: Final[tuple[Quantizer, ...]] = ("nearest", "gptq")
"""Of 8-bit blocks: round to nearest, the default, and error feedback. Searching a range or a zero point gains
nothing that so many codes would show.
"""

DEFAULT_SCALE_TYPE: Final[dict[Precision, ScaleType]] = {"int8": "float32", "int4": "bfloat16"}
"""Halving the scales saves half a bit a weight at block 32; 4-bit codes do not show their rounding, 8-bit
ones do.
"""


def default_head(precision: Precision, compute_type: ComputeType | None, target: Target) -> Precision:
    """Return the head's precision for layers of ``precision``; unquantised where the target has no such codes
    for it.

    compute_type: as asked for; None is the target's default.
    """
    head, row = DEFAULT_HEAD[precision], TARGETS[target]
    if head in BITS and BITS[head] not in row.table_bits:
        return unquantised(compute_type or row.compute_types[0])
    return head
