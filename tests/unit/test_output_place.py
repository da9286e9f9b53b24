"""The place of an artifact: nothing that an export has not seen is lost there, and killed exports leave
nothing for long.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llorch_export.artifact import place
from llorch_export.artifact.write import ArtifactWriter
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_serve.artifact.folder import MANIFEST_NAME, load_artifact
from llorch_serve.artifact.lock import exclusive
from llorch_serve.errors import ArtifactError, UsageError
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import contents, silent


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "model")


def run(source: Path, output: Path, progress: Any = silent, **options: Any) -> None:
    export(ExportOptions(str(source), output, **options), progress)


def at_weights(act: Callable[[], object]) -> Callable[[str, int, int], None]:
    """Return a progress that does ``act`` once, while weights are written."""
    waiting = [act]

    def progress(phase: str, _done: int, _total: int) -> None:
        if phase == "writing weights" and waiting:
            waiting.pop()()

    return progress


def write(output: Path, manifest: bytes, *, force: bool = False) -> None:
    with ArtifactWriter(output, force=force) as writer:
        writer.add_unlisted(MANIFEST_NAME, manifest)
        writer.commit()


def someone_elses(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_bytes(b"precious")


# -- what appears or changes during an export
# --------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_appears_during_the_export_stays(tmp_path: Path, model: Path, force: bool) -> None:
    output = tmp_path / "out"
    with pytest.raises(ArtifactError, match=r"out .*while the export ran.*nothing was replaced"):
        run(model, output, at_weights(lambda: someone_elses(output)), force=force)
    assert contents(output) == {"thesis.tex": b"precious"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_file_that_appears_during_the_export_stays(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(ArtifactError, match="while the export ran"):
        run(model, output, at_weights(lambda: output.write_bytes(b"precious")))
    assert output.read_bytes() == b"precious"


@pytest.mark.parametrize("change", ["a file more", "another file", "a file in a folder", "gone and another"])
def test_an_artifact_that_changes_during_the_export_is_not_replaced(
    tmp_path: Path, model: Path, change: str
) -> None:
    output = tmp_path / "out"
    run(model, output)

    def act() -> None:
        if change == "a file more":
            (output / "notes.txt").write_bytes(b"precious")
        elif change == "another file":
            (output / "model.onnx").write_bytes(b"precious")
        elif change == "a file in a folder":
            someone_elses(output / "sub")
        else:
            output.rename(tmp_path / "elsewhere")
            someone_elses(output)
            (output / MANIFEST_NAME).write_bytes(b"{}")

    with pytest.raises(ArtifactError, match="while the export ran"):
        run(model, output, at_weights(act), force=True)
    assert b"precious" in contents(output).values()


def just_before_the_rename(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have ``act`` called when the new artifact is about to be moved into place."""
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            act()
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


def test_what_appears_between_the_last_look_and_the_rename_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename itself refuses it, so there is no moment at which it could be lost."""
    output = tmp_path / "out"

    just_before_the_rename(monkeypatch, lambda: someone_elses(output))
    with pytest.raises(ArtifactError, match="while the export ran"):
        write(output, b"new")
    assert contents(tmp_path) == {"out/thesis.tex": b"precious"}


def test_an_old_artifact_that_cannot_go_back_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / MANIFEST_NAME).write_bytes(b"old")

    just_before_the_rename(monkeypatch, lambda: someone_elses(output))
    with pytest.raises(ArtifactError, match=r"was kept as .*\.kept"):
        write(output, b"new", force=True)
    assert sorted(contents(tmp_path).values()) == [b"old", b"precious"]


def test_a_second_interrupt_costs_the_old_artifact_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, real = tmp_path / "out", Path.rename
    output.mkdir()
    (output / MANIFEST_NAME).write_bytes(b"old")

    def rename(self: Path, target: Path) -> Path:
        if self.suffix == ".partial" or target == output:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        write(output, b"new", force=True)
    monkeypatch.undo()
    assert list(contents(tmp_path).values()) == [b"old"]
    with pytest.raises(UsageError, match="already holds an artifact"):
        write(output, b"new")
    assert contents(tmp_path) == {f"out/{MANIFEST_NAME}": b"old"}


# -- what is known before anything is read
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".", "..", "{cwd}", "{cwd}/..", "link"])
@pytest.mark.parametrize("artifact", [False, True])
def test_the_current_folder_is_refused_before_the_source_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, artifact: bool
) -> None:
    here = tmp_path / "here" / "below"
    here.mkdir(parents=True)
    (here / "link").symlink_to(here)
    if artifact:
        (here / MANIFEST_NAME).write_bytes(b"{}")
        (here.parent / MANIFEST_NAME).write_bytes(b"{}")
    monkeypatch.chdir(here)
    output = Path(name.format(cwd=here))
    with pytest.raises(UsageError, match="the current folder, or holds it"):
        run(tmp_path / "no such model", output, force=True)


@pytest.mark.parametrize("device", ["another", "the same"])
def test_a_mount_point_is_refused_before_the_source_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    output = tmp_path / "a volume"
    output.mkdir()
    if device == "another":
        monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == output)
    else:  # a bind mount within one file system: only the system's table tells
        table = tmp_path / "mountinfo"
        point = str(output).replace(" ", r"\040")
        table.write_text(f"36 35 98:0 /somewhere {point} rw,noatime master:1 - ext4 /dev/root rw\n")
        monkeypatch.setattr(place, "MOUNT_TABLE", table)
    with pytest.raises(UsageError, match=r"a volume is a mount point.*choose a folder inside it"):
        run(tmp_path / "no such model", output)


def test_a_folder_that_may_not_be_written_is_refused_before_the_source_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ArtifactError, match="may not be written"):
        run(tmp_path / "no such model", tmp_path / "deep" / "out")


def test_a_parent_that_is_a_file_is_refused_before_the_source_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"cannot write .*Not a directory"):
        run(tmp_path / "no such model", tmp_path / "file" / "deep" / "out")


def test_a_link_to_an_artifact_stays_a_link(tmp_path: Path, model: Path) -> None:
    run(model, tmp_path / "real" / "v1")
    (tmp_path / "current").symlink_to(tmp_path / "real" / "v1")
    run(model, tmp_path / "current", precision="fp32", force=True)
    assert (tmp_path / "current").is_symlink()
    assert load_artifact(tmp_path / "real" / "v1").manifest.recipe.precision == "fp32"
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["v1"]


# -- killed exports, and two at once
# -----------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from pathlib import Path
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export

def die():
    os.kill(os.getpid(), signal.SIGKILL)

moment = sys.argv[3]
if moment == "between the renames":
    real = Path.rename
    def rename(self, target):
        if self.suffix == ".partial":
            die()
        return real(self, target)
    Path.rename = rename

def progress(phase, done, total):
    if phase == "writing weights":
        if moment == "writing":
            die()
        if moment == "waiting":
            print("writing", flush=True)
            sys.stdin.read()

export(ExportOptions(sys.argv[1], Path(sys.argv[2]), force=moment == "between the renames"), progress)
"""


