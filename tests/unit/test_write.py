"""An artifact is whole or not there: whatever fails while writing, nothing is left and nothing is lost."""

from __future__ import annotations

import errno
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest

from llorch_export.artifact.write import ArtifactWriter
from llorch_export.graph.weights import WeightPlan
from llorch_serve.artifact.folder import MANIFEST_NAME
from llorch_serve.errors import ArtifactError, ResourceError, UsageError
from support.builders.tiny_exports import contents

FLOAT = ir.DataType.FLOAT


class DiskUsage(NamedTuple):
    total: int
    used: int
    free: int


def old_artifact(folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    (folder / MANIFEST_NAME).write_text("{}")
    (folder / "model.onnx.data").write_bytes(b"old")
    (folder / "stray.txt").write_bytes(b"from an older export")
    return contents(folder)


def write_new(output: Path, *, force: bool = False) -> None:
    with ArtifactWriter(output, force=force) as writer:
        writer.add_weights("data", (), lambda count: None)
        writer.add_bytes("a.txt", b"new")
        writer.add_unlisted(MANIFEST_NAME, b"{}")
        writer.commit()


def test_files_are_listed_with_size_and_hash_and_the_manifest_is_not(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out", force=False) as writer:
        writer.add_bytes("a.txt", b"new")
        writer.add_unlisted(MANIFEST_NAME, b"{}")
        writer.commit()
    (entry,) = writer.entries
    assert (entry.path, entry.bytes, entry.sha256) == ("a.txt", 3, hashlib.sha256(b"new").hexdigest())
    assert contents(tmp_path) == {"out/a.txt": b"new", f"out/{MANIFEST_NAME}": b"{}"}


def test_weights_lie_at_their_offsets_and_progress_adds_up(tmp_path: Path) -> None:
    plan = WeightPlan()
    first, second = np.arange(5, dtype=np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    plan.add([("first", FLOAT, (5,))], lambda: (first,))
    plan.add([("second", FLOAT, (4, 3))], lambda: (second.T,))  # not contiguous
    told: list[int] = []
    with ArtifactWriter(tmp_path / "out", force=False) as writer:
        writer.add_weights("data", tuple(plan.jobs), told.append)
        writer.commit()
    data = (tmp_path / "out" / "data").read_bytes()
    assert data == first.tobytes().ljust(64, b"\0") + second.T.tobytes()
    assert sum(told) == len(data) == plan.total_bytes == writer.entries[0].bytes
    assert writer.entries[0].sha256 == hashlib.sha256(data).hexdigest()


def test_chunks_of_a_jobs_tensors_land_side_by_side(tmp_path: Path) -> None:
    plan = WeightPlan()
    codes, scales = np.arange(24, dtype=np.uint8).reshape(8, 3), np.arange(8, dtype=np.float32)
    plan.add([("before", FLOAT, (1,))], lambda: (np.ones(1, np.float32),))
    specs = [("codes", ir.DataType.UINT8, (8, 3)), ("scales", FLOAT, (8,))]
    plan.stream(specs, lambda: ((codes[a:b], scales[a:b]) for a, b in ((0, 3), (3, 4), (4, 8))))
    with ArtifactWriter(tmp_path / "out", force=False) as writer:
        writer.add_weights("data", tuple(plan.jobs), lambda count: None)
        data = (writer.folder / "data").read_bytes()
    parts = (np.ones(1, np.float32), codes, scales)
    assert data == b"".join(part.tobytes().ljust(64, b"\0") for part in parts)[: plan.total_bytes]
    assert writer.entries[0].sha256 == hashlib.sha256(data).hexdigest()


def test_no_chunk_outlives_the_next(tmp_path: Path) -> None:
    """Chunks bound an export's memory only if they go away."""
    plan = WeightPlan()
    alive: list[weakref.ref[Any]] = []

    def chunks() -> Iterator[tuple[np.ndarray]]:
        for _ in range(3):
            assert not [ref for ref in alive if ref() is not None]
            chunk = np.zeros(4, np.float32)
            alive.append(weakref.ref(chunk))
            yield (chunk,)
            del chunk

    plan.stream([("a", FLOAT, (12,))], chunks)
    with ArtifactWriter(tmp_path / "out", force=False) as writer:
        writer.add_weights("data", tuple(plan.jobs), lambda count: None)
    assert len(alive) == 3


def test_no_array_outlives_its_job(tmp_path: Path) -> None:
    """Two jobs' arrays side by side would double the memory of an export."""
    plan = WeightPlan()
    alive: list[weakref.ref[Any]] = []

    def produce() -> tuple[np.ndarray, np.ndarray]:
        assert not [ref for ref in alive if ref() is not None]
        pair = np.zeros(8, np.float32), np.zeros(8, np.float32)
        alive.extend(weakref.ref(array) for array in pair)
        return pair

    for index in range(3):
        plan.add([(f"a{index}", FLOAT, (8,)), (f"b{index}", FLOAT, (8,))], produce)
    with ArtifactWriter(tmp_path / "out", force=False) as writer:
        writer.add_weights("data", tuple(plan.jobs), lambda count: None)
    assert len(alive) == 6


def test_the_temporary_folder_lies_beside_the_output(tmp_path: Path) -> None:
    """Only within one file system is the last step a rename."""
    with ArtifactWriter(tmp_path / "out", force=False) as writer:
        assert writer.folder.parent == tmp_path
        assert not (tmp_path / "out").exists()


def test_others_may_read_the_folder(tmp_path: Path) -> None:
    write_new(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_never_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "out").write_bytes(b"a file")
    with pytest.raises(UsageError, match="is a file"):
        write_new(tmp_path / "out", force=force)
    assert contents(tmp_path) == {"out": b"a file"}


@pytest.mark.parametrize("force", [False, True])
def test_a_foreign_folder_is_never_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_bytes(b"precious")
    with pytest.raises(UsageError, match="llorch did not make"):
        write_new(tmp_path / "out", force=force)
    assert contents(tmp_path) == {"out/thesis.tex": b"precious"}


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_new(tmp_path / "out")
    assert sorted(contents(tmp_path)) == ["out/a.txt", "out/data", f"out/{MANIFEST_NAME}"]


def test_an_artifact_is_replaced_only_with_force_and_then_as_a_whole(tmp_path: Path) -> None:
    before = old_artifact(tmp_path / "out")
    with pytest.raises(UsageError, match="--force"):
        write_new(tmp_path / "out")
    assert contents(tmp_path / "out") == before
    write_new(tmp_path / "out", force=True)
    assert sorted(contents(tmp_path)) == ["out/a.txt", "out/data", f"out/{MANIFEST_NAME}"]


def test_missing_parents_are_made(tmp_path: Path) -> None:
    write_new(tmp_path / "deep" / "down" / "out")
    assert (tmp_path / "deep" / "down" / "out" / "a.txt").read_bytes() == b"new"


def write_and_fail(output: Path, error: BaseException) -> None:
    with ArtifactWriter(output, force=False) as writer:
        writer.add_bytes("a.txt", b"new")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ArtifactError("damaged"), MemoryError()])
def test_leaving_without_commit_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "there").mkdir()
    for output in (tmp_path / "there" / "out", tmp_path / "deep" / "down" / "out"):
        with pytest.raises(type(error)):
            write_and_fail(output, error)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["there"]


