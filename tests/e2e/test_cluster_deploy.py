"""Models as Ray runs them, on a real cluster: the smoke test of Ray's private interfaces too."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from llorch_serve.cluster.deploy import (
    DEPLOYMENT,
    ModelStatus,
    application_of,
    await_gone,
    await_running,
    delete,
    deploy,
    find_settings,
    statuses,
)
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.cluster.spec import ModelSpec, ReplicaRange, Scaling
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.errors import UsageError, WorkerError
from support.cluster import RayCluster
from support.fakes.replica import TrivialReplica

PATIENCE_S = 120.0


def spec(name: str = "m", *, replicas: str = "1", fingerprint: str = "a", **changes: object) -> ModelSpec:
    settings = ReplicaSettings(
        model=name,
        artifact=str(changes.pop("artifact", "/models/m")),
        fingerprint=fingerprint * 64,
        version="0.1.0",
        cores=1,
        engine=EngineConfig(session=SessionConfig(slots=2)),
    )
    least, _, most = replicas.partition(":")
    return ModelSpec(settings, ReplicaRange(int(least), int(most or least)), **changes)


def run(*models: ModelSpec, tell=lambda _: None) -> list[ModelStatus]:
    deploy(models, TrivialReplica)
    return await_running([model.name for model in models], PATIENCE_S, tell)


def handle(model: str = "m"):
    from ray import serve

    return serve.get_deployment_handle(DEPLOYMENT, application_of(model))


def who(model: str = "m") -> tuple[int, str]:
    return handle(model).who.remote().result(timeout_s=PATIENCE_S)


@pytest.fixture(autouse=True)
def emptied(cluster: RayCluster) -> Iterator[None]:
    yield
    gone([status.name for status in statuses()])


def test_the_same_spec_again_restarts_nothing():
    with pytest.raises(UsageError, match="no --model is given, and the cluster has no model"):
        find_settings(None)
    [status] = run(spec())
    assert (status.state, status.message, status.running, status.wanted) == ("RUNNING", "", 1, 1)
    assert status.settings == spec().settings == find_settings("m") == find_settings(None)
    process, fingerprint = who()
    assert fingerprint == "a" * 64
    [again] = run(spec())
    assert again.replicas == status.replicas
    assert who() == (process, fingerprint)
    # What is not among the settings of a replica changes without a restart too.
    [more] = run(spec(replicas="2", drain_s=5, max_queued=3))
    assert set(status.replicas) < set(more.replicas)
    assert more.running == 2


def test_a_changed_artifact_replaces_its_replica_under_load_without_a_failure():
    run(spec())
    before = who()
    stream = handle().options(stream=True).count.remote(parts=30, pause_s=0.1)
    parts = iter(stream)
    assert next(parts) == b"a0"
    with asked_again_and_again() as answers:
        seen: list[ModelStatus] = []
        [status] = run(spec(fingerprint="b"), tell=seen.append)
        after = who()
    assert min(each.running for each in seen) == 1  # the new one is there before the old one is not
    assert status.settings.fingerprint == "b" * 64
    assert after[0] != before[0]
    assert after[1] == "b" * 64
    assert answers.failures == []
    assert answers.seen == {before, after}
    # The stream that had begun goes on in the old replica to its end.
    assert list(parts) == [f"a{part}".encode() for part in range(1, 30)]


@pytest.mark.slow
def test_a_replica_that_cannot_start_is_told_of_and_others_go_on():
    run(spec(), spec("other"))
    before = who(), who("other")
    with pytest.raises(
        WorkerError, match=r"^m does not run: the artifact in /broken is damaged; export it again$"
    ):
        run(spec(artifact="/broken"))
    assert (who(), who("other")) == before
    with pytest.raises(UsageError, match=r"no model a, b; it has m, other"):
        delete(["a", "m", "b"])
    with pytest.raises(UsageError, match=r"no --model is given, and the cluster has m, other"):
        find_settings(None)
    with pytest.raises(UsageError, match=r"--model is 'x', and the cluster has m, other"):
        find_settings("x")
    gone(["m"])
    assert [status.name for status in statuses()] == ["other"]
    assert who("other") == before[1]


@pytest.mark.slow
def test_replicas_come_and_go_with_the_requests_and_no_stream_is_cut():
    run(spec(replicas="1:2", scaling=Scaling(target_requests=1, up_delay_s=1, down_delay_s=1)))
    began = time.monotonic()
    streams = [iter(handle().options(stream=True).count.remote(parts=200, pause_s=0.1)) for _ in range(3)]
    firsts = [next(stream) for stream in streams]
    until_running(2, within_s=20)
    assert [status.bounds for status in statuses()] == [ReplicaRange(1, 2)]
    [again] = run(spec(replicas="1:2", scaling=Scaling(target_requests=1, up_delay_s=1, down_delay_s=1)))
    assert again.running == 2  # deployed again, what Ray has chosen stays
    rest = [list(stream) for stream in streams]
    assert [len(parts) for parts in rest] == [199] * 3
    assert time.monotonic() - began < 60
    assert firsts == [b"a0"] * 3
    until_running(1, within_s=30)


def test_what_no_node_can_run_is_told_of_and_can_be_deleted():
    deploy([spec(resources={"none-has-this": 1}, drain_s=PATIENCE_S)], TrivialReplica)
    with pytest.raises(WorkerError, match=r"not all replicas run after 1 s, and Ray goes on trying \(m: "):
        await_running(["m"], 1, lambda _: None)
    began = time.monotonic()
    gone(["m"])
    assert time.monotonic() - began < PATIENCE_S / 2


def gone(names: list[str]) -> None:
    delete(names)
    await_gone(names)


class Answers:
    """What somebody got who asked again and again."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, str]] = set()
        self.failures: list[Exception] = []


@contextlib.contextmanager
def asked_again_and_again() -> Iterator[Answers]:
    """Ask the model who it is, until the context ends."""
    answers, ended = Answers(), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                answers.seen.add(who())
            except Exception as error:  # noqa: BLE001 - for the test to look at
                answers.failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        thread.join()


def until_running(count: int, *, within_s: float) -> None:
    """Look again and again until so many replicas run."""
    until = time.monotonic() + within_s
    while statuses()[0].running != count:
        assert time.monotonic() < until, statuses()
        time.sleep(0.1)  # between two looks
