"""Which tensors a config calls for, and what they are called in GGUF files.

Input is a :class:`LlamaConfig`; output are plain tables of names and shapes, which the readers compare with
what a checkpoint really holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from llorch_export.checkpoint.expert_names import EXPERTS, ROUTER, expert_places, expert_shapes
from llorch_export.checkpoint.expert_names import StoredRows as StoredRows
from llorch_export.config.experts import ExpertNames
from llorch_export.config.families import FAMILIES, FUSED_MODULES
from llorch_export.config.family import Family
from llorch_export.config.fields import listed
from llorch_serve.artifact.manifest import ExpertsConfig, LlamaConfig
from llorch_serve.errors import ArtifactError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
FINAL_NORM_BIAS = "model.norm.bias"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
XIELU = ("act_fn.alpha_p", "act_fn.alpha_n", "act_fn.beta", "act_fn.eps")
"""The factors of an MLP's activation; they have no further name of what kind of parameter they are."""
SINKS = "self_attn.sinks"
"""Of a layer; it has no further name of what kind of parameter it is."""

# Buffers that old exports stored: rotary frequencies and tables, which follow from the config, and masks,
# which are the same in every model.
_IGNORABLE = re.compile(
    r"(?:.+\.)?(?:rotary_emb\.(?:original_)?(?:inv_freq|cos_cached|sin_cached)"
    r"|self_attn\.(?:masked_)?bias|causal_mask|position_ids)"
)

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_GGUF_TOP_LEVEL = {
    EMBEDDING: "token_embd.weight",
    FINAL_NORM: "output_norm.weight",
    FINAL_NORM_BIAS: "output_norm.bias",
    HEAD: "output.weight",
    HEAD_BIAS: "output.bias",
}
_GGUF_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.output_norm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.output_norm": "post_ffw_norm",
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


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape (``[out, in]`` for matrices) of every tensor that ``config`` calls for.

    The order is the order of use: embedding, layers, final norm, head (absent where it is the embedding).
    """
    hidden, form = config.hidden_size, config.form
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    attention, mlp, sparse = _attention(config), _mlp(config), expert_shapes(config)
    before, after = form.norm_placement != "after", form.norm_placement != "before"
    for layer in range(config.num_hidden_layers):
        modules: dict[str, tuple[int, ...]] = {
            **({"input_layernorm": (hidden,)} if before else {}),
            **attention,
            **({"self_attn.output_norm": (hidden,)} if after else {}),
            **({"post_attention_layernorm": (hidden,)} if before and not form.parallel else {}),
            **(mlp if config.layer_experts(layer) is None else sparse),
            **({"mlp.output_norm": (hidden,)} if after else {}),
        }
        for module, shape in modules.items():
            shapes[f"model.layers.{layer}.{module}.weight"] = shape
            if _has_bias(config, module):
                shapes[f"model.layers.{layer}.{module}.bias"] = shape[:1]
        if form.activation == "xielu":
            shapes |= dict.fromkeys((f"model.layers.{layer}.mlp.{factor}" for factor in XIELU), (1,))
        if form.sinks:
            shapes[f"model.layers.{layer}.{SINKS}"] = (config.num_attention_heads,)
    shapes[FINAL_NORM] = (hidden,)
    if form.norm_bias:
        shapes[FINAL_NORM_BIAS] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    if form.head_bias:
        shapes[HEAD_BIAS] = (config.vocab_size,)
    return shapes


def _attention(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the modules of a layer's attention and the shapes of their weights."""
    query, key_value = (
        heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    found: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, config.hidden_size),
        "self_attn.k_proj": (key_value, config.hidden_size),
        "self_attn.v_proj": (key_value, config.hidden_size),
        "self_attn.o_proj": (config.hidden_size, query),
    }
    if config.qk_norm:
        over_head = config.form.qk_norm_over == "head"
        found["self_attn.q_norm"] = (config.head_dim if over_head else query,)
        found["self_attn.k_norm"] = (config.head_dim if over_head else key_value,)
    return found


