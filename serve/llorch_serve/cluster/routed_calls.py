"""Requests that replicas answer, from their submission to their last update.

Input: calls of ``routed_generator.py``, on the fronts' threads. Output: the updates that come of the
replicas' parts, to each call's sink, on the loop on which everything waits for replicas.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

from llorch_serve.cluster import wire
from llorch_serve.cluster.failures import MOST_TRIES, AnswerCutError, judge
from llorch_serve.cluster.interfaces import Replicas
from llorch_serve.cluster.loop_thread import LoopThread
from llorch_serve.cluster.routed_call import RoutedCall
from llorch_serve.errors import ReplicaLostError, UnavailableError, duplicate_id
from llorch_serve.requests import Abort, GenerationUpdate

MOST_AT_ONCE_BYTES: Final = 128 * 1024
"""Of a part of an answer that the event loop reads itself: some ten milliseconds."""

logger = logging.getLogger(__name__)


class RoutedCalls:
    """All live requests of a front. :meth:`enter` is for any thread, the rest for the loop.

    replicas: used on the loop alone.
    """

    def __init__(self, replicas: Replicas, loop: LoopThread) -> None:
        self._replicas = replicas
        self._loop = loop
        self._live: dict[str, RoutedCall] = {}  # by the request's id
        self._lock = threading.Lock()
        self._closed = False

    def find(self, request_id: str) -> RoutedCall | None:
        """Return the live call of that id, else None. Any thread."""
        return self._live.get(request_id)

    def enter(self, call: RoutedCall) -> Abort:
        """Make a request live and have it begin; return what ends it. Any thread.

        Raises InvalidRequestError for an id that is taken, UnavailableError once this is closed.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError("the front is shutting down")
            if call.request_id in self._live:
                raise duplicate_id(call.request_id)
            self._live[call.request_id] = call
            self._loop.call_soon(functools.partial(self._begin, call))
        return functools.partial(self._abort, call)

    def shut(self) -> bool:
        """Take nothing more; tell whether it was this call that did. Any thread."""
        with self._lock:
            closed, self._closed = self._closed, True
        return not closed

    def shut_if_idle(self) -> bool:
        """Take nothing more if no request is live; tell whether that is so. Any thread."""
        with self._lock:
            self._closed = self._closed or not self._live
            return self._closed

    async def withdraw(self) -> list[RoutedCall]:
        """Return the calls that no replica has taken and nobody has been told of: they are live here no
        longer, and whoever gets them has another generator answer them.
        """
        waiting = [
            call
            for call in self._live.values()
            if call.task is not None and not (call.is_taken or call.begun or call.unwanted)
        ]
        for call in waiting:
            self._finish(call, call.withdraw)
        return waiting

    async def end(self) -> None:
        """End what still runs, once nothing more is taken."""
        calls = list(self._live.values())
        for call in calls:
            call.cancel()
        if tasks := [call.task for call in calls if call.task is not None]:
            await asyncio.wait(tasks)

    def give_up_waiting(self) -> None:
        """End with UnavailableError the calls that no replica has taken: none is there."""
        for call in list(self._live.values()):
            if not call.is_taken:
                kind = ReplicaLostError if call.begun else UnavailableError
                self._finish(call, functools.partial(call.fail, kind("no replica runs; try again")))
                call.cancel()

    def _abort(self, call: RoutedCall) -> None:
        """End a call early, wherever it is. Any thread."""
        call.abort()
        self._loop.call_soon(call.cancel)

    def _begin(self, call: RoutedCall) -> None:
        if call.ended:  # given up before it began; its id may be another's by now
            return
        if call.unwanted:
            self._finish(call, call.end_cancelled)
            return
        call.task = asyncio.ensure_future(self._answer(call))
        call.task.add_done_callback(functools.partial(self._done, call))

    async def _answer(self, call: RoutedCall) -> None:
        """Pass an answer on to its end, from another replica where one fails."""
        tries = 0
        while True:
            told = call.told
            try:
                await self._pass_on(call)
            except (Exception, asyncio.CancelledError) as error:
                if call.unwanted or call.ended:
                    raise
                failure = judge(error, begun=call.begun)
                tries = tries + 1 if call.told == told else 1
                if not failure.elsewhere or tries > MOST_TRIES or not call.go_elsewhere():
                    raise failure.error from None
            else:
                return

    async def _pass_on(self, call: RoutedCall) -> None:
        """Pass on what one replica answers. Raises the error that its answer ends with, or Ray's."""
        async with aclosing(self._replicas.call(call.kind, call.raw, hint=call.hint)) as parts:
            async for part in parts:
                if call.ended:  # what comes behind its end is nobody's
                    continue
                updates = await _read(call.request_id, part)
                last = updates[-1]
                if last.error is not None:
                    raise last.error
                if last.is_last:
                    self._finish(call, functools.partial(call.deliver, updates))
                else:
                    call.deliver(updates)
        if not call.ended:
            raise AnswerCutError

    def _done(self, call: RoutedCall, task: asyncio.Task[None]) -> None:
        """End what has not been ended: aborted, or failed."""
        error = None if task.cancelled() else task.exception()
        if call.ended:
            return
        if error is None or call.unwanted:  # whatever became of a call that nobody wants
            self._finish(call, call.end_cancelled)
        else:
            assert isinstance(error, Exception)
            self._finish(call, functools.partial(call.fail, error))

    def _finish(self, call: RoutedCall, tell: Callable[[], None]) -> None:
        """Tell the end of a request, whose id may be taken again by then."""
        with self._lock:
            del self._live[call.request_id]
        try:
            tell()
        except Exception:  # the front's own loop may have ended
            call.ended = True
            logger.exception("the end of a request could not be told")


async def _read(request_id: str, part: bytes) -> list[GenerationUpdate]:
    """Return the updates of a part, read on a thread where all other answers would wait for it."""
    if len(part) <= MOST_AT_ONCE_BYTES:
        return wire.read_updates(request_id, part)
    return await asyncio.to_thread(wire.read_updates, request_id, part)
