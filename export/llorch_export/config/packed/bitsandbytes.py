"""Settings of bitsandbytes' packing, as transformers writes them since it can save such models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from llorch_export.config.fields import Fields
from llorch_export.config.packed.base import Packing, refuse_unasked

# How kernels of other runtimes compute, what is in which type is seen from the tensors, and so are the
# modules that are not packed.
_INERT: Final = (
    "quant_method",
    "_load_in_4bit",
    "_load_in_8bit",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_target_parameters",
    "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_skip_modules",
    "modules_to_not_convert",
)


@dataclass(frozen=True, slots=True)
class BitsAndBytesPacking(Packing):
    """bitsandbytes: a table of sixteen values times the largest of a block, or bytes times that of a row.

    table: the table of 4-bit weights; None: weights have 8 bits.
    """

    table: Literal["nf4", "fp4"] | None


def bitsandbytes_packing(fields: Fields) -> BitsAndBytesPacking:
    """Read the settings. Raises ArtifactError for what is not understood."""
    four, eight = fields.boolean("load_in_4bit", False), fields.boolean("load_in_8bit", False)
    if four is eight:
        raise fields.wrong("load_in_4bit", "true, or load_in_8bit true instead, and not both")
    table = fields.get("bnb_4bit_quant_type")
    if table not in (None, "nf4", "fp4"):
        raise fields.wrong("bnb_4bit_quant_type", "'nf4' or 'fp4'")
    threshold = fields.number("llm_int8_threshold", 6.0, at_least=0, high=1e9)
    packing = BitsAndBytesPacking(
        notices=_notices(threshold) if eight else (),
        table=("nf4" if table == "nf4" else "fp4") if four else None,
    )
    refuse_unasked(fields, _INERT)
    return packing


def _notices(threshold: float) -> tuple[str, ...]:
    outliers = f", but for those above {threshold:g}" if threshold else ""
    return (
        "bitsandbytes rounds the inputs of 8-bit layers to 8 bits too"
        f"{outliers}; here they are rounded as --accuracy-level says",
    )
