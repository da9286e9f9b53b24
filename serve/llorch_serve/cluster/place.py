"""Where a node has a replica's artifact: in the folder that was named, or fetched from a hub, once for all
replicas there. Whatever is there is the artifact that was deployed, or none, and so is its llorch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from llorch_serve.artifact.folder import Artifact, is_artifact
from llorch_serve.artifact.lock import BeingWrittenError
from llorch_serve.artifact.stages import load_stage
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.cluster.spec import llorch_version
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.files.cache import cache_folder
from llorch_serve.hub.reference import Reference, parse_reference
from llorch_serve.loading.models import load_model

_PAUSE_S: Final = 1.0
_PATIENCE_S: Final = 3600.0

logger = logging.getLogger(__name__)

Pull = Callable[[Reference, Path], Artifact]


def check_version(settings: ReplicaSettings) -> None:
    """Raise UsageError where this node's llorch is another one than that which deployed."""
    if settings.version != llorch_version():
        raise UsageError(
            f"this node has llorch {llorch_version()}, and {settings.model} was deployed by "
            f"{settings.version}; install the same version on every node"
        )


def find_folder(settings: ReplicaSettings, *, stage: int | None = None, pull: Pull | None = None) -> Path:
    """Return the folder of a replica's artifact on this machine.

    stage: the only one that runs here, whose files alone need to be there. pull: fetches an artifact; None:
        of the hub itself.
    Raises ArtifactError where there is none, or another one, and HubError where it cannot be fetched.
    """
    folder = Path(settings.artifact)
    if not folder.is_absolute():
        reference = parse_reference(settings.artifact)
        assert reference is not None, "checked as the cluster's file was read"
        folder = cache_folder() / "cluster" / f"{settings.model}-{settings.fingerprint[:16]}"
        _fetch(reference, folder, pull or _pull)
    here = load_model(folder) if stage is None else load_stage(folder, stage)
    found = here.manifest.fingerprint
    if found != settings.fingerprint:
        raise ArtifactError(
            f"{folder} on this node has the fingerprint {found}, and {settings.fingerprint} was deployed; "
            "bring the same artifact to every node, or deploy again"
        )
    return folder


def _fetch(reference: Reference, folder: Path, pull: Pull) -> None:
    """Fetch an artifact, or wait until another replica of this node has."""
    until = time.monotonic() + _PATIENCE_S
    while not is_artifact(folder):
        try:
            pull(reference, folder)
        except BeingWrittenError:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)


def _pull(reference: Reference, folder: Path) -> Artifact:
    from llorch_serve.hub.pull import pull

    logger.info("fetching %s into %s", reference, folder)
    return pull(reference, folder)
