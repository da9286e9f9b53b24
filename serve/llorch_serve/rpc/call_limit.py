"""How many calls run at once, and how long a call may wait for its client.

Where the limit is reached, a new call evicts another: of the calls of the connection that holds most of them,
the one that has run longest. So a client that comes again is served again, and whoever fills the limit evicts
its own calls first.
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


class HeldCall:
    """One call that counts against the limit. connection: the call's, as gRPC names it. evicted: done once
    another call has taken its place.
    """

    __slots__ = ("connection", "evicted")

    def __init__(self, connection: str) -> None:
        self.connection = connection
        self.evicted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class CallLimit:
    """At most ``count`` calls at once, on one event loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: dict[HeldCall, None] = {}  # in the order in which they began

    @contextlib.contextmanager
    def hold(self, context: Context) -> Iterator[HeldCall]:
        """Count a call for as long as the block runs, or until another call evicts it."""
        if len(self._held) >= self._count:
            self._evict_one()
        call = HeldCall(context.peer())
        self._held[call] = None
        try:
            yield call
        finally:
            self._held.pop(call, None)

    def _evict_one(self) -> None:
        held = Counter(call.connection for call in self._held)
        victim = max(self._held, key=lambda call: held[call.connection])  # the first of equals
        del self._held[victim]
        victim.evicted.set_result(None)


async def until(
    awaited: Awaitable[T], *, evicted: asyncio.Future[None] | None = None, limit_s: float | None = None
) -> asyncio.Future[T]:
    """Wait for what gRPC does for a call; return it, not yet done where the call is evicted or the time over
    first.

    It is never cancelled but left to end with its call: of a read that is cancelled gRPC would keep the
    message. The time is counted in slices, so that a loop that was held up for long does not blame the
    client: what has come meanwhile is looked at before the next slice.
    """
    task = asyncio.ensure_future(awaited)
    task.add_done_callback(_retrieve)
    events: tuple[asyncio.Future[Any], ...] = (task,) if evicted is None else (task, evicted)
    if limit_s is None:
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        return task
    slices = max(1, math.ceil(limit_s / SLICE_S))
    for _ in range(slices):
        done, _ = await asyncio.wait(events, timeout=limit_s / slices, return_when=asyncio.FIRST_COMPLETED)
        if done:
            break
    return task


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Take what a task ended with, which asyncio would else report as never retrieved."""
    if not task.cancelled():
        task.exception()
