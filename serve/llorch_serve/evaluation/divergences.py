"""An artifact's divergence from its checkpoint: the limit of its manifest, and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llorch_serve.artifact.folder import Artifact, is_artifact, load_artifact
from llorch_serve.config import SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.evaluation.schema import Fidelity, MeasuredFidelity
from llorch_serve.fidelity.judging import SLOTS
from llorch_serve.fidelity.reference_file import ReferenceFile, check_reference, divergence
from llorch_serve.foreign.detect import foreign_kind
from llorch_serve.loading.models import open_artifact
from llorch_serve.runtime.opening import LoadReport


def known(folder: Path) -> Fidelity | None:
    """Return what the manifest says; None for another tool's folder, which says nothing."""
    return Fidelity(kl_limit=load_artifact(folder).manifest.recipe.kl_limit) if is_artifact(folder) else None


def check_measurable(folder: Path, reference: ReferenceFile) -> Artifact:
    """Return the artifact. Raises UsageError for another tool's folder, ArtifactError if the reference is of
    another model.
    """
    if not is_artifact(folder) and (kind := foreign_kind(folder)) is not None:
        raise UsageError(
            f"--reference is for llorch's own artifacts and {folder} was made by {kind.value}; leave it out"
        )
    artifact = load_artifact(folder)
    check_reference(reference, artifact)
    return artifact


def measure(
    artifact: Artifact,
    reference: ReferenceFile,
    session: SessionConfig,
    report: Callable[[LoadReport], None],
) -> Fidelity:
    """Return the divergence on the reference's text. The model is loaded for it, and freed."""
    length = max(len(reference.header.token_ids), 2)
    opened = open_artifact(artifact, replace(session, slots=SLOTS, max_context=length), report)
    found = divergence(opened, reference)
    return Fidelity(
        kl_limit=artifact.manifest.recipe.kl_limit,
        measured=MeasuredFidelity(
            kl=found.kl,
            top1=found.top1,
            tokens=found.tokens,
            text=found.text,
            oracle=found.oracle,
            limit=found.limit,
            passed=found.passed,
            same_source=found.same_source,
        ),
    )
