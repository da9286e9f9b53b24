"""``llorch serve`` over replicas that are replaced, that are its own, or whose head is lost.

What is quick is in ``test_cluster_commands.py``.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.cluster.deploy import statuses
from llorch_serve.errors import LlorchError, ModelMismatchError
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.builders.checkpoints import write_hf_folder
from support.harness.processes import WorkerProcess, llorch, llorch_here, serving

pytestmark = pytest.mark.slow

TABLE = """
[models.{name}]
artifact = "{folder}"
cores = 1
slots = 2
max_context = 4096
replicas = {replicas}
"""


def asked(tokens: int, name: str = "r") -> GenerationRequest:
    return GenerationRequest(
        name, TokenPrompt((1, 2, 3)), SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True)
    )


def test_a_rolling_update_under_load_fails_no_request_of_a_front(cluster, long, tmp_path):
    there = ("--address", cluster.address)
    file = tmp_path / "cluster.toml"
    before = TABLE.format(name="rolled", folder=long, replicas=1)
    file.write_text(before)
    assert llorch_here("cluster", "deploy", file, *there).code == 0
    with (
        serving("--cluster", cluster.address, "--model", "rolled") as front,
        WorkerClient(front.address) as client,
    ):
        ended = threading.Event()
        counts = [0, 0, 0]
        with ThreadPoolExecutor(3) as pool:

            def ask(number: int, tokens: int) -> None:
                while not ended.is_set():
                    [answer] = client.complete(asked(tokens, f"r{number}-{counts[number]}"))
                    assert len(answer.token_ids) == tokens
                    counts[number] += 1

            asking = [pool.submit(ask, number, tokens) for number, tokens in enumerate((2, 200, 3000))]
            try:
                file.write_text(before.replace("slots = 2", "slots = 3"))
                outcome = llorch_here("cluster", "deploy", file, *there, "--json")
                [model] = outcome.document()["models"]
            finally:
                ended.set()
        for one in asking:
            one.result()
        assert min(counts) > 0
        assert (model["slots"], model["running"]) == (3, 1)
    assert llorch_here("cluster", "delete", "rolled", *there).code == 0


SCALED = """
[models.scaled]
artifact = "{folder}"
cores = 1
slots = 4
max_context = 8192
kv_cache_memory = "64MiB"
replicas = "1:2"
[models.scaled.scaling]
target_requests = 2
up_delay_s = 1
down_delay_s = 1
"""


def test_replicas_come_and_go_with_the_streams_and_none_is_cut(cluster, long, tmp_path):
    there = ("--address", cluster.address)
    file = tmp_path / "cluster.toml"
    file.write_text(SCALED.format(folder=long))
    assert llorch_here("cluster", "deploy", file, *there).code == 0
    with (
        serving("--cluster", cluster.address, "--model", "scaled") as front,
        WorkerClient(front.address) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        enough = [threading.Event() for _ in range(6)]

        def ask(number: int) -> int:
            """Ask for one stream after the other, each to its end; return how many there were."""
            for count in itertools.count():
                if enough[number].is_set():
                    return count
                [answer] = client.complete(asked(4000, f"s{number}-{count}"))
                assert len(answer.token_ids) == 4000
            raise AssertionError

        assert replicas_of("scaled") == (1, 1)
        began = time.monotonic()
        asking = [pool.submit(ask, number) for number in range(6)]
        try:
            look_until(lambda: replicas_of("scaled") == (2, 2), asking)
            up_s = time.monotonic() - began
            # More than one of them has slots for.
            look_until(lambda: client.load().running > 4, asking)
            fewer = time.monotonic()
            for one in enough[2:]:
                one.set()
            # Two go on, in whatever replica each finds: one of them ends with a stream in it.
            look_until(lambda: replicas_of("scaled") == (1, 1), asking)
            down_s = time.monotonic() - fewer
        finally:
            for one in enough:
                one.set()
        counts = [one.result() for one in asking]
        assert min(counts) > 0
        print(f"two after {up_s:.1f} s, one again after {down_s:.1f} s, {sum(counts)} streams whole")  # noqa: T201
        assert up_s < 20
        assert down_s < 30
    assert llorch_here("cluster", "delete", "scaled", *there).code == 0


def replicas_of(model: str) -> tuple[int, int]:
    """Return how many replicas run, and how many should."""
    [found] = [one for one in statuses() if one.name == model]
    return found.running, found.wanted


def look_until(happened: Callable[[], bool], asking: list[Future[int]]) -> None:
    """Look again and again until it happened. Those who ask go on meanwhile."""
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until, statuses()
        failed = [one for one in asking if one.done() and one.exception() is not None]
        assert not failed, failed[0].exception()
        time.sleep(0.1)  # between two looks


@pytest.fixture(scope="module")
def other(tmp_path_factory, export_here):
    """Another artifact of the same name and context as ``long``."""
    folder = tmp_path_factory.mktemp("other")
    source = write_hf_folder(folder / "source", {"max_position_embeddings": 200_000, "rope_theta": 5e5})
    return export_here(source, folder / "artifact")


def test_a_front_serves_another_artifact_without_a_failure_under_load(cluster, long, other, tmp_path):
    there = ("--address", cluster.address)
    file = tmp_path / "cluster.toml"
    file.write_text(TABLE.format(name="changed", folder=long, replicas=1))
    assert llorch_here("cluster", "deploy", file, *there).code == 0
    prints = [load_artifact(folder).manifest.fingerprint for folder in (long, other)]
    with (
        serving("--cluster", cluster.address, "--model", "changed", "--http", "0") as front,
        WorkerClient(front.address) as client,
    ):
        assert client.model_info().fingerprint == prints[0]
        ended = threading.Event()
        counts, longest_s = [0, 0, 0], [0.0, 0.0, 0.0]
        answers: list[set[tuple[int, ...]]] = [set(), set(), set()]
        with ThreadPoolExecutor(3) as pool:

            def ask(number: int, tokens: int) -> None:
                while not ended.is_set():
                    began = time.monotonic()
                    [answer] = client.complete(asked(tokens, f"r{number}-{counts[number]}"))
                    assert len(answer.token_ids) == tokens
                    answers[number].add(tuple(answer.token_ids))
                    counts[number] += 1
                    longest_s[number] = max(longest_s[number], time.monotonic() - began)

            asking = [pool.submit(ask, number, tokens) for number, tokens in enumerate((8, 200, 3000))]
            try:
                file.write_text(TABLE.format(name="changed", folder=other, replicas=1))
                assert llorch_here("cluster", "deploy", file, *there).code == 0
                look_until(lambda: client.model_info().fingerprint == prints[1], asking)
                seen = list(counts)
                look_until(lambda: all(map(int.__gt__, counts, seen)), asking)
            finally:
                ended.set()
        for one in asking:
            one.result()
        print(f"{sum(counts)} answers, the longest took {max(longest_s):.1f} s")  # noqa: T201
        assert max(longest_s[:2]) < 20
        assert {len(each) for each in answers} == {2}  # one of each model, and none of both
        pinned = replace(asked(2), fingerprint=prints[0])
        with pytest.raises(ModelMismatchError):
            client.complete(pinned)
        assert llorch_here("cluster", "delete", "changed", *there).code == 0
        assert front.command.wait() == 7
        [said] = [line for line in front.command.log if line.startswith("error: ")]
        assert said.startswith("error: the model was deleted")


def test_replicas_on_this_machine_answer_and_end_with_the_front(long):
    flags = ("--replicas", "2", "--threads", "1", "--slots", "2", "--max-context", "4096")
    with serving(long, *flags) as front:
        with WorkerClient(front.address) as client:
            [answer] = client.complete(asked(8))
            assert len(answer.token_ids) == 8
        children = psutil.Process(front.command.process.pid).children(recursive=True)
        assert any("ServeReplica" in " ".join(child.cmdline()) for child in children)
        assert "2 of 2 replicas run" in front.command.log
        front.command.process.send_signal(signal.SIGTERM)
        assert front.command.wait() == 0
    _, left = psutil.wait_procs(children, timeout=60)
    assert left == []


OTHER_CLUSTER = """
import os, sys
import ray
context = ray.init(address="local", num_cpus=2, num_gpus=0, object_store_memory=80 * 2**20,
    include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print(context.address_info["address"], flush=True)
sys.stdin.read()
"""


def test_a_front_whose_head_is_lost_answers_on_and_then_says_so(long, tmp_path):
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", OTHER_CLUSTER]
    file = tmp_path / "cluster.toml"
    file.write_text(TABLE.format(name="long", folder=long, replicas=1))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | token
    ) as other:
        address = other.stdout.readline().strip()
        outcome = llorch("cluster", "deploy", file, "--address", address, **token)
        assert outcome.code == 0, outcome
        with serving("--cluster", address, "--drain-timeout", "1", **token) as front:
            [head] = [
                c for c in psutil.Process(other.pid).children(recursive=True) if c.name() == "gcs_server"
            ]
            head.kill()
            lost = time.monotonic()
            answered_s = answers_until_it_ends(front)
            assert front.command.wait() == 7
            assert answered_s - lost > 25
            [said] = [line for line in front.command.log if line.startswith("error: ")]
            assert said.startswith(f"error: the head of the cluster at {address} has not answered for 30 s")
        other.kill()


def answers_until_it_ends(front: WorkerProcess) -> float:
    """Ask again and again until an answer fails; return when the last one came."""
    last = 0.0
    with WorkerClient(front.address) as client:
        for n in range(10_000):
            try:
                client.complete(asked(2, f"r{n}"))
            except LlorchError:
                return last
            last = time.monotonic()
    raise AssertionError("it went on")
