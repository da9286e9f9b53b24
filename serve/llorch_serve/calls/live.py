"""Where the engine's thread and the event loop meet: what each running call has been given and not yet sent
on.

Input: the updates of an engine step, all at once, on the engine's thread (:meth:`LiveCalls.deliver`). Output:
a :class:`LiveCall` per request, from which its handler takes everything that has come in since it last
looked.

At most one hop to the loop per engine step, however many requests it served. What arrives while a handler is
busy writing is joined to what is already there, so a slow reader gets fewer, larger messages, and the most a
call can hold is the rest of its own answer (max_tokens, at most the context).

A hop and the messages that it leads to cost processor time that the model could use, and many streams are
many messages. So hops are spaced for as long as keeps a step's streams to :data:`MESSAGES_PER_S` together, at
most :data:`LONGEST_WAIT_S`. The first token of an answer and its end wait for nothing. A fixed interval in
tokens takes the place of that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import CancelledError, FieldViolation, InvalidRequestError, QueueFullError
from llorch_serve.requests import Abort, GenerationUpdate, JoinedUpdates, UpdateSink

MESSAGES_PER_S: Final = 80  # one stream alone looks fluent with them
LONGEST_WAIT_S: Final = 0.1  # below what people see as halting
MAX_LIVE_CALLS: Final = 1024  # a flood is turned away here, before it costs tokenisation


class LiveCall:
    """One request between its arrival and its last update. Used on the loop only, except where said.

    owner: the caller, where the worker knows its callers; else empty.
    whole: the handler wants the whole answer, so it sleeps until the last update.
    interval: tokens of an answer that it sleeps for, after the first ones and before the end.
    delivered: answers that an update has been delivered of. Used by the engine's thread.
    abandoned: the handler has left (answered, cancelled, deadline); updates are dropped. Read by other
        threads.
    ended: the last update has come; the generator no longer knows the request.
    """

    __slots__ = (
        "_abort",
        "_begun",
        "_interval",
        "_news",
        "_unwanted",
        "_waiter",
        "abandoned",
        "delivered",
        "ended",
        "error",
        "owner",
        "request_id",
        "whole",
    )

    def __init__(self, *, whole: bool, owner: str = "", interval: int = 1) -> None:
        self.whole = whole
        self._interval = interval
        self._begun: set[int] = set()  # answers that something has been taken of
        self.delivered: set[int] = set()
        self.owner = owner
        self.request_id = ""
        self.abandoned = False
        self.ended = False
        self.error: Exception | None = None
        self._news: dict[int, JoinedUpdates] = {}  # by the answer's index
        self._waiter: asyncio.Future[None] | None = None
        self._abort: Abort | None = None  # what the generator returned; it owes a last update then
        self._unwanted = False

    async def take(self) -> list[GenerationUpdate]:
        """Wait for something new, and return all of it, joined to one update for each answer that has news,
        the last one last.

        Raises the error that ended the request.
        """
        while not self._due():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.error is not None:
            raise self.error
        news, self._news = self._news, {}
        self._begun.update(news)
        return sorted(
            (updates.joined() for updates in news.values()), key=lambda update: (update.is_last, update.index)
        )

    def add(self, update: GenerationUpdate) -> None:
        """Take one update and wake the handler if it waits for it."""
        if not update.is_empty:
            if (news := self._news.get(update.index)) is None:
                self._news[update.index] = JoinedUpdates(update)
            else:
                news.add(update)
        self.error = self.error or update.error
        self.ended = update.is_last
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the call with an error, unless it has ended already."""
        if not self.ended:
            self.error = error
            self._wake()

    def accepted(self, abort: Abort) -> None:
        """Take what ends the request, which the generator has accepted. The thread that submits."""
        self._abort = abort

    def cancel(self) -> None:
        """End the request early: now, or as soon as it is admitted."""
        self._unwanted = True
        if self._abort is not None and not self.ended:
            self._abort()

    def admitted(self) -> None:
        """Begin to be served: what has been cancelled meanwhile ends now."""
        if self._unwanted:
            self.cancel()

    def leave(self) -> None:
        """Say that nobody takes updates any more, so that the request ends, now or as soon as it is
        admitted.
        """
        self.abandoned = True
        self.cancel()

    def _due(self) -> bool:
        if self.ended or self.error is not None:
            return True
        if self.whole or not self._news:
            return False
        return self._interval == 1 or any(self._suffices(*news) for news in self._news.items())

    def _suffices(self, index: int, news: JoinedUpdates) -> bool:
        ended = news.last.completion is not None
        return index not in self._begun or ended or news.token_count >= self._interval

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._due():
            self._waiter.set_result(None)


