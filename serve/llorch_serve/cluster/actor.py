"""A replica as Ray makes one: of the bytes of its settings, in a process of its own.

``deploy.py`` hands the class to Ray Serve, which calls what its fronts and its controller ask for.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from llorch_serve.cluster.cores import pin_process
from llorch_serve.cluster.interfaces import Description
from llorch_serve.cluster.replica import ServedReplica
from llorch_serve.cluster.settings import ReplicaSettings, read_settings
from llorch_serve.errors import ArtifactError
from llorch_serve.loading.worker import AnyWorker, load_any
from llorch_serve.runtime.opening import LoadReport

logger = logging.getLogger(__name__)


class ReplicaActor(ServedReplica):
    """Opens its worker as it is made, which takes as long as the model does to load.

    settings: see :class:`llorch_serve.cluster.settings.ReplicaSettings`.
    Raises what loading does, and ArtifactError for a folder that holds another model than was deployed.
    """

    def __init__(self, settings: bytes) -> None:
        from ray import serve

        wanted = read_settings(settings)
        name = serve.get_replica_context().replica_id.unique_id
        worker = _open(wanted)
        engine = wanted.engine
        description = Description(
            worker.model_info(),
            max(1, engine.max_waiting),
            engine.tool_format,
            engine.reasoning_format,
            engine.rank_format,
        )
        super().__init__(worker, description, name=name)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what the router of every front is told of this replica."""
        info = self.description.info
        return {"slots": info.slots, "fingerprint": info.fingerprint}

    def reconfigure(self, _settings: object) -> None:
        """Take note of nothing: settings that change start another replica."""

    def __del__(self) -> None:
        # What Serve calls once the replica's requests have ended. An __init__ that failed has made nothing.
        if hasattr(self, "_worker"):
            self.close()


def _open(wanted: ReplicaSettings) -> AnyWorker:
    """Return the worker of a replica, warmed up."""
    pin_process(wanted.cores)
    session = wanted.engine.session
    engine = replace(wanted.engine, session=replace(session, threads=session.threads or wanted.cores))
    worker = load_any(Path(wanted.artifact), engine, _report)
    try:
        found = worker.artifact.manifest.fingerprint
        if found != wanted.fingerprint:
            raise ArtifactError(
                f"{wanted.artifact} has the fingerprint {found} on this node, and {wanted.fingerprint} was "
                "deployed; put the same folder on every node"
            )
        worker.warm_up()
    except BaseException:
        worker.close()
        raise
    return worker


def _report(report: LoadReport) -> None:
    if report.notice is not None:
        logger.warning(report.notice)
