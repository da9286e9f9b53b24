"""A batch that runs: lines out of the plan, answers into the journal, as many at once as there is room for.

One task reads ahead, one writes behind, and each line in between has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from llorch_serve.batch.answering import Answerer, Usage
from llorch_serve.batch.journal import Journal
from llorch_serve.batch.lines import BatchLine
from llorch_serve.batch.plan import ORDERED_BLOCK, Plan, PlannedLine
from llorch_serve.batch.records import Record, answer_record, failure_record
from llorch_serve.batch.reordered import Reordered
from llorch_serve.batch.retries import Clock, PatientAnswerer
from llorch_serve.batch.summary import Summary
from llorch_serve.batch.window import Window

_READ_AHEAD: Final = 64  # lines
_READ_AHEAD_BYTES: Final = 16 * 2**20
_EARLY_BYTES: Final = 64 * 2**20  # of answers that wait for lines before them


@dataclass(frozen=True, slots=True)
class Limits:
    """How a batch runs.

    lines_in_flight: that are answered at once; a few more than the slots of whoever answers keep it busy.
    tokens_in_flight: the most of them by estimate, None: any; one line may always run.
    attempts: how often a line is asked for that fails on the other side.
    patience_s: how long nobody may answer before the batch is stopped.
    flush_s: how much work a power cut may take.
    """

    lines_in_flight: int
    tokens_in_flight: int | None = None
    attempts: int = 3
    patience_s: float = 300.0
    flush_s: float = 1.0


@dataclass(frozen=True, slots=True)
class _Finished:
    planned: PlannedLine
    record: Record
    usage: Usage


async def run_batch(
    plan: Plan,
    journal: Journal,
    answerer: Answerer,
    limits: Limits,
    tell: Callable[[Summary], None] = lambda _: None,
    *,
    clock: Clock | None = None,
) -> Summary:
    """Answer all lines that are to do, and return what was done.

    tell: gets the summary whenever more is on the disk.
    Raises BatchStoppedError where nobody answers any more, ResourceError where the disk is full, UsageError
    where the input was changed, OSError, and asyncio's CancelledError; what was answered is on the disk then.
    """
    with ThreadPoolExecutor(1, "batch-disk") as disk, ThreadPoolExecutor(1, "batch-input") as files:
        run = _Run(plan, journal, answerer, limits, tell, disk, files, clock or Clock())
        try:
            await run.answer_all()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        await asyncio.get_running_loop().run_in_executor(disk, journal.finish)
        return run.summary


class _Run:
    def __init__(
        self,
        plan: Plan,
        journal: Journal,
        answerer: Answerer,
        limits: Limits,
        tell: Callable[[Summary], None],
        disk: ThreadPoolExecutor,
        files: ThreadPoolExecutor,
        clock: Clock,
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._answerer = PatientAnswerer(answerer, limits.attempts, limits.patience_s, clock)
        self._limits = limits
        self._tell = tell
        self._disk = disk
        self._files = files
        self._clock = clock
        self._window = Window(limits.lines_in_flight, limits.tokens_in_flight, 2 * ORDERED_BLOCK)
        self._in_order: Reordered[_Finished] = Reordered(_EARLY_BYTES)
        self._ready: list[_Finished] = []  # to be written, in this order
        self._writing: list[_Finished] = []
        self._is_over = False  # all lines are answered
        self._news = asyncio.Event()
        self._began = clock.now()
        self.summary = Summary(
            plan.counts.lines,
            answered=journal.answered,
            failed=journal.failed,
            answered_before=journal.answered,
            failed_before=journal.failed,
            tokens_planned=plan.tokens_to_do(),
        )

    async def answer_all(self) -> None:
        """Answer all lines. Raises ExceptionGroup of what ended it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_writing())
                async with asyncio.TaskGroup() as lines:
                    async for planned, line in self._lines():
                        await self._window.enter(planned.tokens)
                        lines.create_task(self._answer(planned, line))
                self._is_over = True
                self._news.set()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self._write_rest()
            raise

    async def _lines(self) -> AsyncIterator[tuple[PlannedLine, BatchLine]]:
        loop = asyncio.get_running_loop()
        pending = self._plan.pending(in_blocks=self._journal.header.ordered)

        def read_some() -> list[tuple[PlannedLine, BatchLine]]:
            found: list[tuple[PlannedLine, BatchLine]] = []
            size = 0
            for planned in islice(pending, _READ_AHEAD):
                found.append((planned, self._plan.read(planned)))
                size += planned.size
                if size >= _READ_AHEAD_BYTES:
                    break
            return found

        while some := await loop.run_in_executor(self._files, read_some):
            for one in some:
                yield one

    async def _answer(self, planned: PlannedLine, line: BatchLine) -> None:
        run_id = self._journal.header.run_id
        usage = Usage()
        try:
            if planned.problem is not None:
                record = failure_record(run_id, line.number, line.custom_id, "invalid_line", planned.problem)
            else:
                answer = await self._answerer.answer(line)
                usage = answer.usage
                record = answer_record(run_id, line.number, line.custom_id, answer)
        finally:
            self._window.leave(planned.tokens)
        self._finish(_Finished(planned, record, usage))

    def _finish(self, finished: _Finished) -> None:
        if not self._journal.header.ordered:
            self._ready.append(finished)
        else:
            self._ready += self._in_order.put(finished.planned.turn, finished, len(finished.record.data))
        if self._ready:
            self._news.set()

    async def _keep_writing(self) -> None:
        loop = asyncio.get_running_loop()
        flushed = loop.time()
        is_dirty = False
        while not (self._is_over and not self._ready and not is_dirty):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.flush_s if is_dirty else None):
                    await self._news.wait()
            self._news.clear()
            self._writing, self._ready = self._ready, []
            if self._writing:
                records = [one.record for one in self._writing]
                # Shielded: cancelled before its thread begins, it would never be done.
                await asyncio.shield(loop.run_in_executor(self._disk, self._journal.write, records))
                is_dirty = True
            if is_dirty and (self._is_over or loop.time() - flushed >= self._limits.flush_s):
                await loop.run_in_executor(self._disk, self._journal.flush)
                flushed = loop.time()
                is_dirty = False
            self._count()

    def _write_rest(self) -> None:
        """Write what is ready, after what is being written when a batch is interrupted."""
        records = [one.record for one in self._ready]
        self._disk.submit(self._journal.write, records).result()
        self._disk.submit(self._journal.flush).result()
        self._writing += self._ready
        self._ready = []
        self._count()

    def _count(self) -> None:
        seconds = self._clock.now() - self._began
        for one in self._writing:
            self._window.written()
            self.summary = self.summary.with_line(
                is_failure=one.record.is_failure,
                usage=one.usage,
                tokens=one.planned.tokens,
                seconds=seconds,
            )
        self.summary = replace(self.summary, retries=self._answerer.retries)
        if self._writing:
            self._tell(self.summary)
        self._writing = []


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
