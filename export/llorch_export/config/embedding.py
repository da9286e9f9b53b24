"""How a model turns texts into vectors, and the config of one whose output layer is left out for that.

``source/pooling.py`` finds it beside a checkpoint; the graph and the manifest are made by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from llorch_serve.artifact.manifest import EmbeddingForm, LayerForm, LlamaConfig

EmbedChoice = Literal["last", "mean", "none"]
"""What a user may ask for: a pooling, or a language model whatever the checkpoint says."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """How texts become vectors.

    max_tokens: of a text, as the checkpoint's own files say; None: they do not.
    notices: what a person should know of it, a line each.
    """

    form: EmbeddingForm
    max_tokens: int | None = None
    notices: tuple[str, ...] = ()


def without_head(config: LlamaConfig) -> LlamaConfig:
    """Return the config of the same model without an output layer of its own."""
    form = config.layer_form
    if isinstance(form, LayerForm) and form.head_bias:
        form = msgspec.structs.replace(form, head_bias=False)
    return msgspec.structs.replace(config, tie_word_embeddings=True, layer_form=form)
