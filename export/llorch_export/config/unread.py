"""Settings of a config.json that are not understood: refused, ignored with a notice, or not worth one.

What transformers reads for a family and this exporter does not understand is refused. What transformers does
not read is ignored, and its name kept; so is the few that change a model in code of its own and leave no
trace in its weights, if they have the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from llorch_export.config.bookkeeping import BOOKKEEPING
from llorch_export.config.fields import Fields, shown
from llorch_serve.errors import ArtifactError

MAX_IGNORED: Final = 256
_MAX_SETTINGS: Final = 2**10

# What transformers reads for every family, beside what the exporter understands: the value that changes
# nothing, and what another one would do.
_READ: Final[Mapping[str, tuple[object, str]]] = {
    "is_causal": (True, "tokens would see those after them, as in models for embeddings"),
    "per_layer_config": ({}, "layers would have settings of their own"),
    "transformers_weights": ("model.safetensors", "weights would come from another file"),
    "attention_chunk_size": (0, "attention would be cut into chunks"),
    "kv_sharing_modes": ([], "layers would share keys and values"),
    "fusion_config": ({}, "modules would be fused by code of transformers"),
    "number_of_conv_states": (1, "layers would keep states of convolutions"),
}
# What transformers does not read for these families, and what changes the model in code that came with it
# without a trace in the tensors. Ignoring another value would export another model in silence.
_CHANGES: Final[Mapping[str, tuple[object, str]]] = {
    "use_mrope": (False, "positions would have three axes"),
    "rope_interleaved": (False, "rotary pairs would lie side by side"),
    "rotary_pct": (1, "a part of each head would be rotated"),
    "alibi": (False, "scores would fall with distance"),
    "use_alibi": (False, "scores would fall with distance"),
    "parallel_attn": (False, "attention and MLP would run side by side"),
    "use_parallel_residual": (False, "attention and MLP would run side by side"),
    "embedding_multiplier": (1, "the embedding would be scaled"),
    "attention_multiplier": (1, "attention would be scaled"),
    "residual_multiplier": (1, "each block's output would be scaled"),
    "logits_scaling": (1, "logits would be scaled"),
    "logit_scale": (1, "logits would be scaled"),
    "scale_emb": (1, "the embedding would be scaled"),
    "scale_depth": (1, "each block's output would be scaled"),
    "dim_model_base": (0, "logits would be scaled"),
    "final_logit_softcapping": (0, "logits would be capped"),
    "attn_logit_softcapping": (0, "scores would be capped"),
    "query_pre_attn_scalar": (0, "attention would be scaled"),
    "clip_qkv": (0, "queries, keys and values would be clipped"),
    "qk_norm": (False, "heads would be normalised"),
    "use_qk_norm": (False, "heads would be normalised"),
    "no_rope_layers": ([], "some layers would not rotate"),
    "full_attn_mod": (1, "only some layers would see all tokens"),
    "interpolate_factor": (1, "positions would be interpolated"),
    "num_experts": (0, "layers would be mixtures of experts"),
    "num_local_experts": (0, "layers would be mixtures of experts"),
    "n_routed_experts": (0, "layers would be mixtures of experts"),
    "short_mscale": (1, "attention would be scaled"),
    "long_mscale": (1, "attention would be scaled"),
}
# Biases that a family may not have; a file that says so agrees with it.
_BIASES: Final = frozenset(
    {
        "attention_bias",
        "mlp_bias",
        "lm_head_bias",
        "qkv_bias",
        "use_qkv_bias",
        "use_bias",
        "attn_bias",
        "bias",
    }
)


def check_count(data: Mapping[str, object], origin: str) -> None:
    """Raise ArtifactError for more settings than any config has, before each of them is looked at."""
    if len(data) > _MAX_SETTINGS:
        raise ArtifactError(
            f"{origin} has {len(data)} settings, expected at most {_MAX_SETTINGS}; is it the config of a "
            "model?"
        )


def ignored_settings(
    fields: Fields, read: frozenset[str], *, inert: frozenset[str] = frozenset(), prefix: str = ""
) -> tuple[str, ...]:
    """Return the names of the settings that nobody asked for, sorted.

    read: what transformers reads here. inert: what it reads and never applies. prefix: goes before each name.
    What most files say of themselves is left out, and what states the lack of something that the model lacks
    anyway.
    Raises ArtifactError for a setting that would change the model, and for an absurd number of them.
    """
    found = []
    for key in fields.unasked():
        value = fields.get(key)
        if key in inert:
            found += [prefix + key] if value else []
        elif key in read:
            neutral, effect = _READ.get(key, (None, "transformers reads it for this family"))
            _refuse_effect(fields, key, value, neutral, effect)
        elif key in _CHANGES:
            _refuse_effect(fields, key, value, *_CHANGES[key])
        elif key not in BOOKKEEPING and not (key in _BIASES and value is False):
            found.append(prefix + shown(key))
    if len(found) > MAX_IGNORED:
        raise ArtifactError(
            f"{fields.origin} has {len(found)} settings that no code of the family reads, expected at most "
            f"{MAX_IGNORED}; is it the config of a model?"
        )
    return tuple(sorted(set(found)))


def notice_of(ignored: Sequence[str], code: Sequence[str]) -> tuple[str, ...]:
    """Return what a person should know of what was left aside, a line each."""
    lines = []
    if ignored:
        more = f" and {len(ignored) - 8} more" if len(ignored) > 8 else ""
        lines.append(
            "config.json has settings that transformers does not apply in this family; they were ignored: "
            f"{', '.join(ignored[:8])}{more}"
        )
    if code:
        more = f" and {len(code) - 4} more" if len(code) > 4 else ""
        lines.append(
            f"the checkpoint brings code of its own, which was not run: {', '.join(code[:4])}{more}; the "
            "model is what transformers makes of its model_type, and llorch verify compares it with that"
        )
    return tuple(lines)


def _refuse_effect(fields: Fields, key: str, value: object, neutral: object, effect: str) -> None:
    if _changes_nothing(value, neutral):
        return
    raise fields.wrong(key, f"{neutral!r} or none ({effect}, which is not supported)")


def _changes_nothing(value: object, neutral: object) -> bool:
    if isinstance(value, list) and neutral == []:  # one number a layer, as SmolLM3 says that all rotate
        return all(item == 1 for item in value)
    return value == neutral  # 0 is false and 1 is true, as both are for the code that reads them
