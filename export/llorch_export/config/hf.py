"""From a Hugging Face ``config.json`` to a :class:`LlamaConfig`.

Every key is understood, or known to have no influence on inference, or refused by name: a setting that is
silently dropped gives a model that works on short prompts and is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, cast

from llorch_export.config.families import FAMILIES, SUPPORTED_HF, Family
from llorch_export.config.fields import Fields, refuse_unknown
from llorch_export.config.fp8 import fp8_format
from llorch_export.config.inert_keys import INERT_HF_KEYS
from llorch_export.config.rope import RopeContext, rope_from_hf
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError

MAX_WIDTH: Final = 2**20
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 4096
MAX_POSITIONS: Final = 2**26
MAX_MULTIPLIER: Final = 1e6
_MAX_VOCAB: Final = 2**22
_MAX_HEAD_DIM: Final = 1024
_FULL, _SLIDING = "full_attention", "sliding_attention"

# What transformers' LlamaConfig takes absent keys to mean; a family's own defaults come first.
_DEFAULTS: Final[Mapping[str, int | float | bool]] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def config_from_hf(data: Mapping[str, object], *, origin: str = "config.json") -> LlamaConfig:
    """Parse the content of a ``config.json``; ``origin`` names it in errors.

    Absent keys mean what transformers takes them to mean for that model type.
    Raises ArtifactError for anything that is not understood, contradictory or out of range.
    """
    fields = Fields(data, origin=origin)
    family = _family(fields, origin)
    defaults = {**_DEFAULTS, **family.defaults}

    def count(key: str, high: int) -> int:
        return fields.integer(key, int(defaults[key]), high=high)

    _require_plain_decoder(fields, family, origin)
    hidden, heads = count("hidden_size", MAX_WIDTH), count("num_attention_heads", MAX_HEADS)
    layers = count("num_hidden_layers", MAX_LAYERS)
    max_positions = count("max_position_embeddings", MAX_POSITIONS)
    # Null means one for each head; only an absent key means the family's own number.
    kv_default = heads if "num_key_value_heads" in data else int(defaults.get("num_key_value_heads", heads))
    usual = {"head_dim": defaults["head_dim"]} if "head_dim" in defaults else {}
    head_dim = head_size(fields, "head_dim", hidden, heads, origin=origin, default=usual.get("head_dim"))
    no_rope_layers = _no_rope_layers(fields, family, layers)
    window, layer_types = _windows(data, fields, family, layers, max_positions, no_rope_layers)
    multiplier = {
        key: fields.number(key, 1.0, above=0, high=MAX_MULTIPLIER) if family.multipliers else 1.0
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    }
    config = LlamaConfig(
        architecture=family.architecture,
        vocab_size=count("vocab_size", _MAX_VOCAB),
        hidden_size=hidden,
        intermediate_size=count("intermediate_size", MAX_WIDTH),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", kv_default, high=MAX_HEADS),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", float(defaults["rms_norm_eps"]), above=0, high=1),
        max_position_embeddings=max_positions,
        rope=rope_from_hf(fields, RopeContext(family, head_dim, max_positions, origin)),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", bool(defaults["tie_word_embeddings"])),
        attention_bias=_bias(fields, family, "attention_bias"),
        mlp_bias=_bias(fields, family, "mlp_bias"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        no_rope_layers=no_rope_layers,
        sliding_window=window,
        layer_types=cast("tuple[Literal['full_attention', 'sliding_attention'], ...]", layer_types),
        embedding_multiplier=multiplier["embedding_multiplier"],
        attention_multiplier=multiplier["attention_multiplier"] if family.multipliers else None,
        residual_multiplier=multiplier["residual_multiplier"],
        logits_scaling=multiplier["logits_scaling"],
    )
    refuse_unknown(fields.unasked(known=INERT_HF_KEYS | family.inert), origin)
    return checked(config, origin)


def _family(fields: Fields, origin: str) -> Family:
    model_type, architectures = fields.get("model_type"), fields.get("architectures")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ArtifactError(f"{origin}: model_type is {model_type!r}; {SUPPORTED_HF}")
    if architectures is not None and architectures != [family.causal_lm]:
        raise ArtifactError(
            f"{origin}: architectures is {architectures!r}, expected [{family.causal_lm!r}] for model_type "
            f"{model_type}; "
            f"{SUPPORTED_HF}"
        )
    return family


def _require_plain_decoder(fields: Fields, family: Family, origin: str) -> None:
    """Refuse what no family here has."""
    fp8_format(fields.get("quantization_config"), origin=origin)  # refuses every other packing
    fields.require("hidden_act", "silu", "the only activation supported")
    fields.require("rope_interleaved", False, "rotary pairs are half the head apart")
    fields.require("is_encoder_decoder", False, "the model must be a decoder only")
    fields.require("add_cross_attention", False, "the model must be a decoder only")
    fields.require("tie_encoder_decoder", False, "the model must be a decoder only")
    fields.require("pruned_heads", {}, "pruned heads are not supported")
    for key, accepted in family.fixed.items():
        fields.require(key, accepted, f"the only value known for {family.architecture}")


def _bias(fields: Fields, family: Family, key: str) -> bool:
    if key in family.biases:
        return fields.boolean(key, False)
    fields.require(key, False, f"{family.architecture} has no such biases")
    return False


def _no_rope_layers(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
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


def _windows(
    data: Mapping[str, object],
    fields: Fields,
    family: Family,
    layers: int,
    max_positions: int,
    no_rope_layers: tuple[int, ...],
) -> tuple[int | None, tuple[str, ...]]:
    """Return the attention window and, if only some layers have it, the type of every layer."""
    if family.windows == "none":
        fields.require("sliding_window", 0, "attention windows are not supported in this family")
        fields.require("use_sliding_window", False, "attention windows are not supported in this family")
        return None, ()
    # Null means no window; only an absent key means the family's own.
    default = None if "sliding_window" in data else family.defaults.get("sliding_window")
    window = fields.integer("sliding_window", int(default or 1), high=2**31 - 1)
    present = "sliding_window" in fields or default is not None
    if family.windows == "all layers":
        if present:
            fields.require(
                "use_sliding_window", True, "the window holds in every layer; without one, set it to null"
            )
        fields.get("use_sliding_window")
        return (window if present and window < max_positions else None), ()
    used = fields.boolean("use_sliding_window", False) and present
    types = _layer_types(fields, family, layers, no_rope_layers, used=used)
    if _SLIDING in types and not used:
        raise fields.wrong(
            "layer_types", f"only {_FULL}, because use_sliding_window is off or there is no window"
        )
    # A window as long as the context hides nothing.
    if _SLIDING not in types or window >= max_positions:
        return None, ()
    return window, types if _FULL in types else ()


def _layer_types(
    fields: Fields, family: Family, layers: int, no_rope_layers: tuple[int, ...], *, used: bool
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
        return tuple(
            _FULL if not no_rope_layers or rotates else _SLIDING
            for rotates in no_rope_layers or (1,) * layers
        )
    return tuple(_SLIDING if layer >= first_sliding else _FULL for layer in range(layers))


def head_size(
    fields: Fields, key: str, hidden: int, heads: int, *, origin: str, default: float | None = None
) -> int:
    """Return the size of a head: stated, the family's ``default``, or an equal share of the hidden size.

    Raises ArtifactError if none of them is usable.
    """
    if key in fields or default is not None:
        head_dim = fields.integer(key, None if default is None else int(default), high=_MAX_HEAD_DIM)
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise ArtifactError(
            f"{origin} lacks {key}, which does not follow from hidden size {hidden} and {heads} attention "
            f"heads; add it"
        )
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        raise ArtifactError(
            f"{origin}: heads have {head_dim} elements, expected an even number up to {_MAX_HEAD_DIM}; "
            "rotary embedding turns pairs"
        )
    return head_dim


def checked(config: LlamaConfig, origin: str) -> LlamaConfig:
    """Return the config. Raises ArtifactError if its heads do not fit together."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise ArtifactError(
            f"{origin}: {config.num_attention_heads} attention heads cannot share "
            f"{config.num_key_value_heads} "
            "key-value heads evenly"
        )
    return config
