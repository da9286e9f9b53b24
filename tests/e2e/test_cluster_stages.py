"""A model whose stages are actors on several nodes: the ids of one graph, and a stage that is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.errors import LlorchError, ReplicaLostError
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.builders.checkpoints import write_hf_folder
from support.harness.processes import llorch, serving
from support.ray_nodes import RayNodes, ray_nodes

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
FLAGS = ("--threads", "1", "--slots", "4", "--max-context", "60000")
TABLE = """
[models.staged]
artifact = "{folder}"
cores = 1
slots = 4
kv_cache_memory = "64MiB"
max_context = 60000
stages = {{cores = 1}}
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(2) as started:
        yield started


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, whose context is so long that an answer does not end during a test."""
    config = {"max_position_embeddings": 200_000, "num_hidden_layers": 4}
    return write_hf_folder(tmp_path_factory.mktemp("stages") / "source", config)


@pytest.fixture(scope="module")
def whole(source: Path, export_here: Callable[..., Path]) -> Path:
    return export_here(source, source.parent / "whole")


@pytest.fixture(scope="module")
def staged(source: Path, export_here: Callable[..., Path]) -> Path:
    return export_here(source, source.parent / "staged", "--stages", "2")


@pytest.fixture(scope="module")
def file(nodes: RayNodes, staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("spec") / "cluster.toml"
    made.write_text(TABLE.format(folder=staged))
    outcome = llorch("cluster", "deploy", made, "--address", nodes.address, **nodes.token)
    assert outcome.code == 0, outcome
    return made


def asked(name: str, tokens: int, prompt: int = 1) -> GenerationRequest:
    sampling = SamplingParams(temperature=1, seed=7, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(name, TokenPrompt((prompt, *range(2, 40))), sampling)


def answers(client: WorkerClient, pool: ThreadPoolExecutor) -> list[tuple[int, ...]]:
    found = pool.map(lambda n: client.complete(asked(f"a-{n}", 40, n + 1)), range(4))
    return [answer.token_ids for (answer,) in found]


def gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, PATIENCE_S)
    assert alive == []


def answered_within(client: WorkerClient, limit_s: float) -> float:
    """Ask until there is an answer; return the seconds that took."""
    began = time.monotonic()
    while True:
        try:
            client.complete(asked("again", 2))
        except LlorchError:
            assert time.monotonic() - began < limit_s, "nothing answers"
            time.sleep(0.05)  # between two looks
        else:
            return time.monotonic() - began


def test_stages_on_several_nodes_give_the_ids_of_one_graph(nodes: RayNodes, whole: Path, file: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        with serving(whole, *FLAGS) as worker, WorkerClient(worker.address) as one:
            expected = answers(one, pool)
        with (
            serving("--cluster", nodes.address, **nodes.token) as front,
            WorkerClient(front.address) as client,
        ):
            assert answers(client, pool) == expected
    shown = llorch("cluster", "status", "--json", "--address", nodes.address, **nodes.token)
    [model] = shown.document()["models"]
    [replica] = model["replicas"]
    assert len(replica["stages"]) == 2
    assert all(replica["stages"])
    raylets = [*nodes.others]
    assert max(len(nodes.stages_of(node)) for node in raylets) == 1  # spread
    assert len(nodes.stages()) == 2


@pytest.mark.parametrize("how", ["a killed stage", "a killed replica", "a lost node"])
def test_a_lost_stage_ends_its_replica_and_another_one_answers(nodes: RayNodes, file: Path, how: str) -> None:
    with (
        serving("--cluster", nodes.address, **nodes.token) as front,
        WorkerClient(front.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        answered_within(client, PATIENCE_S)
        stages = nodes.stages()
        assert len(stages) == 2
        stream = iter(client.generate(asked("long", 50_000), timeout_s=PATIENCE_S))
        next(stream)
        if how == "a lost node":
            victim = next(n for n in nodes.others if nodes.stages_of(n) and not nodes.replicas_of(n))
            nodes.lose(victim)
        elif how == "a killed replica":
            [replica] = nodes.replicas()
            replica.kill()
        else:
            stages[1].kill()
        began = time.monotonic()
        with pytest.raises(ReplicaLostError):
            pool.submit(list, stream).result(PATIENCE_S)
        told_s = time.monotonic() - began
        answered_within(client, PATIENCE_S)
        again_s = time.monotonic() - began
        gone(stages)
        assert len(nodes.stages()) == 2
    print(f"{how}: told after {told_s:.1f} s, answered after {again_s:.1f} s")  # noqa: T201 - with -s
    assert told_s < 10
    assert again_s < 40


def test_no_stage_is_left_of_a_deleted_model(nodes: RayNodes, file: Path) -> None:
    stages = nodes.stages()
    assert len(stages) == 2
    outcome = llorch("cluster", "delete", "staged", "--address", nodes.address, **nodes.token)
    assert outcome.code == 0, outcome
    gone(stages)
    assert nodes.stages() == []
