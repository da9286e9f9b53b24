"""Which layers of a ``config.json`` rotate, and which see only a window of tokens before them."""

from __future__ import annotations

from typing import Final

from llorch_export.config.families import Family
from llorch_export.config.fields import Fields

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


def no_rope_layers(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Return one number a layer, 0 where it does not rotate; empty if all do."""
    if not family.no_rope_interval:
        return ()
    interval = fields.integer("no_rope_layer_interval", family.no_rope_interval, high=2**31)
    if "no_rope_layers" not in fields:
        return spaced_no_rope_layers(interval, layers)
    # transformers takes more than it has layers; what is beyond them does not matter.
    numbers = fields.array("no_rope_layers", int)
    if len(numbers) < layers or not set(numbers) <= {0, 1}:
        raise fields.wrong("no_rope_layers", f"0 or 1 for each of {layers} layers")
    return normal_no_rope_layers(tuple(numbers[:layers]))


def spaced_no_rope_layers(interval: int, layers: int) -> tuple[int, ...]:
    """Return the pattern in which the last of every ``interval`` layers does not rotate."""
    return normal_no_rope_layers(tuple(int((layer + 1) % interval != 0) for layer in range(layers)))


def normal_no_rope_layers(pattern: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pattern, or nothing if all layers rotate."""
    return pattern if 0 in pattern else ()


def windows(
    fields: Fields, family: Family, layers: int, max_positions: int, rotating: tuple[int, ...]
) -> tuple[int | None, tuple[str, ...]]:
    """Return the attention window and, if only some layers have it, the type of every layer.

    rotating: from :func:`no_rope_layers`.
    """
    # Null means no window; only an absent key means the family's own.
    default = None if fields.states("sliding_window") else family.defaults.get("sliding_window")
    none = "sliding_window" not in fields and default is None
    # Qwen2-MoE's own config writes 0 where the window is off.
    none_is_zero = family.windows == "none" or (
        family.windows == "by turns" and not fields.boolean("use_sliding_window", False)
    )
    window = fields.integer("sliding_window", int(default or 1), low=0 if none_is_zero else 1, high=2**31 - 1)
    hides = not none and 0 < window < max_positions  # a window as long as the context hides nothing
    if family.windows == "none":
        if hides:
            raise fields.wrong("sliding_window", "none (attention windows are not supported in this family)")
        _require_types(fields, layers, _FULL)
        return None, ()
    if family.windows == "all layers if used" and not fields.boolean("use_sliding_window", False):
        return None, ()
    if family.windows in ("all layers", "all layers if used"):
        _require_types(fields, layers, *([_SLIDING] if hides else [_FULL, _SLIDING]))
        return (window if hides else None), ()
    used = fields.boolean("use_sliding_window", False) and not none
    types = _layer_types(fields, family, layers, rotating, used=used)
    if _SLIDING in types and not used:
        raise fields.wrong(
            "layer_types", f"only {_FULL}, because use_sliding_window is off or there is no window"
        )
    if _SLIDING not in types or not hides:
        return None, ()
    return window, types if _FULL in types else ()


def _require_types(fields: Fields, layers: int, *possible: str) -> None:
    """Raise ArtifactError if the file gives layers another type than those that mean what all of them do."""
    if "layer_types" in fields and not set(fields.array("layer_types", str, length=layers)) <= set(possible):
        raise fields.wrong("layer_types", f"{' or '.join(possible)} for every layer, which is all there is")


def _layer_types(
    fields: Fields, family: Family, layers: int, rotating: tuple[int, ...], *, used: bool
) -> tuple[str, ...]:
    first_sliding = (
        fields.integer("max_window_layers", int(family.defaults["max_window_layers"]), low=0, high=2**31)
        if "max_window_layers" in family.defaults
        else None
    )
    if "layer_types" in fields:
        types = tuple(fields.array("layer_types", str, length=layers))
        if not set(types) <= {_FULL, _SLIDING}:
            raise fields.wrong("layer_types", f"{_FULL} or {_SLIDING} for each layer")
        return types
    if not used:
        return (_FULL,) * layers
    if first_sliding is None:  # SmolLM3: the layers that do not rotate are those that slide
        return tuple(_FULL if not rotating or rotates else _SLIDING for rotates in rotating or (1,) * layers)
    if family.windows == "by turns":
        return tuple(
            _SLIDING if layer % 2 == 0 and layer < first_sliding else _FULL for layer in range(layers)
        )
    return tuple(_SLIDING if layer >= first_sliding else _FULL for layer in range(layers))
