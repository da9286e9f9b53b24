"""A call's message, received when there is room for it and within a time.

Methods with one request are registered as if they took a stream of them, which is the same on the wire: gRPC
then runs the handler first, which refuses what is to be refused, and receives no message that is not asked
for. What a client sends before that waits in its stream's window. The moment gRPC has read the first bytes of
a message it makes room for all of it, so a message being received is counted as the largest there may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from llorch_serve.errors import FieldViolation, InvalidRequestError, QueueFullError
from llorch_serve.rpc.call_limit import Context, until

RECEIVING_BYTES: Final = 256 * 2**20
"""Of messages being received at once from those who may use the worker."""

MAX_EXPECTED: Final = 1024  # calls that wait until others' messages are received
LIMIT_S: Final = 30.0  # for a message to arrive
GUARANTEED_S: Final = 2.0  # of it while others wait
SMALL_LIMIT_S: Final = 5.0  # for a message of a few bytes to arrive
MAX_SMALL_WAITING: Final = 64  # calls that wait until others' messages of a few bytes are received
SMALL_BYTES: Final = 2**18
"""Of such a message, the most ids to abort among them. gRPC itself knows only the limit of all messages, so a
larger one is received and let go.
"""


class Receiving:
    """Receives messages of any size up to ``max_message_bytes``, so many at once that they fit into
    RECEIVING_BYTES.

    Others wait, and connections have turns: one with a thousand calls keeps another waiting for one message,
    not for a thousand. While any wait, a message that takes longer than GUARANTEED_S is given up.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._free = max(1, RECEIVING_BYTES // max_message_bytes)
        # Calls that wait, by connection; the connection whose turn is next comes first.
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}
        self._expected = 0
        # A future of each message that has taken longer than GUARANTEED_S.
        self._slow: deque[asyncio.Future[None]] = deque()

    async def message(self, context: Context) -> bytes:
        """Return a call's message. Raises QueueFullError, and InvalidRequestError where none comes."""
        async with self._place(context.peer()):
            read = await until(context.read(), limit_s=GUARANTEED_S)
            if not read.done() and not self._expected:
                evicted = asyncio.get_running_loop().create_future()
                self._slow.append(evicted)
                try:
                    await until(read, evicted=evicted, limit_s=LIMIT_S - GUARANTEED_S)
                finally:
                    with contextlib.suppress(ValueError):
                        self._slow.remove(evicted)
                if not read.done() and not evicted.done():
                    raise _late(LIMIT_S)
            if not read.done():
                raise QueueFullError(
                    f"the request's message had not arrived after {GUARANTEED_S:g} s, and others wait "
                    "to send theirs; try again",
                    retry_after_s=1.0,
                )
            return _found(read)

    @contextlib.asynccontextmanager
    async def _place(self, connection: str) -> AsyncIterator[None]:
        if self._free:
            self._free -= 1
        else:
            await self._turn(connection)
        try:
            yield
        finally:
            self._release()

    async def _turn(self, connection: str) -> None:
        """Wait for a place. Raises QueueFullError if too many wait."""
        if self._slow:
            self._slow.popleft().set_result(None)
        turn = asyncio.get_running_loop().create_future()
        self._turns.setdefault(connection, deque()).append(turn)
        self._expected += 1
        if self._expected > MAX_EXPECTED:
            # Of the connection that has most of them, the last one gives way.
            last = self._take(max(self._turns, key=lambda name: len(self._turns[name])), -1)
            if not last.done():  # its caller may just have left
                found = (
                    f"{MAX_EXPECTED} requests wait for their messages to be received, the most this worker "
                    f"lets wait; try again"
                )
                last.set_exception(QueueFullError(found, retry_after_s=1.0))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place came at the same moment
                if turn.exception() is None:
                    self._release()
            elif turn in self._turns.get(connection, ()):
                self._take(connection, self._turns[connection].index(turn))
            raise

    def _take(self, connection: str, index: int) -> asyncio.Future[None]:
        """Take one out of those that wait."""
        waiting = self._turns.pop(connection)
        turn = waiting[index]
        del waiting[index]
        if waiting:
            self._turns[connection] = waiting  # behind the other connections'
        self._expected -= 1
        return turn

    def _release(self) -> None:
        """Give a place up, to the call whose turn it is."""
        while self._turns:
            turn = self._take(next(iter(self._turns)), 0)
            if not turn.done():  # its caller may just have left
                turn.set_result(None)
                return
        self._free += 1


