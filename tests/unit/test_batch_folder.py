"""The folder of files and batches: what is found again, what is left over, and what was never a worker's."""

from __future__ import annotations

import errno
import os

import pytest

from llorch_serve.errors import UsageError
from llorch_serve.http.batches.folder import BatchFolder
from llorch_serve.http.batches.records import FileRecord, Status
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.batches.store import Page, Store
from llorch_serve.http.problems import HttpError
from support.builders.batch_records import batch_record, kept_file

EVERYTHING = Page(100)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kept"


def opened(folder, **how):
    store = Store(BatchSettings(folder, **how))
    store.open()
    return store


def files_of(folder):
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()
    )


def test_a_folder_is_made_for_its_owner_alone(folder):
    opened(folder / "deep").close()
    if os.name == "posix":
        assert (folder / "deep").stat().st_mode & 0o777 == 0o700


def test_a_folder_of_anybodys_is_refused_and_left_as_it_is(folder):
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "holiday.jpg").write_bytes(b"mine")
    (folder / "thesis.txt").write_bytes(b"mine")
    with pytest.raises(UsageError, match="thesis"):
        opened(folder)
    (folder / "thesis.txt").unlink()
    opened(folder).close()
    assert (folder / "files" / "holiday.jpg").read_bytes() == b"mine"


def test_what_a_file_system_puts_into_its_root_is_no_hindrance(folder):
    (folder / "lost+found").mkdir(parents=True)
    (folder / ".snapshot").mkdir()
    opened(folder).close()


@pytest.mark.parametrize("room", ["files", "batches", "work", "incoming"])
def test_a_room_that_is_a_link_is_refused(folder, tmp_path, room):
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / room).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is a link"):
        opened(folder)


@pytest.mark.parametrize("made", ["a file", "below a file"])
def test_a_place_that_is_no_folder_is_refused(folder, made):
    folder.write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        opened(folder if made == "a file" else folder / "below")


def test_a_link_in_place_of_a_files_content_is_not_followed(folder, tmp_path):
    store = opened(folder)
    file = kept_file(store, b"mine")
    batch = store.add_batch(batch_record(file))
    (tmp_path / "secret").write_bytes(b"secret")
    content = store.folder.content(file.id)
    content.unlink()
    content.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError) as refused:
        store.open_file(file.id, "")
    assert refused.value.errno == errno.ELOOP
    record = folder / "batches" / f"{batch.id}.json"
    record.unlink()
    record.symlink_to(tmp_path / "secret")
    store.move(batch.id, Status.CANCELLING, frozenset({Status.VALIDATING}))
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert not record.is_symlink()
    store.close()
    store = opened(folder)
    assert store.list_files("", EVERYTHING, None) == ([], False)
    assert not content.is_symlink()
    store.close()


def test_uploads_that_were_cut_off_and_content_without_a_record_go(folder):
    store = opened(folder)
    file = kept_file(store, b"mine")
    place, unfinished = store.folder.new_upload()
    unfinished.close()
    store.close()
    (folder / "files" / f"file-{'0' * 32}.data").write_bytes(b"left")
    (folder / "files" / f".file-{'0' * 32}.json.12ab34cd.part").write_bytes(b"left")
    (folder / "work" / f"batch_{'0' * 32}").mkdir()
    store = opened(folder)
    store.close()
    assert files_of(folder) == [f"files/{file.id}.data", f"files/{file.id}.json"]
    assert not list((folder / "work").iterdir())
    assert not place.exists()


@pytest.mark.parametrize(
    "record", [b"", b"{", b'{"id": 1}', b"[" * 100_000, b"\xff", None], ids=lambda raw: repr(raw)[:12]
)
def test_a_record_that_cannot_be_read_is_told_and_left_alone(folder, caplog, record):
    store = opened(folder)
    kept, lost = kept_file(store, b"kept"), kept_file(store, b"lost")
    store.close()
    place = folder / "files" / f"{lost.id}.json"
    if record is None:  # another file's
        place.write_bytes((folder / "files" / f"{kept.id}.json").read_bytes())
    else:
        place.write_bytes(record)
    store = opened(folder)
    assert [file.id for file in store.list_files("", EVERYTHING, None)[0]] == [kept.id]
    store.close()
    assert place.exists()
    assert store.folder.content(lost.id).exists()
    assert lost.id in caplog.text


def test_room_is_counted_again_after_a_start(folder):
    store = opened(folder, caller_bytes=100)
    file = kept_file(store, b"x" * 90)
    store.close()
    store = opened(folder, caller_bytes=100)
    with pytest.raises(HttpError, match="100 bytes"):
        store.check_room("", 11)
    store.check_room("another", 11)
    store.delete_file(file.id, "")
    store.check_room("", 100)
    store.close()


def test_a_full_disk_leaves_no_part_of_a_file(folder, monkeypatch):
    store = opened(folder)

    def full(_self: BatchFolder, _record: FileRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BatchFolder, "write_file", full)
    with pytest.raises(OSError, match="No space"):
        kept_file(store, b"mine")
    assert [name for name in files_of(folder) if not name.startswith(".worker")] == []
    store.check_room("", BatchSettings(folder).caller_bytes)
    store.close()


def test_results_fill_nobodys_room_but_their_callers(folder):
    store = opened(folder, caller_files=4, total_files=8)
    file = kept_file(store, b"{}", "a")
    for _ in range(2):
        batch = store.add_batch(batch_record(file, status=Status.COMPLETED))
        for file_id in (batch.output_file_id, batch.error_file_id):
            place, written = store.folder.new_upload()
            with written:
                written.write(b"{}")
            assert store.keep_result(batch, file_id, place)
    with pytest.raises(HttpError, match=r"you have 5 files, which is the most"):
        store.add_batch(batch_record(file))
    kept_file(store, b"{}", "b")
    store.close()
