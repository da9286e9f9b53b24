"""Which tensors a config calls for, and what they are called in GGUF files.

Input is a :class:`LlamaConfig`; output are plain tables of names and shapes, which the readers compare with
what a checkpoint really holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from llorch_export.checkpoint.expert_names import StoredRows as StoredRows
from llorch_export.checkpoint.expert_names import expert_places, expert_shapes
from llorch_export.config.experts import ExpertNames
from llorch_export.config.families import FAMILIES, FUSED_MODULES
from llorch_serve.artifact.manifest import ExpertsConfig, LlamaConfig
from llorch_serve.errors import ArtifactError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# Buffers that old exports stored: rotary frequencies and tables, which follow from the config, and masks,
# which are the same in every model.
_IGNORABLE = re.compile(
    r"(?:.+\.)?(?:rotary_emb\.(?:original_)?(?:inv_freq|cos_cached|sin_cached)"
    r"|self_attn\.(?:masked_)?bias|causal_mask|position_ids)"
)

_GGUF_TOP_LEVEL = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_GGUF_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_ONE_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)_proj")
_MAX_LISTED = 8


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape (``[out, in]`` for matrices) of every tensor that ``config`` calls for.

    The order is the order of use: embedding, layers, final norm, head (absent where it is the embedding).
    """
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    attention = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
    }
    mlp = {
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    biased = {module for module in attention if config.attention_bias}
    biased |= {module for module in attention if config.qkv_bias and module != "self_attn.o_proj"}
    biased |= {module for module in mlp if config.mlp_bias}
    sparse = expert_shapes(config)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        for group in (attention, mlp if config.layer_experts(layer) is None else sparse):
            if group is not attention:
                shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
            for module, shape in group.items():
                shapes[f"{prefix}{module}.weight"] = shape
                if module in biased:
                    shapes[f"{prefix}{module}.bias"] = shape[:1]
            if group is attention and config.qk_norm:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def stored_places(config: LlamaConfig, experts: ExpertNames | None = None) -> dict[str, StoredRows]:
    """Return the place of every tensor of :func:`expected_tensors`: itself, or a part of a fused one.

    experts: how the checkpoint keeps them; None: under their own names.
    """
    expected = expected_tensors(config)
    places = {name: StoredRows(name) for name in expected}
    if FAMILIES[config.architecture].fused:
        for layer in range(config.num_hidden_layers):
            for fused, parts in FUSED_MODULES.items():
                start = 0
                for part in parts:
                    name = f"model.layers.{layer}.{part}.weight"
                    stop = start + expected[name][0]
                    places[name] = StoredRows(f"model.layers.{layer}.{fused}.weight", start, stop)
                    start = stop
    return places if experts is None else places | expert_places(config, experts)


def stored_tensors(config: LlamaConfig, experts: ExpertNames | None = None) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a checkpoint must hold, in the order of use."""
    shapes: dict[str, tuple[int, ...]] = {}
    expected = expected_tensors(config)
    for name, place in stored_places(config, experts).items():
        rows = expected[name][0] if place.stop is None else place.stop  # the last part's end is the whole's
        stack = () if place.stack is None else (place.stack,)
        shapes[place.name] = (*stack, rows // (place.stack or 1), *expected[name][1:])
    return shapes


def gguf_name(name: str) -> str:
    """Return the GGUF name of a tensor that :func:`stored_tensors` lists."""
    if name in _GGUF_TOP_LEVEL:
        return _GGUF_TOP_LEVEL[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    module, kind = rest.rsplit(".", 1)
    if one := _ONE_EXPERT.fullmatch(module):
        return f"blk.{layer}.ffn_{one[2]}.{one[1]}.{kind}"
    return f"blk.{layer}.{_GGUF_IN_LAYER[module]}.{kind}"


def is_ignorable(name: str) -> bool:
    """Tell whether a tensor is known to hold nothing that inference needs."""
    return _IGNORABLE.fullmatch(name) is not None


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], *, origin: str
) -> None:
    """Compare names and shapes. Raises ArtifactError naming missing, unused and wrongly shaped tensors."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise ArtifactError(
            f"{origin} lacks {len(missing)} of {len(expected)} tensors that its config calls for: "
            f"{_listed(missing)}; "
            "the file is incomplete or its config belongs to another model"
        )
    unused = [name for name in found if name not in expected]
    if unused:
        raise ArtifactError(
            f"{origin} holds {len(unused)} tensors that its config has no use for: {_listed(unused)}; "
            "leaving them out would change the model, so its config must be corrected (bias flags, layer "
            "count, tying)"
        )
    wrong = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if found[name] != shape
    ]
    if wrong:
        raise ArtifactError(
            f"{origin} has tensors whose shape contradicts its config: {_listed(wrong)}; "
            "the config belongs to another model"
        )


def _listed(items: Iterable[str]) -> str:
    entries = list(items)
    shown = ", ".join(entries[:_MAX_LISTED])
    return shown if len(entries) <= _MAX_LISTED else f"{shown} and {len(entries) - _MAX_LISTED} more"


def parameters(config: LlamaConfig) -> int:
    """Return how many parameters a model has."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def active_parameters(config: LlamaConfig) -> int:
    """Return how many of them one token is computed with: of experts, only those that it takes."""
    experts = config.experts
    if not isinstance(experts, ExpertsConfig):
        return parameters(config)
    sparse = sum(config.layer_experts(layer) is not None for layer in range(config.num_hidden_layers))
    one = 3 * experts.intermediate_size * config.hidden_size
    return parameters(config) - sparse * (experts.count - experts.per_token) * one
