"""A replica as Ray makes one: of the bytes of its settings, in a process of its own.

``deploy.py`` hands the class to Ray Serve, which calls what its fronts and its controller ask for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from llorch_serve.calls.interfaces import ClosableGenerator
from llorch_serve.cluster.cores import pin_process
from llorch_serve.cluster.interfaces import Description
from llorch_serve.cluster.place import check_version, find_folder
from llorch_serve.cluster.replica import ServedReplica
from llorch_serve.cluster.settings import ReplicaSettings, read_settings
from llorch_serve.cluster.stage_host import start_stages
from llorch_serve.loading.worker import AnyWorker, load_any, notes
from llorch_serve.runtime.opening import LoadReport

logger = logging.getLogger(__name__)

Observe: TypeAlias = Callable[[ClosableGenerator], ClosableGenerator]
"""Puts observers around a generator."""


class ReplicaActor(ServedReplica):
    """Opens its worker as it is made, which takes as long as the model does to load.

    settings: see :class:`llorch_serve.cluster.settings.ReplicaSettings`.
    Raises what loading does, ArtifactError for a folder that holds another model than was deployed, and
    UsageError for another llorch than deployed it.
    """

    def __init__(self, settings: bytes) -> None:
        from ray import serve

        wanted = read_settings(settings)
        name = serve.get_replica_context().replica_id.unique_id
        observe = self.observation(wanted, name)  # before the load, which takes longer than its refusal
        worker: ClosableGenerator = _open(wanted)
        if observe is not None:
            worker = observe(worker)
        engine = wanted.engine
        description = Description(
            worker.model_info(),
            max(1, engine.max_waiting),
            engine.tool_format,
            engine.reasoning_format,
            engine.rank_format,
            engine.cache_sharing,
        )
        super().__init__(worker, description, name=name)

    def observation(self, settings: ReplicaSettings, name: str) -> Observe | None:
        """Return what puts observers around the worker, if any are wanted. name: the replica's."""
        return None

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
    check_version(wanted)
    if pin_process(wanted.cores) is None:
        logger.warning("too few cores are free to take %d alone; threads run anywhere", wanted.cores)
    session = wanted.engine.session
    engine = replace(wanted.engine, session=replace(session, threads=session.threads or wanted.cores))
    elsewhere = None if wanted.stages is None else partial(start_stages, wanted)
    worker = load_any(find_folder(wanted), engine, _report, elsewhere=elsewhere)
    try:
        for note in notes(worker):
            logger.warning("%s", note)
        worker.warm_up()
    except BaseException:
        worker.close()
        raise
    return worker


def _report(report: LoadReport) -> None:
    if report.notice is not None:
        logger.warning("%s", report.notice)