def fail_on(call: int, error: BaseException) -> Callable[[Path, Path], Path]:
    """Return a ``Path.rename`` that fails at its ``call``-th call, before it does anything."""
    real, count = Path.rename, 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == call:
            raise error
        return real(self, target)

    return rename


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "broken disk")])
def test_an_artifact_survives_a_failed_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException
) -> None:
    before = old_artifact(tmp_path / "out")
    monkeypatch.setattr(Path, "rename", fail_on(call, error))
    with pytest.raises((KeyboardInterrupt, ArtifactError)):
        write_new(tmp_path / "out", force=True)
    assert contents(tmp_path) == {f"out/{name}": data for name, data in before.items()}


def test_an_interrupt_after_the_old_one_was_moved_away_brings_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = old_artifact(tmp_path / "out")
    real, count = Path.rename, 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        moved = real(self, target)
        if count == 1:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        write_new(tmp_path / "out", force=True)
    assert contents(tmp_path) == {f"out/{name}": data for name, data in before.items()}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("place", ["write", "fsync"])
def test_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, place: str
) -> None:
    def full(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(*((Path, "write_bytes") if place == "write" else (os, "fsync")), full)
    before = old_artifact(tmp_path / "out") if place == "fsync" else {}
    with pytest.raises(ResourceError, match=r"disk of .*out is full"):
        write_new(tmp_path / "out", force=True)
    assert contents(tmp_path) == {f"out/{name}": data for name, data in before.items()}


def test_too_little_free_space_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: DiskUsage(0, 0, 2**20))
    with (
        pytest.raises(ResourceError, match="1 MiB free and the artifact needs 3 MiB"),
        ArtifactWriter(tmp_path / "out", force=False) as writer,
    ):
        writer.require_space(3 * 2**20)
    assert not list(tmp_path.iterdir())


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"cannot write .*check the path"):
        write_new(tmp_path / "file" / "out")


def test_an_output_that_may_not_be_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ArtifactError, match=r"cannot write .*Permission denied"):
        write_new(tmp_path / "out")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_counted_and_refused(bad: float) -> None:
    plan = WeightPlan()
    plan.add([("norm", FLOAT, (3,))], lambda: (np.array([1, bad, bad], np.float32),))
    with pytest.raises(ArtifactError, match="norm: 2 of 3 values are NaN or infinite"):
        list(plan.jobs[0].chunks())
