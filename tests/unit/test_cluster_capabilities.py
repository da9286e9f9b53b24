"""What a model can is what its worker can, or all its replicas: clients and managers are told so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llorch_serve.calls.interfaces import ClosableGenerator
from llorch_serve.cluster import wire
from llorch_serve.cluster.interfaces import ReplicaLoad
from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.pool.messages import ready
from llorch_serve.requests import ModelInfo
from llorch_serve.rpc.convert_info import read_model_info, write_model_info
from llorch_serve.worker.worker import Worker
from support.fakes.generator import INFO, LOAD, FakeGenerator
from support.fakes.replicas import replica_of, replicas_of, routed
from support.harness.worker import make_session, make_worker

TEXT = ("generate", "tokenize", "chat")


class Able(FakeGenerator):
    """A generator that says what it can."""

    def __init__(self, *able: str) -> None:
        super().__init__()
        self.able = able

    def model_info(self) -> ModelInfo:
        return replace(super().model_info(), capabilities=self.able)


def told(generator: ClosableGenerator) -> tuple[str, ...]:
    """Return what a pool manager is told of a generator."""
    return ready(generator.model_info(), worker_id="w", model_ref=None, uri="grpc://a:1").capabilities


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = make_worker(tmp_path)
    yield made
    made.close()


def test_a_worker_scores_and_holds_forms_where_it_can(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    assert told(worker) == (*TEXT, "score", "structured")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert told(worker) == (*TEXT, "score")


def test_a_graph_without_logits_of_prompts_neither_scores_nor_ranks(tmp_path: Path) -> None:
    session = make_session(capabilities=Capabilities(prompt_logits=False))
    worker = make_worker(tmp_path, session)
    worker._ranking = object()  # type: ignore[assignment]
    assert not {"score", "rank"} & set(told(worker))
    worker.close()


def test_a_model_that_was_trained_to_ranks(worker: Worker) -> None:
    assert "rank" not in told(worker)
    worker._ranking = object()  # type: ignore[assignment]
    assert "rank" in told(worker)


def test_a_front_can_what_its_replicas_can(worker: Worker) -> None:
    front = routed(worker)
    try:
        assert "score" in told(worker)
        assert told(front) == told(worker)
        assert front.model_info() == worker.model_info()
    finally:
        front.close()


def test_a_front_can_only_what_all_its_replicas_can() -> None:
    full, less = Able(*TEXT, "score", "structured"), Able(*TEXT, "score")
    front = routed(full, less, replicas=replicas_of(full, less))
    try:
        assert told(front) == (*TEXT, "score")
    finally:
        front.close()
        full.close()
        less.close()


def test_a_front_without_a_replica_can_what_the_one_it_opened_with_could() -> None:
    able = Able(*TEXT, "score")
    replicas = replicas_of(able)
    asked = replicas.describe

    async def described() -> object:
        found = await asked()
        replicas.replicas = ()
        return found

    replicas.describe = described  # type: ignore[method-assign, assignment]
    front = routed(able, replicas=replicas)
    try:
        assert told(front) == (*TEXT, "score")
    finally:
        front.close()
        able.close()


def test_what_a_replica_can_crosses_with_how_busy_it_is() -> None:
    load = ReplicaLoad("a", "f", LOAD, capabilities=("generate", "score"))
    assert wire.read_load(wire.write_load(load)) == load
    assert replica_of(Able("generate")).description.info.capabilities == ("generate",)


def test_get_model_info_tells_it() -> None:
    info = replace(INFO, capabilities=("generate", "score"))
    assert read_model_info(write_model_info(info)) == info
    assert tuple(write_model_info(info).capabilities) == ("generate", "score")
