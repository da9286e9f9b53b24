"""A folder of another tool as the worker sees it: the counterpart of an artifact and its manifest.

Filled by ``genai.py`` and ``optimum.py`` from the folder's JSON files; what only the graph can say is checked
when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from llorch_serve.artifact.kinds import ModelKind
from llorch_serve.artifact.manifest import GenerationDefaults

UNSTATED: Final = "unstated"
"""Precision of a graph whose maker does not write it down."""


@dataclass(frozen=True, slots=True)
class ForeignArchitecture:
    """What the tool's config says of the model. kv_heads, head_dim: of the cached keys and values."""

    vocab_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class ForeignRecipe:
    """Precisions, which the other tools do not state."""

    precision: str = UNSTATED
    head_precision: str = UNSTATED
    block_size: int | None = None
    precisions: frozenset[str] = frozenset({UNSTATED})
    rules: tuple[()] = ()
    compute_type: str = UNSTATED


@dataclass(frozen=True, slots=True)
class ForeignManifest:
    """Description of the model; fields as in :class:`llorch_serve.artifact.manifest.Manifest`.

    fingerprint: SHA-256 over the names and contents of the folder's files.
    """

    model_id: str
    fingerprint: str
    model: ForeignArchitecture
    context_length: int
    bos_token_id: int | None
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    recipe: ForeignRecipe = ForeignRecipe()
    template_tokens: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class GraphNames:
    """Names of the graph's inputs and outputs; those of the cache hold ``%d`` for the layer."""

    input_ids: str = "input_ids"
    attention_mask: str = "attention_mask"
    position_ids: str = "position_ids"
    logits: str = "logits"
    past_key: str = "past_key_values.%d.key"
    past_value: str = "past_key_values.%d.value"
    present_key: str = "present.%d.key"
    present_value: str = "present.%d.value"

    def past(self, layer: int) -> tuple[str, str]:
        """Return the names of a layer's cached keys and values going in."""
        return _numbered(self.past_key, layer), _numbered(self.past_value, layer)

    def present(self, layer: int) -> tuple[str, str]:
        """Return the names of a layer's keys and values coming out."""
        return _numbered(self.present_key, layer), _numbered(self.present_value, layer)


def _numbered(pattern: str, layer: int) -> str:
    # Not the % operator: the pattern comes from a file.
    return pattern.replace("%d", str(layer))


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A described folder.

    shared_cache: the graph appends to a buffer that is input and output at once; else its outputs are its
        next inputs.
    total_bytes: size of all files.
    """

    folder: Path
    kind: ModelKind
    manifest: ForeignManifest
    graph_path: Path
    tokenizer_path: Path
    templates: dict[str, str]
    names: GraphNames
    shared_cache: bool
    total_bytes: int

    def chat_templates(self) -> dict[str, str]:
        """Return the sources of the chat templates by name."""
        return self.templates