def _mlp(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the modules of a layer's MLP and the shapes of their weights."""
    wide = (config.intermediate_size, config.hidden_size)
    return {
        **({"mlp.gate_proj": wide} if config.form.gated else {}),
        "mlp.up_proj": wide,
        "mlp.down_proj": (config.hidden_size, config.intermediate_size),
    }


def _has_bias(config: LlamaConfig, module: str) -> bool:
    if is_norm(module):
        return config.form.norm_bias and module not in ("self_attn.q_norm", "self_attn.k_norm")
    if module == ROUTER or module.startswith(EXPERTS):
        return isinstance(config.experts, ExpertsConfig) and config.experts.biases is True
    if module.startswith("mlp."):
        return config.mlp_bias
    return config.attention_bias or (config.qkv_bias and module != "self_attn.o_proj")


def is_norm(module: str) -> bool:
    """Tell whether a module is a norm."""
    return module.endswith("norm")


def stored_places(
    config: LlamaConfig,
    experts: ExpertNames | None = None,
    *,
    gguf: bool = False,
    fused: Collection[str] | None = None,
) -> dict[str, StoredRows]:
    """Return the place of every tensor of :func:`expected_tensors`: itself under the family's own name, or a
    part of a fused one.

    experts: how the checkpoint keeps them; None: each matrix under its own name. gguf: in a GGUF file, under
        its name there. fused: modules that are stored instead of their parts; None: those of the family.
    """
    expected, family = expected_tensors(config), FAMILIES[config.architecture]
    parts = _fused_rows(config, expected, family.fused if fused is None else fused)
    if experts is not None:
        parts |= expert_places(config, experts)
    places = {}
    for name in expected:
        place = parts.get(name, StoredRows(name))
        own = _gguf_name(place.name, family) if gguf else family_name(place.name, family)
        places[name] = replace(place, name=own)
    return places


def _fused_rows(
    config: LlamaConfig, expected: Mapping[str, tuple[int, ...]], fused: Collection[str]
) -> dict[str, StoredRows]:
    """Return the places of the tensors that are stored in one with others."""
    places = {}
    for prefix in (f"model.layers.{layer}" for layer in range(config.num_hidden_layers)):
        for whole in fused:
            start = 0
            for part in FUSED_MODULES[whole]:
                stop = start + expected[f"{prefix}.{part}.weight"][0]
                for kind in ("weight", "bias"):
                    if f"{prefix}.{part}.{kind}" in expected:
                        place = StoredRows(f"{prefix}.{whole}.{kind}", start, stop)
                        places[f"{prefix}.{part}.{kind}"] = place
                start = stop
    return places


def stored_tensors(
    config: LlamaConfig,
    experts: ExpertNames | None = None,
    *,
    gguf: bool = False,
    fused: Collection[str] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a checkpoint must hold, in the order of use."""
    shapes: dict[str, tuple[int, ...]] = {}
    expected = expected_tensors(config)
    for name, place in stored_places(config, experts, gguf=gguf, fused=fused).items():
        rows = expected[name][0] if place.stop is None else place.stop  # the last part's end is the whole's
        stack = () if place.stack is None else (place.stack,)
        matrix = (rows // (place.stack or 1), *expected[name][1:])
        shapes[place.name] = (*stack, *(reversed(matrix) if place.turned else matrix))
    return shapes


def family_name(name: str, family: Family) -> str:
    """Return what a family's checkpoints call a tensor."""
    if not family.stored_names or family.renamed_on_loading:
        return name
    module, _, kind = name.rpartition(".")
    if (found := _LAYER.fullmatch(module)) is None:
        return f"{family.stored_names.get(module, module)}.{kind}"
    return f"model.layers.{found[1]}.{family.stored_names.get(found[2], found[2])}.{kind}"


def own_module(module: str, family: Family) -> str:
    """Return what a family's checkpoints call ``module``, by the name that it has here."""
    known = {stored: own for own, stored in family.stored_names.items()}
    layer = re.fullmatch(rf"{re.escape(family.stored_layers)}\.(\d+)\.(.+)", module)
    if layer is None:
        return known.get(module, module)
    return f"model.layers.{layer[1]}.{known.get(layer[2], layer[2])}"


def loaded_name(name: str, family: Family) -> str:
    """Return what a stored tensor is called once files are read."""
    if not family.renamed_on_loading:
        return name
    module, _, kind = name.rpartition(".")
    return f"{own_module(module, family)}.{kind}"


def _gguf_name(name: str, family: Family) -> str:
    if name in _GGUF_TOP_LEVEL:
        return _GGUF_TOP_LEVEL[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    if rest == SINKS:
        return f"blk.{layer}.attn_sinks.weight"
    module, kind = rest.rsplit(".", 1)
    if one := _ONE_EXPERT.fullmatch(module):
        return f"blk.{layer}.ffn_{one[2]}.{one[1]}.{kind}"
    return f"blk.{layer}.{family.gguf_names.get(module) or _GGUF_IN_LAYER[module]}.{kind}"


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
            f"{listed(missing)}; "
            "the file is incomplete or its config belongs to another model"
        )
    unused = [name for name in found if name not in expected]
    if unused:
        raise ArtifactError(
            f"{origin} holds {len(unused)} tensors that its config has no use for: {listed(unused)}; "
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
            f"{origin} has tensors whose shape contradicts its config: {listed(wrong)}; "
            "the config belongs to another model"
        )


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
