"""Rotary settings of a GGUF header and its tensors of rotary divisors, to :class:`RopeConfig`.

What a file leaves open is resolved here as llama.cpp resolves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from llorch_export.config.fields import Fields, quoted
from llorch_export.config.rope import (
    MAX_FACTOR,
    MAX_POSITIONS,
    MAX_THETA,
    MIN_FACTOR,
    RopeContext,
    checked_rotary_dim,
    yarn_scale,
    yarn_theta,
)
from llorch_serve.artifact.manifest import QueryScale, RopeConfig
from llorch_serve.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class GgufRopeTensors:
    """Divisors of the rotary frequencies that a GGUF file holds as tensors, one number a rotary pair.

    plain: ``rope_freqs.weight``; short, long: ``rope_factors_short.weight`` and ``rope_factors_long.weight``.
    """

    plain: Sequence[float] | None = None
    short: Sequence[float] | None = None
    long: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class _Scaling:
    """The settings that all kinds of rotary scaling share.

    key: what the names of the settings begin with. factor: 1 where positions are not stretched.
    original: the context length before extension. rotary_dim: None where all of a head is rotated.
    """

    key: str
    kind: str
    theta: float
    factor: float
    original: int
    attention_factor: float
    rotary_dim: int | None


def rope_from_gguf(fields: Fields, tensors: GgufRopeTensors, context: RopeContext) -> RopeConfig:
    """Read ``ARCHITECTURE.rope.*`` and the tensors of rotary divisors.

    Raises ArtifactError for types that are not supported, contradictions and settings that are not
    understood.
    """
    scaling = _scaling(fields, context)
    rope = _rope_config(fields, tensors, scaling, context)
    if not context.family.scales_queries:
        return rope
    beta = fields.number(
        f"{context.family.gguf_name}.attention.temperature_scale", 0.0, at_least=0, high=MAX_FACTOR
    )
    scale = QueryScale(beta=beta, positions=scaling.original) if beta else msgspec.UNSET
    return msgspec.structs.replace(rope, query_scale=scale)


def _rope_config(
    fields: Fields, tensors: GgufRopeTensors, scaling: _Scaling, context: RopeContext
) -> RopeConfig:
    if scaling.kind == "longrope" or tensors.short is not None or tensors.long is not None:
        return _longrope(scaling, tensors, context)
    if scaling.kind == "yarn":
        return _yarn(fields, scaling, tensors, context)
    theta, factor, attention_factor = scaling.theta, scaling.factor, scaling.attention_factor
    if tensors.plain is not None:
        divisors = _divisors(tensors.plain, "rope_freqs.weight", scaling, context)
        return RopeConfig(
            theta=theta,
            kind="factors",
            frequency_factors=tuple(divisor * factor for divisor in divisors),
            attention_factor=attention_factor,
            rotary_dim=scaling.rotary_dim,
        )
    if factor == 1.0:
        return RopeConfig(theta=theta, attention_factor=attention_factor, rotary_dim=scaling.rotary_dim)
    return RopeConfig(
        theta=theta,
        kind="linear",
        factor=factor,
        attention_factor=attention_factor,
        rotary_dim=scaling.rotary_dim,
    )


def _scaling(fields: Fields, context: RopeContext) -> _Scaling:
    key = f"{context.family.gguf_name}.rope"
    kind = fields.get(f"{key}.scaling.type") or "linear"
    if not isinstance(kind, str) or kind not in ("none", "linear", "yarn", "longrope"):
        raise ArtifactError(
            f"{context.origin}: {key}.scaling.type is {quoted(kind)}; supported are none, linear, yarn and "
            "longrope"
        )
    theta = fields.number(f"{key}.freq_base", 10000.0, above=MIN_FACTOR, high=MAX_THETA)
    # llama.cpp takes a factor without a type to be linear, and knows it under an older key as well.
    factors = [
        fields.number(name, above=MIN_FACTOR, high=MAX_FACTOR)
        for name in (f"{key}.scaling.factor", f"{key}.scale_linear")
        if name in fields
    ]
    original = fields.integer(
        f"{key}.scaling.original_context_length", context.max_positions, high=MAX_POSITIONS
    )
    attention_factor = fields.number(f"{key}.scaling.attn_factor", 1.0, above=MIN_FACTOR, high=MAX_FACTOR)
    rotary_dim = checked_rotary_dim(
        fields.integer(f"{key}.dimension_count", context.head_dim, high=context.head_dim), context
    )
    if rotary_dim is not None and not context.family.partial_rotary:
        fields.require(f"{key}.dimension_count", context.head_dim, "all of a head is rotated")
    return _Scaling(
        key=key,
        kind=kind,
        theta=theta,
        factor=factors[0] if factors and kind != "none" else 1.0,
        original=original,
        attention_factor=attention_factor,
        rotary_dim=rotary_dim,
    )


def _longrope(scaling: _Scaling, tensors: GgufRopeTensors, context: RopeContext) -> RopeConfig:
    if scaling.factor != 1 or tensors.plain is not None:
        raise ArtifactError(
            f"{context.origin} combines longrope with another rotary scaling; convert the model again"
        )
    return RopeConfig(
        theta=scaling.theta,
        kind="longrope",
        short_factor=_divisors(tensors.short, "rope_factors_short.weight", scaling, context),
        long_factor=_divisors(tensors.long, "rope_factors_long.weight", scaling, context),
        original_max_position_embeddings=scaling.original,
        attention_factor=scaling.attention_factor,
        rotary_dim=scaling.rotary_dim,
    )


def _yarn(fields: Fields, scaling: _Scaling, tensors: GgufRopeTensors, context: RopeContext) -> RopeConfig:
    key = scaling.key
    if tensors.plain is not None:
        raise ArtifactError(f"{context.origin} combines yarn with rope_freqs.weight; convert the model again")
    fields.require(f"{key}.scaling.yarn_ext_factor", 1, "the whole ramp is applied")
    fields.require(f"{key}.scaling.yarn_attn_factor", 1, "attn_factor is the one that is read")
    attention_factor = scaling.attention_factor * yarn_scale(scaling.factor, 1)
    log_multiplier = f"{key}.scaling.yarn_log_multiplier"
    if context.family.scales_queries:  # the one architecture here of which llama.cpp reads it
        weight = fields.number(log_multiplier, 0.0, at_least=0, high=MAX_FACTOR)
        attention_factor /= yarn_scale(scaling.factor, weight)
    else:
        fields.require(log_multiplier, 0, "attention is scaled by the factor alone")
    return RopeConfig(
        theta=yarn_theta(scaling.theta, fields),
        kind="yarn",
        factor=scaling.factor,
        original_max_position_embeddings=scaling.original,
        attention_factor=attention_factor,
        beta_fast=fields.number(f"{key}.scaling.yarn_beta_fast", 32.0, above=MIN_FACTOR, high=MAX_FACTOR),
        beta_slow=fields.number(f"{key}.scaling.yarn_beta_slow", 1.0, above=MIN_FACTOR, high=MAX_FACTOR),
        rotary_dim=scaling.rotary_dim,
    )


def _divisors(
    values: Sequence[float] | None, name: str, scaling: _Scaling, context: RopeContext
) -> tuple[float, ...]:
    """Return the divisors of a tensor, one a rotary pair. Raises ArtifactError if they are not that."""
    pairs = (scaling.rotary_dim or context.head_dim) // 2
    if values is None or len(values) != pairs or not all(MIN_FACTOR < f <= MAX_FACTOR for f in values):
        raise ArtifactError(
            f"{context.origin}: {name} must hold {pairs} positive numbers, one a rotary pair; convert the "
            f"model again"
        )
    return tuple(values)
