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
import contextlib
import threading
from collections.abc import Callable
from typing import Final

from llorch_serve.calls.live_call import LiveCall
from llorch_serve.errors import QueueFullError, duplicate_id
from llorch_serve.requests import Abort, GenerationUpdate, UpdateSink

MESSAGES_PER_S: Final = 80  # one stream alone looks fluent with them
LONGEST_WAIT_S: Final = 0.1  # below what people see as halting
MAX_LIVE_CALLS: Final = 1024  # a flood is turned away here, before it costs tokenisation


class LiveCalls:
    """All live requests of a front, by request id. The sink of every request that the front desk submits.

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

    def is_live(self, request_id: str) -> bool:
        """Return whether the id is taken. Any thread."""
        return request_id in self._calls

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
            raise duplicate_id(request_id)
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
        """Take the updates of one engine step, and hop to the loop if it is time. The engine's thread."""
        with self._lock:
            self._kept += updates
        urgent = self._interval is not None
        streams: set[str] = set()
        for update in updates:
            call = self._calls.get(update.request_id)
            if call is None:
                continue
            if update.completion is not None or update.error is not None:
                urgent = urgent or not call.whole or update.is_last
            elif not call.whole:
                streams.add(update.request_id)
                if update.index not in call.delivered and not update.is_empty:
                    call.delivered.add(update.index)
                    urgent = True
        spacing = min(len(streams) / MESSAGES_PER_S, LONGEST_WAIT_S) if streams else LONGEST_WAIT_S
        now = self._loop.time()
        if urgent or now - self._hopped_at >= spacing:
            self._hopped_at = now
            # The loop may close at any moment. Raised here, its error would end the engine for everybody.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._distribute)

    def _distribute(self) -> None:
        """Give each call what has been kept for it. On the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            updates, self._kept = self._kept, []
        for update in updates:
            call = self._calls.get(update.request_id)
            if call is None:
                continue
            call.add(update)
            if call.ended:
                del self._calls[update.request_id]
        if self._interval is None and updates and self._calls:
            # The next step may take long; what the engine keeps back meanwhile is fetched.
            self._timer = self._loop.call_later(LONGEST_WAIT_S, self._distribute)
