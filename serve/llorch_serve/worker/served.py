"""What the worker needs of a model and its session, whoever made the folder; ``loading/models.py`` opens
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from llorch_serve.artifact.kinds import ModelKind
from llorch_serve.artifact.manifest import GenerationDefaults
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.engine.embedding import Embedder
from llorch_serve.engine.load import StageTimes
from llorch_serve.engine.runner import Session
from llorch_serve.errors import StageEndedError
from llorch_serve.providers import Placement


class ServedArchitecture(Protocol):
    """What is read of a model's architecture."""

    @property
    def vocab_size(self) -> int:
        """Rows of the logits."""


class ServedRecipe(Protocol):
    """How the weights are stored, as far as it is known."""

    @property
    def precision(self) -> str:
        """Of the linear layers."""

    @property
    def head_precision(self) -> str:
        """Of the output head."""

    @property
    def block_size(self) -> int | None:
        """Elements that share a scale."""

    @property
    def precisions(self) -> frozenset[Any]:
        """Every precision that some matrix is stored in."""

    @property
    def rules(self) -> Sequence[object]:
        """What departs from the above, module by module."""

    @property
    def compute_type(self) -> str:
        """What activations and the KV cache are in."""


class ServedManifest(Protocol):
    """The description of a model; see :class:`llorch_serve.artifact.manifest.Manifest` for the fields."""

    @property
    def model_id(self) -> str:
        """Name of the model."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 that tells models apart."""

    @property
    def model(self) -> ServedArchitecture:
        """The architecture."""

    @property
    def recipe(self) -> ServedRecipe:
        """The weights' precision."""

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""

    @property
    def bos_token_id(self) -> int | None:
        """Begin of sequence, for templates."""

    @property
    def eos_token_id(self) -> int | None:
        """End of sequence, for templates."""

    @property
    def template_tokens(self) -> dict[str, str] | msgspec.UnsetType:
        """Texts that templates see by name; unset: begin and end of sequence alone."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that ends generation."""

    @property
    def generation(self) -> GenerationDefaults:
        """Recommended sampling."""


class ServedModel(Protocol):
    """A folder that can be served; fulfilled by Artifact and ForeignModel."""

    @property
    def folder(self) -> Path:
        """Where it lies."""

    @property
    def kind(self) -> ModelKind:
        """Who made it."""

    @property
    def manifest(self) -> ServedManifest:
        """What it is."""

    @property
    def tokenizer_path(self) -> Path:
        """Path of tokenizer.json."""

    def chat_templates(self) -> dict[str, str]:
        """Return the sources of the chat templates by name, ``default`` first; empty if there is none.

        Raises ArtifactError.
        """


class ServedEmbedder(Embedder, Protocol):
    """A loaded graph that embeds texts."""

    @property
    def context(self) -> int:
        """Most tokens of a text."""

    @property
    def placement(self) -> Placement:
        """Where the nodes run."""


class ServedSession(Session, Protocol):
    """A loaded graph with a KV cache."""

    @property
    def capacity(self) -> KvCapacity:
        """Slots and their length."""

    @property
    def placement(self) -> Placement:
        """Where the nodes run."""


class ServedDraft(ServedSession, Protocol):
    """A loaded graph that guesses for another one."""

    @property
    def vocab_size(self) -> int:
        """Rows of its table of tokens."""


class ServedPipeline(Protocol):
    """A model that is cut into stages, loaded: see :class:`llorch_serve.stages.pipeline.Pipeline`."""

    @property
    def sessions(self) -> Sequence[ServedSession]:
        """One for each lane."""

    def times(self) -> tuple[StageTimes, ...]:
        """Return how long each stage has worked so far. Any thread."""

    def when_ended(self, tell: Callable[[StageEndedError], None]) -> None:
        """Have ``tell`` called, on any thread, if a stage ends by itself; at once if one has."""

    def close(self) -> None:
        """End all stages."""
