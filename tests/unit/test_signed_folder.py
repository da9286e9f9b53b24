"""A folder whose signature was checked: whatever was put there for a moment, and taken away, is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llorch_serve.artifact import signed_files
from llorch_serve.artifact.signed_files import SignedFolder, files_to_cover
from llorch_serve.errors import ArtifactError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder, by way of a link in its path, with a file, a subfolder and a link."""
    made = tmp_path / "parent" / "model"
    (made / "deep").mkdir(parents=True)
    (made / "model.onnx").write_bytes(b"graph")
    (made / "deep" / "weights").write_bytes(b"weights")
    (made / "model.data").symlink_to("deep/weights")
    (tmp_path / "current").symlink_to("parent")
    evil = tmp_path / "evil"
    (evil / "model" / "deep").mkdir(parents=True)
    return tmp_path / "current" / "model"


def swap(one: Path, other: Path) -> None:
    """Put ``other`` in the place of ``one``, and back again."""
    away = one.with_name(one.name + ".away")
    for _ in range(2):
        one.rename(away)
        other.rename(one)
        one, other = other, one
        away.rename(one)
    assert not away.exists()


def swap_file(folder: Path) -> None:
    (folder.parent / "other").write_bytes(b"GRAPH")
    swap(folder / "model.onnx", folder.parent / "other")


def swap_link(folder: Path) -> None:
    (folder.parent / "other").symlink_to("model.onnx")
    swap(folder / "model.data", folder.parent / "other")


def make_link_anew(folder: Path) -> None:
    link = folder / "model.data"
    for target in ("model.onnx", "deep/weights"):
        link.unlink()
        link.symlink_to(target)


def swap_subfolder(folder: Path) -> None:
    swap(folder / "deep", folder.parent.parent / "evil" / "model" / "deep")


def swap_root(folder: Path) -> None:
    swap(folder, folder.parent.parent / "evil" / "model")


def swap_parent(folder: Path) -> None:
    top = folder.parent.parent
    swap(top / "parent", top / "evil")


def swap_link_above(folder: Path) -> None:
    link = folder.parent
    for target in ("evil", "parent"):
        link.unlink()
        link.symlink_to(target)


def add_and_remove(folder: Path) -> None:
    (folder / "deep" / "more").write_bytes(b"")
    (folder / "deep" / "more").unlink()


@pytest.mark.parametrize(
    "change",
    [
        swap_file,
        swap_link,
        make_link_anew,
        swap_subfolder,
        swap_root,
        swap_parent,
        swap_link_above,
        add_and_remove,
    ],
)
def test_what_was_changed_and_changed_back_is_seen(folder: Path, change: Callable[[Path], None]) -> None:
    signed = SignedFolder.of(folder)
    signed.check_unchanged()
    before = {path: path.read_bytes() for path in files_to_cover(folder)}
    change(folder)
    assert {path: path.read_bytes() for path in files_to_cover(folder)} == before
    with pytest.raises(ArtifactError, match="changed between"):
        signed.check_unchanged()


def test_what_others_do_beside_a_folder_above_is_no_change(folder: Path) -> None:
    signed = SignedFolder.of(folder)
    (folder.parent / "beside").mkdir()
    signed.check_unchanged()
    # So it looks where a container's file system makes a folder writable, once something below it is written.
    signed = SignedFolder.of(folder)
    above = folder.parent.resolve()
    above.chmod(above.stat().st_mode)
    signed.check_unchanged()


def test_the_version_of_a_volume_is_seen_too(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    for version in ("..1", "..2"):
        (volume / version).mkdir(parents=True)
        (volume / version / "model.onnx").write_bytes(version.encode())
    (volume / "..data").symlink_to("..1")
    (volume / "model.onnx").symlink_to("..data/model.onnx")
    signed = SignedFolder.of(volume)
    signed.check_unchanged()
    for version in ("..2", "..1"):
        (volume / "next").symlink_to(version)
        (volume / "next").replace(volume / "..data")
    with pytest.raises(ArtifactError, match="changed between"):
        signed.check_unchanged()


def test_a_cache_may_take_other_files_meanwhile(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "abc").write_bytes(b"graph")
    (snapshot / "model.onnx").symlink_to("../../blobs/abc")
    signed = SignedFolder.of(snapshot)
    (cache / "blobs" / "def").write_bytes(b"another revision's")
    (cache / "snapshots" / "2").mkdir()
    (tmp_path / "beside").mkdir()
    signed.check_unchanged()
    signed = SignedFolder.of(snapshot)
    (cache / "blobs").rename(cache / "old")
    (cache / "old").rename(cache / "blobs")
    with pytest.raises(ArtifactError, match="changed between"):
        signed.check_unchanged()


def test_a_file_that_was_written_a_moment_ago_is_let_settle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(signed_files.time, "sleep", pauses.append)
    changed = (folder / "model.onnx").lstat().st_ctime_ns
    newest = max(path.lstat().st_ctime_ns for path in [folder, *folder.rglob("*")])
    assert changed <= newest
    monkeypatch.setattr(signed_files.time, "time_ns", lambda: newest + 1_000_000)
    SignedFolder.of(folder)
    monkeypatch.setattr(signed_files.time, "time_ns", lambda: newest + 10**9)
    SignedFolder.of(folder)
    assert len(pauses) == 1
    assert 0 < pauses[0] < 0.1


@pytest.mark.parametrize("kind", ["files", "folders", "nested"])
def test_no_more_is_looked_at_than_a_model_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(signed_files, "_MOST_ENTRIES", 20)
    place = tmp_path
    for number in range(60):
        path = place / f"{number}"
        if kind == "files":
            path.touch()
        else:
            path.mkdir()
        place = path if kind == "nested" else place
    looked_at = 0
    real = os.scandir

    def scandir(path: str) -> object:
        nonlocal looked_at
        looked_at += kind == "nested" or path != str(tmp_path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ArtifactError, match="has more than 20 files and folders, which no model has"):
        files_to_cover(tmp_path)
    assert looked_at <= 21
