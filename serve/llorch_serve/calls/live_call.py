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
        "_due",
        "_interval",
        "_news",
        "_unwanted",
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
        # By the answer's index; several updates of one answer are joined as they come.
        self._news: dict[int, GenerationUpdate | JoinedUpdates] = {}
        self._due = asyncio.Event()  # set while there is enough for the handler to take
        self._abort: Abort | None = None  # what the generator returned; it owes a last update then
        self._unwanted = False

    async def take(self) -> list[GenerationUpdate]:
        """Wait for something new, and return all of it, joined to one update for each answer that has news,
        the last one last.

        Raises the error that ended the request.
        """
        await self._due.wait()
        if self.error is not None:
            raise self.error
        news, self._news = self._news, {}
        self._begun.update(news)
        updates = [
            each.joined() if isinstance(each, JoinedUpdates) else each for _, each in sorted(news.items())
        ]
        if self.ended:
            updates.sort(key=lambda update: update.is_last)
        else:
            self._due.clear()
        return updates

    def add(self, update: GenerationUpdate) -> None:
        """Take one update, and wake the handler if it waits for it. Once the handler has left, only the end
        counts.
        """
        if update.completion is not None or update.error is not None:
            self.error = self.error or update.error
            self.ended = update.is_last
        if self.abandoned:
            return
        if update.token_ids or not update.is_empty:
            news = self._news.get(update.index)
            if news is None:
                self._news[update.index] = update
            else:
                if isinstance(news, GenerationUpdate):
                    news = self._news[update.index] = JoinedUpdates(news)
                news.add(update)
            if not self.whole and (self._interval == 1 or self._suffices(update)):
                self._due.set()
        if self.ended or self.error is not None:
            self._due.set()

    def fail(self, error: Exception) -> None:
        """End the call with an error, unless it has ended already."""
        if not self.ended:
            self.error = error
            self._due.set()

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

    def _suffices(self, update: GenerationUpdate) -> bool:
        """Whether an answer has enough news for a message, now that this update has been added."""
        if update.index not in self._begun or update.completion is not None:
            return True
        news = self._news[update.index]
        count = news.token_count if isinstance(news, JoinedUpdates) else len(news.token_ids)
        return count >= self._interval


def check_completed(update: GenerationUpdate) -> None:
    """Raise CancelledError where an answer ends with this update without having run to its end."""
    completion = update.completion
    if completion is not None and completion.reason is FinishReason.CANCELLED:
        raise CancelledError(f"the request was aborted after {completion.generated_tokens} tokens")
