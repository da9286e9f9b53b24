"""From a Hugging Face ``config.json`` to a :class:`LlamaConfig`.

Every setting that transformers reads for the family is understood or refused by name: one that is dropped in
silence gives a model that works on short prompts and is wrong. What transformers does not read is ignored,
and named beside the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

from llorch_export.config.architectures import code_files, family_of, has_unknown_class
from llorch_export.config.embedding import Embedding, without_head
from llorch_export.config.experts import experts_from_hf
from llorch_export.config.family import Family
from llorch_export.config.fields import Fields
from llorch_export.config.fp8 import Fp8Format, packed_weights
from llorch_export.config.layer_form import layer_form, query_multiplier
from llorch_export.config.packed.base import Packing
from llorch_export.config.packed.reading import read_packing
from llorch_export.config.reference_keys import reference_keys
from llorch_export.config.rope import MIN_FACTOR, RopeContext
from llorch_export.config.rope_by_layer import ropes_from_hf
from llorch_export.config.unread import check_count, ignored_settings
from llorch_export.config.windows import no_rope_layers, rotating_in_windows, windows
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError

MAX_WIDTH: Final = 2**20
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 4096
MAX_POSITIONS: Final = 2**26
MAX_MULTIPLIER: Final = 1e6
_MAX_VOCAB: Final = 2**22
_MAX_HEAD_DIM: Final = 1024

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


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """A config.json that has been read.

    ignored_settings: names of what transformers does not read for the family, but for what every file says.
    code_not_run: files of Python that the checkpoint brings.
    packing: how weights are packed; None: they stand for themselves.
    embedding: how it turns texts into vectors, as files beside it or its user say; None: it does not.
    """

    config: LlamaConfig
    ignored_settings: tuple[str, ...] = ()
    code_not_run: tuple[str, ...] = ()
    packing: Packing | Fp8Format | None = None
    embedding: Embedding | None = None


def config_from_hf(data: Mapping[str, object], *, origin: str = "config.json") -> LlamaConfig:
    """Return only the config that :func:`read_config` finds."""
    return read_config(data, origin=origin).config


def read_config(
    data: Mapping[str, object], *, origin: str = "config.json", headless: bool = False
) -> ReadConfig:
    """Parse the content of a ``config.json``; ``origin`` names it in errors.

    headless: the output layer is not wanted; the config is then that of a model without one.
    Absent keys mean what transformers takes them to mean for that model type.
    Raises ArtifactError for anything that transformers reads and this exporter does not understand, and for
    what is contradictory or out of range.
    """
    check_count(data, origin)
    fields = Fields(data, origin=origin)
    family = family_of(fields, origin, headless=headless)
    if family.other_keys:
        fields = Fields(_by_usual_keys(data, family, origin), origin=origin)
        family_of(fields, origin, headless=headless)
    packing = data.get("quantization")  # MLX's; other tools write notes under that key
    if isinstance(packing, Mapping) and "bits" in packing:
        raise packed_weights(packing, f"{origin}: quantization")
    code = code_files(fields)
    packed = read_packing(data.get("quantization_config"), origin=origin)
    config, of_rope = _model_config(fields, family, origin)
    if headless:
        config = without_head(config)
    own_class = ("architectures",) if has_unknown_class(fields, family) else ()
    ignored = ignored_settings(fields, reference_keys().keys[family.architecture], inert=family.inert)
    return ReadConfig(config, tuple(sorted({*own_class, *ignored, *of_rope})), code, packed)


def _by_usual_keys(data: Mapping[str, object], family: Family, origin: str) -> Mapping[str, object]:
    """Return a config's content with the family's other names for keys replaced by the usual ones."""
    found = dict(data)
    for other, usual in family.other_keys.items():
        if other in found:
            value = found.pop(other)
            if found.setdefault(usual, value) != value:
                raise ArtifactError(
                    f"{origin}: {other} and {usual} contradict each other; remove the wrong one"
                )
    return found


def _model_config(fields: Fields, family: Family, origin: str) -> tuple[LlamaConfig, tuple[str, ...]]:
    """Return the config, and the names of rotary settings that nothing reads."""
    defaults = {**_DEFAULTS, **family.defaults}

    def count(key: str, high: int) -> int:
        return fields.integer(key, int(defaults[key]), high=high)

    _require_plain_decoder(fields, family, origin)
    hidden, heads = count("hidden_size", MAX_WIDTH), count("num_attention_heads", MAX_HEADS)
    layers = count("num_hidden_layers", MAX_LAYERS)
    max_positions = count("max_position_embeddings", MAX_POSITIONS)
    # Null means one for each head; only an absent key means the family's own number.
    stated = fields.states("num_key_value_heads")
    kv_usual = heads if stated else int(defaults.get("num_key_value_heads", heads))
    usual = {"head_dim": defaults["head_dim"]} if "head_dim" in defaults else {}
    head_dim = head_size(fields, "head_dim", hidden, heads, origin=origin, default=usual.get("head_dim"))
    if family.equal_heads and head_dim * heads != hidden:
        raise fields.wrong("head_dim", f"{hidden} / {heads}: heads of this family share the hidden size")
    rotating = no_rope_layers(fields, family, layers)
    window, layer_types = windows(fields, family, layers, max_positions, rotating)
    if family.rotates_in_windows:
        rotating = rotating_in_windows(fields, family, layers)
    rope, sliding_rope, ignored = ropes_from_hf(fields, RopeContext(family, head_dim, max_positions, origin))
    multiplier = _multipliers(fields, family, hidden, layers)
    config = LlamaConfig(
        architecture=family.architecture,
        vocab_size=count("vocab_size", _MAX_VOCAB),
        hidden_size=hidden,
        intermediate_size=count("intermediate_size", MAX_WIDTH),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", kv_usual, high=MAX_HEADS),
        head_dim=head_dim,
        rms_norm_eps=fields.number(family.norm_key, float(defaults["rms_norm_eps"]), above=0, high=1),
        max_position_embeddings=max_positions,
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", bool(defaults["tie_word_embeddings"])),
        attention_bias=_bias(fields, family, "attention_bias"),
        mlp_bias=_bias(fields, family, "mlp_bias"),
        qkv_bias=_qkv_bias(fields, family),
        qk_norm=family.qk_norm,
        no_rope_layers=rotating,
        sliding_window=window,
        layer_types=cast("tuple[Literal['full_attention', 'sliding_attention'], ...]", layer_types),
        embedding_multiplier=hidden**0.5 if family.scaled_embedding else multiplier["embedding_multiplier"],
        attention_multiplier=multiplier["attention_multiplier"]
        if family.multipliers
        else query_multiplier(fields, family, head_dim),
        residual_multiplier=multiplier["residual_multiplier"],
        logits_scaling=_logits_divisor(fields, family) or multiplier["logits_scaling"],
        layer_form=layer_form(fields, family, sliding_rope),
        experts=experts_from_hf(fields, family.experts, defaults, layers),
    )
    return checked(config, origin), ignored


def _multipliers(fields: Fields, family: Family, hidden: int, layers: int) -> dict[str, float]:
    """Return what embedding, blocks' outputs and scores are multiplied by, and logits divided by."""

    def number(key: str, usual: float | None = None) -> float:
        return fields.number(key, usual, above=MIN_FACTOR, high=MAX_MULTIPLIER)

    keys = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    if family.depth_scaled:
        return {
            "embedding_multiplier": number("scale_emb"),
            "residual_multiplier": number("scale_depth") / layers**0.5,
            "logits_scaling": hidden / number("dim_model_base"),
        }
    return {key: number(key, 1.0) if family.multipliers else 1.0 for key in keys}


