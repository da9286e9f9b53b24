"""A model whose stages are actors of Ray: its life on the cluster that tests share."""

from __future__ import annotations

from pathlib import Path

import psutil

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.cluster.deploy import await_gone, await_running, delete, deploy, statuses
from llorch_serve.cluster.settings import ReplicaSettings, StageShare
from llorch_serve.cluster.spec import ModelSpec, llorch_version
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.observe.replica import ObservedReplica
from support.cluster import RayCluster

PATIENCE_S = 120.0


def stages() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [one for one in below if one.cmdline()[:1] and one.cmdline()[0].startswith("ray::StageActor")]


def test_stages_come_and_go_with_their_replica(cluster: RayCluster, tiny_staged: Path) -> None:
    settings = ReplicaSettings(
        model="staged",
        artifact=str(tiny_staged),
        fingerprint=load_artifact(tiny_staged).manifest.fingerprint,
        version=llorch_version(),
        cores=1,
        engine=EngineConfig(session=SessionConfig(slots=2)),
        stages=StageShare(count=2, cores=1),
    )
    deploy([ModelSpec(settings, drain_s=1)], ObservedReplica)
    [status] = await_running(["staged"], PATIENCE_S, lambda _: None)
    [replica] = status.replicas
    assert replica.stages == (replica.node, replica.node)
    started = stages()
    assert len(started) == 2
    delete(["staged"])
    await_gone(["staged"])
    _, left = psutil.wait_procs(started, PATIENCE_S)
    assert left == []
    assert [status.name for status in statuses()] == []
