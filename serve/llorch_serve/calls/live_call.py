"""One running call: what it has been given by the engine and has not sent on yet.

Input: the updates of one request, on the event loop. Output: everything new at once, for the handler that
writes the answer.
"""

from __future__ import annotations

import asyncio

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import CancelledError
from llorch_serve.requests import Abort, GenerationUpdate, JoinedUpdates


class LiveCall:
    """One request between its arrival and its last update. Used on the loop only, except where said.

    owner: the caller, where the worker knows its callers; else empty.
    whole: the handler wants the whole answer, so it sleeps until the last update.
    interval: tokens of an answer that it sleeps for, after the first ones and before the end.
    delivered: answers that an update has been delivered of. Used by the engine's thread.
    abandoned: the handler has left (answered, cancelled, deadline); updates are dropped.
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


def check_completed(update: GenerationUpdate) -> None:
    """Raise CancelledError where an answer ends with this update without having run to its end."""
    completion = update.completion
    if completion is not None and completion.reason is FinishReason.CANCELLED:
        raise CancelledError(f"the request was aborted after {completion.generated_tokens} tokens")
