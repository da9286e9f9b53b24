"""``llorch cluster`` refuses what it can before any cluster is asked."""

from __future__ import annotations

import contextlib
import importlib.metadata
from dataclasses import replace

import pytest

from llorch_serve.cluster import deploy, front_model, handles, place
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.config import EngineConfig
from llorch_serve.loading.progress import LoadProgress
from llorch_serve.observe.replica import ObservedReplica
from llorch_serve.terminal.replica_flags import ReplicaFlags
from llorch_serve.terminal.serve_replicas import Elsewhere, beside
from llorch_serve.terminal.serving_flags import QueueFlags
from support.builders.tiny_artifact import write_tiny_artifact
from support.fakes.generator import FakeGenerator
from support.fakes.replicas import reader_of, replicas_of
from support.harness.processes import llorch_here

SMALL = f'[models.m]\nartifact = "/nowhere/m"\nfingerprint = "{"0" * 64}"\ncores = 1\n'


@pytest.fixture
def file(tmp_path):
    written = tmp_path / "cluster.toml"
    written.write_text(SMALL)
    return written


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["cluster"], 2, "llorch cluster takes one more word: deploy, status, delete"),
        (["cluster", "start"], 2, "llorch cluster takes one more word: deploy, status, delete"),
        (
            ["cluster", "status"],
            2,
            "no cluster is named; give --address HOST:PORT of its head, or set LLORCH_CLUSTER",
        ),
        (["cluster", "deploy", "FILE"], 2, "no cluster is named"),
        (
            ["cluster", "deploy", "/nowhere.toml", "--address", "127.0.0.1:1"],
            2,
            "/nowhere.toml cannot be read",
        ),
        (["cluster", "status", "--address", "auto"], 2, "a cluster is named, and never looked for"),
        (
            ["cluster", "status", "--address", "ray://h:10001"],
            2,
            "--address is 'ray://h:10001'; expected HOST:PORT",
        ),
        (
            ["cluster", "status", "--address", "h.example:6379"],
            2,
            "is beyond this machine's loopback, and there is no",
        ),
        (["cluster", "status", "--address", "127.0.0.1:1"], 7, "no cluster answers at 127.0.0.1:1"),
        (["cluster", "delete", "--address", "127.0.0.1:1"], 2, "no model is named; give names, or --all"),
        (["cluster", "delete", "m", "--all"], 2, "--all has no effect beside m; give one of them"),
    ],
)
def test_a_refusal_is_one_line(file, arguments, code, told):
    given = [str(file) if word == "FILE" else word for word in arguments]
    outcome = llorch_here(*given, RAY_AUTH_MODE="disabled")
    assert outcome.code == code
    assert told in outcome.error()


def test_the_variable_names_the_cluster_and_the_flag_wins():
    variable = llorch_here("cluster", "status", LLORCH_CLUSTER="auto")
    assert "'auto'" in variable.error()
    flag = llorch_here("cluster", "status", "--address", "local", LLORCH_CLUSTER="auto")
    assert "'local'" in flag.error()


def version_of(found: str | None):
    """Return what tells that this release of Ray is installed, or none."""

    def version(name: str) -> str:
        if name != "ray":
            return real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    real = importlib.metadata.version
    return version


COMMANDS = [
    ["cluster", "deploy", "FILE", "--address", "127.0.0.1:1"],
    ["cluster", "status", "--address", "127.0.0.1:1"],
    ["cluster", "delete", "m", "--address", "127.0.0.1:1"],
    ["serve", "--cluster", "127.0.0.1:1"],
    ["serve", "MODEL", "--replicas", "2"],
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_without_ray_the_extra_is_named(monkeypatch, file, tmp_path, arguments):
    monkeypatch.setattr(importlib.metadata, "version", version_of(None))
    places = {"FILE": file, "MODEL": write_tiny_artifact(tmp_path / "model")}
    outcome = llorch_here(*(places.get(word, word) for word in arguments))
    assert outcome.code == 4
    assert outcome.error() == (
        "ray is not installed, and this command needs it; install it with: pip install 'llorch[ray]'"
    )


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_release_of_ray_that_was_not_tested_is_refused(monkeypatch, file, tmp_path, arguments):
    monkeypatch.setattr(importlib.metadata, "version", version_of("2.59.1"))
    places = {"FILE": file, "MODEL": write_tiny_artifact(tmp_path / "model")}
    outcome = llorch_here(*(places.get(word, word) for word in arguments))
    assert outcome.code == 4
    assert outcome.error().startswith("ray 2.59.1 is installed, and llorch was tested with 2.60.x alone")


@pytest.mark.parametrize(("exact", "resumes"), [(True, True), (False, True), (False, False)])
def test_streams_that_may_go_on_differently_are_told_of(monkeypatch, capsys, tmp_path, exact, resumes):
    generator = FakeGenerator()
    info = replace(generator.model_info(), batch_invariant=exact)
    monkeypatch.setattr(generator, "model_info", lambda: info)
    monkeypatch.setattr(place, "find_folder", lambda _: tmp_path)
    monkeypatch.setattr(handles, "find_replicas", lambda *_: replicas_of(generator))
    monkeypatch.setattr(front_model, "open_front_model", lambda _, told: reader_of(generator, told))
    settings = ReplicaSettings(model="m", artifact="/m", fingerprint="f", version="1", cores=1)
    load = Elsewhere("here", contextlib.nullcontext, lambda _: settings, resume_streams=resumes)
    load._open(settings).close()
    generator.close()
    told = "may go on as another answer" in capsys.readouterr().err
    assert told == (resumes and not exact)


def test_replicas_send_spans_where_their_front_does(monkeypatch, tmp_path):
    deployed = []
    monkeypatch.setattr(deploy, "deploy", lambda models, actor: deployed.append((actor, *models)))
    monkeypatch.setattr(deploy, "await_running", lambda *_, **__: [])
    folder, url = write_tiny_artifact(tmp_path / "model"), "http://127.0.0.1:4318"
    made = beside(
        str(folder),
        folder,
        EngineConfig(),
        ReplicaFlags(replicas="1"),
        QueueFlags(),
        signed=None,
        tokenizer=None,
        otlp_endpoint=url,
    )
    assert made.settings(LoadProgress()).otlp_endpoint == url
    ((actor, model),) = deployed
    assert (actor, model.settings.otlp_endpoint) == (ObservedReplica, url)
