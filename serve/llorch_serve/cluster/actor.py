"""What Ray starts for each replica: a worker of the artifact that was deployed, on cores of its own.

Input: the bytes of :class:`llorch_serve.cluster.settings.ReplicaSettings`. Ray Serve makes this class in a
process of its own, calls its methods there, and shows whoever starts it what it raises.
"""

from __future__ import annotations

import logging

from llorch_serve.cluster.cores import pin_process
from llorch_serve.cluster.interfaces import Description
from llorch_serve.cluster.place import find_folder
from llorch_serve.cluster.replica import ServedReplica
from llorch_serve.cluster.settings import ReplicaSettings, read_settings
from llorch_serve.cluster.spec import llorch_version
from llorch_serve.errors import UsageError
from llorch_serve.loading.worker import AnyWorker, load_any, notes
from llorch_serve.runtime.opening import LoadReport

logger = logging.getLogger(__name__)


class ReplicaActor(ServedReplica):
    """A replica as Ray starts it. Raises whatever keeps a worker of the artifact from answering."""

    def __init__(self, settings: bytes) -> None:
        from ray import serve

        self._settings = read_settings(settings)
        check_version(self._settings)
        if pin_process(self._settings.cores) is None:
            logger.warning(
                "too few cores are free to take %d alone; threads run anywhere", self._settings.cores
            )
        worker = _open(self._settings)
        engine = self._settings.engine
        description = Description(
            worker.model_info(),
            most_waiting=engine.max_waiting,
            tool_format=engine.tool_format,
            reasoning_format=engine.reasoning_format,
            rank_format=engine.rank_format,
        )
        super().__init__(worker, description, name=serve.get_replica_context().replica_id.unique_id)

    def reconfigure(self, settings: object) -> None:
        """Have nothing to do: Ray keeps these settings to show them, and changed ones are a new replica's."""

    def record_replica_metadata(self) -> dict[str, object]:
        """Return what Ray tells every router of this replica."""
        return {"slots": self._settings.engine.session.slots, "fingerprint": self._settings.fingerprint}


def check_version(settings: ReplicaSettings) -> None:
    """Raise UsageError where this node's llorch is another one than that which deployed."""
    if settings.version != llorch_version():
        raise UsageError(
            f"this node has llorch {llorch_version()}, and {settings.model} was deployed by "
            f"{settings.version}; install the same version on every node"
        )


def _open(settings: ReplicaSettings) -> AnyWorker:
    """Load a worker and warm it up, as for serving."""
    worker = load_any(find_folder(settings), settings.engine, _log_load)
    try:
        for note in notes(worker):
            logger.info("%s", note)
        worker.warm_up()
    except BaseException:
        worker.close()
        raise
    return worker


def _log_load(report: LoadReport) -> None:
    if report.notice is not None:
        logger.info("%s", report.notice)
