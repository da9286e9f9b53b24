"""The hidden folder of a pull holds what pulls left there, and nothing that leads to anybody's files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llorch_serve.errors import UsageError
from llorch_serve.hub import gathered
from llorch_serve.hub.pull import pull
from llorch_serve.hub.reference import Reference
from support.builders.tiny_artifact import write_tiny_artifact
from support.builders.tiny_exports import contents
from support.fakes.hub import Hub
from support.harness.hub import hub_in_this_process

REPO = Reference("some-org/artifact")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_in_this_process(tmp_path / "cache", monkeypatch) as hub:
        files = contents(write_tiny_artifact(tmp_path / "artifact"))
        hub.add(REPO.repository, files)
        yield hub


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    folder = tmp_path / "stranger"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "diary.txt").write_text("mine")
    (folder / "model.onnx").write_text("mine")
    return folder


def link_the_folder(gathered: Path, stranger: Path) -> None:
    gathered.symlink_to(stranger)


def link_nowhere(gathered: Path, stranger: Path) -> None:
    gathered.symlink_to(stranger / "absent")


def make_a_file(gathered: Path, stranger: Path) -> None:
    gathered.write_text("mine")


def link_a_folder_in_it(gathered: Path, stranger: Path) -> None:
    gathered.mkdir()
    (gathered / "sub").symlink_to(stranger)


def link_a_folder_deep_in_it(gathered: Path, stranger: Path) -> None:
    (gathered / "sub").mkdir(parents=True)
    (gathered / "sub" / "deep").symlink_to(stranger / "deep")


def link_the_manifest(gathered: Path, stranger: Path) -> None:
    gathered.mkdir()
    (gathered / "llorch.json").symlink_to(stranger / "model.onnx")


def link_a_part(gathered: Path, stranger: Path) -> None:
    gathered.mkdir()
    name = hashlib.sha256(b"not a graph").hexdigest()[:16]
    os.link(stranger / "model.onnx", gathered / f"model.onnx.{name}.part")


def make_a_pipe(gathered: Path, stranger: Path) -> None:
    gathered.mkdir()
    os.mkfifo(gathered / "llorch.json.part")


@pytest.mark.parametrize(
    ("prepare", "found"),
    [
        (link_the_folder, ".out.pull is a link"),
        (link_nowhere, ".out.pull is a link"),
        (make_a_file, ".out.pull is no folder"),
        (link_a_folder_in_it, "sub is a link"),
        (link_a_folder_deep_in_it, "deep is a link"),
        (link_the_manifest, "llorch.json is a link"),
        (link_a_part, ".part has another name too"),
        (make_a_pipe, "llorch.json.part is no file and no folder"),
    ],
)
def test_what_no_pull_left_there_is_refused_and_left_alone(
    hub: Hub, stranger: Path, tmp_path: Path, prepare: Callable[[Path, Path], None], found: str
) -> None:
    place = tmp_path / ".out.pull"
    prepare(place, stranger)
    before = contents(stranger)
    with pytest.raises(UsageError, match="remove it, and pull again") as caught:
        pull(REPO, tmp_path / "out")
    assert found in str(caught.value)
    assert contents(stranger) == before
    assert os.path.lexists(place)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_user_is_refused(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".out.pull").mkdir()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with monkeypatch.context() as patch:
        patch.setattr(gathered, "_user_of_new_folders", lambda _: owner + 1)
        with pytest.raises(UsageError, match="belongs to another user"):
            pull(REPO, tmp_path / "out")
    # A file server may give everything to a user of its own choice.
    pull(REPO, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
