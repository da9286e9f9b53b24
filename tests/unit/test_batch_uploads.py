"""A file that is sent: the same however its body is cut, in bounded memory and time."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import time
import tracemalloc

import pytest

from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.batches.store import Store
from llorch_serve.http.batches.uploads import Upload, plain_name
from llorch_serve.http.problems import HttpError

KIND = "multipart/form-data; boundary=7e3b"
HEAD = (
    b'--7e3b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--7e3b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n"
)
END = b"\r\n--7e3b--\r\n"


@pytest.fixture
def store(tmp_path):
    store = Store(BatchSettings(tmp_path))
    store.open()
    yield store
    store.close()


def sent(store, pieces):
    upload = Upload(store, "", KIND)
    try:
        for piece in pieces:
            upload.write(piece)
        return upload.finish()
    finally:
        upload.abandon()


def content_of(store, file):
    with store.folder.open_content(file.id) as opened:
        return opened.read()


def test_a_body_may_be_cut_anywhere(store):
    content = b"{}\r\n\r\n--7e3\r\n--7e3bb\n--\r\r\n-" * 3
    body = HEAD + content + END
    draw = random.Random(7)
    for _ in range(30):
        places = sorted(draw.sample(range(len(body)), 40))
        pieces = [body[a:b] for a, b in zip([0, *places], [*places, len(body)], strict=True)]
        assert content_of(store, sent(store, pieces)) == content
    assert content_of(store, sent(store, [bytes([each]) for each in body])) == content


def test_memory_holds_a_piece_and_not_the_file(store):
    piece = b"x" * 2**18

    def pieces():
        yield HEAD
        for _ in range(256):
            yield piece
        yield END

    tracemalloc.start()
    try:
        file = sent(store, pieces())
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
    assert file.size == 2**26


@pytest.mark.parametrize("unit", [b"\r", b"\r\n", b"\r\n--7e3", b"-", b"\n"])
def test_bytes_that_look_like_a_boundary_cost_little_more_than_others(store, unit):
    size = 2**20
    begun = time.process_time()
    sent(store, [HEAD, (unit * size)[:size], END])
    assert time.process_time() - begun < 5


def test_what_is_abandoned_gives_its_room_back(store):
    upload = Upload(store, "", KIND)
    upload.write(HEAD + b"x" * 1000)
    with pytest.raises(HttpError):
        store.check_room("", 2**30 - 999)
    upload.abandon()
    store.check_room("", 2**30)
    sent(store, [HEAD, b"x" * 1000, END])
    store.check_room("", 2**30 - 1000)
    with pytest.raises(HttpError):
        store.check_room("", 2**30 - 999)


def test_a_file_that_has_no_room_is_refused_while_it_comes(tmp_path):
    store = Store(BatchSettings(tmp_path, caller_bytes=1000))
    store.open()
    upload = Upload(store, "", KIND)
    upload.write(HEAD + b"x" * 900)
    with pytest.raises(HttpError, match="1000 bytes"):
        upload.write(b"x" * 200)
    upload.abandon()
    assert not list((tmp_path / "incoming").iterdir())
    store.close()


@pytest.mark.parametrize(
    ("sent_name", "kept"),
    [
        (b"a.jsonl", "a.jsonl"),
        (b"../../etc/passwd", "passwd"),
        (b"C:\\folder\\a b.jsonl", "a b.jsonl"),
        ("Ünï.jsonl".encode(), "Ünï.jsonl"),
        (b"\xff\x00\x1b[2J", "�[2J"),
        (b"x" * 300, "x" * 255),
        (b"", ""),
    ],
)
def test_a_name_is_a_label_without_folders(sent_name, kept):
    assert plain_name(sent_name) == kept


class FullDisk(io.FileIO):
    """Takes nothing, as a disk that is full: what is still in the buffer fails again when it is closed."""

    def write(self, _piece):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_neither_a_file_nor_bytes_that_are_counted(tmp_path, monkeypatch):
    store = Store(BatchSettings(tmp_path, caller_bytes=1000))
    store.open()
    monkeypatch.setattr(os, "fdopen", lambda handle, _: io.BufferedWriter(FullDisk(handle, "wb")))
    upload = Upload(store, "", KIND)
    upload.write(HEAD + b"x" * 900 + END)
    with pytest.raises(OSError, match="No space"):
        upload.finish()
    with contextlib.suppress(OSError):
        upload.abandon()
    monkeypatch.undo()
    assert not list((tmp_path / "incoming").iterdir())
    store.check_room("", 1000)
    store.close()
