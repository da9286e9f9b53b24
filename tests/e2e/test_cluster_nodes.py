"""A front over replicas on three nodes, of which two are lost one after the other while it answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.errors import LlorchError, ReplicaLostError
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.harness.processes import llorch, serving
from support.ray_nodes import RayNodes, ray_nodes

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
SLOTS = 4
LONG = 3000
FEW = 20
TABLE = """
[models.spread]
artifact = "{folder}"
cores = 1
slots = 4
kv_cache_memory = "64MiB"
max_context = 4096
replicas = 2
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes() as started:
        yield started


@dataclass
class Answer:
    """What a caller has of a stream so far."""

    ids: list[int] = field(default_factory=list)
    error: LlorchError | None = None
    ended_s: float = 0.0


def asked(name: str, tokens: int, prompt: int = 1) -> GenerationRequest:
    sampling = SamplingParams(temperature=1, seed=7, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(name, TokenPrompt((prompt, 2, 3)), sampling)


def stream(client: WorkerClient, request: GenerationRequest, answer: Answer) -> Answer:
    """Take a stream's parts to its end."""
    try:
        for update in client.generate(request, timeout_s=PATIENCE_S):
            answer.ids += update.token_ids
    except LlorchError as error:
        answer.error = error
    answer.ended_s = time.monotonic()
    return answer


def begin(pool: ThreadPoolExecutor, client: WorkerClient, name: str, count: int) -> list[Future[Answer]]:
    """Begin streams; return them once each has a part."""
    answers = [Answer() for _ in range(count)]
    begun = [
        pool.submit(stream, client, asked(f"{name}-{n}", LONG, n + 1), answer)
        for n, answer in enumerate(answers)
    ]
    wait_until(lambda: all(answer.ids for answer in answers))
    return begun


def wait_until(happened) -> None:
    until = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.01)  # between two looks


def test_a_node_that_is_lost_costs_the_streams_it_made_and_nothing_else(
    nodes: RayNodes, long: Path, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(TABLE.format(folder=long))
    outcome = llorch("cluster", "deploy", file, "--address", nodes.address, **nodes.token)
    assert outcome.code == 0, outcome
    with (
        serving("--cluster", nodes.address, **nodes.token) as front,
        serving("--cluster", nodes.address, "--resume-streams", **nodes.token) as resuming,
        WorkerClient(front.address) as client,
        WorkerClient(resuming.address) as resuming_client,
        ThreadPoolExecutor(32) as pool,
    ):
        undisturbed = [resuming_client.complete(asked(f"u-{n}", LONG, n + 1))[0].token_ids for n in range(2)]
        victim = next(node for node in nodes.others if nodes.replicas_of(node))
        plain = begin(pool, client, "plain", 4)
        resumed = begin(pool, resuming_client, "resumed", 2)
        nodes.lose(victim)
        lost_s = time.monotonic()
        few = [pool.submit(client.complete, asked(f"few-{n}", 4, n + 9)) for n in range(FEW)]
        ends = [one.result(PATIENCE_S) for one in plain]
        broken = [end for end in ends if end.error is not None]
        assert 0 < len(broken) < len(ends)
        assert {type(end.error) for end in broken} == {ReplicaLostError}
        assert [len(end.ids) for end in ends if end.error is None] == [LONG] * (len(ends) - len(broken))
        assert [len(one.result(PATIENCE_S)[0].token_ids) for one in few] == [4] * FEW
        few_s = time.monotonic() - lost_s
        assert [tuple(one.result(PATIENCE_S).ids) for one in resumed] == undisturbed
        wait_until(lambda: client.load().slots == 2 * SLOTS)
        told_s = max(end.ended_s for end in broken) - lost_s
        assert told_s < 10  # and not when Ray gives the node up
        print(  # noqa: T201 - with -s
            f"told after {told_s:.2f} s, {FEW} others answered after "
            f"{few_s:.1f} s, capacity after {time.monotonic() - lost_s:.1f} s"
        )

        # No node is left for what this one ran: fewer replicas answer, and nothing waits for more.
        nodes.lose(next(node for node in nodes.others if node != victim))
        wait_until(lambda: client.load().slots == SLOTS)
        few = [pool.submit(client.complete, asked(f"late-{n}", 4, n + 9)) for n in range(FEW)]
        assert [len(one.result(PATIENCE_S)[0].token_ids) for one in few] == [4] * FEW
        wait_until(lambda: running_of(nodes) == (1, 2))


def test_a_machine_that_vanishes_costs_its_streams_though_no_connection_closes(
    long: Path, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(TABLE.format(folder=long))
    # How soon Ray gives a silent node up; by default that takes longer.
    soon = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000"}
    with ray_nodes(**soon) as nodes:
        assert llorch("cluster", "deploy", file, "--address", nodes.address, **nodes.token).code == 0
        with (
            serving("--cluster", nodes.address, **nodes.token) as front,
            WorkerClient(front.address) as client,
            ThreadPoolExecutor(32) as pool,
        ):
            begun = begin(pool, client, "long", 4)
            stopped = nodes.vanish(next(node for node in nodes.others if nodes.replicas_of(node)))
            lost_s = time.monotonic()
            try:
                # Some of these go where the machine was, before anybody knows.
                few = [pool.submit(client.complete, asked(f"few-{n}", 4, n + 1)) for n in range(FEW)]
                assert [len(one.result(PATIENCE_S)[0].token_ids) for one in few] == [4] * FEW
                few_s = time.monotonic() - lost_s
                ends = [one.result(PATIENCE_S) for one in begun]
                assert {process.status() for process in stopped} == {psutil.STATUS_STOPPED}
            finally:
                for process in stopped:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
    broken = [end for end in ends if end.error is not None]
    assert 0 < len(broken) < len(ends)
    assert {type(end.error) for end in broken} == {ReplicaLostError}
    told_s = max(end.ended_s for end in broken) - lost_s
    print(f"told after {told_s:.1f} s, {FEW} others answered after {few_s:.1f} s")  # noqa: T201 - with -s


def running_of(nodes: RayNodes) -> tuple[int, int]:
    """Return how many replicas run, and how many should."""
    shown = llorch("cluster", "status", "--json", "--address", nodes.address, **nodes.token)
    [model] = shown.document()["models"]
    return model["running"], model["wanted"]