class LiveCalls:
    """All live requests of a worker, by request id. The sink of every request that the servicer submits.

    interval: of every call, see :class:`LiveCall`; None: updates are spaced as the load asks for.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: int | None = None) -> None:
        self._loop = loop
        self._interval = interval
        self._calls: dict[str, LiveCall] = {}
        self._end: Exception | None = None
        self._lock = threading.Lock()
        self._kept: list[GenerationUpdate] = []  # what no hop has taken along yet
        self._hopped_at = float("-inf")  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    def call(self, *, whole: bool, owner: str) -> LiveCall:
        """Return a call that is not entered yet."""
        return LiveCall(whole=whole, owner=owner, interval=self._interval or 1)

    def end_all(self, error: Exception) -> None:
        """End every call with an error, those too that are still being admitted. On the loop."""
        self._end = error
        self._distribute()
        for call in tuple(self._calls.values()):
            call.fail(error)

    def admitted(self, call: LiveCall) -> None:
        """Take a call that has just been submitted: it ends at once if it, or all calls, have been ended. On
        the loop.
        """
        call.admitted()
        if self._end is not None:
            call.fail(self._end)

    def find(self, request_id: str, owner: str) -> LiveCall | None:
        """Return the live call of that id if it is that caller's, else None."""
        call = self._calls.get(request_id)
        return call if call is not None and call.owner == owner else None

    def add(self, request_id: str, call: LiveCall) -> None:
        """Enter a call under its id. Any thread.

        An id stays taken until the generator has sent the request's last update, even if its handler left
        long before, so that a late update of one request can never reach another.

        Raises InvalidRequestError if the id is taken, QueueFullError if there are too many calls.
        """
        if len(self._calls) >= MAX_LIVE_CALLS:
            raise QueueFullError(
                f"{len(self._calls)} requests are live, the most this worker holds; try again",
                retry_after_s=1.0,
            )
        if self._calls.setdefault(request_id, call) is not call:  # one atomic step, whatever thread is here
            bad = FieldViolation(
                "request_id", f"{request_id!r} belongs to a live request; choose another or leave it out"
            )
            raise InvalidRequestError([bad])
        call.request_id = request_id

    def submit(self, request_id: str, call: LiveCall, submit: Callable[[UpdateSink], Abort]) -> None:
        """Enter a call and submit its request. Any thread. Raises what :meth:`add` and ``submit`` do."""
        self.add(request_id, call)
        try:
            call.accepted(submit(self))
        except BaseException:
            if self._calls.get(request_id) is call:  # the generator did not accept it
                del self._calls[request_id]
            raise

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        """Take the updates of one engine step. The engine's thread."""
        with self._lock:
            self._kept += updates
        now = self._loop.time()
        if now - self._hopped_at >= self._spacing(updates):
            self._hopped_at = now
            self._loop.call_soon_threadsafe(self._distribute)

    def _spacing(self, updates: list[GenerationUpdate]) -> float:
        """Return the seconds since the last hop before which these updates need none; at most
        LONGEST_WAIT_S.
        """
        if self._interval is not None:
            return 0.0
        streams, urgent = set(), False
        for update in updates:
            call = self._calls.get(update.request_id)
            if call is None:
                continue
            if update.is_last:
                urgent = True
            elif not call.whole:
                begins = not update.is_empty and update.index not in call.delivered
                if begins:
                    call.delivered.add(update.index)
                urgent = urgent or begins or update.completion is not None
                streams.add(update.request_id)
        if urgent:
            return 0.0
        if not streams:
            return LONGEST_WAIT_S
        return min(len(streams) / MESSAGES_PER_S, LONGEST_WAIT_S)

    def _distribute(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            updates, self._kept = self._kept, []
        for update in updates:
            call = self._calls.get(update.request_id)
            if call is None:
                continue
            if update.is_last:
                del self._calls[update.request_id]
            if call.abandoned:
                call.ended = call.ended or update.is_last
            else:
                call.add(update)
        if self._interval is None and updates and self._calls:
            # The next step may take long; what the engine keeps back meanwhile is fetched.
            self._timer = self._loop.call_later(LONGEST_WAIT_S, self._distribute)


def check_completed(update: GenerationUpdate) -> None:
    """Raise CancelledError where an answer ends with this update without having run to its end."""
    completion = update.completion
    if completion is not None and completion.reason is FinishReason.CANCELLED:
        raise CancelledError(f"the request was aborted after {completion.generated_tokens} tokens")
