"""What a row of the families' table can say: how a family differs from Llama.

The rows are in :mod:`.families`. What a row says of config keys, tensors and GGUF files is used while a
checkpoint is read; what it says of layers goes into :class:`LlamaConfig`, and the graph knows no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from llorch_export.config.experts import ExpertKeys
from llorch_serve.artifact.manifest import Activation, LayerForm

LLAMA_FORM: Final = LayerForm()
# The first name of a table is what absent keys mean.
SILU: Final[Mapping[str, Activation]] = {"silu": "silu", "swish": "silu"}
GELU: Final[Mapping[str, Activation]] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One row. What is not said is as in Llama.

    architecture: ``model_type`` of config.json, and ``general.architecture`` of a GGUF file.
    causal_lm: the class of transformers that ``architectures`` names.
    defaults: what transformers takes absent keys to mean, where Llama's config differs.
    biases: which of ``attention_bias`` and ``mlp_bias`` a GGUF file may have; of config.json
        ``reference_keys.json`` says it.
    windows: whether ``sliding_window`` is refused, holds in every layer, in every layer if
        ``use_sliding_window`` says so, or in those that ``layer_types`` names; where it names none, in all
        from ``max_window_layers`` on, by turns up to there, or in all but every n-th (``pattern``).
    qkv_bias: biases on q, k and v only: always, or if the key of that name says so.
    qk_norm: RMS norm of query and key heads.
    multipliers: the config scales embedding, attention, residual and logits.
    depth_scaled: the config scales them otherwise: ``scale_emb``, ``scale_depth`` over the root of the number
        of layers, and the hidden size over ``dim_model_base``.
    no_rope_interval: GGUF files leave every such layer unrotated (config.json says which by itself); 0: none.
    partial_rotary: a leading part of each head may be rotated.
    equal_heads: heads share the hidden size; transformers cannot run models of other heads.
    outer_original_context: ``original_max_position_embeddings`` where config.json has none beside its rope
        settings.
    longrope_names: further names by which the family's config.json means longrope, the only scaling that such
        a family has there.
    fused: modules of :data:`.families.FUSED_MODULES` that are stored instead of their parts.
    in_gguf: llama.cpp knows the family under its own name.
    gguf_in_transformers: transformers reads such files.
    permuted: conversion to GGUF interleaves the two halves of query and key heads.
    inert: keys that transformers reads and never applies.
    fixed: keys that transformers reads for this family alone, with the one value that is supported.

    form: how its layers are built; the config adds what it has keys for.
    activation_key, activations: the key that names the MLP's activation, and the names it may have.
    norm_key: the key of the norms' epsilon.
    bias_key: a key that says at once whether projections and MLP have biases; "": there is none.
    head_biases: projections, MLP and output layer always have biases.
    norm_offset: norms multiply by their weight and this. GGUF files hold the sum.
    scaled_embedding: embeddings are multiplied by the square root of the hidden size.
    query_scalar: scores are divided by the root of ``query_pre_attn_scalar``, which is this where
        absent.
    logit_scale: logits are multiplied by ``logit_scale``, which is this where absent; 0: there is none.
    parallel_key: the key that says whether attention and MLP are parallel; "": the row says it.
    softcaps: which of ``attn_logit_softcapping`` and ``final_logit_softcapping`` have an effect, and what
        they are where absent; None: no cap.
    window_pattern: of windows by ``pattern``, which layers have none: every one of so many; 0: no layer.
    null_window_is_none: a window of null means that no layer has one.
    rotates_in_windows: where there is a window, layers without one do not rotate. ``always``: and without
        any window no layer does.
    local_theta: layers with a window rotate by ``rope_local_base_freq``, which is this where absent; 0: as
        the others. local_key: that key; "": the base cannot be set.
    interleaved: rotary pairs are neighbours in a head, not half a head apart.
    scales_queries: queries are scaled by their position, as ``llama_4_scaling_beta`` says.
    usual_rope: what absent rotary settings mean, where that is not the plain rotation.
    alpha: dynamic rotary scaling with ``alpha`` stretches the base once and for all.
    module: of transformers, where it is not called as the family.
    reference: the family by which transformers computes the same, where this one exists only as code of
        checkpoints; "": transformers has it.
    gguf: ``general.architecture`` where it is another name.
    gguf_names: what GGUF files call modules that others call otherwise.
    gguf_wide_layers: numbers of layers of the models whose scores llama.cpp divides by the root of an equal
        share of the hidden size.
    experts: where its config and files have experts; None: it has none.
    with_experts: the family of its GGUF files whose layers have experts.
    with_windows: the family of its GGUF files that state a window.
    gguf_window_if_stated: GGUF files that state no window have none; else they have the usual one.
    other_keys: by what other names the family's config.json has settings of Llama's.
    stored_layers: what the names of layers begin with in a checkpoint.
    renamed_on_loading: those names are taken for Llama's when files are read, here and by transformers, whose
        model has Llama's.
    stored_names: what a checkpoint calls modules for which Llama has another name or none.
    """

    architecture: str
    causal_lm: str
    defaults: Mapping[str, int | float | bool] = field(default_factory=dict)
    biases: frozenset[str] = frozenset()
    windows: Literal["none", "all layers", "all layers if used", "by layer", "by turns", "pattern"] = "none"
    qkv_bias: bool | str = False
    qk_norm: bool = False
    multipliers: bool = False
    depth_scaled: bool = False
    no_rope_interval: int = 0
    partial_rotary: bool = False
    equal_heads: bool = False
    outer_original_context: int | None = None
    longrope_names: frozenset[str] = frozenset()
    fused: tuple[str, ...] = ()
    in_gguf: bool = True
    gguf_in_transformers: bool = True
    permuted: bool = False
    fixed: Mapping[str, object] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    form: LayerForm = LLAMA_FORM
    activation_key: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: SILU)
    norm_key: str = "rms_norm_eps"
    bias_key: str = ""
    head_biases: bool = False
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    query_scalar: float | None = None
    logit_scale: float = 0.0
    parallel_key: str = ""
    softcaps: Mapping[str, float | None] = field(default_factory=dict)
    window_pattern: int = 0
    null_window_is_none: bool = False
    rotates_in_windows: Literal["", "if any", "always"] = ""
    local_theta: float = 0.0
    local_key: str = "rope_local_base_freq"
    interleaved: bool = False
    scales_queries: bool = False
    usual_rope: Mapping[str, object] = field(default_factory=dict)
    alpha: bool = False
    module: str = ""
    reference: str = ""
    gguf: str = ""
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_wide_layers: frozenset[int] = frozenset()
    experts: ExpertKeys | None = None
    with_experts: str = ""
    with_windows: str = ""
    gguf_window_if_stated: bool = False
    other_keys: Mapping[str, str] = field(default_factory=dict)
    stored_layers: str = "model.layers"
    renamed_on_loading: bool = False
    stored_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def gguf_name(self) -> str:
        """The architecture's name in GGUF files, and what their keys begin with."""
        return self.gguf or self.architecture
