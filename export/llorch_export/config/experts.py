"""Mixtures of experts: which keys a family's config has for them, and where checkpoints keep their weights.

A row of the families' table holds an :class:`ExpertKeys`; :func:`experts_from_hf` reads a ``config.json`` by
it. The names of :class:`ExpertNames` are those of files, in the parts that follow ``model.layers.N.``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from llorch_export.config.fields import Fields
from llorch_serve.artifact.manifest import ClampedGate, ExpertsConfig
from llorch_serve.errors import ArtifactError

MAX_EXPERTS: Final = 4096
MAX_MATRICES: Final = 2**16
"""Experts of all layers together; four times as many as the largest model that is known."""
MAX_EXPERT_WIDTH: Final = 2**20
_MAX_GATE: Final = 1e6
EXPERT: Final = "{expert}"
"""Stands for an expert's number in names of files that keep each in tensors of its own."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """One way of keeping the experts of a layer.

    router, gate, up, down: names of tensors. A name without ``EXPERT`` is one tensor [experts, rows,
        columns]; where ``gate`` and ``up`` are the same, it holds each expert's gate rows before those of
        up, or ``by_turns``, the first of each before the second.
    turned: such tensors are [experts, columns, rows].
    packed: what the names end in where they are packed; "": they are not.
    """

    router: str
    gate: str
    up: str
    down: str
    by_turns: bool = False
    turned: bool = False
    packed: str = ""

    @property
    def together(self) -> bool:
        """Whether gate and up are one tensor."""
        return self.gate == self.up

    def is_used(self, found: Iterable[str], layer: int) -> bool:
        """Tell whether a file with tensors of these names keeps the experts of a layer so."""
        module = f"layers.{layer}.{self.down.replace(EXPERT, '0').removesuffix('.weight')}"
        if self.packed:
            return any(name.endswith(f"{module}{self.packed}") for name in found)
        # Packed ones have several tensors, called after what they hold.
        return any(name.endswith(module) or f"{module}." in name for name in found)


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """What a family says of its experts.

    counts: keys of ``config.json`` for their number; any of them may stand there, and transformers' own name
        comes first. per_token: how many a token takes where the config does not say it.
    width: key of one expert's width.
    normalised: whether the shares that a token takes add up to one; None: ``norm_topk_prob`` says it.
    shared: every layer with experts also has a block that all tokens take.
    some_layers: ``decoder_sparse_step`` and ``mlp_only_layers`` say which layers have experts.
    names: the ways of keeping them in safetensors files; the first is how transformers' modules are named.
    normalised_in_gguf: the same as ``normalised`` for llama.cpp, which knows it by the architecture alone.
    biases: the router and all matrices have one.
    clamped: what ``swiglu_alpha`` and ``swiglu_limit`` are where absent; None: the activation is SwiGLU.
    """

    counts: tuple[str, ...]
    count: int
    per_token: int
    width: str
    names: tuple[ExpertNames, ...]
    normalised: bool | None = True
    shared: bool = False
    some_layers: bool = False
    normalised_in_gguf: bool = True
    biases: bool = False
    clamped: ClampedGate | None = None


STACKED: Final = ExpertNames(
    "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
)
BY_EXPERT: Final = ExpertNames(
    "mlp.gate.weight",
    "mlp.experts.{expert}.gate_proj.weight",
    "mlp.experts.{expert}.up_proj.weight",
    "mlp.experts.{expert}.down_proj.weight",
)
MIXTRAL: Final = ExpertNames(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{expert}.w1.weight",
    "block_sparse_moe.experts.{expert}.w3.weight",
    "block_sparse_moe.experts.{expert}.w2.weight",
)
GRANITE_STACKED: Final = ExpertNames(
    "block_sparse_moe.router.weight",
    "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj",
)
GRANITE: Final = ExpertNames(
    "block_sparse_moe.router.layer.weight",
    "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.output_linear.weight",
)
TURNED: Final = ExpertNames(
    "mlp.router.weight",
    "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    by_turns=True,
    turned=True,
)
TURNED_IN_BLOCKS: Final = replace(TURNED, turned=False, packed="_blocks")
GGUF_STACKED: Final = ExpertNames(
    "mlp.gate.weight",
    "mlp.experts.gate_proj.weight",
    "mlp.experts.up_proj.weight",
    "mlp.experts.down_proj.weight",
)
"""As GGUF files have them since 2024, in Hugging Face's words; before, each expert had its own tensors."""


