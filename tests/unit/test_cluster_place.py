"""A node's artifact: the folder that was named or fetched once, and none but what was deployed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.artifact.lock import exclusive
from llorch_serve.cluster import place
from llorch_serve.cluster.place import check_version, find_folder
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.hub.reference import Reference
from support.builders.tiny_artifact import write_tiny_artifact

FINGERPRINT = "0" * 64  # of the tiny artifact


def settings(artifact: object, fingerprint: str = FINGERPRINT, version: str = "0.1.0") -> ReplicaSettings:
    return ReplicaSettings(
        model="m", artifact=str(artifact), fingerprint=fingerprint, version=version, cores=1
    )


def refuse_pull(reference: Reference, folder: Path) -> None:
    raise AssertionError(reference)


def test_a_folder_with_the_deployed_artifact_is_found(tmp_path):
    folder = write_tiny_artifact(tmp_path / "m")
    assert find_folder(settings(folder), pull=refuse_pull) == folder


def test_a_folder_with_another_artifact_is_refused(tmp_path):
    folder = write_tiny_artifact(tmp_path / "m")
    with pytest.raises(
        ArtifactError, match=f"fingerprint {FINGERPRINT}, and 1{{64}} was deployed; bring the same"
    ):
        find_folder(settings(folder, "1" * 64))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="is not a folder"):
        find_folder(settings(tmp_path / "m"))


def test_a_repository_is_fetched_once_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("LLORCH_CACHE", str(tmp_path))
    pulled = []

    def pull(reference, folder):
        pulled.append(str(reference))
        return load_artifact(write_tiny_artifact(folder))

    wanted = settings("org/name@abc")
    folder = find_folder(wanted, pull=pull)
    assert folder.is_relative_to(tmp_path)
    assert find_folder(wanted, pull=pull) == folder
    assert pulled == ["org/name@abc"]
    with pytest.raises(ArtifactError, match="was deployed; bring the same"):
        find_folder(settings("org/name@abc", "1" * 64), pull=pull)


def test_a_repository_that_another_replica_fetches_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("LLORCH_CACHE", str(tmp_path))
    monkeypatch.setattr(place, "_PAUSE_S", 0)
    tries = []

    def pull(reference, folder):
        tries.append(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder):
            if len(tries) > 1:
                write_tiny_artifact(folder)
            with exclusive(folder):  # as another process would find it
                pass

    assert find_folder(settings("org/name@abc"), pull=pull) == tries[0]
    assert len(tries) == 2


def test_a_repository_that_cannot_be_fetched_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LLORCH_CACHE", str(tmp_path))

    def pull(reference, folder):
        raise UsageError("holds something else")

    with pytest.raises(UsageError, match="holds something else"):
        find_folder(settings("org/name@abc"), pull=pull)


def test_a_node_with_another_llorch_is_refused():
    here = importlib.metadata.version("llorch")
    check_version(settings("/m", version=here))
    with pytest.raises(
        UsageError, match=f"this node has llorch {here}, and m was deployed by 9.9.9; install"
    ):
        check_version(settings("/m", version="9.9.9"))
