"""How many calls run at once, and how long a call may wait for its client.

Where the limit is reached, a new call evicts another: of the calls of the connection that holds most of them,
the one that has run longest. So a client that comes again is served again, and whoever fills the limit evicts
its own calls first. A limit can also refuse that connection another call, which costs less than an eviction,
until its oldest has run for a while: a connection may be a proxy's, and its calls many people's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Iterator
from typing import Any, Final, TypeAlias, TypeVar

import grpc

from llorch_serve.errors import QueueFullError

SLICE_S: Final = 0.25  # of a time that a client has

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
T = TypeVar("T")


class HeldCall:
    """One call that counts against the limit. connection: the call's, as gRPC names it. evicted: done once
    another call has taken its place.
    """

    __slots__ = ("connection", "evicted", "since")

    def __init__(self, connection: str) -> None:
        loop = asyncio.get_running_loop()
        self.connection = connection
        self.since = loop.time()
        self.evicted: asyncio.Future[None] = loop.create_future()


class CallLimit:
    """At most ``count`` calls at once, on one event loop.

    kept_s: a connection that holds most of them is refused another until its oldest has run for so long,
        which costs the loop half of what an eviction and the new call would.
    """

    def __init__(self, count: int, *, kept_s: float = 0.0) -> None:
        self._free = count
        self._kept_s = kept_s
        # By connection, and of each in the order in which they began.
        self._held: dict[str, dict[HeldCall, None]] = {}

    @contextlib.contextmanager
    def hold(self, context: Context) -> Iterator[HeldCall]:
        """Count a call for as long as the block runs, or until another call evicts it.

        Raises QueueFullError where the limit is reached and the call's own connection is refused another.
        """
        connection = context.peer()
        if not self._free:
            self._make_room(connection)
        self._free -= 1
        call = HeldCall(connection)
        self._held.setdefault(connection, {})[call] = None
        try:
            yield call
        finally:
            if not call.evicted.done():
                self._leave(call)

    def _make_room(self, connection: str) -> None:
        most = max(self._held.values(), key=len)  # the connection that came first, of equals
        own = self._held.get(connection, {})
        if len(own) == len(most):
            most = own
            if asyncio.get_running_loop().time() - next(iter(own)).since < self._kept_s:
                raise QueueFullError(
                    "this connection has its share of the calls of a kind that this worker takes at once; "
                    "end one of them, or ask again later",
                    retry_after_s=1.0,
                )
        victim = next(iter(most))
        self._leave(victim)
        victim.evicted.set_result(None)

    def _leave(self, call: HeldCall) -> None:
        held = self._held[call.connection]
        del held[call]
        if not held:
            del self._held[call.connection]
        self._free += 1


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
