"""What a front needs before the engine has a request: threads that read it, and a count of calls.

Used by ``calls/front_desk.py``, on the event loop of its front.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar

from llorch_serve.errors import CancelledError, QueueFullError

POOL_THREADS: Final = 2  # tokenising is the work; more threads would only take cores from the model

R = TypeVar("R")


class ReadingThreads:
    """A small thread pool that reads, checks, tokenises and submits requests, so that a long one holds up no
    stream.

    max_pending_bytes: of requests that wait for it.
    """

    def __init__(self, name: str, max_pending_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix=name)
        self._max_pending_bytes = max_pending_bytes
        self._pending_bytes = 0

    async def run(self, size: int, work: Callable[[], R]) -> R:
        """Run ``work``, which holds a request of ``size`` bytes. Raises QueueFullError, or what it raises."""
        if self._pending_bytes + size > self._max_pending_bytes:
            raise QueueFullError(
                f"{self._pending_bytes} bytes of requests wait to be read, the most is "
                f"{self._max_pending_bytes}; try again",
                retry_after_s=1.0,
            )
        self._pending_bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._pending_bytes -= size

    def admit(self, size: int, work: Callable[[], R]) -> Admission[R]:
        """Begin what :meth:`run` does, for a caller that may leave before it has ended."""
        abandoned = threading.Event()
        return Admission(self.run(size, functools.partial(_unless, abandoned, work)), abandoned)

    def close(self) -> None:
        """Drop what waits and end the threads, without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Admission(Generic[R]):
    """Work on a thread. Where whoever waits for it leaves, it is not begun any more; what has been begun goes
    on, since a thread cannot be interrupted.

    What it raises then has nobody to be told to, and is not logged: a refusal may quote the request.
    """

    def __init__(self, work: Coroutine[Any, Any, R], abandoned: threading.Event) -> None:
        self._abandoned = abandoned
        self._work = asyncio.ensure_future(work)
        self._work.add_done_callback(_retrieve)

    def abandon(self) -> None:
        """Say that nobody waits for the work any more."""
        self._abandoned.set()

    async def result(self) -> R:
        """Return what the work does, or raise what it raises."""
        await asyncio.wait((self._work,))  # which leaves the work alone when it is cancelled
        try:
            return self._work.result()
        finally:
            del self  # holds the error, which holds this frame: a circle around the request's bytes

    def afterwards(self, act: Callable[[], None]) -> None:
        """Call ``act`` once the work has ended, now if it has."""
        if self._work.done():
            act()
        else:
            self._work.add_done_callback(lambda _: act())


def _unless(abandoned: threading.Event, work: Callable[[], R]) -> R:
    """Do the work unless nobody waits for it. No method, whose frame in an error would hold the admission."""
    if abandoned.is_set():
        raise CancelledError("the caller left before its request was read")
    return work()


def _retrieve(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()  # else asyncio logs it, where nobody has waited for it


class Activity:
    """Counts the calls that run, and remembers when the last one ended. Made on a running event
    loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._used_at = self._loop.time()

    def begin(self) -> None:
        """Count the time without a call from now on."""
        self._used_at = self._loop.time()

    @contextlib.contextmanager
    def call(self, *, is_use: bool = True) -> Iterator[None]:
        """Count a call for as long as it runs. is_use: it keeps a worker from being unused."""
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if is_use:
                self._used_at = self._loop.time()
            if self._active == 0:
                self._idle.set()

    def idle_s(self) -> float:
        """Return for how long no call has run, in seconds."""
        return 0.0 if self._active else self._loop.time() - self._used_at

    async def wait_idle(self) -> None:
        """Return once no call is running."""
        await self._idle.wait()

    async def wait_unused(self, seconds: float) -> None:
        """Return once no call has run for so long."""
        while True:
            await self._idle.wait()
            left = seconds - self.idle_s()
            if left <= 0:
                return
            await asyncio.sleep(left)
