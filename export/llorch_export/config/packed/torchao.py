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
    # Every configuration that rounds inputs says so in its name, in either spelling.
    name = repr(kind).replace("_", "").lower()
    rounds = "dynamicactivation" in name or "staticactivation" in name
    return TorchAoPacking(
        notices=(
            "torchao rounds the inputs of layers by quant_type; here they are what --accuracy-level says",
        )
        if rounds
        else ()
    )
