"""Rotary settings of families whose layers with a window rotate by a base of their own.

transformers 4 has ``rope_local_base_freq`` beside ``rope_theta`` and ``rope_scaling``, which is for the other
layers; transformers 5 has settings by kind of layer in ``rope_parameters``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llorch_export.config.fields import Fields
from llorch_export.config.rope import MAX_THETA, RopeContext, rope_from_hf
from llorch_serve.artifact.manifest import RopeConfig
from llorch_serve.errors import ArtifactError

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


def ropes_from_hf(
    fields: Fields, context: RopeContext
) -> tuple[RopeConfig, RopeConfig | None, tuple[str, ...]]:
    """Return the rotation of layers, that of layers with a window where it is another, and the names of
    settings that nothing reads.

    Raises ArtifactError as :func:`rope_from_hf` does.
    """
    if not context.family.local_theta:
        rope, ignored = rope_from_hf(fields, context)
        return rope, None, ignored
    by_kind = fields.mapping("rope_parameters")
    if strange := sorted(str(key) for key in by_kind if key not in (_FULL, _SLIDING)):
        raise fields.wrong("rope_parameters", f"{_FULL} and {_SLIDING} alone, not {strange[0][:80]}")
    of_all = {**_settings(fields, by_kind, _FULL), **fields.mapping("rope_scaling")}
    of_sliding = _settings(fields, by_kind, _SLIDING)
    usual = float(context.family.defaults["rope_theta"])
    outer = fields.number("rope_theta", usual, above=0, high=MAX_THETA)
    local, key = context.family.local_theta, context.family.local_key
    if key:
        local = fields.number(key, local, above=0, high=MAX_THETA)
    rope, ignored = _one(fields, of_all, outer, _FULL, context)
    sliding, also_ignored = _one(fields, of_sliding, local, _SLIDING, context)
    return rope, sliding, (*ignored, *also_ignored)


def _settings(fields: Fields, by_kind: Mapping[str, object], kind: str) -> Mapping[str, object]:
    found = by_kind.get(kind)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ArtifactError(
            f"{fields.origin}: rope_parameters.{kind} is {str(found)[:80]!r}, expected an object or null"
        )
    return found


def _one(
    fields: Fields, settings: Mapping[str, object], theta: float, kind: str, context: RopeContext
) -> tuple[RopeConfig, tuple[str, ...]]:
    # transformers looks for it beside the kinds of layers, where it stands in no file.
    read = {key: value for key, value in settings.items() if key != "truncate"}
    own = Fields({"rope_parameters": {"rope_theta": theta, **read}}, origin=f"{fields.origin}: {kind}")
    rope, ignored = rope_from_hf(own, context)
    left = ("rope_parameters.truncate",) if "truncate" in settings else ()
    return rope, tuple(f"{name} of {kind}" for name in (*ignored, *left))
