"""All files and batches of a worker: who has which, and what they look like now.

Input: what routes and runs change. Output: records, each only for the caller that it belongs to. Records are
in memory and on disk; content is on disk alone. Methods block on the disk and may be called on any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.batches.folder import BatchFolder
from llorch_serve.http.batches.lookup import Page, own, page_of
from llorch_serve.http.batches.quota import Quota
from llorch_serve.http.batches.records import (
    INPUT_PURPOSE,
    OUTPUT_PURPOSE,
    BatchRecord,
    FileRecord,
    Status,
    new_file_id,
)
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.problems import HttpError


class Store:
    """Made by :meth:`open`, ended by :meth:`close`. now: a clock of Unix time, in seconds."""

    def __init__(self, settings: BatchSettings, now: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._now = now
        self.folder = BatchFolder(settings.folder)
        self._quota = Quota(settings)
        self._lock = threading.RLock()
        self._files: dict[str, FileRecord] = {}  # the oldest first
        self._batches: dict[str, BatchRecord] = {}  # the oldest first
        self._number = 0
        self._reserved: dict[str, int] = {}  # bytes of results that grow, by batch

    def open(self) -> None:
        """Take the folder and read its records. Raises UsageError if it cannot be used."""
        self.folder.open()
        with self._lock:
            for file in sorted(self.folder.files(), key=lambda record: record.number):
                self._keep_file(file)
            for batch in sorted(self.folder.batches(), key=lambda record: record.number):
                self._batches[batch.id] = batch
                self._number = max(self._number, batch.number)
            # What a run has finished but not named yet is its results, and no left-over.
            live = self._live()
            named = {name for batch in live for name in (batch.output_file_id, batch.error_file_id)}
            working = {batch.id for batch in live}
            self.folder.clean(set(self._files) | named, set(self._batches), working)

    def close(self) -> None:
        """Let others use the folder."""
        self.folder.close()

    def now(self) -> int:
        """Return the time, in whole seconds."""
        return int(self._now())

    def take(self, owner: str, size: int) -> None:
        """Count bytes that a caller adds. Raises HttpError if there is no room."""
        with self._lock:
            self._quota.take(owner, size)

    def give_back(self, owner: str, size: int) -> None:
        """Count bytes that are gone."""
        with self._lock:
            self._quota.give_back(owner, size)

    def grow(self, batch: BatchRecord, size: int) -> None:
        """Count what the results of a run take by now. Raises HttpError if there is no room for more."""
        with self._lock:
            self._quota.give_back(batch.owner, self._reserved.get(batch.id, 0))
            self._reserved[batch.id] = size
            self._quota.count(batch.owner, size)
            self._quota.take(batch.owner, 0)

    def tidy(self, batch: BatchRecord) -> None:
        """Let go of what the run of a batch has left beside its results, which are files by now."""
        with self._lock:
            self._quota.give_back(batch.owner, self._reserved.pop(batch.id, 0))
            self.folder.remove_work(batch.id)

    # Files

    def check_room(self, owner: str, size: int) -> None:
        """Raise HttpError if a caller has no room for so many bytes, or for another file."""
        with self._lock:
            self._expire()
            self._quota.take(owner, size)
            self._quota.give_back(owner, size)
            self._quota.take_file(owner)
            self._quota.give_back_file(owner)

    def keep_upload(
        self, place: Path, size: int, owner: str, filename: str, purpose: str, seconds: int | None
    ) -> FileRecord:
        """Keep a file that has come whole, whose bytes are counted already. Raises HttpError if the caller
        has too many.
        """
        with self._lock:
            self.check_room(owner, 0)
            file_id = new_file_id()
            try:
                record = self._adopt(place, file_id, owner, filename, purpose, size, seconds)
            except OSError:
                self.folder.remove_file(file_id)  # or it would take room until the next start
                raise
            self._keep_file(record)
            self._quota.give_back(owner, size)
            return record

    def keep_result(self, batch: BatchRecord, file_id: str, place: Path) -> bool:
        """Keep what a run has written as a file of its owner's, unless it is empty; tell whether it is kept.

        After a break it may be called again: what has been moved already is found where it is.
        """
        with self._lock:
            if file_id in self._files:
                return True
            found = place if place.exists() else self.folder.content(file_id)
            size = found.stat().st_size if found.exists() else 0
            if not size:
                return False
            kind = "output" if file_id == batch.output_file_id else "error"
            name = f"{batch.id}_{kind}.jsonl"
            record = self._adopt(
                found, file_id, batch.owner, name, OUTPUT_PURPOSE, size, batch.output_seconds
            )
            self._keep_file(record)
            return True

    def file(self, file_id: str, owner: str) -> FileRecord:
        """Return a caller's file. Raises HttpError if there is none."""
        with self._lock:
            self._expire()
            return own(self._files, file_id, owner, "file")

    def list_files(self, owner: str, page: Page, purpose: str | None) -> tuple[list[FileRecord], bool]:
        """Return a caller's files, and whether there are more. Raises HttpError for an unknown place."""
        with self._lock:
            self._expire()
            found = [file for file in self._files.values() if purpose in (None, file.purpose)]
            return page_of(found, owner, page, "file")

    def delete_file(self, file_id: str, owner: str) -> None:
        """Let go of a caller's file. Raises HttpError if there is none, or a batch needs it."""
        with self._lock:
            own(self._files, file_id, owner, "file")
            if (
                batch := next((one for one in self._live() if one.input_file_id == file_id), None)
            ) is not None:
                found = f"{batch.id} reads this file; wait until it has ended, or cancel it"
                raise HttpError(400, "file_in_use", found)
            self._drop_file(file_id)

    def open_file(self, file_id: str, owner: str) -> BinaryIO:
        """Open the content of a caller's file. Raises HttpError if there is none."""
        with self._lock:
            return self.folder.open_content(self.file(file_id, owner).id)

    # Batches

    def add_batch(self, batch: BatchRecord) -> BatchRecord:
        """Keep a new batch; where its caller has too many, the oldest that has ended makes room.

        Raises HttpError if none has, or if its caller has no room for results, which nobody would refuse,
        InvalidRequestError if its input is no file that a batch reads.
        """
        with self._lock:
            self.check_room(batch.owner, 0)
            self._check_input(batch)
            mine = [one for one in self._batches.values() if one.owner == batch.owner]
            if len(mine) >= self._settings.caller_files:
                self._forget(mine, f"you have {len(mine)} batches")
            if len(self._batches) >= self._settings.total_files:
                self._forget(self._batches.values(), f"there are {len(self._batches)} batches")
            kept = msgspec.structs.replace(batch, number=self._next())
            self.folder.write_batch(kept)
            self._batches[kept.id] = kept
            return kept

    def _check_input(self, batch: BatchRecord) -> None:
        file = self._files.get(batch.input_file_id)
        found = None
        if file is None or file.owner != batch.owner:
            found = f"you have no file {batch.input_file_id[:100]!r} here; send it to /v1/files first"
        elif file.purpose != INPUT_PURPOSE:
            found = f"the purpose of this file is {file.purpose!r}, expected {INPUT_PURPOSE!r}"
        if found is not None:
            raise InvalidRequestError([FieldViolation("input_file_id", found)])

    def batch(self, batch_id: str, owner: str) -> BatchRecord:
        """Return a caller's batch. Raises HttpError if there is none."""
        with self._lock:
            return own(self._batches, batch_id, owner, "batch")

    def list_batches(self, owner: str, page: Page) -> tuple[list[BatchRecord], bool]:
        """Return a caller's batches, and whether there are more. Raises HttpError for an unknown place."""
        with self._lock:
            return page_of(list(self._batches.values()), owner, page, "batch")

    def live_batches(self) -> list[BatchRecord]:
        """Return the batches that have not ended, of all callers, the oldest first."""
        with self._lock:
            return self._live()

    def is_current(self, batch: BatchRecord) -> bool:
        """Tell whether a batch is still as it was found. Does not block."""
        return self._batches.get(batch.id) is batch

    def move(self, batch_id: str, status: Status, begun: frozenset[Status], **changes: Any) -> BatchRecord:
        """Bring a batch into another status, unless its own is not one of ``begun`` any more; return it as it
        is then. Raises OSError if the disk does not take it.
        """
        with self._lock:
            batch = self._batches[batch_id]
            if batch.status in begun:
                batch = batch.moved(status, self.now(), **changes)
                self.folder.write_batch(batch)
                self._batches[batch_id] = batch
            return batch

    def _live(self) -> list[BatchRecord]:
        return [batch for batch in self._batches.values() if not batch.has_ended]

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _forget(self, batches: Iterable[BatchRecord], found: str) -> None:
        """Let go of the oldest batch that has ended."""
        ended = next((batch for batch in batches if batch.has_ended), None)
        if ended is None:
            raise HttpError(
                400, "quota_exceeded", f"{found} that have not ended, the most; wait for one, or cancel it"
            )
        self.folder.remove_batch(ended.id)
        del self._batches[ended.id]

    def _adopt(
        self,
        place: Path,
        file_id: str,
        owner: str,
        filename: str,
        purpose: str,
        size: int,
        seconds: int | None,
    ) -> FileRecord:
        """Move a whole file to where files are, and write its record."""
        if place != self.folder.content(file_id):
            self.folder.adopt(place, file_id)
        now = self.now()
        expires = None if seconds is None else now + seconds
        record = FileRecord(file_id, owner, self._next(), size, now, filename, purpose, expires)
        self.folder.write_file(record)
        return record

    def _keep_file(self, record: FileRecord) -> None:
        self._files[record.id] = record
        self._number = max(self._number, record.number)
        self._quota.count(record.owner, record.size)
        self._quota.count_file(record.owner)

    def _drop_file(self, file_id: str) -> None:
        self.folder.remove_file(file_id)
        record = self._files.pop(file_id)
        self._quota.give_back(record.owner, record.size)
        self._quota.give_back_file(record.owner)

    def _expire(self) -> None:
        """Let go of files that have expired, but for those that batches still read."""
        now = self._now()
        old = [
            file.id for file in self._files.values() if file.expires_at is not None and file.expires_at <= now
        ]
        if old:
            needed = {batch.input_file_id for batch in self._live()}
            for file_id in old:
                if file_id not in needed:
                    self._drop_file(file_id)
