"""The front desk: what happens to a call whatever protocol it came over.

Input: messages that a front has received, and what reads them in the front's own dialect. Output: live calls,
whose updates the front writes in its dialect. Admission, refusal, aborting, draining and closing are done
here, so that gRPC and HTTP do them alike. Each front has a desk of its own.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Final, TypeVar

from llorch_serve.calls.admission import Activity, ReadingThreads
from llorch_serve.calls.interfaces import spread_of
from llorch_serve.calls.live import LiveCalls
from llorch_serve.calls.live_call import LiveCall
from llorch_serve.calls.waiting import first_of
from llorch_serve.errors import EngineStoppedError, UnavailableError
from llorch_serve.requests import Abort, ModelInfo, TextGenerator, UpdateSink

_STOPPING: Final = "the worker is shutting down; send the request to another"
_CUT: Final = "the worker shut down before the answer was complete; send the request to another"
_ABSENT: Final = "no replica of the model runs; try again when the health service says SERVING"
FAREWELL_S: Final = 1.0  # for the last bytes of ended calls to leave the process

M = TypeVar("M")


class MessageCalls:
    """The live calls that one message asks for: one over gRPC, one for each prompt over HTTP.

    owner: the caller, where the worker knows its callers; else empty.
    """

    def __init__(self, live: LiveCalls, owner: str) -> None:
        self._live = live
        self._owner = owner
        self._calls: list[LiveCall] = []

    def submit(self, request_id: str, submit: Callable[[UpdateSink], Abort], *, whole: bool) -> LiveCall:
        """Submit one request; return its call. A pool thread.

        whole: the front wants the whole answer at once.
        Raises InvalidRequestError if the id is taken, QueueFullError if there are too many calls, and what
        ``submit`` raises.
        """
        call = self._live.call(whole=whole, owner=self._owner)
        self._live.submit(request_id, call, submit)
        self._calls.append(call)
        return call

    def admitted(self) -> None:
        """Begin to serve the calls: those that have been ended meanwhile end now."""
        for call in self._calls:
            self._live.admitted(call)

    def abort(self) -> None:
        """Abort the calls that still run."""
        for call in self._calls:
            call.leave()


class FrontDesk:
    """Admits, refuses and ends the calls of one front. Belongs to the event loop that it is made on.

    name: of the threads that read messages. loading: what callers are told before :meth:`open`.
    max_pending_bytes: of messages that wait to be read. stream_interval: see
        :class:`llorch_serve.calls.live.LiveCalls`.

    From :meth:`refuse`, :meth:`drain` or :meth:`fail` on it is closed to new calls; those that run go on.
    """

    def __init__(
        self, name: str, loading: str, *, max_pending_bytes: int, stream_interval: int | None
    ) -> None:
        self._calls = LiveCalls(asyncio.get_running_loop(), stream_interval)
        self._threads = ReadingThreads(name, max_pending_bytes)
        self._activity = Activity()
        self._generator: TextGenerator | None = None
        self._refusal: str | None = loading

    @property
    def generator(self) -> TextGenerator:
        """What answers, from :meth:`open` on."""
        assert self._generator is not None
        return self._generator

    @property
    def info(self) -> ModelInfo | None:
        """What is served now; None until it is loaded. Over replicas it may come to be another model."""
        return None if self._generator is None else self._generator.model_info()

    @property
    def refusal(self) -> str | None:
        """Why no call is taken; None while they are."""
        return self._refusal

    def open(self, generator: TextGenerator) -> None:
        """Take calls from now on."""
        self._generator, self._refusal = generator, None
        self._activity.begin()

    def set_answerable(self, answerable: bool) -> None:
        """Refuse new calls while no replica could answer them, and take them again."""
        if answerable and self._refusal == _ABSENT:
            self._refusal = None
        elif not answerable and self._refusal is None:
            self._refusal = _ABSENT

    def check_open(self) -> None:
        """Raise UnavailableError, with the reason, while no call is taken."""
        if self._refusal is not None:
            raise UnavailableError(self._refusal)

    def call(self, *, is_use: bool = True) -> AbstractContextManager[None]:
        """Count a call for as long as it runs. is_use: it keeps a worker from being unused."""
        return self._activity.call(is_use=is_use)

    async def run(self, size: int, work: Callable[[], M]) -> M:
        """Run ``work`` on a reading thread; it holds a message of ``size`` bytes.

        Raises QueueFullError, or what it raises.
        """
        admission = self._threads.admit(size, work)
        del work
        try:
            return await admission.result()
        finally:
            admission.abandon()
            del admission  # as in admit

    @asynccontextmanager
    async def admit(self, size: int, owner: str, read: Callable[[MessageCalls], M]) -> AsyncIterator[M]:
        """Have a message of ``size`` bytes read, and give what ``read`` returns to whoever writes the answer,
        inside ``async with``. Calls of the message that still run at its end are aborted.

        read: parses, checks and submits, on a reading thread.
        Raises QueueFullError, and what ``read`` raises.
        """
        calls = MessageCalls(self._calls, owner)
        admission = self._threads.admit(size, functools.partial(read, calls))
        del read  # it holds the message, which would be kept for as long as the answer takes
        try:
            message = await admission.result()
            calls.admitted()
            yield message
        finally:
            admission.abandon()
            admission.afterwards(calls.abort)
            # It holds the error that it ended with, which holds this frame: a circle around the message.
            del admission

    def cancel(self, request_ids: Iterable[str], owner: str) -> tuple[str, ...]:
        """End live requests of a caller; return the ids of those that were live. Idempotent."""
        found = [call for name in dict.fromkeys(request_ids) if (call := self._calls.find(name, owner))]
        for call in found:
            call.cancel()
        return tuple(call.request_id for call in found)

    async def cancel_everywhere(self, request_ids: Iterable[str], owner: str) -> tuple[str, ...]:
        """End live requests of a caller, where replicas answer those of other fronts too; return the ids of
        those that were live. Idempotent.
        """
        wanted = tuple(dict.fromkeys(request_ids))
        here = self.cancel(wanted, owner)
        others = [name for name in wanted if name not in here]
        spread = spread_of(self._generator)
        if spread is None or not others:
            return here
        there = await asyncio.to_thread(spread.abort_everywhere, others, owner)
        return tuple(name for name in wanted if name in here or name in there)

    def is_live(self, request_id: str) -> bool:
        """Return whether the generator still has a request of that id."""
        return self._calls.is_live(request_id)

    def idle_s(self) -> float:
        """Return for how long no call has run, in seconds."""
        return self._activity.idle_s()

    async def wait_unused(self, seconds: float) -> None:
        """Return once no call of a client has run for so long."""
        await self._activity.wait_unused(seconds)

    async def wait_idle(self) -> None:
        """Return once no call is running."""
        await self._activity.wait_idle()

    def end_all(self, error: Exception) -> None:
        """End every running call with an error and abort its request."""
        self._calls.end_all(error)

    async def drain(
        self, forced: asyncio.Event, timeout_s: float, on_timeout: Callable[[], None] = lambda: None
    ) -> None:
        """Refuse new calls, and let running ones finish within the timeout or until ``forced``.

        Those that do not finish end with UnavailableError. on_timeout: told before that, if the time is over.
        """
        self._refusal = _STOPPING
        if not await first_of(self.wait_idle(), forced.wait(), timeout_s=timeout_s):
            on_timeout()
        await self._end(UnavailableError(_CUT))

    async def fail(self, error: EngineStoppedError) -> None:
        """Refuse new calls for good and end those that run with the engine's error."""
        self._refusal = f"the engine has stopped; {error}"
        await self._end(error)

    async def _end(self, error: Exception) -> None:
        self.end_all(error)
        await first_of(self.wait_idle(), timeout_s=FAREWELL_S)

    def close(self) -> None:
        """Drop what waits to be read and end the threads, without waiting for them."""
        self._threads.close()
