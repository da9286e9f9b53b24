"""Experts in the metadata of a GGUF file, in whose architectures all layers have them or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from llorch_export.config.experts import MAX_EXPERT_WIDTH, MAX_EXPERTS, checked_experts
from llorch_export.config.families import SUPPORTED_GGUF
from llorch_export.config.family import Family
from llorch_export.config.fields import Fields
from llorch_serve.artifact.manifest import ExpertsConfig

_SOFTMAX: Final = 1  # of the kinds that llama.cpp numbers


def experts_from_gguf(
    fields: Fields, family: Family, shapes: Mapping[str, tuple[int, ...]], layers: int
) -> ExpertsConfig | msgspec.UnsetType:
    """Return what a file says of experts; UNSET if it has none.

    shapes: of the tensors, which say how wide an expert is where the metadata does not.
    Raises ArtifactError for values out of range, and for experts in a family that has none.
    """
    name, keys = family.gguf_name, family.experts
    if keys is None:
        fields.require(f"{name}.expert_count", 0, f"the architecture has no experts here; {SUPPORTED_GGUF}")
        fields.require(f"{name}.expert_used_count", 0, "the architecture has no experts here")
        return msgspec.UNSET
    fields.require(f"{name}.expert_gating_func", _SOFTMAX, "shares are those of softmax")
    width = f"{name}.expert_feed_forward_length"
    stored = shapes.get("blk.0.ffn_gate_exps.weight", ())
    usual = stored[1] if len(stored) == 3 else fields.integer(f"{name}.feed_forward_length", high=2**31)
    shared = None
    if keys.shared:
        own = shapes.get("blk.0.ffn_gate_shexp.weight", ())
        key = f"{name}.expert_shared_feed_forward_length"
        shared = fields.integer(key, own[0] if len(own) == 2 else None, high=MAX_EXPERT_WIDTH)
    return checked_experts(
        ExpertsConfig(
            count=fields.integer(f"{name}.expert_count", high=MAX_EXPERTS),
            per_token=fields.integer(f"{name}.expert_used_count", high=MAX_EXPERTS),
            intermediate_size=fields.integer(width, usual, high=MAX_EXPERT_WIDTH),
            normalised=keys.normalised_in_gguf,
            shared_intermediate_size=shared,
            biases=keys.biases or msgspec.UNSET,
            clamped=keys.clamped or msgspec.UNSET,
        ),
        layers,
        fields.origin,
    )
