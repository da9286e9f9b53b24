"""Settings of compressed-tensors, as llm-compressor writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llorch_export.config.fields import Fields, shown
from llorch_export.config.packed.base import (
    ONE_GROUP,
    WAY_OUT,
    Packing,
    group_size,
    names,
    refuse_unasked,
)
from llorch_export.config.packed.patterns import Expressions, ModulePatterns
from llorch_serve.errors import ArtifactError

_ACTIVATION_BITS: Final = 16  # from which on nothing is rounded that a checkpoint has
_MAX_BLOCK: Final = 2**16
_MAX_GROUPS: Final = 256
_FORMATS: Final[Mapping[str, tuple[tuple[str, int | None], ...]]] = {
    "pack-quantized": (("int", None),),
    "int-quantized": (("int", None),),
    "float-quantized": (("float", 8),),
    "naive-quantized": (("int", None), ("float", 8)),
    "nvfp4-pack-quantized": (("float", 4),),
    "mxfp4-pack-quantized": (("float", 4),),
    "mxfp8-quantized": (("float", 8),),
}
"""The types and widths of weights (None: any up to 8) that a format stores."""
_STRATEGIES: Final = ("tensor", "channel", "group", "tensor_group", "block")
# How the weights were found, and in which types; what these are is seen from the tensors.
_INERT: Final = ("observer", "observer_kwargs", "dynamic", "actorder", "scale_dtype", "zp_dtype")
_OF_CACHES: Final = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")
_LINEAR, _EMBEDDING_CLASS = "Linear", "Embedding"


@dataclass(frozen=True, slots=True)
class CompressedScheme:
    """How some modules are packed.

    format: of the tensors. bits: of a code. block: outputs and inputs that share a scale, ``ONE_GROUP`` for
        all of them. symmetric: there are no zero points.
    """

    format: str
    floating: bool
    bits: int
    block: tuple[int, int]
    symmetric: bool


@dataclass(frozen=True, slots=True)
class CompressedPacking(Packing):
    """compressed-tensors.

    groups: modules by name or class, and their scheme. ignored: modules that are plain.
    """

    groups: tuple[tuple[ModulePatterns, CompressedScheme], ...]
    ignored: ModulePatterns

    def of(self, module: str, *, embedding: bool) -> CompressedScheme | None:
        """Return how a module is packed, or None if it is not: by its name, then by expressions, then by its
        class. embedding: it is the table of token embeddings.
        """
        kind = _EMBEDDING_CLASS if embedding else _LINEAR
        if self.ignored.have(module) or kind in self.ignored.names:
            return None
        named = (scheme for targets, scheme in self.groups if module in targets.names)
        matched = (scheme for targets, scheme in self.groups if targets.have(module))
        by_class = (scheme for targets, scheme in self.groups if kind in targets.names)
        return next((scheme for found in (named, matched, by_class) for scheme in found), None)


def compressed_packing(fields: Fields) -> CompressedPacking:
    """Read the settings. Raises ArtifactError for what is not understood."""
    _require_nothing_else(fields)
    whole = fields.get("format")
    config_groups = fields.mapping("config_groups")
    if len(config_groups) > _MAX_GROUPS:
        raise fields.wrong("config_groups", f"at most {_MAX_GROUPS} groups")
    groups, notices, expressions = [], [], Expressions(fields.origin)
    for name, value in config_groups.items():
        origin = f"{fields.origin}: config_groups: {shown(name)}"
        if not isinstance(value, Mapping):
            raise ArtifactError(f"{origin} is no object of settings; {WAY_OUT}")
        own = Fields(value, origin=origin)
        scheme = _scheme(own, whole)
        targets = expressions.patterns(names(own, "targets"))
        notices += [notice for key in _ACTIVATIONS if (notice := _activations(own, key))]
        refuse_unasked(own)
        if scheme is not None:
            groups.append((targets, scheme))
    ignored = expressions.patterns(names(fields, "ignore"))
    cache = bool(fields.mapping("kv_cache_scheme"))
    if cache:
        notices.append(
            "the checkpoint's own code rounds keys and values by stored scales (kv_cache_scheme); here the "
            "cache is what --kv-dtype says"
        )
    refuse_unasked(fields, ("quant_method", "global_compression_ratio", "version"))
    return CompressedPacking(
        tuple(dict.fromkeys(notices)), tuple(groups), ignored, unused=_OF_CACHES if cache else ()
    )


_ACTIVATIONS: Final = ("input_activations", "output_activations")


def _require_nothing_else(fields: Fields) -> None:
    """Refuse what changes weights or the computation in other ways."""
    if fields.get("quantization_status") not in (None, "compressed", "frozen"):
        raise fields.wrong("quantization_status", "'compressed' or 'frozen'")
    sparsity = fields.mapping("sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        raise fields.wrong("sparsity_config", f"no format but 'dense'; {WAY_OUT}")
    for key in ("transform_config", "moe_sparsity_config"):
        if any(fields.mapping(key).values()):
            raise fields.wrong(key, f"nothing, since it changes what the model computes; {WAY_OUT}")


def _scheme(fields: Fields, whole: object) -> CompressedScheme | None:
    """Read the scheme of a group, in the format ``whole`` unless it has its own; None: weights are plain."""
    layout = fields.get("format") or whole
    weights = fields.mapping("weights")
    if not weights or layout == "dense":
        return None
    if not isinstance(layout, str) or layout not in _FORMATS:
        raise ArtifactError(
            f"{fields.origin}: format is {shown(str(layout))!r}, expected one of {', '.join(_FORMATS)}; "
            f"{WAY_OUT}"
        )
    own = Fields(weights, origin=f"{fields.origin}: weights")
    bits = own.integer("num_bits", 8, low=2, high=8)
    kind = own.get("type") or "int"
    if not any(kind == one and width in (None, bits) for one, width in _FORMATS[layout]):
        raise own.wrong("type" if kind not in ("int", "float") else "num_bits", f"what {layout} stores")
    if own.get("dynamic"):
        raise own.wrong("dynamic", "false: weights are stored")
    symmetric = own.boolean("symmetric", True)
    if kind == "float" and not symmetric:
        raise own.wrong("symmetric", "true, for floating point")
    scheme = CompressedScheme(layout, kind == "float", bits, _block(own), symmetric)
    refuse_unasked(own, _INERT)
    return scheme


def _block(fields: Fields) -> tuple[int, int]:
    """Return outputs and inputs that share a scale."""
    strategy = fields.get("strategy") or ("group" if fields.get("group_size") else "tensor")
    if strategy not in _STRATEGIES:
        raise fields.wrong("strategy", f"one of {', '.join(_STRATEGIES)}")
    if strategy == "block":
        rows, columns = fields.array("block_structure", int, length=2)
        if not (0 < rows <= _MAX_BLOCK and 0 < columns <= _MAX_BLOCK):
            raise fields.wrong("block_structure", f"two integers from 1 to {_MAX_BLOCK}")
        fields.get("group_size")
        return rows, columns
    fields.get("block_structure")
    if strategy in ("group", "tensor_group"):
        return 1, group_size(fields, "group_size")
    fields.get("group_size")
    return (ONE_GROUP if strategy == "tensor" else 1), ONE_GROUP


def _activations(fields: Fields, key: str) -> str | None:
    """Return a notice where the checkpoint's own code rounds activations."""
    settings = fields.mapping(key)
    if not settings:
        return None
    own = Fields(settings, origin=f"{fields.origin}: {key}")
    bits = own.integer("num_bits", 8, low=1, high=64)
    if bits >= _ACTIVATION_BITS:
        return None
    return rounding_notice(key.replace("_", " "), bits, floating=own.get("type") == "float")


def rounding_notice(what: str, bits: int, *, floating: bool) -> str:
    """Say that ``what`` is rounded by the checkpoint's own code, and not here."""
    kind = "floating point" if floating else "whole numbers"
    return (
        f"the checkpoint's own code rounds {what} of layers to {kind} of {bits} bits; here they are what "
        "--accuracy-level says, and layers differ by that rounding"
    )
