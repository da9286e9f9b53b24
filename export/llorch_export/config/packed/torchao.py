"""Settings of torchao, as transformers writes them; how a weight is packed stands in its file's header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llorch_export.config.fields import Fields
from llorch_export.config.packed.base import Packing, refuse_unasked

_INERT: Final = (
    "quant_method",
    "quant_type",
    "quant_type_kwargs",
    "modules_to_not_convert",
    "include_input_output_embeddings",
    "untie_embedding_weights",
)


@dataclass(frozen=True, slots=True)
class TorchAoPacking(Packing):
    """torchao's tensor subclasses, flattened into tensors and a description of each."""


def torchao_packing(fields: Fields) -> TorchAoPacking:
    """Read the settings. Raises ArtifactError for what is not understood."""
    kind = fields.get("quant_type")
    refuse_unasked(fields, _INERT)
    # Every configuration that rounds activations says so in its name.
    rounds = "ActivationFloat8" in repr(kind) or "DynamicActivation" in repr(kind)
    return TorchAoPacking(
        notices=(
            "torchao rounds the inputs of layers by quant_type; here they are what --accuracy-level says",
        )
        if rounds or "StaticActivation" in repr(kind)
        else ()
    )
