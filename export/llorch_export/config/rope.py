"""Rotary settings of a ``config.json``, to :class:`RopeConfig`.

What a file leaves open is resolved here as transformers resolves it, so that the manifest says what the
tables are made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from llorch_export.config.family import Family
from llorch_export.config.fields import Fields, quoted
from llorch_export.config.reference_keys import reference_keys
from llorch_export.config.unread import check_count, ignored_settings
from llorch_serve.artifact.manifest import QueryScale, RopeConfig
from llorch_serve.errors import ArtifactError

MAX_POSITIONS: Final = 2**26
MAX_THETA: Final = 1e12
MAX_FACTOR: Final = 1e6
MIN_FACTOR: Final = 1e-6
"""What bases and factors lie above: frequencies that they divide stay finite in float32."""

_ORIGINAL: Final = "original_max_position_embeddings"
_KINDS: Final = "default, linear, llama3, dynamic, yarn and longrope"


@dataclass(frozen=True, slots=True)
class RopeContext:
    """What rotary settings are read in the light of. origin: names the file in errors."""

    family: Family
    head_dim: int
    max_positions: int
    origin: str


def rope_from_hf(fields: Fields, context: RopeContext) -> tuple[RopeConfig, tuple[str, ...]]:
    """Read ``rope_theta``, ``rope_scaling`` or ``rope_parameters``, and the settings next to them.

    Returns them, and the names of settings that transformers does not read for that rotary type.
    Raises ArtifactError for types that are not supported and for contradictions.
    """
    rope, place = _rope_fields(fields, context)
    kind = _kind(rope, context)
    result = _rope_config(fields, rope, place, kind, context)
    if context.family.scales_queries:
        result = msgspec.structs.replace(result, query_scale=_query_scale(rope, context))
    table = reference_keys()
    read = table.default_rope[context.family.architecture] if kind == "default" else table.rope[kind]
    unasked = rope.unasked()
    ignored = ignored_settings(rope, read, prefix=f"{place}.")
    for key in unasked:
        if isinstance(rope.get(key), dict):
            raise rope.wrong(key, "a number (rotary settings by kind of layer are not supported)")
    return result, ignored


def _rope_config(fields: Fields, rope: Fields, place: str, kind: str, context: RopeContext) -> RopeConfig:
    """Return the rotary settings of type ``kind``, which :func:`_kind` has found."""
    _refuse_differences(fields, rope, place, context.origin)
    outer = fields.number(
        "rope_theta",
        float(context.family.defaults.get("rope_theta", 10000.0)),
        above=MIN_FACTOR,
        high=MAX_THETA,
    )
    theta = rope.number("rope_theta", outer, above=MIN_FACTOR, high=MAX_THETA)
    rotary_dim = _rotary_dim(rope if "partial_rotary_factor" in rope else fields, context)
    original = _original_context(fields, rope, context)
    match kind:
        case "default":
            # Some files say "default" with a factor of 1; any other factor would be a contradiction.
            rope.require("factor", 1, "the rope type is default")
            return RopeConfig(theta=theta, rotary_dim=rotary_dim)
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=_factor(rope), rotary_dim=rotary_dim)
        case "dynamic" if context.family.alpha and rope.get("alpha"):
            stretch = rope.number("alpha", above=0, high=MAX_FACTOR)
            size = rotary_dim or context.head_dim
            for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
                rope.get(key)  # of dynamic and yarn, which alpha takes the place of
            return RopeConfig(theta=theta * stretch ** (size / (size - 2)), rotary_dim=rotary_dim)
        case "dynamic":
            return _dynamic_from_hf(rope, theta, rotary_dim, context)
        case "llama3":
            return _llama3_from_hf(rope, theta, original or context.max_positions, rotary_dim)
        case "yarn":
            return _yarn_from_hf(
                rope, theta, original or context.max_positions, rotary_dim, context.max_positions
            )
        case "longrope":
            return _longrope_from_hf(rope, theta, original or context.max_positions, rotary_dim, context)
        case _:
            raise ArtifactError(
                f"{context.origin}: rope type {quoted(kind)} is not supported; supported are {_KINDS}"
            )


def _query_scale(rope: Fields, context: RopeContext) -> QueryScale | msgspec.UnsetType:
    """Return by what queries are scaled at their position; UNSET if by nothing."""
    beta = rope.number("llama_4_scaling_beta", 0.0, at_least=0, high=MAX_FACTOR)
    if beta == 0:
        return msgspec.UNSET
    return QueryScale(beta=beta, positions=rope.integer(_ORIGINAL, high=MAX_POSITIONS))


def _rope_fields(fields: Fields, context: RopeContext) -> tuple[Fields, str]:
    """Return the rotary settings and the key that holds them; "" if these are what the lack of them means.

    Raises ArtifactError if a file has two that contradict each other.
    """
    # transformers 4 has rope_theta next to rope_scaling; transformers 5 has both inside rope_parameters.
    scaling, parameters = fields.mapping("rope_scaling"), fields.mapping("rope_parameters")
    if scaling and parameters and dict(scaling) != dict(parameters):
        raise ArtifactError(
            f"{context.origin}: rope_scaling and rope_parameters contradict each other; remove the wrong one"
        )
    place = "rope_parameters" if parameters else "rope_scaling"
    check_count(parameters or scaling, f"{context.origin}: {place}")
    if context.family.usual_rope and not (parameters or scaling):
        return Fields(context.family.usual_rope, origin=f"{context.origin}: absent rope_parameters"), ""
    return Fields(parameters or scaling, origin=f"{context.origin}: {place}"), place


def _refuse_differences(fields: Fields, rope: Fields, place: str, origin: str) -> None:
    """Raise ArtifactError if a setting stands inside and outside of the rotary settings with two values, or
    has another one than the lack of rotary settings means.
    """
    if not place and "rope_theta" in rope and fields.get("rope_theta") not in (None, rope.get("rope_theta")):
        usual = f"{rope.get('rope_theta')}, as absent rotary settings mean in this family"
        raise fields.wrong("rope_theta", f"{usual}; say rope_parameters if another is meant")
    for key in ("rope_theta", "partial_rotary_factor", _ORIGINAL):
        if key in fields and key in rope and fields.get(key) != rope.get(key):
            raise ArtifactError(f"{origin}: {key} differs from the one inside {place}; remove the wrong one")


def _kind(rope: Fields, context: RopeContext) -> str:
    """Return the rotary type, by the name that the match below has. Raises ArtifactError for two."""
    old_name, new_name = rope.get("type"), rope.get("rope_type")
    if old_name is not None and new_name is not None and old_name != new_name:
        raise ArtifactError(
            f"{context.origin}: rope type is {quoted(old_name)} by type and {quoted(new_name)} by "
            f"rope_type; remove the wrong one"
        )
    kind = new_name or old_name or "default"
    if not isinstance(kind, str):
        raise rope.wrong("rope_type" if new_name else "type", f"a name; supported are {_KINDS}")
    if context.family.longrope_names and kind not in ("default", "longrope", *context.family.longrope_names):
        raise rope.wrong(
            "rope_type" if new_name else "type", "default or longrope, which are all that the family has"
        )
    return "longrope" if kind in context.family.longrope_names else kind


def _original_context(fields: Fields, rope: Fields, context: RopeContext) -> int | None:
    """Return the context length before extension: next to the rope settings first, as transformers has it."""
    outer, inner = (
        source.integer(_ORIGINAL, high=MAX_POSITIONS) if _ORIGINAL in source else None
        for source in (fields, rope)
    )
    usual = context.family.outer_original_context
    if usual is not None and outer is None and inner not in (None, usual):
        raise rope.wrong(
            _ORIGINAL,
            f"it beside the rotary settings, where transformers looks for it and else takes {usual}",
        )
    return outer or inner or usual


def _rotary_dim(fields: Fields, context: RopeContext) -> int | None:
    if not context.family.partial_rotary:
        fields.require("partial_rotary_factor", 1, "all of a head is rotated in this family")
        return None
    usual = float(context.family.defaults.get("partial_rotary_factor", 1.0))
    share = fields.number("partial_rotary_factor", usual, above=0, high=1)
    return checked_rotary_dim(int(context.head_dim * share), context)


def checked_rotary_dim(rotary_dim: int, context: RopeContext) -> int | None:
    """Return the rotated part of a head, or None for all of it. Raises ArtifactError if it is not made of
    pairs.
    """
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > context.head_dim:
        raise ArtifactError(
            f"{context.origin}: {rotary_dim} of {context.head_dim} elements of a head are rotated, "
            "expected an even number from 2 on; rotary embedding turns pairs"
        )
    return None if rotary_dim == context.head_dim else rotary_dim


def _factor(rope: Fields) -> float:
    return rope.number("factor", above=MIN_FACTOR, high=MAX_FACTOR)


def _dynamic_from_hf(rope: Fields, theta: float, rotary_dim: int | None, context: RopeContext) -> RopeConfig:
    rope.require(_ORIGINAL, context.max_positions, "transformers scales from max_position_embeddings on")
    return RopeConfig(
        theta=theta,
        kind="dynamic",
        factor=_factor(rope),
        original_max_position_embeddings=context.max_positions,
        rotary_dim=rotary_dim,
    )


def _llama3_from_hf(rope: Fields, theta: float, original: int, rotary_dim: int | None) -> RopeConfig:
    low = rope.number("low_freq_factor", above=MIN_FACTOR, high=MAX_FACTOR)
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=_factor(rope),
        low_freq_factor=low,
        high_freq_factor=rope.number("high_freq_factor", above=low, high=MAX_FACTOR),
        original_max_position_embeddings=original,
        rotary_dim=rotary_dim,
    )


def _yarn_from_hf(
    rope: Fields, theta: float, original: int, rotary_dim: int | None, max_positions: int
) -> RopeConfig:
    # A null factor, unlike an absent one, means by how much the context has grown.
    usual = max_positions / original if rope.states("factor") else None
    factor = rope.number("factor", usual, above=MIN_FACTOR, high=MAX_FACTOR)
    attention_factor, mscale, all_dim = (
        rope.number(key, at_least=0, high=MAX_FACTOR) if key in rope else None
        for key in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if attention_factor is None and mscale and all_dim:  # zero counts as absent
        attention_factor = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
    return RopeConfig(
        theta=yarn_theta(theta, rope),
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=yarn_scale(factor, 1) if attention_factor is None else attention_factor,
        beta_fast=rope.number("beta_fast", 32.0, above=MIN_FACTOR, high=MAX_FACTOR),
        beta_slow=rope.number("beta_slow", 1.0, above=MIN_FACTOR, high=MAX_FACTOR),
        truncate=rope.boolean("truncate", not rope.states("truncate")),  # null switches it off
        rotary_dim=rotary_dim,
    )


def yarn_scale(factor: float, weight: float) -> float:
    """Return by how much attention over a stretched context is sharpened (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_theta(theta: float, fields: Fields) -> float:
    """Return ``theta``. Raises ArtifactError if yarn cannot be computed from it."""
    if theta <= 1:
        raise fields.wrong("rope_theta", "a number above 1 (yarn takes its logarithm)")
    return theta


def _longrope_from_hf(
    rope: Fields, theta: float, original: int, rotary_dim: int | None, context: RopeContext
) -> RopeConfig:
    stretch = rope.number("factor", context.max_positions / original, above=MIN_FACTOR, high=MAX_FACTOR)
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    pairs = (rotary_dim or context.head_dim) // 2
    short, long = (
        rope.numbers(key, length=pairs, above=MIN_FACTOR, high=MAX_FACTOR)
        for key in ("short_factor", "long_factor")
    )
    return RopeConfig(
        theta=theta,
        kind="longrope",
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", usual, above=MIN_FACTOR, high=MAX_FACTOR),
        rotary_dim=rotary_dim,
    )