def _require_plain_decoder(fields: Fields, family: Family, origin: str) -> None:
    """Refuse what no family here has."""
    fields.get("quantization_config")  # which read_config has read
    fields.require("is_encoder_decoder", False, "the model must be a decoder only")
    fields.require("add_cross_attention", False, "the model must be a decoder only")
    fields.require("tie_encoder_decoder", False, "the model must be a decoder only")
    fields.require("pruned_heads", {}, "pruned heads are not supported")
    for key in ("qk_norm", "use_qk_norm") if family.qk_norm else ():
        fields.require(key, True, f"{family.architecture} always has a norm over query and key heads")
    for key, supported in family.fixed.items():
        fields.require(key, supported, f"the only value supported for {family.architecture}")


def _logits_divisor(fields: Fields, family: Family) -> float | None:
    """Return what logits are divided by, as ``logit_scale`` says it; None where there is none."""
    if not family.logit_scale:
        return None
    return 1 / fields.number("logit_scale", family.logit_scale, above=0, high=MAX_MULTIPLIER)


def _bias(fields: Fields, family: Family, key: str) -> bool:
    """Return a bias flag; a family that does not read it has no such biases."""
    if family.bias_key:
        return fields.boolean(family.bias_key, bool(family.defaults[family.bias_key]))
    if family.head_biases:
        return True
    if key == family.qkv_bias or key not in reference_keys().keys[family.architecture]:
        return False
    return fields.boolean(key, bool(family.defaults.get(key, False)))


def _qkv_bias(fields: Fields, family: Family) -> bool:
    """Tell whether q, k and v alone have biases."""
    if isinstance(family.qkv_bias, bool):
        return family.qkv_bias
    return fields.boolean(family.qkv_bias, bool(family.defaults.get(family.qkv_bias, False)))


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
