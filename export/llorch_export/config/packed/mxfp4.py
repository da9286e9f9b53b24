"""Settings of the packing in which gpt-oss is published: experts in floating point of four bits."""

from __future__ import annotations

from dataclasses import dataclass

from llorch_export.config.fields import Fields
from llorch_export.config.packed.base import Packing, refuse_unasked


@dataclass(frozen=True, slots=True)
class Mxfp4Packing(Packing):
    """MXFP4: blocks of 32 codes of E2M1 with a power of two."""


def mxfp4_packing(fields: Fields) -> Mxfp4Packing:
    """Read the settings. Raises ArtifactError for what is not understood."""
    fields.boolean("dequantize", False)  # in what transformers computes
    refuse_unasked(fields, ("quant_method", "modules_to_not_convert"))  # seen from the tensors
    return Mxfp4Packing(notices=())
