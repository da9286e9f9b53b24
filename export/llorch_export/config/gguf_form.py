"""How a model's layers are built, by a GGUF header: windows, caps and the layers' second rotation.

What a header leaves open is what llama.cpp takes it to be, which it knows by the architecture alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, cast

import msgspec

from llorch_export.config.family import Family
from llorch_export.config.fields import Fields
from llorch_export.config.layer_form import LOGITS_CAP, MAX_SOFTCAP, SCORES_CAP, settled_form
from llorch_export.config.rope import MAX_THETA
from llorch_export.config.windows import spaced_types
from llorch_serve.artifact.manifest import LayerForm, RopeConfig

LayerTypes = tuple[Literal["full_attention", "sliding_attention"], ...]
MAX_SCALE: Final = 1e6
_MAX_WINDOW: Final = 2**31 - 1


def gguf_windows(
    fields: Fields, family: Family, layers: int, max_positions: int
) -> tuple[int | None, LayerTypes]:
    """Return the attention window and, if only some layers have it, the type of every layer."""
    key = f"{family.gguf_name}.attention.sliding_window"
    if family.windows not in ("all layers", "pattern"):
        fields.require(key, 0, "attention windows are not supported in this architecture")
        return None, ()
    by_pattern = family.windows == "pattern"
    if by_pattern and family.gguf_window_if_stated and not fields.integer(key, 0, low=0, high=_MAX_WINDOW):
        fields.get(f"{key}_pattern")  # says nothing without a window
        return None, ()
    usual = family.defaults.get("sliding_window", 0) if by_pattern else 0
    window = fields.integer(key, int(usual), low=int(by_pattern), high=_MAX_WINDOW)
    hides = 0 < window < max_positions
    if family.windows == "all layers":
        return (window if hides else None), ()
    types = _pattern_types(fields, f"{key}_pattern", family, layers)
    if not (hides or family.local_theta) or "sliding_attention" not in types:
        return None, ()
    return window, cast("LayerTypes", types if "full_attention" in types else ())


def _pattern_types(fields: Fields, key: str, family: Family, layers: int) -> tuple[str, ...]:
    """Return the type of every layer; a file says which have a window, or how often one has none."""
    stated = fields.get(key)
    if not isinstance(stated, (list, tuple)):
        return spaced_types(fields.integer(key, family.window_pattern, low=0, high=_MAX_WINDOW), layers)
    numbers = isinstance(stated[0] if stated else None, int) and not isinstance(stated[0], bool)
    windowed = fields.array(key, int if numbers else bool, length=layers)
    if not set(windowed) <= {0, 1}:
        raise fields.wrong(key, f"true or false for each of {layers} layers")
    return tuple("sliding_attention" if has else "full_attention" for has in windowed)


def gguf_form(
    fields: Fields, family: Family, rope: RopeConfig, shapes: Mapping[str, tuple[int, ...]]
) -> LayerForm | msgspec.UnsetType:
    """Return how layers are built; UNSET where it is as in Llama.

    rope: of layers without a window. shapes: of the file's tensors.
    """
    parallel = family.form.parallel
    if family.parallel_key:
        fields.get(f"{family.gguf_name}.{family.parallel_key}")  # llama.cpp goes by the tensors
        parallel = "blk.0.ffn_norm.weight" not in shapes
    sliding = None
    if family.local_theta:
        # A base that config.json cannot set is that of the other layers.
        usual = family.local_theta if family.local_key else rope.theta
        theta = fields.number(f"{family.gguf_name}.rope.freq_base_swa", usual, above=0, high=MAX_THETA)
        sliding = RopeConfig(theta=theta, rotary_dim=rope.rotary_dim)
    return settled_form(
        msgspec.structs.replace(
            family.form,
            activation=next(iter(family.activations.values())),
            attention_softcap=_softcap(fields, family, SCORES_CAP),
            logits_softcap=_softcap(fields, family, LOGITS_CAP),
            sliding_rope=sliding,
            parallel=parallel,
        )
    )


def norm_epsilon_key(family: Family) -> str:
    """Return the key of the norms' epsilon."""
    kind = "layer_norm_rms_epsilon" if family.form.norm == "rms" else "layer_norm_epsilon"
    return f"{family.gguf_name}.attention.{kind}"


def logits_divisor(fields: Fields, family: Family) -> float | None:
    """Return what logits are divided by in families that say what they are multiplied by."""
    if not family.logit_scale:
        return None
    return 1 / fields.number(f"{family.gguf_name}.logit_scale", above=0, high=MAX_SCALE)


def gguf_query_multiplier(
    family: Family, hidden: int, heads: int, layers: int, head_dim: int
) -> float | None:
    """Return what scores are multiplied by; None: the usual. Headers do not say it of Gemma.

    llama.cpp knows the one model of each generation that has another scale by its number of layers.
    """
    if layers not in family.gguf_wide_layers or hidden // heads == head_dim:
        return None
    return float((hidden // heads) ** -0.5)


def _softcap(fields: Fields, family: Family, key: str) -> float | None:
    if key not in family.softcaps:
        return None
    usual, name = family.softcaps[key], f"{family.gguf_name}.{key}"
    if name not in fields and usual is None:
        return None
    return fields.number(name, usual, above=0, high=MAX_SOFTCAP)
