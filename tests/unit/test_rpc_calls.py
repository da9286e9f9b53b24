"""What a running call is given between two looks is joined, kept within its own answer, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

import pytest

from llorch_serve.calls import live as calls
from llorch_serve.calls.live import LiveCalls
from llorch_serve.calls.live_call import LiveCall
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import CancelledError, InvalidRequestError, QueueFullError, UnavailableError
from llorch_serve.requests import Completion, GenerationUpdate, Timings

DONE = Completion(FinishReason.LENGTH, None, 1, 2, 3, Timings(0, 0, 0))


async def with_call(*, whole: bool) -> tuple[LiveCalls, LiveCall]:
    live = LiveCalls(asyncio.get_running_loop(), 1)
    call = live.call(whole=whole, owner="")
    live.add("a", call)
    return live, call


async def delivered(live: LiveCalls, *updates: GenerationUpdate) -> None:
    live.deliver(list(updates))
    await asyncio.sleep(0)  # one turn of the loop, in which the delivery arrives


def test_updates_that_pile_up_become_one():
    async def scenario():
        live, call = await with_call(whole=False)
        await delivered(live, GenerationUpdate("a", "x", (1,)), GenerationUpdate("other", "no", (9,)))
        await delivered(live, GenerationUpdate("a", "", (2,)))
        await delivered(live, GenerationUpdate("a", "y", (3,)))
        assert await call.take() == [GenerationUpdate("a", "xy", (1, 2, 3))]
        waiting = asyncio.ensure_future(call.take())
        await asyncio.sleep(0)
        await delivered(live, GenerationUpdate("a", "", ()))
        assert not waiting.done()
        await delivered(live, GenerationUpdate("a", "", (), DONE))
        assert await waiting == [GenerationUpdate("a", "", (), DONE)]

    asyncio.run(scenario())


def test_an_update_that_comes_after_its_loop_has_ended_goes_nowhere():
    async def scenario():
        live, _ = await with_call(whole=True)
        return live

    live = asyncio.run(scenario())
    live.deliver([GenerationUpdate("a", "", (), DONE)])  # its error would end the engine, for everybody


def test_a_message_waits_for_as_many_tokens_as_are_asked_for_but_the_first_and_the_last():
    async def scenario():
        live = LiveCalls(asyncio.get_running_loop(), 3)
        live.add("a", call := live.call(whole=False, owner=""))
        taken = []

        async def follow():
            while not call.ended:
                taken.append([update.token_ids for update in await call.take()])

        following = asyncio.ensure_future(follow())
        for token in range(1, 8):
            await delivered(live, GenerationUpdate("a", "x", (token,), open_answers=1))
            await asyncio.sleep(0)
        assert taken == [[(1,)], [(2, 3, 4)], [(5, 6, 7)]]
        # Another answer's first token is due at once, and takes along what has come of the other.
        await delivered(live, GenerationUpdate("a", "x", (8,), open_answers=1))
        await delivered(live, GenerationUpdate("a", "y", (1,), index=1, open_answers=1))
        await asyncio.sleep(0)
        assert taken[3:] == [[(8,), (1,)]]
        await delivered(live, GenerationUpdate("a", "x", (9,), DONE, open_answers=1))
        await asyncio.sleep(0)
        assert taken[4:] == [[(9,)]]
        await delivered(live, GenerationUpdate("a", "y", (2,), index=1, open_answers=1))
        await asyncio.sleep(0)
        assert taken[5:] == []
        await delivered(live, GenerationUpdate("a", "", (), DONE, index=1))
        await following
        assert taken[5:] == [[(2,)]]

    asyncio.run(scenario())


class WatchedUpdate(GenerationUpdate):
    """An update that counts how often one of its kind is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "token_ids":
            WatchedUpdate.looks += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("whole", [False, True])
