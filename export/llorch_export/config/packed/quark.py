"""Settings of AMD's Quark, as it exports models for Hugging Face."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llorch_export.config.fields import MAX_NAME, Fields, shown
from llorch_export.config.packed.base import MAX_PATTERNS, WAY_OUT, Packing, refuse_unasked
from llorch_serve.errors import ArtifactError

TYPES: Final = ("int4", "uint4", "int8", "uint8", "fp8_e4m3", "fp4")
_GROUPINGS: Final = ("per_tensor", "per_channel", "per_group")
_WILD: Final = frozenset("*?[")
_MAX_WILD: Final = 2**14  # characters: each name of a module is compared with each pattern
# How the weights were found, what runs them elsewhere, and what is seen from the tensors.
_INERT: Final = (
    "quant_method",
    "quant_mode",
    "version",
    "exclude",
    "algo_config",
    "kv_cache_post_rope",
    "log_severity_level",
    "config_version",
)


@dataclass(frozen=True, slots=True)
class QuarkScheme:
    """How a weight is packed: its type, and whether groups of inputs share scales.

    kind: one of ``TYPES``. grouped: numbers and scales lie input by input then.
    """

    kind: str
    grouped: bool


@dataclass(frozen=True, slots=True)
class QuarkPacking(Packing):
    """Quark: whole numbers or floating point, by module.

    names, patterns: modules by name and by pattern, with their place in the file, of which the first holds,
        and their scheme; None: they are plain. otherwise: of all others.
    interleaved: words hold eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
    """

    names: Mapping[str, tuple[int, QuarkScheme | None]]
    patterns: tuple[tuple[str, int, QuarkScheme | None], ...]
    otherwise: QuarkScheme | None
    interleaved: bool

    def of(self, module: str) -> QuarkScheme | None:
        """Return how a module is packed, or None if it is not."""
        last = len(self.names) + len(self.patterns)
        first, scheme = self.names.get(module, (last, self.otherwise))
        for pattern, place, other in self.patterns:
            if place < first and fnmatch.fnmatchcase(module, pattern):
                return other
        return scheme


def quark_packing(fields: Fields) -> QuarkPacking:
    """Read the settings. Raises ArtifactError for what is not understood."""
    export = Fields(fields.mapping("export"), origin=f"{fields.origin}: export")
    order = export.get("pack_method")
    if order not in (None, "reorder", "order"):
        raise export.wrong("pack_method", "'reorder' or 'order'")
    if export.get("weight_format") not in (None, "real_quantized"):
        raise export.wrong("weight_format", f"'real_quantized', since others are not packed; {WAY_OUT}")
    for key in ("softmax_quant_spec", "layer_type_quant_config"):
        if fields.get(key):
            raise fields.wrong(key, f"nothing; {WAY_OUT}")
    notices: list[str] = []
    layers = fields.mapping("layer_quant_config")
    if len(layers) > MAX_PATTERNS or any(len(pattern) > MAX_NAME for pattern in layers):
        raise fields.wrong("layer_quant_config", f"at most {MAX_PATTERNS} names of modules")
    names, patterns = {}, []
    for place, (name, value) in enumerate(layers.items()):
        scheme = _scheme(value, f"{fields.origin}: layer_quant_config: {shown(name)}", notices)
        if _WILD.isdisjoint(name):
            names[name] = place, scheme
        else:
            patterns.append((name, place, scheme))
    if sum(len(pattern) for pattern, _, _ in patterns) > _MAX_WILD:
        wild = " ".join(sorted(_WILD))
        raise fields.wrong(
            "layer_quant_config",
            f"patterns (with {wild}) of at most {_MAX_WILD} characters in all; list names of modules instead",
        )
    everywhere = fields.mapping("global_quant_config")
    otherwise = _scheme(everywhere, f"{fields.origin}: global_quant_config", notices)
    cache = bool(fields.mapping("kv_cache_quant_config"))
    if cache:
        notices.append(
            "Quark rounds keys and values by stored scales; here the cache is what --kv-dtype says"
        )
    refuse_unasked(fields, _INERT)
    return QuarkPacking(
        tuple(dict.fromkeys(notices)),
        names,
        tuple(patterns),
        otherwise,
        interleaved=order != "order",
        unused=(".output_scale", ".output_zero_point") if cache else (),
    )


def _scheme(value: object, origin: str, notices: list[str]) -> QuarkScheme | None:
    """Read the settings of some modules; add to ``notices`` what they say of activations."""
    if not isinstance(value, Mapping):
        raise ArtifactError(f"{origin} is no object of settings; {WAY_OUT}")
    if any(value.get(key) for key in ("input_tensors", "output_tensors")):
        notices.append("Quark rounds the inputs of layers too; here they are what --accuracy-level says")
    weight = value.get("weight")
    if weight is None:
        return None
    if not isinstance(weight, Mapping):
        raise ArtifactError(f"{origin}: weight is packed in several steps, expected one; {WAY_OUT}")
    own = Fields(weight, origin=f"{origin}: weight")
    kind, grouping = own.get("dtype"), own.get("qscheme")
    if not isinstance(kind, str) or kind not in TYPES:
        raise own.wrong("dtype", f"one of {', '.join(TYPES)}; {WAY_OUT}")
    if grouping not in _GROUPINGS:
        raise own.wrong("qscheme", f"one of {', '.join(_GROUPINGS)}; {WAY_OUT}")
    if own.get("is_dynamic"):
        raise own.wrong("is_dynamic", "false: weights are stored")
    if own.get("zero_point_type") not in (None, "int32"):
        raise own.wrong("zero_point_type", f"'int32'; {WAY_OUT}")
    axis = own.get("ch_axis")
    expected = {"per_tensor": (None, *range(-2, 2)), "per_channel": (0, -2), "per_group": (1, -1)}
    if axis not in expected[str(grouping)]:
        raise own.wrong("ch_axis", f"what makes scales of outputs or groups of inputs; {WAY_OUT}")
    return QuarkScheme(kind, grouped=grouping == "per_group")
