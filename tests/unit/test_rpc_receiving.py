"""Whose message is received next, where more callers send than there is room for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from llorch_serve.errors import QueueFullError
from llorch_serve.rpc import receiving
from llorch_serve.rpc.receiving import RECEIVING_BYTES, Receiving


class Call:
    """A call whose message arrives when the test says so."""

    def __init__(self, connection: str) -> None:
        self._connection = connection
        self.asked = False
        self.sent: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def peer(self) -> str:
        return self._connection

    async def read(self) -> bytes:
        self.asked = True
        return await self.sent


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def with_calls(body: Callable[[Callable[[str], tuple[Call, asyncio.Task[bytes]]]], Awaitable[None]]) -> None:
    """Run a body that makes calls, of which one message is received at a time."""

    async def run() -> None:
        one_at_a_time = Receiving(RECEIVING_BYTES)
        tasks = []

        def begin(connection: str) -> tuple[Call, asyncio.Task[bytes]]:
            call: Any = Call(connection)
            tasks.append(asyncio.ensure_future(one_at_a_time.message(call)))
            return call, tasks[-1]

        await body(begin)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_connection_with_many_calls_lets_another_have_its_turn() -> None:
    async def body(begin: Any) -> None:
        many = [begin("many") for _ in range(6)]
        await settled()
        one, received = begin("one")
        await settled()
        for call, _ in many[:2]:
            call.sent.set_result(b"")
            await settled()
        assert one.asked
        one.sent.set_result(b"message")
        assert await received == b"message"
        await settled()
        assert [call.asked for call, _ in many] == [True] * 3 + [False] * 3

    with_calls(body)


def test_where_too_many_wait_the_connection_with_most_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_EXPECTED", 4)

    async def body(begin: Any) -> None:
        many = [begin("many") for _ in range(6)]
        await settled()
        with pytest.raises(QueueFullError):  # one more than may wait
            await many[5][1]
        begin("one")
        await settled()
        with pytest.raises(QueueFullError):
            await many[4][1]
        assert sum(task.done() for _, task in many) == 2

    with_calls(body)


@pytest.mark.parametrize("ticks", range(8))
def test_a_caller_that_leaves_while_it_waits_takes_no_place_along(ticks: int) -> None:
    """Also where a place comes just before, or just after."""

    async def body(begin: Any) -> None:
        (first, receives), (_, waits), (last, _) = (begin("a") for _ in range(3))
        await settled()
        assert first.asked
        receives.cancel()
        for _ in range(ticks):
            await asyncio.sleep(0)
        waits.cancel()
        await settled()
        assert last.asked

    with_calls(body)


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_caller_that_leaves_as_it_gives_way_is_not_missed(
    monkeypatch: pytest.MonkeyPatch, leaves_first: bool
) -> None:
    monkeypatch.setattr(receiving, "MAX_EXPECTED", 2)

    async def body(begin: Any) -> None:
        first, (_, waits), (_, gives_way) = (begin("many") for _ in range(3))
        await settled()
        if leaves_first:
            gives_way.cancel()
        one, _ = begin("one")
        await asyncio.sleep(0)
        gives_way.cancel()
        await settled()
        assert gives_way.done()
        waits.cancel()
        first[0].sent.set_result(b"")
        await settled()
        assert one.asked

    with_calls(body)
