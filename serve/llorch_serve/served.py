"""What the worker needs of a model and its session, whoever made the folder: llorch, onnxruntime-genai or Optimum.

:func:`load_model` reads a folder and :func:`open_model` loads its graph; what they return fits the protocols here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from llorch_serve import huge_pages
from llorch_serve.artifact import Artifact, is_artifact, load_artifact
from llorch_serve.config import SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.fixed_session import FixedSession, open_fixed
from llorch_serve.foreign.detect import ModelKind, foreign_kind
from llorch_serve.foreign.genai import describe_genai
from llorch_serve.foreign.model import ForeignModel
from llorch_serve.foreign.opening import open_foreign
from llorch_serve.foreign.optimum import describe_optimum
from llorch_serve.foreign.wrapped import wrapped_model
from llorch_serve.kv_cache import KvCapacity
from llorch_serve.manifest import GenerationDefaults
from llorch_serve.providers import Placement
from llorch_serve.runner import Session
from llorch_serve.session import DecoderSession
from llorch_serve.session_opening import LoadReport, open_session


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
    """The description of a model; see :class:`llorch_serve.manifest.Manifest` for the fields."""

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


class ServedSession(Session, Protocol):
    """A loaded graph with a KV cache."""

    @property
    def capacity(self) -> KvCapacity:
        """Slots and their length."""

    @property
    def placement(self) -> Placement:
        """Where the nodes run."""


def load_model(folder: Path) -> Artifact | ForeignModel:
    """Read and check a folder; its own manifest comes before any other tool's files.

    Raises ArtifactError if it holds no model, or one that is damaged, unsafe or of a kind that cannot be run.
    """
    kind = None if is_artifact(folder) else foreign_kind(folder)
    if kind is None:
        return load_artifact(folder)
    return describe_genai(folder) if kind is ModelKind.GENAI else describe_optimum(folder)


def open_model(
    model: Artifact | ForeignModel, config: SessionConfig, report: Callable[[LoadReport], None]
) -> ServedSession:
    """Load a model's graph and make its cache. See :func:`llorch_serve.session_opening.open_session` for the errors.

    Raises UsageError too where ``config.huge_pages`` is asked for and has no effect.
    """
    if config.huge_pages:
        huge_pages.require()
    session = _open(model, config, report)
    if config.huge_pages is not False:
        if session.placement.device == "cpu":
            huge_pages.gather()
        elif config.huge_pages:
            raise UsageError(
                f"--huge-pages has no effect on weights that lie on {session.placement.device}; leave it out"
            )
    return session


def _open(
    model: Artifact | ForeignModel, config: SessionConfig, report: Callable[[LoadReport], None]
) -> ServedSession:
    if isinstance(model, Artifact):
        if model.kind is ModelKind.LLORCH:
            return open_artifact(model, config, report)
        model = wrapped_model(model)
    return open_foreign(model, config, report)


def open_artifact(
    artifact: Artifact, config: SessionConfig, report: Callable[[LoadReport], None]
) -> DecoderSession | FixedSession:
    """Load the graphs of an artifact with one of llorch's own. See :func:`llorch_serve.session_opening.open_session` for the errors."""
    opener = open_session if artifact.manifest.fixed_shapes is None else open_fixed
    return opener(artifact, config, report)
