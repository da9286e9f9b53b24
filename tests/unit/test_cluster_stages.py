"""Stages as actors, without Ray: what crosses, what each node needs, and how an end is told."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llorch_export.graph.stage_choice import parse_stages
from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.artifact.stages import load_stage
from llorch_serve.cluster import stage_host
from llorch_serve.cluster.place import find_folder
from llorch_serve.cluster.settings import ReplicaSettings, StageShare
from llorch_serve.cluster.spec import llorch_version
from llorch_serve.cluster.stage_actor import StageActor
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.errors import ArtifactError, UnavailableError, UsageError
from llorch_serve.loading.worker import load_any
from llorch_serve.providers import ProviderChoice, activate, import_runtime
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.stages import wire
from llorch_serve.stages.loading import StageRoom
from llorch_serve.stages.plan import pooled_capacity
from llorch_serve.worker.local import LocalClient
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Ray's errors without Ray: it reads its environment once, which a cluster of the tests sets."""
    package, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    exceptions.__dict__["RayError"] = type("RayError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "ray", package)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)


ENGINE = EngineConfig(session=SessionConfig(threads=1, slots=4, max_context=100))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Artifact]:
    """A model as one graph and as two stages."""
    folder = tmp_path_factory.mktemp("stages")
    source = write_hf_folder(folder / "source", {"num_hidden_layers": 4})
    whole = export_tiny(source, folder / "whole", precision="int8")
    return whole, export_tiny(source, folder / "staged", precision="int8", stages=parse_stages("2"))


class Method:
    """A method of an actor, called as Ray has it called."""

    def __init__(self, call: Callable[..., Any], actor: FakeActor, name: str) -> None:
        self._call = call
        self._actor = actor
        self._name = name

    def remote(self, *arguments: object) -> Method:
        assert {type(each) for each in arguments} <= {bytes, int}
        self._arguments = arguments
        return self

    def future(self) -> Future[Any]:
        if self._name == "stay":
            return self._actor.ended
        done = self._actor.pool.submit(self._call, *self._arguments)
        if self._name == "answer":
            self._actor.crossed.append((self._arguments[1], done.result()))
        return done


class FakeActor:
    """An actor of this process. crossed: questions of lanes and their answers. ended: what ``stay`` gives."""

    def __init__(self, *arguments: Any) -> None:
        self._actor = StageActor(*arguments)
        self.pool = ThreadPoolExecutor(1)
        self.crossed: list[tuple[bytes, bytes]] = []
        self.ended: Future[None] = Future()

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._actor, name), self, name)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[FakeActor]:
    """The actors that have been started and not been ended."""
    started: list[FakeActor] = []

    def start(kind: type, arguments: tuple[Any, ...], bundle: int, **options: object) -> FakeActor:
        assert kind is StageActor
        assert options == {"num_cpus": 1, "num_gpus": 0.5, "memory": 7, "max_concurrency": 4}
        assert bundle == len(started) == arguments[1]
        started.append(FakeActor(*arguments))
        return started[-1]

    monkeypatch.setattr(stage_host, "start_in_bundle", start)
    monkeypatch.setattr(stage_host, "end_actor", started.remove)
    return started


def wanted(artifact: Artifact, count: int = 2, **changes: Any) -> ReplicaSettings:
    given = {"fingerprint": artifact.manifest.fingerprint, "version": llorch_version()} | changes
    share = StageShare(count=count, cores=1, gpus=0.5, memory_bytes=7)
    return ReplicaSettings(model="m", artifact=str(artifact.folder), cores=1, stages=share, **given)


def opened(artifact: Artifact, settings: ReplicaSettings | None = None) -> Worker:
    elsewhere = None if settings is None else partial(stage_host.start_stages, settings)
    worker = load_any(artifact.folder, ENGINE, lambda _report: None, elsewhere=elsewhere)
    assert isinstance(worker, Worker)
    return worker


def asked(name: str, prompt: int = 1) -> GenerationRequest:
    sampling = SamplingParams(temperature=1, seed=7, max_tokens=20, ignore_eos=True)
    return GenerationRequest(name, TokenPrompt((prompt, *range(2, 30))), sampling)


def answers(worker: Worker) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda n: LocalClient(worker).complete(asked(f"r{n}", n + 1)), range(4))
        return [answer.token_ids for (answer,) in found]


