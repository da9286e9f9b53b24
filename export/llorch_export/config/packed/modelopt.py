"""Settings of NVIDIA's ModelOpt, from ``config.json`` or from ``hf_quant_config.json`` beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llorch_export.config.fields import Fields
from llorch_export.config.packed.base import Packing, refuse_unasked

_ALGORITHM: Final = "quant_algo"
_CACHES: Final = ("kv_cache_quant_algo", "kv_cache_scheme")
# What is packed how is seen from the tensors.
_INERT: Final = (
    "quant_method",
    "producer",
    "config_groups",
    "ignore",
    "exclude_modules",
    "group_size",
    "has_zero_point",
    "pre_quant_scale",
    "quantized_layers",
)
_WEIGHTS_ALONE: Final = ("W4A16", "W8A16", "FP8_PB_WO", "MIXED_PRECISION")
"""What algorithms begin with that do not round activations, or not all."""
# Low-rank matrices beside the weights, which no tensor of the graph has a place for.
_REFUSED: Final = ("NVFP4_SVD", "W4A8_MXFP4_FP8")


@dataclass(frozen=True, slots=True)
class ModelOptPacking(Packing):
    """ModelOpt: floating point of 8 or 4 bits, or whole numbers; which of them, the tensors say."""


def modelopt_packing(fields: Fields) -> ModelOptPacking:
    """Read the settings, of either file. Raises ArtifactError for what is not understood."""
    nested = fields.mapping("quantization")
    own = Fields(nested, origin=f"{fields.origin}: quantization") if nested else fields
    algorithm = own.get(_ALGORITHM)
    if not isinstance(algorithm, str) or algorithm.upper() in _REFUSED:
        raise own.wrong(_ALGORITHM, "an algorithm whose weights are codes with scales, such as FP8 or NVFP4")
    cache = any(own.get(key) for key in _CACHES)
    for one in {fields, own}:
        refuse_unasked(one, _INERT)
    notices = []
    if not algorithm.upper().startswith(_WEIGHTS_ALONE) or _rounds(own):
        notices.append(
            f"{algorithm} of ModelOpt rounds the inputs of layers too; here they are what --accuracy-level "
            "says"
        )
    if cache:
        notices.append(
            "ModelOpt rounds keys and values by stored scales; here the cache is what --kv-dtype says"
        )
    return ModelOptPacking(tuple(notices), unused=(".k_scale", ".v_scale") if cache else ())


def _rounds(fields: Fields) -> bool:
    """Tell whether some group of modules has its inputs rounded."""
    groups = fields.mapping("config_groups").values()
    return any(isinstance(group, Mapping) and bool(group.get("input_activations")) for group in groups)


def is_modelopt(config: Mapping[object, object]) -> bool:
    """Tell whether ModelOpt wrote these settings, where they name no method that packs weights."""
    producer = config.get("producer")
    return isinstance(producer, Mapping) and producer.get("name") == "modelopt"
