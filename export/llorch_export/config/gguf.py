"""From the metadata of a GGUF file to a :class:`LlamaConfig`.

As for ``config.json``: every key is understood, known to be inert, or refused by name. Absent keys mean what
llama.cpp takes them to mean.
"""

from __future__ import annotations

from collections.abc import Mapping

from llorch_export.config.bookkeeping import INERT_GGUF_KEYS
from llorch_export.config.experts_gguf import experts_from_gguf
from llorch_export.config.families import FAMILIES, FAMILIES_IN_GGUF, SUPPORTED_GGUF
from llorch_export.config.family import Family
from llorch_export.config.fields import Fields, quoted, refuse_unknown
from llorch_export.config.gguf_form import (
    gguf_form,
    gguf_query_multiplier,
    gguf_windows,
    logits_divisor,
    norm_epsilon_key,
)
from llorch_export.config.gguf_rope import GgufRopeTensors, rope_from_gguf
from llorch_export.config.hf import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_MULTIPLIER,
    MAX_POSITIONS,
    MAX_WIDTH,
    checked,
    head_size,
)
from llorch_export.config.rope import MIN_FACTOR, RopeContext
from llorch_export.config.windows import normal_no_rope_layers, spaced_no_rope_layers, spaced_types
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError


def config_from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_tensors: GgufRopeTensors | None = None,
    origin: str = "the GGUF file",
) -> LlamaConfig:
    """Parse the metadata of a GGUF file.

    shapes: shape of every tensor by its GGUF name; says what metadata does not: vocabulary, biases, tying.
    rope_tensors: rotary divisors, where the file has them.
    Raises ArtifactError for anything that is not understood, contradictory or out of range.
    """
    family = _family(metadata, origin)
    name = family.gguf_name
    fields = Fields({k: v for k, v in metadata.items() if k.startswith(f"{name}.")}, origin=origin)
    fields.require(f"{name}.attention.causal", True, "attention must be causal")
    vocab_size = _vocab_size(shapes, origin)
    hidden = fields.integer(f"{name}.embedding_length", high=MAX_WIDTH)
    heads = fields.integer(f"{name}.attention.head_count", high=MAX_HEADS)
    layers = fields.integer(f"{name}.block_count", high=MAX_LAYERS)
    max_positions = fields.integer(f"{name}.context_length", high=MAX_POSITIONS)
    head_dim = _head_dim(fields, family, hidden, heads, origin)
    embedding_scale, residual_scale, logit_scale, attention_scale = _multipliers(fields, family)
    window, layer_types = gguf_windows(fields, family, layers, max_positions)
    rope = rope_from_gguf(
        fields, rope_tensors or GgufRopeTensors(), RopeContext(family, head_dim, max_positions, origin)
    )
    config = LlamaConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer(f"{name}.feed_forward_length", high=MAX_WIDTH),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.integer(f"{name}.attention.head_count_kv", heads, high=MAX_HEADS),
        head_dim=head_dim,
        rms_norm_eps=fields.number(norm_epsilon_key(family), above=0, high=1),
        max_position_embeddings=max_positions,
        rope=rope,
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="attention_bias" in family.biases
        and _has_bias(shapes, "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output"),
        mlp_bias="mlp_bias" in family.biases and _has_bias(shapes, "ffn_gate", "ffn_up", "ffn_down"),
        qkv_bias=family.qkv_bias is True
        or (bool(family.qkv_bias) and _has_bias(shapes, "attn_qkv", "attn_q", "attn_k", "attn_v")),
        qk_norm=family.qk_norm,
        no_rope_layers=_no_rope_layers(family, layers, layer_types),
        sliding_window=window,
        layer_types=layer_types,
        embedding_multiplier=hidden**0.5 if family.scaled_embedding else embedding_scale or 1.0,
        attention_multiplier=attention_scale
        or gguf_query_multiplier(family, hidden, heads, layers, head_dim),
        residual_multiplier=residual_scale or 1.0,
        logits_scaling=logits_divisor(fields, family) or logit_scale or 1.0,
        layer_form=gguf_form(fields, family, rope, shapes),
        experts=experts_from_gguf(fields, family, shapes, layers),
    )
    refuse_unknown(fields.unasked(known={f"{name}.{key}" for key in INERT_GGUF_KEYS}), origin)
    return checked(config, origin)


def _family(metadata: Mapping[str, object], origin: str) -> Family:
    architecture = metadata.get("general.architecture")
    family = FAMILIES_IN_GGUF.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise ArtifactError(f"{origin}: general.architecture is {quoted(architecture)}; {SUPPORTED_GGUF}")
    if family.with_experts and metadata.get(f"{architecture}.expert_count"):
        family = FAMILIES[family.with_experts]
    if family.with_windows and metadata.get(f"{architecture}.attention.sliding_window"):
        family = FAMILIES[family.with_windows]
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ArtifactError(
            f"{origin}: general.type is {quoted(kind)}, expected 'model'; adapters must be merged first"
        )
    return family


def _vocab_size(shapes: Mapping[str, tuple[int, ...]], origin: str) -> int:
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ArtifactError(
            f"{origin} lacks a two-dimensional tensor token_embd.weight; it holds no complete model"
        )
    return embedding[0]


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int, origin: str) -> int:
    name = family.gguf_name
    key = f"{name}.attention.key_length"
    if key not in fields and not family.partial_rotary:
        # Old conversions state the head's size only by how much of it is rotated, which is all of it.
        key = f"{name}.rope.dimension_count"
    head_dim = head_size(fields, key, hidden, heads, origin=origin)
    fields.require(f"{name}.attention.value_length", head_dim, "keys and values must be of one length")
    return head_dim


def _has_bias(shapes: Mapping[str, tuple[int, ...]], *modules: str) -> bool:
    """Tell whether one of the modules has a bias. It calls for all of them: absent ones are then reported as
    missing.
    """
    return any(f"blk.0.{module}.bias" in shapes for module in modules)


def _no_rope_layers(family: Family, layers: int, types: tuple[str, ...]) -> tuple[int, ...]:
    """Return the layers that do not rotate; llama.cpp knows the pattern by the architecture alone."""
    if family.rotates_in_windows and (types or family.rotates_in_windows == "always"):
        sliding = types or spaced_types(family.window_pattern, layers)
        return normal_no_rope_layers(tuple(int(kind == "sliding_attention") for kind in sliding))
    return spaced_no_rope_layers(family.no_rope_interval, layers) if family.no_rope_interval else ()


def _multipliers(fields: Fields, family: Family) -> tuple[float, float, float, float]:
    """Return the scales of embedding, residual, logits and attention; llama.cpp takes 0 to mean none."""
    name = family.gguf_name
    if family.depth_scaled:
        embedding, residual, logits = (
            fields.number(f"{name}.{key}", above=MIN_FACTOR, high=MAX_MULTIPLIER)
            for key in ("embedding_scale", "residual_scale", "logit_scale")
        )
        return embedding, residual, logits, 0.0
    if not family.multipliers:
        return 0.0, 0.0, 0.0, 0.0
    fields.require(f"{name}.rope.scaling.finetuned", True, "llama.cpp turns rotary embedding off by it")
    embedding, residual, logits, attention = (
        _multiplier(fields, f"{name}.{key}")
        for key in ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
    )
    return embedding, residual, logits, attention


def _multiplier(fields: Fields, key: str) -> float:
    value = fields.number(key, 0.0, at_least=0, high=MAX_MULTIPLIER)
    if 0 < value <= MIN_FACTOR:
        raise fields.wrong(key, f"0 or a number above {MIN_FACTOR:g}")
    return value
