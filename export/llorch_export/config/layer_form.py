"""How a model's layers are built: what a family's row says, and what its config.json says beside."""

from __future__ import annotations

from typing import Final

import msgspec

from llorch_export.config.family import LLAMA_FORM, Family
from llorch_export.config.fields import Fields
from llorch_serve.artifact.manifest import Activation, LayerForm, RopeConfig

MAX_SOFTCAP: Final = 1e6
SCORES_CAP: Final = "attn_logit_softcapping"
LOGITS_CAP: Final = "final_logit_softcapping"
_MAX_SCALAR: Final = 2**20


def layer_form(
    fields: Fields, family: Family, sliding_rope: RopeConfig | None
) -> LayerForm | msgspec.UnsetType:
    """Return how layers are built; UNSET where it is as in Llama.

    sliding_rope: of layers with a window, where they have their own.
    Raises ArtifactError for an activation or a cap that is not supported.
    """
    return settled_form(
        msgspec.structs.replace(
            family.form,
            activation=_activation(fields, family),
            attention_softcap=_softcap(fields, family, SCORES_CAP),
            logits_softcap=_softcap(fields, family, LOGITS_CAP),
            sliding_rope=sliding_rope,
            parallel=fields.boolean(family.parallel_key, False)
            if family.parallel_key
            else family.form.parallel,
        )
    )


def settled_form(form: LayerForm) -> LayerForm | msgspec.UnsetType:
    """Return the form, or UNSET where it is Llama's, of which the manifest says nothing."""
    return msgspec.UNSET if form == LLAMA_FORM else form


def query_multiplier(fields: Fields, family: Family, head_dim: int) -> float | None:
    """Return what scores are multiplied by, as ``query_pre_attn_scalar`` says it; None: the usual."""
    if family.query_scalar is None:
        return None
    scalar = fields.number("query_pre_attn_scalar", family.query_scalar, above=0, high=_MAX_SCALAR)
    return None if scalar == head_dim else scalar**-0.5


def _activation(fields: Fields, family: Family) -> Activation:
    key = family.activation_key
    usual = next(iter(family.activations))
    value = usual if (stated := fields.get(key)) is None else stated
    if stated is not None:
        fields.get("hidden_act")  # files have both keys, and the family's own says it
    if isinstance(value, str) and value in family.activations:
        return family.activations[value]
    named = list(family.activations)
    if named == ["silu", "swish"]:
        raise fields.wrong(key, "'silu' (the only activation supported)")
    raise fields.wrong(key, f"{' or '.join(map(repr, named))} (the activations supported in this family)")


def _softcap(fields: Fields, family: Family, key: str) -> float | None:
    if key not in family.softcaps:
        return None
    usual = None if fields.states(key) else family.softcaps[key]
    if key not in fields and usual is None:
        return None
    return fields.number(key, usual, above=0, high=MAX_SOFTCAP)
