"""Settings of NVIDIA's ModelOpt, from ``config.json`` or from ``hf_quant_config.json`` beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llorch_export.config.fields import Fields, shown
from llorch_export.config.packed.base import MAX_PATTERNS, WAY_OUT, Packing, refuse_unasked
from llorch_serve.errors import ArtifactError

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
_ROUNDS_INPUTS: Final[Mapping[str, bool]] = {
    "FP8": True,
    "FP8_PER_CHANNEL_PER_TOKEN": True,
    "FP8_PB_REAL": True,
    "FP8_PB_WO": False,
    "MXFP8": True,
    "W8A16": False,
    "W8A8_SQ_PER_CHANNEL": True,
    "W4A16_AWQ": False,
    "NVFP4": True,
    "NVFP4_AWQ": True,
    "W4A16_NVFP4": False,
    "W4A8_NVFP4_FP8": True,
    "MXFP4": True,
    "W4A8_MXFP4_FP8": True,
}
"""By algorithm whose weights are codes with scales: whether it rounds the inputs of layers too.

Others are refused: NVFP4_SVD has low-rank matrices beside the weights, W4A8_AWQ rounds them once more.
"""
_MIXED: Final = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class ModelOptPacking(Packing):
    """ModelOpt: floating point of 8 or 4 bits, or whole numbers; which of them, the tensors say."""


def modelopt_packing(fields: Fields) -> ModelOptPacking:
    """Read the settings, of either file. Raises ArtifactError for what is not understood."""
    nested = fields.mapping("quantization")
    own = Fields(nested, origin=f"{fields.origin}: quantization") if nested else fields
    algorithms, rounds = _algorithms(own), _groups_round(own)
    cache = any(own.get(key) for key in _CACHES)
    for one in {fields, own}:
        refuse_unasked(one, _INERT)
    notices = []
    if rounds or any(_ROUNDS_INPUTS[algorithm] for algorithm in algorithms):
        notices.append(
            f"{own.get(_ALGORITHM)} of ModelOpt rounds the inputs of layers too; here they are what "
            "--accuracy-level says"
        )
    if cache:
        notices.append(
            "ModelOpt rounds keys and values by stored scales; here the cache is what --kv-dtype says"
        )
    return ModelOptPacking(tuple(notices), unused=(".k_scale", ".v_scale") if cache else ())


def _algorithms(fields: Fields) -> frozenset[str]:
    """Return the algorithms of all layers. Raises ArtifactError for one that is not known."""
    whole = fields.get(_ALGORITHM)
    if not (isinstance(whole, str) and whole.upper() == _MIXED):
        return frozenset({_known(fields)})
    layers = fields.mapping("quantized_layers")
    origin = f"{fields.origin}: quantized_layers"
    if len(layers) > MAX_PATTERNS:
        raise fields.wrong("quantized_layers", f"at most {MAX_PATTERNS} layers")
    found = set()
    for name, settings in layers.items():
        if not isinstance(settings, Mapping):
            raise ArtifactError(f"{origin}: {shown(name)} is no object of settings; {WAY_OUT}")
        found.add(_known(Fields(settings, origin=f"{origin}: {shown(name)}")))
    return frozenset(found)


def _known(fields: Fields) -> str:
    algorithm = fields.get(_ALGORITHM)
    if not isinstance(algorithm, str) or algorithm.upper() not in _ROUNDS_INPUTS:
        raise fields.wrong(_ALGORITHM, f"one of {', '.join(_ROUNDS_INPUTS)}; {WAY_OUT}")
    return algorithm.upper()


def _groups_round(fields: Fields) -> bool:
    """Tell whether some group of modules has its inputs rounded, or may have, since nothing is said of it."""
    groups, layers = fields.mapping("config_groups"), fields.mapping("quantized_layers")
    if any(isinstance(group, Mapping) and group.get("input_activations") for group in groups.values()):
        return True
    whole = fields.get(_ALGORITHM)
    return not groups and not layers and isinstance(whole, str) and whole.upper() == _MIXED


def is_modelopt(config: Mapping[object, object]) -> bool:
    """Tell whether ModelOpt wrote these settings, where they name no method that packs weights."""
    producer = config.get("producer")
    return isinstance(producer, Mapping) and producer.get("name") == "modelopt"
