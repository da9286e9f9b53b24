"""The sampling values that a model's authors recommend.

Input is a ``generation_config.json`` or GGUF metadata; output is :class:`GenerationDefaults`, within the
limits that the worker accepts. Values out of range raise ArtifactError and are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from llorch_export.config.fields import Fields
from llorch_serve.artifact.manifest import GenerationDefaults

_MAX_TOP_K: Final = 2**31 - 1


def defaults_from_folder(data: Mapping[str, object], origin: str) -> GenerationDefaults:
    """Return the recommended sampling values.

    ``do_sample: false`` recommends greedy decoding, which is temperature 0, and makes temperature, top-k,
        top-p,
    min-p and typical-p void. Where it is absent the values are taken as they are.
    """
    fields = Fields(data, origin=origin)
    if fields.boolean("do_sample", True):
        return _defaults(fields, "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "typical_p")
    return GenerationDefaults(temperature=0.0, repetition_penalty=_penalty(fields, "repetition_penalty"))


def defaults_from_gguf(metadata: Mapping[str, object], origin: str) -> GenerationDefaults:
    """Return the values under ``general.sampling.*`` of a GGUF file."""
    prefix = "general.sampling."
    sampling = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    fields = Fields(sampling, origin=f"{origin}: general.sampling")
    defaults = _defaults(fields, "temp", "top_k", "top_p", "min_p", "penalty_repeat", None)
    window = fields.integer("penalty_last_n", low=-1, high=_MAX_TOP_K) if "penalty_last_n" in fields else None
    return msgspec.structs.replace(defaults, repeat_last_n=window)


def _defaults(
    fields: Fields,
    temperature: str,
    top_k: str,
    top_p: str,
    min_p: str,
    penalty: str,
    typical_p: str | None,
) -> GenerationDefaults:
    """Read sampling values under the given keys, within the limits of SamplingParams."""
    return GenerationDefaults(
        temperature=fields.number(temperature, at_least=0, high=2) if temperature in fields else None,
        top_k=fields.integer(top_k, low=0, high=_MAX_TOP_K) if top_k in fields else None,
        top_p=fields.number(top_p, above=0, high=1) if top_p in fields else None,
        min_p=fields.number(min_p, at_least=0, high=1) if min_p in fields else None,
        typical_p=None
        if typical_p is None or typical_p not in fields
        else fields.number(typical_p, above=0, high=1),
        repetition_penalty=_penalty(fields, penalty),
    )


def _penalty(fields: Fields, key: str) -> float | None:
    return fields.number(key, above=0, high=2) if key in fields else None
