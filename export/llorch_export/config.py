"""From a checkpoint's own description of its architecture to a :class:`LlamaConfig`.

Input is the content of a Hugging Face ``config.json`` or of a GGUF header. Every key is understood, or known to
have no influence on inference, or refused by name: a setting that is silently dropped gives a model that works
on short prompts and is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from llorch_export.checkpoint.fp8 import fp8_format
from llorch_export.fields import Fields
from llorch_export.inert_keys import INERT_GGUF_KEYS, INERT_HF_KEYS
from llorch_serve.errors import ArtifactError
from llorch_serve.manifest import LlamaConfig, RopeConfig

SUPPORTED: Final = (
    "supported is the Llama architecture (model_type llama, LlamaForCausalLM; GGUF architecture llama)"
)

_MAX_VOCAB: Final = 2**22
_MAX_WIDTH: Final = 2**20
_MAX_LAYERS: Final = 1024
_MAX_HEADS: Final = 4096
_MAX_HEAD_DIM: Final = 1024
_MAX_POSITIONS: Final = 2**26
_MAX_THETA: Final = 1e12
_MAX_FACTOR: Final = 1e6


def config_from_hf(data: Mapping[str, object], *, origin: str = "config.json") -> LlamaConfig:
    """Parse the content of a ``config.json``; ``origin`` names it in errors.

    Absent keys mean what transformers' LlamaConfig takes them to mean.
    Raises ArtifactError for anything that is not understood, contradictory or out of range.
    """
    fields = Fields(data, origin=origin)
    model_type, architectures = fields.get("model_type"), fields.get("architectures")
    if model_type != "llama":
        raise ArtifactError(f"{origin}: model_type is {model_type!r}; {SUPPORTED}")
    if architectures is not None and architectures != ["LlamaForCausalLM"]:
        raise ArtifactError(f"{origin}: architectures is {architectures!r}; {SUPPORTED}")
    fp8_format(fields.get("quantization_config"), origin=origin)  # refuses every other packing
    fields.require("hidden_act", "silu", "the only activation supported")
    fields.require("sliding_window", 0, "attention windows are not supported")
    fields.require("use_sliding_window", False, "attention windows are not supported")
    fields.require("rope_interleaved", False, "rotary pairs are half the head apart")
    fields.require("partial_rotary_factor", 1, "all of a head is rotated")
    fields.require("is_encoder_decoder", False, "the model must be a decoder only")
    fields.require("add_cross_attention", False, "the model must be a decoder only")
    fields.require("tie_encoder_decoder", False, "the model must be a decoder only")
    fields.require("pruned_heads", {}, "pruned heads are not supported")
    hidden = fields.integer("hidden_size", 4096, high=_MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 32, high=_MAX_HEADS)
    config = LlamaConfig(
        vocab_size=fields.integer("vocab_size", 32000, high=_MAX_VOCAB),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 11008, high=_MAX_WIDTH),
        num_hidden_layers=fields.integer("num_hidden_layers", 32, high=_MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", heads, high=_MAX_HEADS),
        head_dim=_head_dim(fields, "head_dim", hidden, heads, origin=origin),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0, high=1),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048, high=_MAX_POSITIONS),
        rope=_rope_from_hf(fields, origin=origin),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )
    _refuse_unknown(fields.unasked(known=INERT_HF_KEYS), origin)
    return _checked(config, origin)


def _rope_from_hf(fields: Fields, *, origin: str) -> RopeConfig:
    # transformers 4 has rope_theta beside rope_scaling; transformers 5 has both inside rope_parameters.
    scaling, parameters = fields.mapping("rope_scaling"), fields.mapping("rope_parameters")
    if scaling and parameters and dict(scaling) != dict(parameters):
        raise ArtifactError(
            f"{origin}: rope_scaling and rope_parameters contradict each other; remove the wrong one"
        )
    rope = Fields(
        parameters or scaling, origin=f"{origin}: {'rope_parameters' if parameters else 'rope_scaling'}"
    )
    old_name, new_name = rope.get("type"), rope.get("rope_type")
    if old_name is not None and new_name is not None and old_name != new_name:
        raise ArtifactError(
            f"{origin}: rope type is {old_name!r} by type and {new_name!r} by rope_type; remove the wrong one"
        )
    kind = new_name or old_name or "default"
    if "rope_theta" in fields and "rope_theta" in rope and fields.get("rope_theta") != rope.get("rope_theta"):
        raise ArtifactError(
            f"{origin}: rope_theta differs from the one inside rope_parameters; remove the wrong one"
        )
    outer = fields.number("rope_theta", 10000.0, above=0, high=_MAX_THETA)
    theta = rope.number("rope_theta", outer, above=0, high=_MAX_THETA)
    rope.require("partial_rotary_factor", 1, "all of a head is rotated")
    if kind == "default":
        # Some files say "default" with a factor of 1; any other factor would be a contradiction.
        rope.require("factor", 1, "the rope type is default")
        result = RopeConfig(theta=theta)
    elif kind == "linear":
        result = RopeConfig(
            theta=theta, kind="linear", factor=rope.number("factor", above=0, high=_MAX_FACTOR)
        )
    elif kind == "llama3":
        low = rope.number("low_freq_factor", above=0, high=_MAX_FACTOR)
        result = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor", above=0, high=_MAX_FACTOR),
            low_freq_factor=low,
            high_freq_factor=rope.number("high_freq_factor", above=low, high=_MAX_FACTOR),
            original_max_position_embeddings=rope.integer(
                "original_max_position_embeddings", high=_MAX_POSITIONS
            ),
        )
    else:
        raise ArtifactError(
            f"{origin}: rope type {kind!r} is not supported; supported are default, linear and llama3"
        )
    _refuse_unknown([f"{key} (rope)" for key in rope.unasked()], origin)
    return result


def config_from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    frequency_factors: Sequence[float] | None = None,
    origin: str = "the GGUF file",
) -> LlamaConfig:
    """Parse the metadata of a GGUF file.

    shapes: shape of every tensor by its GGUF name; says what metadata does not: vocabulary, biases, tying.
    frequency_factors: content of ``rope_freqs.weight``, where the file has it.
    Raises ArtifactError for anything that is not understood, contradictory or out of range.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ArtifactError(f"{origin}: general.architecture is {architecture!r}; {SUPPORTED}")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ArtifactError(
            f"{origin}: general.type is {kind!r}, expected 'model'; adapters must be merged first"
        )
    fields = Fields({k: v for k, v in metadata.items() if k.startswith("llama.")}, origin=origin)
    fields.require("llama.expert_count", 0, "mixtures of experts are not supported")
    fields.require("llama.attention.causal", True, "attention must be causal")
    fields.require("llama.attention.sliding_window", 0, "attention windows are not supported")
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ArtifactError(
            f"{origin} lacks a two-dimensional tensor token_embd.weight; it holds no complete model"
        )
    hidden = fields.integer("llama.embedding_length", high=_MAX_WIDTH)
    heads = fields.integer("llama.attention.head_count", high=_MAX_HEADS)
    # Old conversions state the head's size only by how much of it is rotated, which is all of it.
    key = "llama.attention.key_length"
    key = key if key in fields else "llama.rope.dimension_count"
    head_dim = _head_dim(fields, key, hidden, heads, origin=origin)
    fields.require("llama.attention.value_length", head_dim, "keys and values must be of one length")
    fields.require("llama.rope.dimension_count", head_dim, "all of a head is rotated")
    config = LlamaConfig(
        vocab_size=embedding[0],
        hidden_size=hidden,
        intermediate_size=fields.integer("llama.feed_forward_length", high=_MAX_WIDTH),
        num_hidden_layers=fields.integer("llama.block_count", high=_MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("llama.attention.head_count_kv", heads, high=_MAX_HEADS),
        head_dim=head_dim,
        rms_norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon", above=0, high=1),
        max_position_embeddings=fields.integer("llama.context_length", high=_MAX_POSITIONS),
        rope=_rope_from_gguf(fields, frequency_factors, head_dim, origin=origin),
        tie_word_embeddings="output.weight" not in shapes,
        # One bias of a kind calls for all of them; those that are absent are then reported as missing.
        attention_bias=any(f"blk.0.attn_{part}.bias" in shapes for part in ("q", "k", "v", "output")),
        mlp_bias=any(f"blk.0.ffn_{part}.bias" in shapes for part in ("gate", "up", "down")),
    )
    _refuse_unknown(fields.unasked(known=INERT_GGUF_KEYS), origin)
    return _checked(config, origin)


def _rope_from_gguf(
    fields: Fields, frequency_factors: Sequence[float] | None, head_dim: int, *, origin: str
) -> RopeConfig:
    theta = fields.number("llama.rope.freq_base", 10000.0, above=0, high=_MAX_THETA)
    kind = fields.get("llama.rope.scaling.type") or "linear"
    # llama.cpp takes a factor without a type to be linear, and knows it under an older key as well.
    newer = (
        fields.number("llama.rope.scaling.factor", above=0, high=_MAX_FACTOR)
        if "llama.rope.scaling.factor" in fields
        else None
    )
    older = (
        fields.number("llama.rope.scale_linear", above=0, high=_MAX_FACTOR)
        if "llama.rope.scale_linear" in fields
        else None
    )
    fields.require("llama.rope.scaling.attn_factor", 1, "attention is scaled by the head's size only")
    if kind not in ("none", "linear"):
        raise ArtifactError(f"{origin}: llama.rope.scaling.type is {kind!r}; supported are none and linear")
    factor = 1.0 if kind == "none" else newer or older or 1.0
    if frequency_factors is None:
        return (
            RopeConfig(theta=theta)
            if factor == 1.0
            else RopeConfig(theta=theta, kind="linear", factor=factor)
        )
    if len(frequency_factors) != head_dim // 2 or not all(0 < f <= _MAX_FACTOR for f in frequency_factors):
        raise ArtifactError(
            f"{origin}: rope_freqs.weight must hold {head_dim // 2} positive numbers, one a rotary pair"
        )
    return RopeConfig(
        theta=theta, kind="factors", frequency_factors=tuple(f * factor for f in frequency_factors)
    )


def _head_dim(fields: Fields, key: str, hidden: int, heads: int, *, origin: str) -> int:
    if key in fields:
        head_dim = fields.integer(key, high=_MAX_HEAD_DIM)
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise ArtifactError(
            f"{origin} lacks {key}, which does not follow from hidden size {hidden} and {heads} attention heads; add it"
        )
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        raise ArtifactError(
            f"{origin}: heads have {head_dim} elements, expected an even number up to {_MAX_HEAD_DIM}; "
            "rotary embedding turns pairs"
        )
    return head_dim


def _checked(config: LlamaConfig, origin: str) -> LlamaConfig:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ArtifactError(
            f"{origin}: {config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} "
            "key-value heads evenly"
        )
    return config


def _refuse_unknown(keys: Sequence[str], origin: str) -> None:
    if keys:
        raise ArtifactError(
            f"{origin} has settings that are not understood and might change the model: {', '.join(keys[:8])}; "
            "remove them if they have no influence on inference, or upgrade with: pip install -U llorch"
        )