class SmallReceiving:
    """Receives messages that honest clients send in one piece with their call.

    One at a time, since each may be one of megabytes, whose bytes take a core and hold the event loop for
    tens of milliseconds. Next is the latest call of a connection that has fewest of them, so that nobody
    waits behind those that dribble; where too many wait, the earliest of the connection that has most gives
    way.

    guaranteed_s: while any wait, a message that takes longer is given up. distrust_s: after a message of more
        than SMALL_BYTES none is received for so long, since a loop that has copied megabytes waits for a core
        as long as others run.
    """

    def __init__(self, guaranteed_s: float, distrust_s: float = 0.0) -> None:
        self._guaranteed_s = guaranteed_s
        self._distrust_s = distrust_s
        self._distrusting_until = -math.inf
        self._taken = False
        # Of calls that wait, with their connection, the latest last.
        self._turns: dict[asyncio.Future[None], str] = {}
        self._wanted: asyncio.Future[None] | None = None  # done once a call wants the place of a slow message

    async def message(self, context: Context) -> bytes:
        """Return a call's message. Raises QueueFullError, and InvalidRequestError where none comes."""
        async with self._place(context.peer()):
            if asyncio.get_running_loop().time() < self._distrusting_until:
                raise _unreceived()
            message = await self._receive(context)
        if len(message) > SMALL_BYTES:
            found = f"found a message of {len(message)} bytes, expected at most {SMALL_BYTES}"
            raise InvalidRequestError([FieldViolation("request", found)])
        return message

    async def _receive(self, context: Context) -> bytes:
        read = await until(context.read(), limit_s=self._guaranteed_s / 2)
        read.add_done_callback(self._weigh)  # also of a message that comes after it has been given up
        if not read.done():  # a second look, as the loop itself may have been held up
            await until(read, limit_s=self._guaranteed_s / 2)
        if not read.done() and not self._turns:
            self._wanted = asyncio.get_running_loop().create_future()
            try:
                await until(read, evicted=self._wanted, limit_s=SMALL_LIMIT_S - self._guaranteed_s)
                if not read.done() and not self._wanted.done():
                    raise _late(SMALL_LIMIT_S)
            finally:
                self._wanted = None
        if not read.done():
            raise _unreceived()
        return _found(read)

    def _weigh(self, read: asyncio.Future[Any]) -> None:
        if read.cancelled() or read.exception() is not None or read.result() is grpc.aio.EOF:
            return
        if len(read.result()) > SMALL_BYTES:
            self._distrusting_until = asyncio.get_running_loop().time() + self._distrust_s

    @contextlib.asynccontextmanager
    async def _place(self, connection: str) -> AsyncIterator[None]:
        if self._taken:
            await self._turn(connection)
        self._taken = True
        try:
            yield
        finally:
            self._release()

    async def _turn(self, connection: str) -> None:
        """Wait for the place. Raises QueueFullError for the call that gives way if too many wait."""
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)
        turn = asyncio.get_running_loop().create_future()
        self._turns[turn] = connection
        if len(self._turns) > MAX_SMALL_WAITING:
            counts = Counter(self._turns.values())
            last = max(self._turns, key=lambda one: counts[self._turns[one]])  # the earliest of equals
            del self._turns[last]
            if not last.done():  # its caller may just have left
                last.set_exception(_unreceived())
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._turns.pop(turn, None)
            elif turn.exception() is None:  # the place came at the same moment
                self._release()
            raise

    def _release(self) -> None:
        """Give the place up, to the call whose turn it is."""
        while self._turns:
            counts = Counter(self._turns.values())
            # The latest of equals.
            turn = min(reversed(self._turns), key=lambda one: counts[self._turns[one]])
            del self._turns[turn]
            if not turn.done():  # its caller may just have left
                turn.set_result(None)
                return
        self._taken = False


def _unreceived() -> QueueFullError:
    return QueueFullError(
        "the request's message had not arrived, and other calls wanted its place; try again",
        retry_after_s=1.0,
    )


def _late(limit_s: float) -> InvalidRequestError:
    found = (
        f"its message had not arrived whole after {limit_s:g} s, the most this worker waits; send it "
        f"faster, or a shorter one"
    )
    return InvalidRequestError([FieldViolation("request", found)])


def _found(read: asyncio.Future[Any]) -> bytes:
    message = read.result()
    if message is grpc.aio.EOF:
        raise InvalidRequestError([FieldViolation("request", "none came; expected one message")])
    found: bytes = message
    return found
