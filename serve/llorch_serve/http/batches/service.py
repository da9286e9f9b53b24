"""Files and batches as the HTTP front has them: the store, the runner, and threads that wait for the disk.

Input: the settings, then the model's answers once it is loaded. Output: what the routes use. Its life is the
front's: opened before anything listens, started with the model, stopped when the worker drains.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from llorch_serve.http.batches.records import BatchRecord
from llorch_serve.http.batches.runner import BatchRunner, Work
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.batches.store import Store
from llorch_serve.http.problems import HttpError

_THREADS: Final = 4

T = TypeVar("T")

logger = logging.getLogger(__name__)


class BatchService:
    """Belongs to the event loop that it is made on."""

    def __init__(self, settings: BatchSettings) -> None:
        self.settings = settings
        self.store = Store(settings)
        self._threads = ThreadPoolExecutor(_THREADS, "llorch-batches")
        # Of their own: a batch may read and write gigabytes at its beginning and end.
        self._asked = ThreadPoolExecutor(_THREADS, "llorch-files")
        self._runner: BatchRunner | None = None

    async def open(self) -> None:
        """Take the folder. Raises UsageError if it cannot be used."""
        await self.blocking(self.store.open)

    def start(self, work: Work) -> None:
        """Run batches from now on."""
        self._runner = BatchRunner(self.store, work, self.blocking)
        self._runner.start()

    def look(self) -> None:
        """Have batches looked for that have come or that are to be cancelled."""
        if self._runner is not None:
            self._runner.look()

    def now(self, batch: BatchRecord) -> BatchRecord:
        """Return a batch with the requests that are done by now."""
        return batch if self._runner is None else self._runner.now(batch)

    async def stop(self) -> None:
        """Break off what runs; the next worker with this folder goes on with it."""
        if self._runner is not None:
            await self._runner.stop()

    async def close(self) -> None:
        """Stop, and let others use the folder."""
        await self.stop()
        for threads in (self._asked, self._threads):
            threads.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    async def asked(self, work: Callable[[], T]) -> T:
        """Do what a request asks for. Raises what it raises, and HttpError where the disk is full."""
        try:
            return await _on(self._asked, work)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            logger.error("the disk of --batch-folder is full: %s", error)
            raise HttpError(507, "disk_full", "the worker's disk is full; try again later") from error

    async def blocking(self, work: Callable[[], T], hurry: Callable[[], None] = lambda: None) -> T:
        """Run a function of a batch on a thread. Where this is cancelled it waits for the function first.

        hurry: called then, to have the function end soon.
        """
        return await _on(self._threads, work, hurry)


async def _on(
    threads: ThreadPoolExecutor, work: Callable[[], T], hurry: Callable[[], None] = lambda: None
) -> T:
    running = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        hurry()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # else asyncio logs it
        raise
