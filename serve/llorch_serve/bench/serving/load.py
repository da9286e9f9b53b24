"""Putting a worker under load: sends requests when they are due and notes what comes back and when.

Input: a function that calls the worker, the requests, and when to send them. Output: a :class:`LoadRun`. It
knows neither gRPC nor HTTP, and no clock but the one that it is given. One event loop reads all streams;
nothing is computed during the run.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

from llorch_serve.bench.serving.arrivals import Arrivals, ClosedLoop, OpenLoop
from llorch_serve.bench.serving.records import CallError, LoadRun, Piece, RequestRecord
from llorch_serve.bench.serving.work import Job

Call = Callable[[Job], AsyncGenerator[Piece]]
"""Sends a request and yields the messages of its answer as they come. Raises CallError."""


class LoadGenerator:
    """Sends requests through ``call``. clock: in seconds."""

    def __init__(self, call: Call, clock: Callable[[], float] = time.perf_counter) -> None:
        self._call = call
        self._clock = clock
        self._start = 0.0
        self._records: list[RequestRecord] = []

    async def run(
        self, arrivals: Arrivals, jobs: Iterator[Job], *, requests: int | None, duration_s: float | None
    ) -> LoadRun:
        """Send requests until so many were sent, or so long after the start; return when all have ended.

        One of ``requests`` and ``duration_s`` must be given. ``jobs`` must not end before.
        """
        jobs = itertools.islice(jobs, requests)
        self._records = []
        if isinstance(arrivals, ClosedLoop):
            self._start = self._clock()
            async with asyncio.TaskGroup() as users:
                for _ in range(arrivals.concurrency):
                    users.create_task(self._user(jobs, duration_s))
        else:
            await self._open(arrivals, jobs, requests, duration_s)
        return LoadRun(tuple(self._records), self._clock() - self._start)

    async def _user(self, jobs: Iterator[Job], duration_s: float | None) -> None:
        """Send one request after another. Each is due when the one before has ended."""
        while duration_s is None or self._now() < duration_s:
            job = next(jobs, None)
            if job is None:
                return
            await self._follow(job, self._now())

    async def _open(
        self, arrivals: OpenLoop, jobs: Iterator[Job], requests: int | None, duration_s: float | None
    ) -> None:
        moments: Iterator[float] = itertools.islice(arrivals.moments(), requests)
        if duration_s is not None:
            moments = itertools.takewhile(lambda moment: moment < duration_s, moments)
        plan = list(zip(moments, jobs))  # noqa: B905 - jobs may go on; made before the run, so that it costs no time in it
        self._start = self._clock()
        async with asyncio.TaskGroup() as sent:
            for moment, job in plan:
                # Where it is late, what is due must still get a turn on the loop.
                await asyncio.sleep(max(0.0, moment - self._now()))
                sent.create_task(self._follow(job, moment))

    async def _follow(self, job: Job, scheduled_s: float) -> None:
        """Send a request and read its answer to the end."""
        record = RequestRecord(scheduled_s, self._now())
        self._records.append(record)
        try:
            async with aclosing(self._call(job)) as pieces:
                async for piece in pieces:
                    record.take(self._now(), piece)
        except CallError as error:
            record.fail(self._now(), error.status, str(error))
        else:
            record.close(self._now())

    def _now(self) -> float:
        return self._clock() - self._start
