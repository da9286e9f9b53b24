"""Threads that read requests, when a worker counts as unused, and what it waits for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from llorch_serve.calls.admission import Activity, ReadingThreads
from llorch_serve.calls.interfaces import Front, FrontFactory
from llorch_serve.calls.waiting import first_of
from llorch_serve.engine.load import Load
from llorch_serve.errors import QueueFullError
from llorch_serve.lifecycle.fronts import Fronts
from llorch_serve.rpc.server import WorkerServer
from support.fakes.generator import PATIENCE_S


def test_what_waits_to_be_read_is_bounded_by_its_bytes() -> None:
    gate = threading.Event()

    def work() -> bool:
        return gate.wait(PATIENCE_S)

    async def flood() -> None:
        threads = ReadingThreads("test", max_pending_bytes=10)
        first = asyncio.ensure_future(threads.run(8, work))
        await asyncio.sleep(0)  # one turn, in which it begins
        with pytest.raises(QueueFullError, match="8 bytes of requests wait to be read, the most is 10"):
            await threads.run(3, work)
        gate.set()
        assert await first
        assert await threads.run(10, work)
        threads.close()

    asyncio.run(flood())


def test_only_use_counts_against_idleness() -> None:
    async def idleness() -> tuple[float, float, float]:
        now = 0.0
        asyncio.get_running_loop().time = lambda: now  # type: ignore[method-assign]
        activity = Activity()
        now = 5.0
        with activity.call(is_use=False):
            running = activity.idle_s()
        looked = activity.idle_s()
        with activity.call():
            pass
        return running, looked, activity.idle_s()

    assert asyncio.run(idleness()) == (0.0, 5.0, 0.0)


class _UnusedServer:
    """A gRPC server that nobody has called for its idle timeout."""

    idle_timeout_s = 1e-3

    async def wait_unused(self) -> None:
        pass

    def load(self) -> Load:
        raise AssertionError("idleness asks for no load")


class _Front:
    """A front that has been idle for so many seconds, each time that it is asked."""

    def __init__(self, idle: Iterator[float]) -> None:
        self._idle = idle

    def idle_s(self) -> float:
        return next(self._idle)


def test_a_worker_used_over_http_alone_does_not_say_that_it_stops(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    said: list[int] = []

    def idle() -> Iterator[float]:
        for seconds in (0.0, 0.0, 5.0):
            said.append(len(caplog.records))
            yield seconds

    def make(_load: Any) -> Front:
        return cast("Front", _Front(idle()))

    factories: tuple[FrontFactory, ...] = (make,)
    asyncio.run(Fronts(cast("WorkerServer", _UnusedServer()), factories).wait_unused())
    assert said == [0, 0, 0]
    assert [record.getMessage() for record in caplog.records] == ["no call for 0.001 s; stopping"]


def test_an_event_that_fails_is_not_taken_for_one_that_came() -> None:
    async def fail() -> None:
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        asyncio.run(first_of(fail(), asyncio.Event().wait()))


def test_the_first_event_or_the_timeout_ends_the_wait() -> None:
    async def waits() -> tuple[bool, bool]:
        there = asyncio.Event()
        there.set()
        never = asyncio.Event()
        return await first_of(there.wait(), never.wait()), await first_of(never.wait(), timeout_s=0)

    assert asyncio.run(waits()) == (True, False)


def test_a_wait_that_is_given_up_leaves_no_event_waited_for() -> None:
    async def wait() -> int:
        waiting = asyncio.ensure_future(first_of(asyncio.Event().wait(), asyncio.Event().wait()))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(wait()) == 1  # this one
