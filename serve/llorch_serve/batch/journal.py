"""A batch's output: answers, failures and header, of which a run that was interrupted knows what it has done.

``OUT`` has the answers, ``OUT.errors.jsonl`` the failures, ``OUT.run.json`` what both were made from. Lines
are written whole as they come, so that a killed process loses none; a power cut may take the last second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from llorch_serve.artifact.lock import exclusive
from llorch_serve.batch.appending import AppendedFile
from llorch_serve.batch.header import Header, header_path, read_header, refuse_mismatch, write_header
from llorch_serve.batch.plan import Plan
from llorch_serve.batch.records import Record
from llorch_serve.batch.sources import whole_lines
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.files.durable import flush_folder
from llorch_serve.files.json_errors import NOT_JSON


class _Written(msgspec.Struct):
    custom_id: str


_decode = msgspec.json.Decoder(_Written).decode


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """An output that nobody else writes while this is held."""

    output: Path

    @property
    def errors(self) -> Path:
        """Where lines go that failed."""
        return self.output.with_name(f"{self.output.name}.errors.jsonl")

    @property
    def plan_folder(self) -> Path:
        """Where the plan lies while the batch runs."""
        return self.output.with_name(f".{self.output.name}.plan")


class Journal:
    """An output that is being written. Used by one thread at a time."""

    def __init__(self, place: OutputPlace, header: Header, plan: Plan) -> None:
        self.header = header
        self.answered = 0  # lines that earlier runs answered
        self.failed = 0  # lines that failed in earlier runs
        self._place = place
        self._plan = plan
        self._answers = AppendedFile(place.output)
        try:
            self._errors = AppendedFile(place.errors)
        except BaseException:
            self._answers.close()
            raise

    def find_done(self) -> None:
        """Mark in the plan what is done already. Raises ArtifactError where a file has been changed."""
        self.answered = self._mark(self._answers)
        self.failed = self._mark(self._errors)
        if self.header.ordered:
            self._cut_after_gap()

    def _mark(self, file: AppendedFile) -> int:
        marked = 0

        def ranks() -> Iterator[int]:
            nonlocal marked
            for place, rank in self._written(file):
                if self._plan.is_done(rank):
                    raise self._changed(file, place, "the same line was answered before")
                marked += 1
                yield rank

        self._plan.mark_done(ranks())
        return marked

    def _written(self, file: AppendedFile) -> Iterator[tuple[int, int]]:
        """Yield where each written line begins, and the rank of the line that it answers."""
        place = 0
        with file.path.open("rb") as lines:
            for raw in whole_lines(lines):
                if isinstance(raw, int):
                    raise self._changed(file, place, "it is longer than any answer")
                try:
                    custom_id = _decode(raw).custom_id
                except NOT_JSON as error:
                    raise self._changed(file, place, str(error)) from None
                rank = self._plan.rank_of(custom_id)
                if rank is None:
                    raise self._changed(file, place, f"the input has no custom_id {custom_id!r}")
                yield place, rank
                place += len(raw)

    def _changed(self, file: AppendedFile, place: int, why: str) -> ArtifactError:
        return ArtifactError(
            f"the line at byte {place} of {file.path} is not of this batch ({why}); put the file back as it "
            "was, or choose another output"
        )

    def _cut_after_gap(self) -> None:
        """Take away what was written after the first line that is missing, as both files keep the order."""
        first = self._plan.first_undone()
        if first is None:
            return
        self.answered = self._cut_after(self._answers, first)
        self.failed = self._cut_after(self._errors, first)
        self._plan.undo_from(first)

    def _cut_after(self, file: AppendedFile, rank: int) -> int:
        kept = 0
        for place, found in self._written(file):
            if found > rank:
                file.cut(place)
                break
            kept += 1
        return kept

    def write(self, records: Sequence[Record]) -> None:
        """Add records in this order. Raises ResourceError if there is no room, OSError.

        Failures are written first: where one is on the disk and answers after it are not, nothing of the
        order is lost.
        """
        if failures := b"".join(record.data for record in records if record.is_failure):
            self._errors.append(failures)
        if answers := b"".join(record.data for record in records if not record.is_failure):
            self._answers.append(answers)

    def flush(self) -> None:
        """Wait until the disk has all that was written. Raises ResourceError, OSError."""
        self._errors.flush()
        self._answers.flush()

    def close(self) -> None:
        """Close both files; one of failures that has none is removed."""
        self._answers.close()
        self._errors.close()
        if not self._errors.size:
            self._place.errors.unlink(missing_ok=True)


@contextlib.contextmanager
def hold_output(output: Path) -> Iterator[OutputPlace]:
    """Hold an output for one run. Raises BeingWrittenError while another has it, UsageError, OSError."""
    if not output.parent.is_dir():
        raise UsageError(f"{output.parent} is no folder; make it first, or choose another output")
    place = OutputPlace(output)
    with exclusive(output):
        yield place


@contextlib.contextmanager
def open_journal(place: OutputPlace, header: Header, plan: Plan, *, retry_failed: bool) -> Iterator[Journal]:
    """Begin an output, or go on with one: what it has is marked as done in the plan.

    retry_failed: lines that failed are done again; their failures are forgotten.
    Raises UsageError where the output was made from something else, ArtifactError, ResourceError, OSError.
    """
    found = read_header(place.output)
    if found is None:
        for path in (place.output, place.errors):
            if path.exists() and (not path.is_file() or path.stat().st_size):
                raise UsageError(
                    f"{path} is there already and no batch wrote it, as {header_path(place.output).name} is "
                    "missing; choose another output, or remove it"
                )
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