def child(source: Path, output: Path, moment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(output), moment],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_a_killed_export_left_goes_with_the_next(tmp_path: Path, model: Path) -> None:
    (tmp_path / "there").mkdir()
    output = tmp_path / "there" / "out"
    someone_elses(tmp_path / "there" / ".out.mine.partial")  # no name of ours
    someone_elses(tmp_path / "there" / ".out.original.old")
    someone_elses(tmp_path / "there" / ".out2.0123456789abcdef.partial")  # of another output
    kept = {path.name for path in output.parent.iterdir()}
    for _ in range(2):
        with child(model, output, "writing") as killed:
            assert killed.wait() == -signal.SIGKILL
        left = {path.name for path in output.parent.iterdir()} - kept
        assert len([name for name in left if name.endswith(".partial")]) == 1  # not one more each time
        assert not output.exists()
    run(model, output)
    assert {path.name for path in output.parent.iterdir()} == kept | {"out"}


def test_an_artifact_that_was_being_replaced_when_the_export_was_killed_comes_back(
    tmp_path: Path, model: Path
) -> None:
    output = tmp_path / "out"
    run(model, output)
    before = contents(output)
    with child(model, output, "between the renames") as killed:
        assert killed.wait() == -signal.SIGKILL
    assert not output.exists()
    with pytest.raises(UsageError, match="already holds an artifact"):
        run(model, output)
    assert contents(output) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_two_exports_to_one_output_do_not_fight(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out"
    with child(model, output, "waiting") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "writing\n"
        before = sorted(str(path) for path in tmp_path.rglob("*"))
        with pytest.raises(UsageError, match=r"another export or pull is writing .*out"):
            run(model, output)
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before
        run(model, tmp_path / "another")  # which concerns nobody
        first.communicate("")
    assert first.returncode == 0
    assert load_artifact(output).manifest.recipe.precision == "int8"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "model", "out"]


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "link"])
def test_what_is_no_lock_of_an_export_is_left_alone(tmp_path: Path, kind: str) -> None:
    lock, victim = tmp_path / ".out.lock", tmp_path / "victim"
    victim.touch()
    match kind:
        case "file":
            lock.write_bytes(b"precious")
        case "folder":
            lock.mkdir()
        case "pipe":
            os.mkfifo(lock)
        case "link":
            lock.symlink_to(victim)
    before = lock.lstat()
    with pytest.raises(ArtifactError, match=r"\.out"):
        write(tmp_path / "out", b"new")
    assert lock.lstat() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "victim"]


def test_a_lock_that_was_given_back_while_another_waited_for_it_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is gone by then: who holds that one, and who makes the next, would both believe to be
    alone.
    """
    output, real, taken = tmp_path / "out", os.fstat, []

    def fstat(handle: int) -> os.stat_result:
        if not taken:  # between the lock and the look at its file
            taken.append(handle)
            (tmp_path / ".out.lock").unlink()
        return real(handle)

    monkeypatch.setattr(os, "fstat", fstat)
    with exclusive(output):
        assert (tmp_path / ".out.lock").exists()
        with pytest.raises(UsageError, match="another export"), exclusive(output):
            pass
    assert not list(tmp_path.iterdir())


# -- power cuts
# --------------------------------------------------------------------------------------------------------


def test_everything_is_on_the_disk_before_the_artifact_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, flushed, real = tmp_path / "out", set(), os.fsync
    at_rename: set[int] = set()

    def fsync(handle: int) -> None:
        flushed.add(os.fstat(handle).st_ino)
        real(handle)

    renamed = Path.rename

    def rename(self: Path, target: Path) -> Path:
        at_rename.update(flushed)
        flushed.clear()
        return renamed(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    with ArtifactWriter(output, force=False) as writer:
        writer.add_bytes("a.txt", b"new")
        writer.add_weights("data", (), lambda count: None)
        writer.add_unlisted(MANIFEST_NAME, b"{}")
        writer.commit()
    assert {path.stat().st_ino for path in (output, *output.iterdir())} <= at_rename
    assert tmp_path.stat().st_ino in flushed
