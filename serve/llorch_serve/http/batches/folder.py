"""The folder of files and batches: what lies where, who may use it, and what is left over in it.

Input: a folder that one worker uses at a time. Output: its records, and places whose names this module makes
of ids that the worker has drawn: nothing that a caller sends becomes a part of a path. No link inside of the
folder is followed. Methods block on the disk, and may be called on any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from llorch_serve.artifact.lock import BeingWrittenError, exclusive
from llorch_serve.errors import UsageError
from llorch_serve.files.durable import flush_folder, write_whole
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.http.batches.records import BATCH_ID, FILE_ID, BatchRecord, FileRecord

_MOST_RECORD_BYTES: Final = 2**20
_FILES, _BATCHES, _WORK, _INCOMING = "files", "batches", "work", "incoming"
_ROOMS: Final = (_FILES, _BATCHES, _WORK, _INCOMING)
_OURS: Final = re.compile(
    rf"(?P<id>{FILE_ID.pattern}|{BATCH_ID.pattern})(\.json|\.data)?"
    rf"|[0-9a-f]{{32}}|\.({FILE_ID.pattern}|{BATCH_ID.pattern})\.json\.[0-9a-f]+\.part"
)
"""Names in the rooms: contents and records, uploads, and records that were not written to their end."""
_STRANGE: Final = re.compile(r"(?!\.|lost\+found$).*")
"""Names that file systems do not put into folders by themselves."""
_NOFOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)

R = TypeVar("R", FileRecord, BatchRecord)

logger = logging.getLogger(__name__)


class BatchFolder:
    """A folder that belongs to this worker from :meth:`open` to :meth:`close`."""

    def __init__(self, path: Path) -> None:
        self._given = path
        self._path = path
        self._lock = contextlib.ExitStack()
        self._unread: set[str] = set()  # ids whose records cannot be read, which are left as they are

    def open(self) -> None:
        """Make the folder if it is not there, and take it. Raises UsageError if it cannot be used."""
        try:
            self._given.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path = Path(os.path.realpath(self._given))
            self._check_empty()
            self._lock.enter_context(exclusive(self._path / "worker"))
            for name in _ROOMS:
                (self._path / name).mkdir(exist_ok=True, mode=0o700)
                if not stat.S_ISDIR((self._path / name).lstat().st_mode):
                    raise UsageError(
                        f"{self._path / name} is a link, and files of callers are kept below it; move it "
                        "away, or choose another folder with --batch-folder"
                    )
        except BeingWrittenError as error:
            raise UsageError(
                f"another worker keeps files in {self._given}; give each a folder of its own with "
                "--batch-folder, or stop the other"
            ) from error
        except OSError as error:
            raise UsageError(
                f"--batch-folder is {self._given}, which cannot be used: {error.strerror}; choose a folder "
                "that this worker may write"
            ) from error

    def _check_empty(self) -> None:
        """Raise UsageError for a folder that holds what is not a worker's."""
        for place in self._path.iterdir():
            if place.name not in _ROOMS and _STRANGE.fullmatch(place.name):
                raise UsageError(
                    f"--batch-folder is {self._given}, which holds {place.name!r}; choose an empty folder, "
                    "or one that an earlier worker has used so"
                )

    def close(self) -> None:
        """Let others use the folder."""
        self._lock.close()

    def files(self) -> Iterator[FileRecord]:
        """Yield the records of files whose content is there."""
        for record in self._records(_FILES, FILE_ID, FileRecord):
            with contextlib.suppress(OSError):
                if stat.S_ISREG(self.content(record.id).lstat().st_mode):
                    yield record

    def batches(self) -> Iterator[BatchRecord]:
        """Yield the records of batches."""
        yield from self._records(_BATCHES, BATCH_ID, BatchRecord)

    def write_file(self, record: FileRecord) -> None:
        """Keep a file's record. Raises OSError."""
        self._write(_FILES, record.id, record)

    def write_batch(self, record: BatchRecord) -> None:
        """Keep a batch's record, in place of the one before. Raises OSError."""
        self._write(_BATCHES, record.id, record)

    def remove_file(self, file_id: str) -> None:
        """Let go of a file: of its record first, without which the rest counts as left over."""
        (self._path / _FILES / f"{file_id}.json").unlink(missing_ok=True)
        with contextlib.suppress(PermissionError):  # where an open file cannot be removed; it is left over
            self.content(file_id).unlink(missing_ok=True)

    def remove_batch(self, batch_id: str) -> None:
        """Let go of a batch's record, and of what its run has left."""
        (self._path / _BATCHES / f"{batch_id}.json").unlink(missing_ok=True)
        self.remove_work(batch_id)

    def content(self, file_id: str) -> Path:
        """Return where a file's content is."""
        return self._path / _FILES / f"{file_id}.data"

    def open_content(self, file_id: str) -> BinaryIO:
        """Open a file's content. Raises OSError for a link, too."""
        return os.fdopen(os.open(self.content(file_id), os.O_RDONLY | _NOFOLLOW), "rb")

    def work(self, batch_id: str) -> Path:
        """Return the folder in which a batch is worked on."""
        place = self._path / _WORK / batch_id
        if place.is_symlink():  # it would be followed
            place.unlink()
        place.mkdir(exist_ok=True, mode=0o700)
        return place

    def remove_work(self, batch_id: str) -> None:
        """Remove the folder in which a batch was worked on."""
        place = self._path / _WORK / batch_id
        if place.is_symlink():
            place.unlink()
        else:
            shutil.rmtree(place, ignore_errors=True)

    def new_upload(self) -> tuple[Path, BinaryIO]:
        """Open a new file for what arrives; its place is for :meth:`adopt`. Raises OSError."""
        place = self._path / _INCOMING / secrets.token_hex(16)
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600)
        return place, os.fdopen(handle, "wb")

    def adopt(self, place: Path, file_id: str) -> None:
        """Make a whole file, which the disk has, the content of an id. Raises OSError."""
        place.replace(self.content(file_id))
        flush_folder(self._path / _FILES)

    def clean(self, files: set[str], batches: set[str], working: set[str]) -> None:
        """Remove what is left over: uploads that were cut off, content without a record, work that is done.

        files, batches: ids that have a record. working: of batches that have not ended. Only what has a name
        as this module gives it goes: anything else is somebody's.
        """
        rooms = ((_INCOMING, set[str]()), (_FILES, files), (_BATCHES, batches), (_WORK, working))
        for room, known in ((name, ids | self._unread) for name, ids in rooms):
            for place in (self._path / room).iterdir():
                if not (found := _OURS.fullmatch(place.name)) or (found["id"] or "") in known:
                    continue
                if room == _WORK:
                    self.remove_work(place.name)
                else:
                    with contextlib.suppress(OSError):
                        place.unlink()

    def _write(self, room: str, name: str, record: FileRecord | BatchRecord) -> None:
        place = self._path / room / f"{name}.json"
        if place.is_symlink():  # it would be followed
            place.unlink()
        write_whole(place, msgspec.json.encode(record))

    def _records(self, room: str, ids: re.Pattern[str], kind: type[R]) -> Iterator[R]:
        """Yield the records of a room; one that cannot be read is told in the log, and left alone."""
        for place in sorted((self._path / room).glob("*.json")):
            if not ids.fullmatch(place.stem):
                continue
            try:
                with os.fdopen(os.open(place, os.O_RDONLY | _NOFOLLOW), "rb") as file:
                    record = msgspec.json.decode(file.read(_MOST_RECORD_BYTES), type=kind)
                if record.id != place.stem:
                    raise msgspec.ValidationError(f"it is of {record.id[:64]!r}")
            except (OSError, *NOT_JSON) as error:
                self._unread.add(place.stem)
                logger.error("%s is no record of a file or batch, and is left out: %s", place, error)
                continue
            yield record