def test_actors_give_the_ids_of_one_graph_and_two_tensors_cross(
    both: tuple[Artifact, Artifact], actors: list[FakeActor]
) -> None:
    whole, staged = both
    one = opened(whole)
    expected = answers(one)
    one.close()
    worker = opened(staged, wanted(staged))
    try:
        assert answers(worker) == expected
        assert [stage.calls > 0 for stage in worker.load().stages] == [True, True]
        first, last = actors
        hidden, vocabulary = staged.manifest.model.hidden_size, staged.manifest.model.vocab_size
        assert {shape[0] for shape in shapes(first, 0)} == {0}  # token ids, in the header
        assert {(shape[0], shape[2]) for shape in shapes(first, 1)} == {(2, hidden)}
        assert sorted(shapes(last, 0)) == sorted(shapes(first, 1))  # lanes may overtake each other
        assert {shape[-1] for shape in shapes(last, 1)} == {vocabulary}
    finally:
        worker.close()
    assert actors == []


def shapes(actor: FakeActor, side: int) -> list[tuple[int, ...]]:
    """Return the shape of what crossed with each call to a stage (0), or from it (1), in order."""
    found = []
    for crossed in sorted(actor.crossed, key=lambda pair: pair[side]):
        question, _ = wire.unpack_question(memoryview(crossed[0]))
        if isinstance(question, wire.Run):
            unpack = wire.unpack_answer if side else wire.unpack_question
            header, _rows = unpack(memoryview(crossed[side]))
            found.append(tuple(header.shape))
    return sorted(found)


def test_an_actor_that_ends_ends_the_worker(both: tuple[Artifact, Artifact], actors: list[FakeActor]) -> None:
    worker = opened(both[1], wanted(both[1]))
    dead = threading.Event()
    worker.when_dead(lambda _error: dead.set())
    actors[1].ended.set_exception(EOFError())
    assert dead.wait(PATIENCE_S)
    with pytest.raises(UnavailableError, match="the engine has stopped"):
        LocalClient(worker).complete(asked("late"))
    worker.close()
    assert actors == []


def test_what_a_node_refuses_is_told_and_nothing_is_left(
    both: tuple[Artifact, Artifact], actors: list[FakeActor]
) -> None:
    whole, staged = both
    with pytest.raises(ArtifactError, match=r"and 1{64} was deployed; bring the same"):
        opened(staged, wanted(staged, fingerprint="1" * 64))
    with pytest.raises(UsageError, match=r"m was deployed by 9\.9; install the same version"):
        opened(staged, wanted(staged, version="9.9"))
    with pytest.raises(UsageError, match=r"has 2 stages, and 3 were deployed; correct stages\.count of m"):
        opened(staged, wanted(staged, 3))
    with pytest.raises(
        UsageError, match="is not cut into stages, which were to run on nodes of their own; leave"
    ):
        opened(whole, wanted(whole))
    assert actors == []


def test_memory_is_that_of_the_fullest_machine(both: tuple[Artifact, Artifact]) -> None:
    config = SessionConfig(slots=4000, max_context=128)
    provider = activate(ProviderChoice(), import_runtime(both[1].manifest.min_onnxruntime))

    def planned(*places: tuple[str, int]) -> int:
        rooms = [StageRoom(None, None, host, mib * 2**20) for host, mib in places]
        return pooled_capacity(both[1], config, provider, rooms, lanes=2).budget

    apart = planned(("a", 20), ("b", 20))
    assert min(planned(("a", 20), ("b", 80)), planned(("a", 80), ("b", 20))) == apart
    assert planned(("a", 40), ("b", 40)) > apart > planned(("a", 20), ("a", 20)) > 128


def test_a_node_needs_the_files_of_its_stage_alone(both: tuple[Artifact, Artifact], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(both[1].folder, folder)
    (folder / "stage0.onnx.data").unlink()
    artifact = load_stage(folder, 1)
    assert artifact.manifest == both[1].manifest
    assert find_folder(wanted(artifact), stage=1) == folder
    with pytest.raises(ArtifactError, match=r"stage0\.onnx\.data"):
        load_stage(folder, 0)
    with pytest.raises(ArtifactError, match="holds 2 stages, and stage 2 was asked for"):
        load_stage(folder, 2)
    with pytest.raises(ArtifactError, match="holds no stages, and stage 0 was asked for"):
        load_stage(both[0].folder, 0)
    with pytest.raises(ArtifactError, match=r"stage0\.onnx\.data"):
        load_artifact(folder)
