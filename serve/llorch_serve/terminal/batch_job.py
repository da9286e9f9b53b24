"""A run of ``llorch batch``: the plan of its input, what answers it, and how it ends.

Input: flags, read. Output: the summary of a run that came to its end; else what is done is on the disk, and
it is said how to go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import typer

from llorch_serve.batch.header import Header, make_header
from llorch_serve.batch.journal import open_journal
from llorch_serve.batch.lines import LineForm
from llorch_serve.batch.opening import open_source
from llorch_serve.batch.place import OutputPlace
from llorch_serve.batch.plan import Plan, make_plan
from llorch_serve.batch.run import Limits, run_batch
from llorch_serve.batch.summary import Summary
from llorch_serve.batch.tables import ParquetSource
from llorch_serve.config import EngineConfig
from llorch_serve.errors import LlorchError
from llorch_serve.http.inner import AskingRun, InnerAnswerer, routes_around
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import ModelInfo
from llorch_serve.terminal.access import WorkerFlags
from llorch_serve.terminal.batch_flags import RunFlags
from llorch_serve.terminal.batch_models import AnsweringModel, model_elsewhere, model_here
from llorch_serve.terminal.batch_output import batch_progress
from llorch_serve.terminal.console import note
from llorch_serve.terminal.target import ModelFlags

_INTERRUPTED: Final = 130
_LINES_OF_TEXTS: Final = 64  # at once, where a step takes whole texts of many lines


@dataclass(slots=True)
class BatchJob:
    """One run. source: its input. form: how lines are read. unknown: what becomes of fields that no route
    knows.
    """

    source: Path
    form: LineForm
    flags: RunFlags
    unknown: UnknownFields
    _seen: Summary | None = field(default=None, init=False)

    @contextlib.contextmanager
    def planned(self, place: OutputPlace) -> Iterator[Plan]:
        """Read the whole input. Raises UsageError, OSError."""
        with (
            open_source(self.source, place.work_folder) as lines,
            make_plan(lines, self.form, place.work_folder, self.flags.order) as plan,
        ):
            if isinstance(lines, ParquetSource) and lines.left_aside:
                note(f"columns that no line is made of: {', '.join(lines.left_aside)}")
            yield plan

    def run_here(self, place: OutputPlace, plan: Plan, model: ModelFlags, config: EngineConfig) -> Summary:
        """Answer with a model in this process. Raises what loading it and :meth:`_run` raise."""
        with model_here(model, config, repeats=self.flags.ordered) as answering:
            return asyncio.run(self._run(place, plan, answering))

    async def run_elsewhere(self, place: OutputPlace, plan: Plan, worker: WorkerFlags) -> Summary:
        """Answer with a worker's model. Raises what connecting and :meth:`_run` raise."""
        async with model_elsewhere(worker) as answering:
            return await self._run(place, plan, answering)

    async def _run(self, place: OutputPlace, plan: Plan, answering: AnsweringModel) -> Summary:
        """Answer what is to do.

        Raises UsageError where the output was made from something else, the error that ended the model,
        BatchStoppedError, ResourceError, OSError; and Exit where a signal came.
        """
        header = self._header(plan, answering)
        if self.flags.ordered and not answering.is_here:
            note(
                "a run that goes on writes the bytes of an unbroken one where the worker was started with "
                "--strict-reuse --kv-dtype float32, or --no-prefix-cache"
            )
        if self.flags.ordered and not answering.info.batch_invariant:
            note(
                f"answers of {answering.info.model_id} may depend in their last bits on what runs beside "
                "them (docs/determinism.md), so a run that goes on may write other bytes than an unbroken one"
            )
        with (
            open_journal(place, header, plan, retry_failed=self.flags.retry_failed) as journal,
            batch_progress() as show,
        ):

            def tell(summary: Summary) -> None:
                self._seen = summary
                show(summary)

            async with routes_around(answering.generator, self.unknown) as routes:
                run = AskingRun(header.run_id, client=f"batch:{header.run_id[:12]}")
                answerer = InnerAnswerer(routes, run, answering.stopped)
                limits = Limits(self._lines_in_flight(answering.info), patience_s=self.flags.patience)
                running = asyncio.create_task(run_batch(plan, journal, answerer, limits, tell))
                return await self._end_of(running, answering)

    def _header(self, plan: Plan, answering: AnsweringModel) -> Header:
        settings: dict[str, Any] = dict(answering.settings)
        if plan.counts.bare:
            settings |= self.form.settings
        if self.unknown is not UnknownFields.REFUSE:
            settings["unknown_fields"] = self.unknown.value
        fingerprint = answering.info.fingerprint
        return make_header(plan.input_sha256, settings, fingerprint, ordered=self.flags.ordered)

    def _lines_in_flight(self, info: ModelInfo) -> int:
        """Return how many lines are answered at once: a few wait where nobody said how many, so that no slot
        does.
        """
        asked = self.flags.concurrency
        if info.embedding_size:
            return asked or _LINES_OF_TEXTS
        slots = max(1, info.slots) if asked is None else asked
        return slots + max(2, slots // 4)

    async def _end_of(self, running: asyncio.Task[Summary], answering: AnsweringModel) -> Summary:
        """Wait for the end of a run, or end it at a signal."""
        try:
            with _cancelled_by_signals(running):
                return await running
        except asyncio.CancelledError:
            self._tell_rest()
            raise typer.Exit(_INTERRUPTED) from None
        except LlorchError as error:
            self._tell_rest()
            raise answering.stopped() or error from None

    def _tell_rest(self) -> None:
        seen = self._seen
        done = "nothing new" if seen is None else f"{seen.answered + seen.failed} of {seen.lines} lines"
        note(f"done so far: {done}; run the same command again to go on")


@contextlib.contextmanager
def _cancelled_by_signals(task: asyncio.Task[Summary]) -> Iterator[None]:
    """Cancel a task on the first SIGINT or SIGTERM; the second ends the process."""
    loop = asyncio.get_running_loop()

    def handle(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        loop.call_soon_threadsafe(task.cancel)

    # signal.signal rather than the loop's add_signal_handler, which Windows lacks.
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
