"""One batch as work on files: checked, run by ``llorch_serve.batch``, and made into files of results.

Input: the batch's input file, and what answers its lines. Output: results in a folder of the batch's own,
with which a run that was broken off goes on, and at the end files of its owner's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from llorch_serve.batch.answering import Answerer
from llorch_serve.batch.header import Header, make_header, read_header
from llorch_serve.batch.journal import Journal, open_journal
from llorch_serve.batch.lines import LineForm
from llorch_serve.batch.place import OutputPlace, hold_output
from llorch_serve.batch.plan import BatchInputError, Plan, make_plan
from llorch_serve.batch.records import failure_record
from llorch_serve.batch.run import Limits, run_batch
from llorch_serve.batch.sources import JsonLinesSource, RawLine
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.http.batches.places import Places, SharedAnswerer
from llorch_serve.http.batches.records import BatchRecord, Counts, Fault, Status, TokenUsage
from llorch_serve.http.batches.runner import BatchFaultError, Blocking
from llorch_serve.http.batches.store import Store
from llorch_serve.http.problems import HttpError

MAX_REQUESTS: Final = 1_000_000
"""Of a batch. A file of 512 MiB has room for twenty times as many of the shortest, which would take the disk
gigabytes for their plan and their failures, and the process minutes of its time.
"""

_MOST_FAULTS: Final = 20
_AT_ONCE: Final = 1000  # lines that are written together
_EXPIRED: Final = "batch_expired"

logger = logging.getLogger(__name__)

MakeAnswerer = Callable[[BatchRecord, str], Answerer]
"""Makes what answers the lines of a batch; it is given the batch, and what ids of answers derive from."""


class _StoppableSource(JsonLinesSource):
    """A file of at most MAX_REQUESTS, of which no more is read once ``stopping`` is set: to read it all may
    take a minute.
    """

    def __init__(self, path: Path, stopping: threading.Event) -> None:
        super().__init__(path)
        self._stopping = stopping

    def scan(self) -> Iterator[RawLine]:
        """Yield every line that is not blank.

        Raises UsageError for too many, OSError, InterruptedError where it was stopped.
        """
        for count, line in enumerate(super().scan(), 1):
            if self._stopping.is_set():
                raise InterruptedError("nobody waits for this file any more")
            if count > MAX_REQUESTS:
                raise UsageError(
                    f"{self._path} has more than {MAX_REQUESTS} requests, the most of a batch; send them in "
                    "several files"
                )
            yield line


class BatchWork:
    """Implements :class:`llorch_serve.http.batches.runner.Work`.

    fingerprint: returns that of the model that answers now. in_flight: most answers to lines of all batches
        that are made at once.
    """

    def __init__(
        self,
        store: Store,
        blocking: Blocking,
        make_answerer: MakeAnswerer,
        fingerprint: Callable[[], str],
        in_flight: int,
    ) -> None:
        self._store = store
        self._blocking = blocking
        self._make_answerer = make_answerer
        self._fingerprint = fingerprint
        self._in_flight = in_flight
        self._places = Places(in_flight)

    def check(self, batch: BatchRecord, stopping: threading.Event) -> int:
        """Return how many requests its input has. Blocks, at most until ``stopping`` is set.

        Raises BatchFaultError, OSError, and InterruptedError where it was stopped.
        """
        with self._told(batch), contextlib.ExitStack() as stack:
            plan = self._planned(batch, stack.enter_context(self._held(batch)), stack, stopping)
            if plan.counts.bad == plan.counts.lines:
                raise BatchFaultError(
                    tuple(
                        Fault("invalid_line", f"line {bad.number} {bad.reason}", bad.number)
                        for bad in plan.bad_lines(_MOST_FAULTS)
                    )
                )
            return plan.counts.lines

    async def run(self, batch: BatchRecord, tell: Callable[[Counts], None]) -> None:
        """Answer what is left to answer; cancelled, it keeps what it has."""
        stack, stopping = contextlib.ExitStack(), threading.Event()
        try:
            plan, journal = await self._blocking(lambda: self._opened(batch, stack, stopping), stopping.set)
            total = plan.counts.lines
            tell(Counts(total, journal.answered, journal.failed))
            answerer = self._make_answerer(batch, journal.header.run_id)
            await run_batch(
                plan,
                journal,
                SharedAnswerer(answerer, self._places),
                Limits(self._in_flight),
                lambda summary: tell(Counts(total, summary.answered, summary.failed)),
            )
        except UsageError as error:
            raise BatchFaultError((Fault("input_changed", self._plain(batch, error)),)) from error
        finally:
            await self._blocking(stack.close)

    def size(self, batch: BatchRecord) -> int:
        """Return how many bytes its results take. Blocks."""
        place = self._place(batch)
        return sum(path.stat().st_size for path in (place.output, place.errors) if path.exists())

    def end(self, batch: BatchRecord, stopping: threading.Event) -> dict[str, Any]:
        """Make files of its results, and return what of its record that changes. Blocks.

        Raises OSError, and InterruptedError where it was stopped.
        """
        place, content = self._place(batch), self._store.folder.content
        named = ((batch.output_file_id, place.output), (batch.error_file_id, place.errors))
        faults = batch.faults
        if batch.end is Status.EXPIRED and not any(content(file_id).exists() for file_id, _ in named):
            faults += self._write_expired(batch, stopping)
        kept = tuple(file_id for file_id, path in named if self._store.keep_result(batch, file_id, path))
        answered, usage = _look(content(batch.output_file_id)) if batch.output_file_id in kept else _NOTHING
        failed, _ = _look(content(batch.error_file_id)) if batch.error_file_id in kept else _NOTHING
        return {
            "counts": Counts(max(batch.counts.total, answered + failed), answered, failed),
            "usage": usage,
            "results": kept,
            "faults": faults,
        }

    def _place(self, batch: BatchRecord) -> OutputPlace:
        return OutputPlace(self._store.folder.work(batch.id) / "output.jsonl")

    def _held(self, batch: BatchRecord) -> contextlib.AbstractContextManager[OutputPlace]:
        return hold_output(self._place(batch).output)

    def _planned(
        self,
        batch: BatchRecord,
        place: OutputPlace,
        stack: contextlib.ExitStack,
        stopping: threading.Event,
    ) -> Plan:
        """Read the input. Raises BatchInputError, UsageError, OSError."""
        try:
            self._store.folder.open_content(batch.input_file_id).close()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):  # ELOOP: a link, which is not followed
                raise
            raise UsageError(f"{batch.input_file_id} is not there any more; send it again") from error
        source = _StoppableSource(self._store.folder.content(batch.input_file_id), stopping)
        stack.callback(source.close)
        form = LineForm(urls=(batch.endpoint,))
        return stack.enter_context(make_plan(source, form, place.work_folder))

    def _opened(
        self, batch: BatchRecord, stack: contextlib.ExitStack, stopping: threading.Event
    ) -> tuple[Plan, Journal]:
        """Read the input, and what is answered already."""
        with self._told(batch):
            place = stack.enter_context(self._held(batch))
            plan = self._planned(batch, place, stack, stopping)
            header, found = self._header(batch, plan), read_header(place.output)
            if found is not None and found.fingerprint != header.fingerprint:
                told = (
                    "the model that began this batch is not served here any more; what it has answered is in "
                    "the output file: begin another batch with the rest"
                )
                raise BatchFaultError((Fault("model_changed", told),))
            return plan, stack.enter_context(open_journal(place, header, plan, retry_failed=False))

    def _header(self, batch: BatchRecord, plan: Plan) -> Header:
        settings = {"batch": batch.id, "endpoint": batch.endpoint}
        return make_header(plan.input_sha256, settings, self._fingerprint(), ordered=False)

    def _write_expired(self, batch: BatchRecord, stopping: threading.Event) -> tuple[Fault, ...]:
        """Write a failure for every line that has neither answer nor failure, for as long as there is room;
        return why some are not written.
        """
        message = f"was not answered within {batch.completion_window}; send it in another batch"
        try:
            with contextlib.ExitStack() as stack:
                place = stack.enter_context(self._held(batch))
                plan = self._planned(batch, place, stack, stopping)
                header = read_header(place.output) or self._header(batch, plan)
                journal = stack.enter_context(open_journal(place, header, plan, retry_failed=False))
                lines = plan.pending(in_blocks=False)
                while some := list(itertools.islice(lines, _AT_ONCE)):
                    if stopping.is_set():
                        raise InterruptedError("nobody waits for these lines any more")
                    named = [(line.number, plan.read(line).custom_id) for line in some]
                    records = [failure_record(header.run_id, *each, _EXPIRED, message) for each in named]
                    size = sum(len(record.data) for record in records)
                    self._store.grow(batch, self.size(batch) + size)
                    journal.write(records)
                journal.flush()
        except HttpError as error:
            told = f"not all lines that have expired are in the file of errors: {error}"
            return (Fault(error.code, told),)
        except (UsageError, ArtifactError) as error:
            logger.error("lines of %s that have expired are not written: %s", batch.id, error)
        return ()

    @contextlib.contextmanager
    def _told(self, batch: BatchRecord) -> Iterator[None]:
        """Tell what is wrong with the files of a batch in words for its owner."""
        try:
            yield
        except BatchInputError as error:
            faults = [
                Fault("invalid_line", f"line {bad.number} {bad.reason}", bad.number) for bad in error.refusals
            ]
            raise BatchFaultError(tuple(faults)) from error
        except (UsageError, ArtifactError) as error:
            raise BatchFaultError((Fault("invalid_file", self._plain(batch, error)),)) from error

    def _plain(self, batch: BatchRecord, error: Exception) -> str:
        """Return an error's words without places on this machine's disk."""
        text = str(error).replace(str(self._store.folder.content(batch.input_file_id)), batch.input_file_id)
        return text.replace(f"{self._place(batch).output.parent}/", "")


class _Body(msgspec.Struct):
    usage: dict[str, Any] | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    response: _Response | None = None


_NOTHING: Final = (0, TokenUsage())
_decode = msgspec.json.Decoder(_Line).decode


def _look(path: Path) -> tuple[int, TokenUsage]:
    """Return how many lines of results a file has, and what their answers cost."""
    count = prompts = answers = 0
    with path.open("rb") as file:
        for raw in file:
            count += 1
            try:
                line = _decode(raw)
            except NOT_JSON:
                continue
            usage = None if line.response is None else line.response.body.usage
            if usage is not None:
                prompts += _number(usage, "prompt_tokens", "input_tokens")
                answers += _number(usage, "completion_tokens", "output_tokens")
    return count, TokenUsage(prompts, 0, answers)


def _number(usage: dict[str, Any], *names: str) -> int:
    found = next((usage[name] for name in names if name in usage), 0)
    return found if isinstance(found, int) else 0
