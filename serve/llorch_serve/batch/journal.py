"""A batch's output: answers, failures and header, of which a run that was interrupted knows what it has done.

``OUT`` has the answers, ``OUT.errors.jsonl`` the failures, ``OUT.run.json`` what both were made from. Lines
are written whole as they come, so that a killed process loses none; a power cut may take the last second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from llorch_serve.batch.appending import AppendedFile
from llorch_serve.batch.header import Header, read_header, refuse_mismatch, write_header
from llorch_serve.batch.in_order import put_in_order
from llorch_serve.batch.place import OutputPlace
from llorch_serve.batch.plan import Plan
from llorch_serve.batch.records import Record
from llorch_serve.batch.sources import MAX_ANSWER_BYTES, whole_lines
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.files.durable import flush_folder
from llorch_serve.files.json_errors import NOT_JSON


class _Written(msgspec.Struct):
    custom_id: str


_decode = msgspec.json.Decoder(_Written).decode


class _JournalFile:
    """One of the two files. count: its lines; is_in_order: they have the input's order."""

    def __init__(self, path: Path) -> None:
        self.file = AppendedFile(path)
        self.count = 0
        self.is_in_order = True
        self._last = 0

    def saw(self, number: int) -> None:
        """Count a line of the file. number: of the line that it answers."""
        self.count += 1
        self.is_in_order = self.is_in_order and number > self._last
        self._last = number

    def append(self, records: Sequence[Record]) -> None:
        """Add records. Raises ResourceError, OSError."""
        if records:
            self.file.append(b"".join(record.data for record in records))
            for record in records:
                self.saw(record.number)


class Journal:
    """An output that is being written. Used by one thread at a time.

    answered, failed: lines that earlier runs answered, and that failed in them.
    """

    def __init__(self, place: OutputPlace, header: Header, plan: Plan) -> None:
        self.header = header
        self.answered = 0
        self.failed = 0
        self._place = place
        self._plan = plan
        self._answers = _JournalFile(place.output)
        try:
            self._errors = _JournalFile(place.errors)
        except BaseException:
            self._answers.file.close()
            raise

    def find_done(self) -> None:
        """Mark in the plan what is done already. Raises ArtifactError where a file has been changed."""
        for file in (self._answers, self._errors):
            self._plan.mark_done(self._found_in(file))
        self.answered = self._answers.count
        self.failed = self._errors.count

    def _found_in(self, file: _JournalFile) -> Iterator[int]:
        for place, _, number in self._written(file.file.path):
            if self._plan.is_done(number):
                raise _changed(file.file.path, place, "its line has an answer before it")
            file.saw(number)
            yield number

    def _written(self, path: Path) -> Iterator[tuple[int, int, int]]:
        """Yield place and size of each line of a file, and the number of the line that it answers."""
        place = 0
        with path.open("rb") as lines:
            for raw in whole_lines(lines, most=MAX_ANSWER_BYTES):
                if isinstance(raw, int):
                    raise _changed(path, place, "it is longer than any answer")
                try:
                    custom_id = _decode(raw).custom_id
                except NOT_JSON as error:
                    raise _changed(path, place, str(error)) from None
                number = self._plan.number_of(custom_id)
                if number is None:
                    raise _changed(path, place, f"the input has no custom_id {custom_id!r}")
                yield place, len(raw), number
                place += len(raw)

    def write(self, records: Sequence[Record]) -> None:
        """Add records in this order. Raises ResourceError if there is no room, OSError."""
        self._errors.append([record for record in records if record.is_failure])
        self._answers.append([record for record in records if not record.is_failure])

    def flush(self) -> None:
        """Wait until the disk has all that was written. Raises ResourceError, OSError."""
        self._errors.file.flush()
        self._answers.file.flush()

    def finish(self) -> None:
        """Put the output of a batch that is done into the input's order, where that was asked for.

        Lines are written in that order; those that failed and are done again, or that a power cut took out
        of the middle, come late. Raises ResourceError, OSError.
        """
        if not self.header.ordered:
            return
        for file in (self._answers, self._errors):
            if not file.is_in_order:
                file.file.close()  # some systems replace no file that is open
                path = file.file.path
                lines = ((number, place, size) for place, size, number in self._written(path))
                put_in_order(path, lines, self._place.work_folder)
                file.is_in_order = True

    def close(self) -> None:
        """Close both files; one of failures that has none is removed."""
        self._answers.file.close()
        self._errors.file.close()
        if not self._errors.file.size:
            self._place.errors.unlink(missing_ok=True)


@contextlib.contextmanager
def open_journal(place: OutputPlace, header: Header, plan: Plan, *, retry_failed: bool) -> Iterator[Journal]:
    """Begin an output, or go on with one: what it has is marked as done in the plan.

    retry_failed: lines that failed are done again; their failures are forgotten.
    Raises UsageError where the output was made from something else, ArtifactError, ResourceError, OSError.
    """
    found = read_header(place.output)
    if found is None:
        _refuse_strange(place)
        write_header(place.output, header)
    else:
        refuse_mismatch(place.output, found, header)
    if retry_failed:
        place.errors.unlink(missing_ok=True)
    journal = Journal(place, header, plan)
    try:
        flush_folder(place.output.parent)
        journal.find_done()
        yield journal
    finally:
        journal.close()


def _refuse_strange(place: OutputPlace) -> None:
    """Raise UsageError where somebody else's files have the names."""
    for path in (place.output, place.errors):
        if path.exists() and (not path.is_file() or path.stat().st_size):
            raise UsageError(
                f"{path} is there already and no batch wrote it, as {place.header.name} is "
                "missing; choose another output, or remove it"
            )


def _changed(path: Path, place: int, why: str) -> ArtifactError:
    return ArtifactError(
        f"the line at byte {place} of {path} is not of this batch ({why}); put the file back as it was, or "
        "choose another output"
    )
