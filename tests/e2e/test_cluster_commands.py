"""``llorch cluster`` with the tiny model on a real cluster: deployed, served, deployed again, deleted."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import msgspec
import pytest

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.cluster import RayCluster
from support.harness.processes import llorch, llorch_here, serving


@pytest.fixture
def file(tiny: Path, tmp_path: Path) -> Path:
    written = tmp_path / "cluster.toml"
    written.write_text(f'[models.tiny]\nartifact = "{tiny}"\ncores = 1\nslots = 2\nreplicas = "1:2"\n')
    return written


@pytest.fixture
def emptied(cluster: RayCluster) -> Iterator[None]:
    yield
    llorch_here("cluster", "delete", "--all", "--address", cluster.address)


@pytest.mark.usefixtures("emptied")
def test_a_model_is_deployed_shown_served_and_deleted(cluster, file, tiny, tmp_path):
    there = ("--address", cluster.address)
    deployed = llorch_here("cluster", "deploy", file, *there, "--json")
    [model] = deployed.document()["models"]
    fingerprint = load_artifact(tiny).manifest.fingerprint
    assert {
        key: model[key] for key in ("name", "state", "message", "least", "most", "wanted", "running")
    } == {
        "name": "tiny",
        "state": "RUNNING",
        "message": "",
        "least": 1,
        "most": 2,
        "wanted": 1,
        "running": 1,
    }
    assert (model["artifact"], model["fingerprint"], model["slots"]) == (str(tiny), fingerprint, 2)
    assert [replica["state"] for replica in model["replicas"]] == ["RUNNING"]
    assert "tiny: DEPLOYING, 0 of 1 replicas run" in deployed.stderr
    assert "tiny: RUNNING, 1 of 1 replicas run" in deployed.stderr

    # From another process, as a person's terminal is one.
    shown = llorch("cluster", "status", "--json", LLORCH_CLUSTER=cluster.address)
    assert shown.document() == {"models": [model]}
    assert shown.stderr == ""

    check_front(cluster.address)

    again = llorch_here("cluster", "deploy", file, *there)
    assert again.code == 0, again
    assert f"  {model['replicas'][0]['name']} RUNNING on " in again.stdout
    assert again.stdout.startswith("tiny: RUNNING, 1 of 1 replicas run (may be 1:2)\n")

    other = tmp_path / "other.toml"
    other.write_text(f'[models.other]\nartifact = "{tiny}"\ncores = 1\nresources = {{"none-has-this" = 1}}\n')
    late = llorch_here("cluster", "deploy", other, *there, "--wait", "0")
    assert late.code == 7
    assert "not all replicas run after 0 s, and Ray goes on trying (other: " in late.stderr

    unknown = llorch_here("cluster", "delete", "tony", *there)
    assert unknown.code == 2
    assert unknown.error() == "the cluster has no model tony; it has other, tiny"
    deleted = llorch_here("cluster", "delete", "tiny", "other", *there)
    assert (deleted.code, deleted.stdout) == (0, "deleted tiny, other\n")
    assert "deleting tiny, other; running answers end first" in deleted.stderr


def check_front(address: str) -> None:
    """Have a front answer by the model's replicas over gRPC and HTTP, and end as it is told to."""
    wrong = llorch_here("serve", "--cluster", address, "--model", "tony", "--port", "0")
    assert wrong.code == 2
    assert "error: --model is 'tony', and the cluster has tiny" in wrong.stderr
    with serving("--cluster", address, "--http", "0") as front:
        url = front.command.wait_for_line(r"HTTP at (\S+)").group(1)
        with WorkerClient(front.address) as client:
            sampling = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
            [answer] = client.complete(GenerationRequest("r", TokenPrompt((1, 2, 3)), sampling))
            assert len(answer.token_ids) == 8
            assert client.model_info().slots == 2
        answered = httpx2.post(f"{url}/v1/completions", json={"prompt": "Once", "max_tokens": 4}, timeout=60)
        assert answered.status_code == 200, answered.text
        front.command.process.send_signal(signal.SIGTERM)
        assert front.command.wait() == 0
        assert not [line for line in front.command.log if re.search(r"\b[Rr]ay\b", line)]


@pytest.mark.slow
@pytest.mark.usefixtures("emptied")
def test_a_replica_that_finds_another_artifact_says_so(cluster, file, tiny, tmp_path):
    moved = tmp_path / "moved"
    text = file.read_text().replace(str(tiny), str(moved))
    file.write_text(f'{text}fingerprint = "{"0" * 64}"\n')
    outcome = llorch_here("cluster", "deploy", file, "--address", cluster.address)
    assert outcome.code == 7
    assert f"error: tiny does not run: {moved} is not a folder" in outcome.stderr


def test_another_cluster_than_the_one_named_is_not_used(cluster):
    outcome = llorch_here("cluster", "status", "--address", "127.0.0.1:1")
    assert outcome.code == 7
    assert "no cluster answers at 127.0.0.1:1" in outcome.error()


def test_status_without_a_model_says_so(cluster):
    outcome = llorch_here("cluster", "status", "--address", cluster.address)
    assert (outcome.code, outcome.stdout) == (0, "the cluster has no model\n")
    empty = llorch_here("cluster", "status", "--address", cluster.address, "--json")
    assert msgspec.json.decode(empty.stdout) == {"models": []}
    nothing = llorch_here("cluster", "delete", "--all", "--address", cluster.address, "--json")
    assert msgspec.json.decode(nothing.stdout) == {"deleted": []}
