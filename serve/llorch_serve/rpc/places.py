"""How often and how long a call may wait for its client: bounded places, and waits that end.

A place is for one call. Where all are taken, a newcomer has the place of another: of the calls of the
connection that holds most of them, the one that has held it longest. So a client that comes again is served
again, and whoever fills the places drives out its own calls first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Iterator
from typing import Any, Final, TypeAlias, TypeVar

import grpc

SLICE_S: Final = 0.25  # of a time that a client has

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
T = TypeVar("T")


class Place:
    """One call's place. connection: the call's, as gRPC names it. lost: done once another call has the
    place.
    """

    __slots__ = ("connection", "lost")

    def __init__(self, connection: str) -> None:
        self.connection = connection
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Places:
    """At most ``count`` calls at once, on one event loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: dict[Place, None] = {}  # in the order in which they were taken

    @contextlib.contextmanager
    def taken(self, context: Context) -> Iterator[Place]:
        """Hold a place for as long as the block runs, or until another call takes it."""
        if len(self._held) >= self._count:
            self._free_one()
        place = Place(context.peer())
        self._held[place] = None
        try:
            yield place
        finally:
            self._held.pop(place, None)

    def _free_one(self) -> None:
        held = Counter(place.connection for place in self._held)
        victim = max(self._held, key=lambda place: held[place.connection])  # the first of equals
        del self._held[victim]
        victim.lost.set_result(None)


async def until(
    awaited: Awaitable[T], *, lost: asyncio.Future[None] | None = None, limit_s: float | None = None
) -> asyncio.Future[T]:
    """Wait for what gRPC does for a call; return it, not yet done where a place is lost or the time over
    first.

    It is never cancelled but left to end with its call: of a read that is cancelled gRPC would keep the
    message. The time is counted in slices, so that a loop that was held up for long does not blame the
    client: what has come meanwhile is looked at before the next slice.
    """
    task = asyncio.ensure_future(awaited)
    task.add_done_callback(_look_at)
    events: tuple[asyncio.Future[Any], ...] = (task,) if lost is None else (task, lost)
    if limit_s is None:
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        return task
    slices = max(1, math.ceil(limit_s / SLICE_S))
    for _ in range(slices):
        done, _ = await asyncio.wait(events, timeout=limit_s / slices, return_when=asyncio.FIRST_COMPLETED)
        if done:
            break
    return task


def _look_at(task: asyncio.Future[Any]) -> None:
    """Take what a task ended with, which asyncio would else report as never retrieved."""
    if not task.cancelled():
        task.exception()