def experts_from_hf(
    fields: Fields, keys: ExpertKeys | None, defaults: Mapping[str, int | float | bool], layers: int
) -> ExpertsConfig | msgspec.UnsetType:
    """Return what a config.json says of experts; UNSET if no layer has any.

    defaults: the family's, for keys that the file leaves out. Raises ArtifactError for values out of range
    and for two keys that differ.
    """
    if keys is None:
        return msgspec.UNSET
    count = _count(fields, keys)
    per_token = fields.integer("num_experts_per_tok", keys.per_token, high=MAX_EXPERTS)
    width = fields.integer(keys.width, int(defaults[keys.width]), high=MAX_EXPERT_WIDTH)
    normalised = fields.boolean("norm_topk_prob", False) if keys.normalised is None else keys.normalised
    shared = None
    if keys.shared:
        key = "shared_expert_intermediate_size"
        shared = fields.integer(key, int(defaults[key]), high=MAX_EXPERT_WIDTH)
    sparse = _sparse_layers(fields, layers) if keys.some_layers else ()
    if count == 0 or (sparse and not any(sparse)):
        return msgspec.UNSET
    return checked_experts(
        ExpertsConfig(
            count=count,
            per_token=per_token,
            intermediate_size=width,
            normalised=normalised,
            shared_intermediate_size=shared,
            sparse_layers=sparse if 0 in sparse else (),
            biases=keys.biases or msgspec.UNSET,
            clamped=_clamped(fields, keys.clamped),
        ),
        layers,
        fields.origin,
    )


def _clamped(fields: Fields, usual: ClampedGate | None) -> ClampedGate | msgspec.UnsetType:
    if usual is None:
        return msgspec.UNSET
    return ClampedGate(
        alpha=fields.number("swiglu_alpha", usual.alpha, above=0, high=_MAX_GATE),
        limit=fields.number("swiglu_limit", usual.limit, above=0, high=_MAX_GATE),
    )


def checked_experts(experts: ExpertsConfig, layers: int, origin: str) -> ExpertsConfig:
    """Return the config. Raises ArtifactError if a token would take more experts than there are, and for an
    absurd number of them.
    """
    if experts.count * layers > MAX_MATRICES:
        raise ArtifactError(
            f"{origin}: {layers} layers of {experts.count} experts, expected at most {MAX_MATRICES} experts "
            "in all; the config is damaged"
        )
    if experts.per_token > experts.count:
        raise ArtifactError(
            f"{origin}: each token takes {experts.per_token} of {experts.count} experts, expected at most "
            "all of them; the config is damaged"
        )
    return experts


def _count(fields: Fields, keys: ExpertKeys) -> int:
    """Return the number of experts, which some families have two names for; 0 where that means none."""
    low = 0 if keys.some_layers else 1
    stated = [
        fields.integer(key, keys.count, low=low, high=MAX_EXPERTS) for key in keys.counts if key in fields
    ]
    if len(set(stated)) > 1:
        raise fields.wrong(keys.counts[0], f"the same as {keys.counts[1]}, which is {stated[1]}")
    return stated[0] if stated else keys.count


def _sparse_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return one number a layer, 0 where it has no experts."""
    step = fields.integer("decoder_sparse_step", 1, high=2**31)
    plain = frozenset(fields.array("mlp_only_layers", int) if "mlp_only_layers" in fields else ())
    return tuple(int(layer not in plain and (layer + 1) % step == 0) for layer in range(layers))