def test_an_update_is_looked_at_when_it_comes_and_not_again(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop serves everybody, so the end of a long answer that nobody has taken is a moment like any
    other.
    """
    count = 1000
    monkeypatch.setattr(WatchedUpdate, "looks", 0)

    async def scenario():
        live = LiveCalls(asyncio.get_running_loop(), count + 1)
        live.add("a", call := live.call(whole=whole, owner=""))
        call.add(GenerationUpdate("a", "x", (0,), open_answers=1))
        if not whole:
            await call.take()
        taking = asyncio.ensure_future(call.take())
        await asyncio.sleep(0)
        for token in range(1, count):
            call.add(WatchedUpdate("a", "x", (token,), open_answers=1))
        assert not taking.done()
        call.add(GenerationUpdate("a", "x", (count,), DONE))
        before = WatchedUpdate.looks
        [update] = await taking
        assert update.token_ids == tuple(range(0 if whole else 1, count + 1))
        return before, WatchedUpdate.looks - before

    adding, taking = asyncio.run(scenario())
    assert adding <= 5 * count
    assert taking == 0


class Paced:
    """A loop with a clock and timers that are set by hand. hops: deliveries that reached it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now = 50.0
        self.hops = 0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.hops += 1
        self.loop.call_soon(callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Paced:
        self.timers = [(delay, callback)]
        return self

    def cancel(self) -> None:
        self.timers = []


def paced(
    *names: str, whole: bool = False, interval: int | None = None
) -> tuple[Paced, LiveCalls, list[LiveCall]]:
    """Return a loop, its live calls, and a call for each name, entered and without news."""
    loop = Paced(asyncio.get_running_loop())
    live = LiveCalls(cast("asyncio.AbstractEventLoop", loop), interval)
    calls = [live.call(whole=whole, owner="") for _ in names]
    for name, call in zip(names, calls, strict=True):
        live.add(name, call)
    return loop, live, calls


async def step(live: LiveCalls, loop: Paced, names: Iterable[str], token: int, after: float = 0.0) -> int:
    """Deliver a token to each call after some seconds; return how many hops there have been."""
    loop.now += after
    await delivered(live, *(GenerationUpdate(name, "x", (token,)) for name in names))
    return loop.hops


@pytest.mark.parametrize(("streams", "spacing"), [(1, 0.0125), (2, 0.025), (7, 0.0875), (8, 0.1), (100, 0.1)])
def test_messages_are_spaced_by_how_many_there_would_be(streams, spacing):
    async def scenario():
        names = [str(number) for number in range(streams)]
        loop, live, calls = paced(*names)
        assert await step(live, loop, names, 1) == 1  # first tokens go at once
        assert [update.token_ids for update in await calls[0].take()] == [(1,)]
        assert await step(live, loop, names, 2, spacing / 2) == 1
        assert await step(live, loop, names, 3, spacing / 2 - 0.001) == 1
        assert await step(live, loop, names, 4, 0.0011) == 2
        for call in calls[1:]:
            assert [update.token_ids for update in await call.take()] == [(1, 2, 3, 4)]
        assert [update.token_ids for update in await calls[0].take()] == [(2, 3, 4)]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "urgent",
    [
        GenerationUpdate("a", "y", (9,), DONE),
        GenerationUpdate("a", "y", (9,), DONE, open_answers=1),
        GenerationUpdate("a", "y", (9,), index=1, open_answers=1),
        GenerationUpdate("a", "", (), error=CancelledError("gone")),
    ],
    ids=["the end", "the end of one answer", "another answer's first token", "an error"],
)
def test_what_is_urgent_waits_for_nothing_and_takes_along_what_was_kept(urgent):
    async def scenario():
        loop, live, (call, other) = paced("a", "b")
        await step(live, loop, "ab", 1)
        await call.take()
        await other.take()
        assert await step(live, loop, "ab", 2, 0.001) == 1
        await delivered(live, urgent)
        assert loop.hops == 2
        assert await other.take() == [GenerationUpdate("b", "x", (2,))]
        if urgent.error is None:
            assert (await call.take())[0].token_ids[0] == 2

    asyncio.run(scenario())


def test_what_a_long_step_leaves_behind_is_fetched():
    async def scenario():
        loop, live, (call,) = paced("a")
        await step(live, loop, "a", 1)
        await call.take()
        await step(live, loop, "a", 2, 0.001)
        waiting = asyncio.ensure_future(call.take())
        await asyncio.sleep(0)
        assert not waiting.done()
        [(delay, fetch)] = loop.timers
        fetch()
        assert delay == calls.LONGEST_WAIT_S
        assert await waiting == [GenerationUpdate("a", "x", (2,))]

    asyncio.run(scenario())


def test_whole_answers_cost_a_hop_now_and_then():
    async def scenario():
        loop, live, (call,) = paced("a", whole=True)
        loop.now += 1
        assert await step(live, loop, "a", 1) == 1
        for token in range(2, 10):
            assert await step(live, loop, "a", token, 0.01) == 1
        await delivered(live, GenerationUpdate("a", "", (), DONE))
        assert (await call.take())[0].token_ids == tuple(range(1, 10))

    asyncio.run(scenario())


def test_a_fixed_interval_is_not_spaced_by_time():
    async def scenario():
        loop, live, (call,) = paced("a", interval=2)
        await step(live, loop, "a", 1)
        await call.take()
        await step(live, loop, "a", 2)
        assert await step(live, loop, "a", 3) == 3
        assert await call.take() == [GenerationUpdate("a", "xx", (2, 3))]
        assert not loop.timers

    asyncio.run(scenario())


def test_what_was_kept_comes_before_the_end_of_all():
    async def scenario():
        loop, live, (call,) = paced("a")
        await step(live, loop, "a", 1)
        await call.take()
        live.deliver([GenerationUpdate("a", "x", (2,), DONE)])  # its hop comes later
        live.end_all(UnavailableError("stopped"))
        assert await call.take() == [GenerationUpdate("a", "x", (2,), DONE)]

    asyncio.run(scenario())


def test_a_whole_answer_wakes_its_handler_once():
    async def scenario():
        live, call = await with_call(whole=True)
        waiting = asyncio.ensure_future(call.take())
        await asyncio.sleep(0)
        await delivered(live, GenerationUpdate("a", "x", (1,)))
        await asyncio.sleep(0)
        assert not waiting.done()
        await delivered(live, GenerationUpdate("a", "y", (2,), DONE))
        assert await waiting == [GenerationUpdate("a", "xy", (1, 2), DONE)]

    asyncio.run(scenario())


def test_an_error_ends_a_call_and_a_failure_after_the_end_does_not():
    async def scenario():
        live, call = await with_call(whole=False)
        await delivered(live, GenerationUpdate("a", "", (), error=CancelledError("gone")))
        with pytest.raises(CancelledError, match="gone"):
            await call.take()
        live.add("a", ended := LiveCall(whole=True))
        await delivered(live, GenerationUpdate("a", "", (1,), DONE))
        ended.fail(UnavailableError("late"))
        assert await ended.take() == [GenerationUpdate("a", "", (1,), DONE)]
        live.add("a", failed := LiveCall(whole=True))
        failed.fail(UnavailableError("draining"))
        with pytest.raises(UnavailableError, match="draining"):
            await failed.take()

    asyncio.run(scenario())


def test_an_id_is_taken_until_the_last_update_even_if_its_handler_left():
    async def scenario():
        live, call = await with_call(whole=False)
        call.abandoned = True
        second = LiveCall(whole=False)
        with pytest.raises(InvalidRequestError, match="request_id: 'a' belongs to a live request"):
            live.add("a", second)
        with pytest.raises(InvalidRequestError, match="belongs to a live request"):
            live.submit("a", second, lambda _sink: pytest.fail("its id is taken"))
        assert live.find("a", "") is call
        await delivered(live, GenerationUpdate("a", "late", (1,)))
        assert live.find("a", "") is call
        await delivered(live, GenerationUpdate("a", "", (), DONE))
        assert call.ended
        live.add("a", second)
        await delivered(live, GenerationUpdate("a", "new", (5,)))
        assert await second.take() == [GenerationUpdate("a", "new", (5,))]

    asyncio.run(scenario())


def test_a_call_that_the_generator_does_not_accept_leaves_its_id_free():
    def refuse(_sink):
        raise QueueFullError("full", retry_after_s=1.0)

    async def scenario():
        live = LiveCalls(asyncio.get_running_loop(), 1)
        with pytest.raises(QueueFullError, match="full"):
            live.submit("a", LiveCall(whole=False), refuse)
        assert live.find("a", "") is None

    asyncio.run(scenario())


@pytest.mark.parametrize("end", [LiveCall.cancel, LiveCall.leave])
@pytest.mark.parametrize("early", [True, False], ids=["before it is accepted", "afterwards"])
def test_a_call_that_is_ended_early_ends_its_own_request_and_only_while_that_is_live(end, early):
    async def scenario():
        live, aborted = LiveCalls(asyncio.get_running_loop(), 1), []
        call = live.call(whole=False, owner="")
        if early:
            end(call)
        live.submit("a", call, lambda _sink: lambda: aborted.append("a"))
        assert aborted == []
        if not early:
            end(call)
        live.admitted(call)
        assert set(aborted) == {"a"}
        count = len(aborted)
        await delivered(live, GenerationUpdate("a", "", (), DONE))
        end(call)
        assert len(aborted) == count

    asyncio.run(scenario())


def test_a_flood_is_turned_away(monkeypatch):
    monkeypatch.setattr(calls, "MAX_LIVE_CALLS", 1)

    async def scenario():
        live, _ = await with_call(whole=False)
        with pytest.raises(QueueFullError) as caught:
            live.add("b", LiveCall(whole=False))
        assert caught.value.retry_after_s == 1.0

    asyncio.run(scenario())
