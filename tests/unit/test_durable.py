"""A file is whole or not there, and what is no file is not replaced by one."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from llorch_serve.files.durable import write_whole


def test_a_file_is_replaced_as_a_whole_and_keeps_its_rights(tmp_path: Path) -> None:
    path = tmp_path / "report"
    write_whole(path, b"one ", memoryview(b"two"))
    assert path.read_bytes() == b"one two"
    path.chmod(0o640)
    write_whole(path, b"three")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"three", 0o640)
    assert [found.name for found in tmp_path.iterdir()] == ["report"]


def test_a_full_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    path = tmp_path / "report"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        write_whole(path, b"new")
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("report", b"old")]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"new")
    reader.join()
    assert got == [b"new"]
    assert pipe.is_fifo()
