"""Which layers of a ``config.json`` rotate, and which see only a window of tokens before them."""

from __future__ import annotations

from typing import Final

from llorch_export.config.family import Family
from llorch_export.config.fields import Fields
from llorch_export.config.reference_keys import reference_keys

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_PATTERN: Final = "sliding_window_pattern"


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
    if family.windows == "pattern":
        return _by_pattern(fields, family, layers, None if none else window, hides=hides)
    used = fields.boolean("use_sliding_window", False) and not none
    types = _layer_types(fields, family, layers, rotating, used=used)
    if _SLIDING in types and not used:
        raise fields.wrong(
            "layer_types", f"only {_FULL}, because use_sliding_window is off or there is no window"
        )
    if _SLIDING not in types or not hides:
        return None, ()
    return window, types if _FULL in types else ()


def _by_pattern(
    fields: Fields, family: Family, layers: int, window: int | None, *, hides: bool
) -> tuple[int | None, tuple[str, ...]]:
    """Return window and types where all layers but every n-th have a window, unless the file says
    which.
    """
    types = _pattern_types(fields, family, layers)
    if _SLIDING not in types:
        return None, ()
    if window is None:
        raise fields.wrong("sliding_window", "the window of the layers that have one")
    # Layers that rotate by a base of their own are known by their window, even if it hides nothing.
    if not (hides or family.local_theta):
        return None, ()
    return window, types if _FULL in types else ()


def _pattern_types(fields: Fields, family: Family, layers: int) -> tuple[str, ...]:
    if "layer_types" in fields:
        types = tuple(fields.array("layer_types", str, length=layers))
        if not set(types) <= {_FULL, _SLIDING}:
            raise fields.wrong("layer_types", f"{_FULL} or {_SLIDING} for each layer")
        fields.get(_PATTERN)  # what it says is in the types
        return types
    if fields.states("sliding_window") and "sliding_window" not in fields and family.null_window_is_none:
        fields.get(_PATTERN)
        return (_FULL,) * layers
    interval = family.window_pattern
    if _PATTERN in reference_keys().keys[family.architecture]:
        interval = fields.integer(_PATTERN, interval, high=2**31)
    return spaced_types(interval, layers)


def rotating_in_windows(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Return one number a layer, 0 where it does not rotate since it has no window; empty if all do."""
    windowless = fields.states("sliding_window") and "sliding_window" not in fields
    if windowless:
        return (0,) * layers if family.rotates_in_windows == "always" else ()
    types = _pattern_types(fields, family, layers)
    return normal_no_rope_layers(tuple(int(kind == _SLIDING) for kind in types))


def spaced_types(interval: int, layers: int) -> tuple[str, ...]:
    """Return the types of layers of which every n-th sees all tokens, the others a window; with 0 all
    have one.
    """
    return tuple(_FULL if interval and (layer + 1) % interval == 0 else _SLIDING for layer in range(layers))


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
