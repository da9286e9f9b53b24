"""Settings of HQQ, as transformers writes them; how a weight is packed stands beside it in tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llorch_export.config.fields import Fields
from llorch_export.config.packed.base import WAY_OUT, Packing, refuse_unasked


@dataclass(frozen=True, slots=True)
class HqqPacking(Packing):
    """HQQ: whole numbers with zero points that need not be whole."""


def hqq_packing(fields: Fields) -> HqqPacking:
    """Read the settings. Raises ArtifactError for what is not understood."""
    settings = fields.mapping("quant_config")
    # Either of all layers, or by the name of a layer without its number.
    every = [settings, *(value for value in settings.values() if isinstance(value, Mapping))]
    if any(one.get(key) for one in every for key in ("scale_quant_params", "zero_quant_params")):
        raise fields.wrong("quant_config", f"no scale_quant_params and zero_quant_params; {WAY_OUT}")
    refuse_unasked(fields, ("quant_method", "skip_modules"))
    return HqqPacking(notices=())
