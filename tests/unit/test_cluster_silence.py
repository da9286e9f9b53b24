"""Calls of replicas that say nothing: those of a replica that is gone end, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from llorch_serve.cluster.silence import Silence, WatchedCall

SILENT_S = 0.01
PATIENCE_S = 20.0


class RayActorError(Exception):
    """Named as Ray's is, which is how Ray's are known."""


class Replica:
    """Says whether it is there, by a probe: what to raise, if anything."""

    def __init__(self, error: Exception | None = None, *, stands_still: bool = False) -> None:
        self.error = error
        self.stands_still = stands_still
        self.asked = 0
        self.answered = asyncio.Event()
        self.probe = self._probe  # one object, as a router keeps it

    async def _probe(self) -> int:
        self.asked += 1
        if self.asked > 2:
            self.answered.set()
        if self.stands_still:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return 0


class Caller:
    """Waits for a call's parts."""

    def __init__(self, call: WatchedCall, replica: Replica | None) -> None:
        self.ended = asyncio.Event()
        call.end_by(self.ended.set)
        if replica is not None:
            call.sent(None)("r", replica.probe)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


@pytest.mark.parametrize("error", [RayActorError("gone"), type("ActorDiedError", (RayActorError,), {})()])
def test_the_calls_of_a_replica_that_is_gone_end(error: Exception) -> None:
    async def body() -> None:
        silence, replica, other = Silence(SILENT_S), Replica(error), Replica()
        with silence.watched() as one, silence.watched() as two, silence.watched() as beside:
            callers = [Caller(one, replica), Caller(two, replica)]
            spared = Caller(beside, other)
            for caller in callers:
                await caller.ended.wait()
            await other.answered.wait()
            assert not spared.ended.is_set()

    run(body)


@pytest.mark.parametrize(
    "replica",
    [lambda: Replica(), lambda: Replica(stands_still=True), lambda: Replica(ValueError("what is that?"))],
    ids=["answers", "stands still", "fails otherwise"],
)
def test_the_calls_of_any_other_replica_go_on(replica: Callable[[], Replica]) -> None:
    async def body() -> None:
        silence, silent = Silence(SILENT_S), replica()
        with silence.watched() as call:
            caller = Caller(call, silent)
            await silent.answered.wait()
            assert not caller.ended.is_set()

    run(body)


def test_a_replica_is_asked_once_for_all_its_calls_and_not_while_it_speaks() -> None:
    async def body() -> None:
        silence, silent, speaking = Silence(SILENT_S), Replica(), Replica(RayActorError())
        with (
            silence.watched() as one,
            silence.watched() as two,
            silence.watched() as nowhere,
            silence.watched() as busy,
        ):
            for call in (one, two):
                Caller(call, silent)
            Caller(nowhere, None)  # no replica has been chosen for it yet
            heard = Caller(busy, speaking)
            asked = 0
            while not silent.answered.is_set():
                busy.heard()
                assert silent.asked - asked in (0, 1)
                asked = silent.asked
                await asyncio.sleep(0)
            assert speaking.asked == 0
            assert not heard.ended.is_set()

    run(body)


def test_one_of_two_calls_that_speaks_goes_on_when_its_replica_is_said_to_be_gone() -> None:
    async def body() -> None:
        silence, cut_off = Silence(SILENT_S), Replica(RayActorError())
        with silence.watched() as silent, silence.watched() as speaking:
            ending, going_on = Caller(silent, cut_off), Caller(speaking, cut_off)
            while not ending.ended.is_set():
                speaking.heard()
                await asyncio.sleep(0)
            assert not going_on.ended.is_set()

    run(body)


def test_an_end_that_fails_keeps_no_other_from_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        silence, gone = Silence(SILENT_S), Replica(RayActorError())

        with silence.watched() as one, silence.watched() as two:
            callers = [Caller(one, gone), Caller(two, gone)]

            def end(caller: Caller) -> None:
                caller.ended.set()
                raise RuntimeError("cannot be cancelled")

            one.end_by(partial(end, callers[0]))
            two.end_by(partial(end, callers[1]))
            for caller in callers:  # whichever of them comes first
                await caller.ended.wait()
            while "cannot be cancelled" not in caplog.text:
                await asyncio.sleep(0)

    run(body)


def test_whoever_else_wants_to_know_is_told_where_a_call_is_sent() -> None:
    async def body() -> None:
        told: list[str] = []
        with Silence(SILENT_S).watched() as call:
            replica = Replica()
            call.sent(lambda name, _probe: told.append(name))("a", replica.probe)
        assert told == ["a"]

    run(body)


def test_nothing_is_asked_about_a_call_that_has_ended() -> None:
    async def body() -> None:
        silence, gone, there = Silence(SILENT_S), Replica(RayActorError()), Replica()
        with silence.watched() as call:
            caller = Caller(call, gone)
        with silence.watched() as call:  # it is watched again after a time without calls
            Caller(call, there)
            await there.answered.wait()
        assert gone.asked == 0
        assert not caller.ended.is_set()

    run(body)
